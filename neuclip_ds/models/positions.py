"""Fit the position embeddings of pretrained towers to another image size or context length."""

import math
import re
from collections.abc import Callable, Mapping

import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor
from torch.nn import functional

from neuclip_ds.errors import UserError

_KEPT = 20  # leading positions that Long-CLIP keeps, because short captions have trained them well
_TABLE = re.compile(r"(pos_embed|position_embeddings?\.weight|positional_embedding|wpe\.weight)$")
_IMAGE = re.compile(r"(visual|vision_model|vision)\.")


def check_patches(size: int, patch: int, option: str = "model.force_image_size") -> None:
    """Raise UserError if an option's image size is not a multiple of the patch size, which would crop it."""
    if size % patch:
        below = size // patch * patch
        raise UserError(
            f"{option}={size} is not divisible into patches of {patch} pixels; use {max(below, patch)} or "
            f"{below + patch}."
        )


def interpolate(table: Tensor, length: int) -> Tensor:
    """Interpolate all (n, d) positions linearly to (length, d), as open_clip's `force_context_length` does."""
    return functional.interpolate(table.T[None], size=length, mode="linear", align_corners=False)[0].T.contiguous()


def long_clip(table: Tensor, length: int) -> Tensor:
    """Keep the first 20 of (n, d) positions and stretch the others to (length, d).

    This is the knowledge-preserving stretch of Long-CLIP (arXiv 2403.15378), here for any length: position p comes
    from 20 + (p - 20) / r with r = (length - 20) / (n - 20), and the last ones are extrapolated.

    Raises:
        UserError: the tower has too few positions.
    """
    if len(table) < _KEPT + 2:
        raise UserError(
            f"model.context_stretch=long_clip keeps the first {_KEPT} positions, but the text tower has {len(table)}; "
            "use interpolate."
        )
    first, others = table[:_KEPT], table[_KEPT:]
    place = torch.arange(length - _KEPT, device=table.device) * (len(others) / (length - _KEPT))
    below = place.long().clamp(max=len(others) - 2)
    stretched = torch.lerp(others[below], others[below + 1], (place - below)[:, None].to(table.dtype))
    return torch.cat([first, stretched])


STRETCHES: dict[str, Callable[[Tensor, int], Tensor]] = {"interpolate": interpolate, "long_clip": long_clip}


def fit_context(table: Tensor, length: int, stretch: str, special: int = 0) -> Tensor:
    """Stretch or truncate a text tower's (n, d) position embeddings to (length, d).

    The first `special` rows do not stand for positions (RoBERTa has such rows) and stay unchanged.
    """
    if length <= len(table):
        return table[:length]
    return torch.cat([table[:special], STRETCHES[stretch](table[special:], length - special)])


def fit_grid(table: Tensor, count: int) -> Tensor:
    """Resample (n, d) or (1, n, d) position embeddings of a square of patches to `count` rows, bicubically.

    Rows before the patches, such as the class token's, stay as they are. A table that is not square is unchanged.
    """
    old = table.shape[-2]
    for tokens in range(min(old, count)):
        if all(math.isqrt(n - tokens) ** 2 == n - tokens for n in (old, count)):
            sides = [[math.isqrt(n - tokens)] * 2 for n in (count, old)]
            rows = table.reshape(1, old, -1)
            fitted = resample_abs_pos_embed(rows, *sides, num_prefix_tokens=tokens)
            return fitted.reshape(*table.shape[:-2], count, -1)
    return table


def fit_positions(
    tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], stretch: str, special: int = 0
) -> dict[str, Tensor]:
    """Return a checkpoint's tensors with the position embeddings resized to the shapes of a model.

    Args:
        tensors: tensors of the checkpoint.
        wanted: tensors of the model, by the same names.
        stretch, special: arguments of `fit_context`, for text towers.
    """
    fitted = dict(tensors)
    for name, tensor in tensors.items():
        if name in wanted and wanted[name].shape != tensor.shape and _TABLE.search(name):
            count = wanted[name].shape[-2]
            is_image = _IMAGE.match(name)
            fitted[name] = fit_grid(tensor, count) if is_image else fit_context(tensor, count, stretch, special)
    return fitted
