"""Packed captions: text towers run on the tokens of a batch without padding.

A causal text tower that pools at one token does not need the later tokens. Captions are therefore cut after the pooled
token and concatenated: all linear layers and norms run on the N remaining tokens, attention runs within each caption,
and the last layer computes queries and everything after them only for the tokens that are pooled. Features and
gradients equal those for padded captions, up to rounding. Bidirectional towers (SigLIP, BERT) keep padded captions,
because their tokens also attend to later tokens, and SigLIP's even to padding.

To let a trunk take packed captions, this module replaces the forward methods of some of the trunk's modules. The
modules, parameters and hooks stay the same, so ZeRO 3, LoRA, activation checkpointing and checkpoints work as with
padded captions.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import CLIPTextModel, MetaClip2TextModel

from neuclip_ds.models.forward import Forward, replace_forward

_LEGACY_EOS = 2  # EOS id in old CLIP configs, for which CLIPTextModel pools at the largest token id


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedCaptions:
    """Token ids of b captions without padding, N in total, with the captions sorted by length.

    `to` copies the tensors to the tower's device. `lengths` stays on the host, so that nothing waits for the device.
    """

    ids: Tensor
    """int64 (N,) token ids."""
    positions: Tensor
    """int64 (N,) positions of the tokens in their captions."""
    offsets: Tensor
    """int32 (b + 1,) start of each caption in `ids`, followed by N."""
    sorted_rows: Tensor
    """int64 (b,) position of each caption of the batch in the sorted order."""
    lengths: tuple[tuple[int, int], ...]
    """Each length that occurs, in ascending order, and the number of captions that have it."""
    context_length: int
    """Length to which the captions were padded."""

    def to(self, device: torch.device) -> "PackedCaptions":
        """Copy the captions to a device; a copy from pinned memory is asynchronous."""
        return self._changed(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "PackedCaptions":
        """Return a copy in pinned memory."""
        return self._changed(Tensor.pin_memory)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The fields that are tensors."""
        return self.ids, self.positions, self.offsets, self.sorted_rows

    @property
    def last(self) -> Tensor:
        """int64 (b,) indices of the captions' last tokens in `ids`, in the sorted order."""
        return self.offsets[1:].long() - 1

    def require_positions(self, count: int) -> None:
        """Raise ValueError if the captions were padded to more tokens than a tower has positions."""
        if self.context_length > count:
            raise ValueError(
                f"captions are padded to {self.context_length} tokens, but the text tower has only {count} positions; "
                f"use a tokenizer with a context length of at most {count}"
            )

    def _changed(self, change: Callable[[Tensor], Tensor]) -> "PackedCaptions":
        """Return the captions with `change` applied to all tensors."""
        return replace(
            self,
            ids=change(self.ids),
            positions=change(self.positions),
            offsets=change(self.offsets),
            sorted_rows=change(self.sorted_rows),
        )


Pack = Callable[[Tensor], PackedCaptions]
"""Function that packs (b, T) int64 token ids: `pack_captions` with a tower's `eos_id`.

If the ids are on a GPU, the host waits for them.
"""


@torch.compiler.disable  # the result's shapes depend on the tokens
def pack_captions(tokens: Tensor, eos_id: int | None) -> PackedCaptions:
    """Cut captions after the token at which the tower pools, sort them by length, and concatenate them.

    Args:
        tokens: (b, T) int64 token ids; if they are on a GPU, the host waits for them.
        eos_id: id of the token whose first occurrence is pooled; if it does not occur, the first token of the caption
            is pooled. With None, the token with the largest id is pooled.
    """
    scores = tokens if eos_id is None else tokens.eq(eos_id).int()
    lengths = scores.argmax(dim=1) + 1
    sorted_lengths, order = lengths.sort(stable=True)
    columns = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    is_kept = columns < sorted_lengths[:, None]
    values, counts = sorted_lengths.unique_consecutive(return_counts=True)
    return PackedCaptions(
        ids=tokens[order][is_kept],
        positions=columns[is_kept],
        offsets=functional.pad(sorted_lengths.cumsum(0), (1, 0)).int(),
        sorted_rows=order.argsort(),
        lengths=tuple(zip(values.tolist(), counts.tolist(), strict=True)),
        context_length=tokens.shape[1],
    )


def attend(query: Tensor, key: Tensor, value: Tensor, captions: PackedCaptions) -> Tensor:
    """Compute causal attention within each caption.

    Args:
        query: (N, heads, head width), or (b, heads, head width) with queries of the captions' last tokens only.
        key, value: (N, heads, head width).
        captions: the captions of the N tokens.

    Returns:
        (N or b, heads * head width) attended values.
    """
    if query.is_cuda and query.element_size() == 2 and query.shape[2] % 8 == 0:
        attended = _attend_in_one_kernel(query, key, value, captions)
    else:
        attended = _attend_by_length(query, key, value, captions)
    return attended.flatten(1)


