"""Packed captions for the text trunks of open_clip's CLIP models; `packing.py` explains packed captions."""

from functools import cache, partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from neuclip_ds.models.forward import Forward, replace_forward
from neuclip_ds.models.packing import Pack, PackedCaptions, attend, pack_captions


def pack_open_clip_text(trunk: Any) -> Pack | None:
    """Let a text trunk of open_clip take packed captions, and return the function to pack them.

    A trunk needs padded captions if it is of another class (an encoder from transformers), if it has other blocks,
    bidirectional attention or CoCa's class token, if it also returns tokens, or if it is pooled at the first or last
    position.

    Args:
        trunk: the text trunk, which is changed in place.

    Returns:
        The function, or None if the trunk needs padded captions.
    """
    from open_clip.transformer import ResidualAttentionBlock, TextTransformer

    if type(trunk) is not TextTransformer or trunk.pool_type not in ("argmax", "eos"):
        return None
    if trunk.attn_mask is None or trunk.cls_emb is not None or trunk.output_tokens:
        return None
    blocks = list(trunk.transformer.resblocks)
    if any(type(block) is not ResidualAttentionBlock for block in blocks):
        return None
    replace_forward(trunk, _packable_trunk)
    for block in blocks:
        replace_forward(block, _packable_block)
        replace_forward(block.attn, _packable_attention)
    return partial(pack_captions, eos_id=trunk.eos_id if trunk.pool_type == "eos" else None)


def _packable_trunk(padded: Forward) -> Forward:
    """Return a forward method of `TextTransformer` that calls `padded`, except for packed captions.

    For packed captions, it returns the (b, d) features.
    """

    def forward(trunk: Any, text: Tensor | PackedCaptions) -> Any:
        if not isinstance(text, PackedCaptions):
            return padded(trunk, text)
        text.require_positions(trunk.num_pos)
        dtype = trunk.transformer.get_cast_dtype()
        tokens = trunk.token_embedding(text.ids).to(dtype)
        hidden = tokens + trunk.positional_embedding.to(dtype)[text.positions]
        *blocks, last_block = trunk.transformer.resblocks
        for block in blocks:
            hidden = block(hidden, captions=text)
        pooled = last_block(hidden, captions=text, rows=text.last)
        feature = trunk.ln_final(pooled).index_select(0, text.sorted_rows)
        if trunk.text_projection is None:
            return feature
        if isinstance(trunk.text_projection, nn.Linear):
            return trunk.text_projection(feature)
        return feature @ trunk.text_projection

    return forward


@cache  # compiled blocks share a graph if they have the same function
def _packable_block(padded: Forward) -> Forward:
    """Return a forward method of `ResidualAttentionBlock` that calls `padded`, except for packed captions.

    For packed captions, it maps (N, width) hidden states to the next block's hidden states, only in the given `rows` if
    these are not None.
    """

    def forward(
        block: Any,
        q_x: Tensor,
        *others: Any,
        captions: PackedCaptions | None = None,
        rows: Tensor | None = None,
        **options: Any,
    ) -> Any:
        if captions is None:
            return padded(block, q_x, *others, **options)
        normed = block.ln_1(q_x)
        kept = q_x if rows is None else q_x.index_select(0, rows)
        hidden = kept + block.ls_1(block.attn(normed, captions=captions, rows=rows))
        return hidden + block.ls_2(block.mlp(block.ln_2(hidden)))

    return forward


@cache
def _packable_attention(padded: Forward) -> Forward:
    """Return a forward method of `MultiheadAttention` that calls `padded`, except for packed captions.

    For packed captions, it maps (N, width) hidden states to the outputs of attention, only in the given `rows` if these
    are not None.
    """

    def forward(
        attention: Any,
        query: Tensor,
        *others: Any,
        captions: PackedCaptions | None = None,
        rows: Tensor | None = None,
        **options: Any,
    ) -> Any:
        if captions is None:
            return padded(attention, query, *others, **options)
        sizes = [attention.embed_dim, 2 * attention.embed_dim]
        query_weight, pair_weight = attention.in_proj_weight.split(sizes)
        query_bias, pair_bias = attention.in_proj_bias.split(sizes)
        kept = query if rows is None else query.index_select(0, rows)
        heads = (attention.num_heads, attention.head_dim)
        queries = functional.linear(kept, query_weight, query_bias).unflatten(1, heads)
        keys, values = functional.linear(query, pair_weight, pair_bias).unflatten(1, (2, *heads)).unbind(1)
        return attention.out_proj(attend(queries, keys, values, captions))

    return forward
