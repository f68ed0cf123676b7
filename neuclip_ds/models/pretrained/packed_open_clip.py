"""Packed captions for the text trunks of open_clip's CLIP models; `packing.py` explains packed captions."""

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from neuclip_ds.models.packing import Pack, PackedCaptions, attend, make_packable, pack_captions


def pack_open_clip_text(trunk: Any) -> Pack | None:
    """Let a text trunk of open_clip take packed captions, and return the function to pack them.

    Trunks that need padded captions are those of other classes (encoders from transformers), with other blocks, with
    bidirectional attention, with CoCa's class token, or pooled at the first or last position.

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
    make_packable(trunk, _Trunk)
    for block in blocks:
        make_packable(block, _Block)
        make_packable(block.attn, _Attention)
    return partial(pack_captions, eos_id=trunk.eos_id if trunk.pool_type == "eos" else None)


class _Trunk:
    """Overrides `TextTransformer.forward` for packed captions."""

    token_embedding: nn.Module
    positional_embedding: Tensor
    transformer: Any
    ln_final: nn.Module
    text_projection: Any

    def forward(self, text: Tensor | PackedCaptions) -> Tensor:
        """Return the (b, d) features of packed captions or of (b, T) token ids."""
        if not isinstance(text, PackedCaptions):
            return super().forward(text)  # type: ignore[misc]
        dtype = self.transformer.get_cast_dtype()
        tokens = self.token_embedding(text.ids).to(dtype)
        hidden = tokens + self.positional_embedding.to(dtype)[text.positions]
        *blocks, last_block = self.transformer.resblocks
        for block in blocks:
            hidden = block(hidden, captions=text)
        pooled = last_block(hidden, captions=text, rows=text.last)
        feature = self.ln_final(pooled).index_select(0, text.sorted_rows)
        if self.text_projection is None:
            return feature
        if isinstance(self.text_projection, nn.Linear):
            return self.text_projection(feature)
        return feature @ self.text_projection


class _Block:
    """Overrides `ResidualAttentionBlock.forward` for packed captions."""

    attn: nn.Module
    ln_1: nn.Module
    ln_2: nn.Module
    ls_1: nn.Module
    ls_2: nn.Module
    mlp: nn.Module

    def forward(
        self,
        q_x: Tensor,
        *others: Any,
        captions: PackedCaptions | None = None,
        rows: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Return (N, width) hidden states of packed captions or, with `rows`, only those rows of them."""
        if captions is None:
            return super().forward(q_x, *others, **options)  # type: ignore[misc]
        normed = self.ln_1(q_x)
        kept = q_x if rows is None else q_x.index_select(0, rows)
        hidden = kept + self.ls_1(self.attn(normed, captions=captions, rows=rows))
        return hidden + self.ls_2(self.mlp(self.ln_2(hidden)))


class _Attention:
    """Overrides the forward method of torch's attention for packed captions."""

    embed_dim: int
    num_heads: int
    head_dim: int
    in_proj_weight: Tensor
    in_proj_bias: Tensor
    out_proj: nn.Module

    def forward(
        self,
        query: Tensor,
        *others: Any,
        captions: PackedCaptions | None = None,
        rows: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Return the (N, width) attention outputs of packed captions or, with `rows`, only those rows of them."""
        if captions is None:
            return super().forward(query, *others, **options)  # type: ignore[misc]
        sizes = [self.embed_dim, 2 * self.embed_dim]
        query_weight, pair_weight = self.in_proj_weight.split(sizes)
        query_bias, pair_bias = self.in_proj_bias.split(sizes)
        kept = query if rows is None else query.index_select(0, rows)
        heads = (self.num_heads, self.head_dim)
        queries = functional.linear(kept, query_weight, query_bias).unflatten(1, heads)
        keys, values = functional.linear(query, pair_weight, pair_bias).unflatten(1, (2, *heads)).unbind(1)
        return self.out_proj(attend(queries, keys, values, captions))