def _attend_in_one_kernel(query: Tensor, key: Tensor, value: Tensor, captions: PackedCaptions) -> Tensor:
    """Call flash attention for sequences of different lengths.

    It needs a GPU, 16-bit tensors and a head width that is a multiple of 8. `torch.nn.attention.varlen` calls the same
    operator, but was added only in torch 2.10, and its arguments have changed since then. The kernel gets the context
    length as the maximum length, so that no argument on the host depends on the captions.
    """
    only_last = len(query) < len(key)
    offsets = captions.offsets
    query_offsets = offsets
    longest_query = captions.context_length
    if only_last:
        query_offsets = torch.arange(len(offsets), dtype=offsets.dtype, device=offsets.device)
        longest_query = 1
    outputs = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        query_offsets,
        offsets,
        longest_query,
        captions.context_length,
        0.0,  # dropout
        not only_last,  # whether attention is causal
        False,  # whether to return a debug mask
    )
    attended: Tensor = outputs[0]
    return attended


@torch.compiler.disable  # the number of calls depends on the captions
def _attend_by_length(query: Tensor, key: Tensor, value: Tensor, captions: PackedCaptions) -> Tensor:
    """Compute attention with one dense call per caption length."""
    only_last = len(query) < len(key)
    counts = [count for _, count in captions.lengths]
    sizes = [length * count for length, count in captions.lengths]
    query_sizes = counts if only_last else sizes
    parts = zip(counts, query.split(query_sizes), key.split(sizes), value.split(sizes), strict=True)
    attended = []
    for count, *tensors in parts:
        queries, keys, values = (tensor.unflatten(0, (count, -1)).transpose(1, 2) for tensor in tensors)
        result = functional.scaled_dot_product_attention(queries, keys, values, is_causal=not only_last)
        attended.append(result.transpose(1, 2).flatten(0, 1))
    return torch.cat(attended)


def pack_clip_text(trunk: Any, eos_id: int | None = None) -> Pack | None:
    """Let a text trunk of transformers' CLIP or MetaCLIP 2 take packed captions, and return the function to pack them.

    Args:
        trunk: the text trunk, which is changed in place.
        eos_id: id of the token whose first occurrence is pooled; by default, the trunk's own rule.

    Returns:
        The function, or None if the trunk needs padded captions: it is of another class, or has attention dropout.
    """
    if type(trunk) not in (CLIPTextModel, MetaClip2TextModel) or trunk.config.attention_dropout:
        return None
    pooled_id = trunk.eos_token_id if eos_id is None else eos_id
    if eos_id is None and type(trunk) is CLIPTextModel and pooled_id == _LEGACY_EOS:
        pooled_id = None
    replace_forward(trunk, _packable_trunk)
    for layer in trunk.encoder.layers:
        replace_forward(layer, _packable_layer)
    return partial(pack_captions, eos_id=pooled_id)


def _packable_trunk(padded: Forward) -> Forward:
    """Return a forward method of `CLIPTextModel` that calls `padded`, except for packed captions.

    For packed captions, it returns the (b, width) features.
    """

    def forward(trunk: Any, input_ids: Tensor | PackedCaptions, **options: Any) -> Any:
        if not isinstance(input_ids, PackedCaptions):
            return padded(trunk, input_ids, **options)
        captions = input_ids
        captions.require_positions(trunk.config.max_position_embeddings)
        tokens = trunk.embeddings.token_embedding(captions.ids)
        hidden = tokens + trunk.embeddings.position_embedding(captions.positions)
        *layers, last_layer = trunk.encoder.layers
        for layer in layers:
            hidden = layer(hidden, None, captions=captions)
        pooled = last_layer(hidden, None, captions=captions, rows=captions.last)
        return trunk.final_layer_norm(pooled).index_select(0, captions.sorted_rows)

    return forward


@cache  # compiled layers share a graph if they have the same function
def _packable_layer(padded: Forward) -> Forward:
    """Return a forward method of `CLIPEncoderLayer` that calls `padded`, except for packed captions.

    For packed captions, it maps (N, width) hidden states to the next layer's hidden states, only in the given `rows` if
    these are not None.
    """

    def forward(
        layer: Any,
        hidden_states: Tensor,
        *others: Any,
        captions: PackedCaptions | None = None,
        rows: Tensor | None = None,
        **options: Any,
    ) -> Any:
        if captions is None:
            return padded(layer, hidden_states, *others, **options)
        attention = layer.self_attn
        normed = layer.layer_norm1(hidden_states)
        normed_rows = normed
        if rows is not None:
            hidden_states = hidden_states.index_select(0, rows)
            normed_rows = normed.index_select(0, rows)
        heads = (attention.num_heads, attention.head_dim)
        query = attention.q_proj(normed_rows).unflatten(1, heads)
        key = attention.k_proj(normed).unflatten(1, heads)
        value = attention.v_proj(normed).unflatten(1, heads)
        attended = attend(query, key, value, captions)
        hidden_states = hidden_states + attention.out_proj(attended)
        return hidden_states + layer.mlp(layer.layer_norm2(hidden_states))

    return forward
