"""Fit the position embeddings of pretrained towers to another image size or context length."""

import math
import re
from collections.abc import Mapping

from timm.layers import resample_abs_pos_embed
from torch import Tensor
from torch.nn import functional

from neuclip_ds.errors import UserError

_TABLE = re.compile(r"(pos_embed|position_embedding\.weight|positional_embedding)$")
_IMAGE = re.compile(r"(visual|vision_model|vision)\.")


def check_patches(size: int, patch: int, option: str = "model.force_image_size") -> None:
    """Raise UserError if an option's image size is not a multiple of the patch size, which would crop it."""
    if size % patch:
        below = size // patch * patch
        raise UserError(
            f"{option}={size} is not divisible into patches of {patch} pixels; use {max(below, patch)} or "
            f"{below + patch}."
        )


def fit_context(table: Tensor, length: int) -> Tensor:
    """Truncate a text tower's (n, d) position embeddings to (length, d), or interpolate them linearly.

    open_clip's `force_context_length` does the same for more positions.
    """
    if length <= len(table):
        return table[:length]
    return functional.interpolate(table.T[None], size=length, mode="linear", align_corners=False)[0].T.contiguous()


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


def fit_positions(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's tensors with the position embeddings resized to the shapes of a model.

    Args:
        tensors: tensors of the checkpoint.
        wanted: tensors of the model, by the same names.
    """
    fitted = dict(tensors)
    for name, tensor in tensors.items():
        if name in wanted and wanted[name].shape != tensor.shape and _TABLE.search(name):
            count = wanted[name].shape[-2]
            fitted[name] = fit_grid(tensor, count) if _IMAGE.match(name) else fit_context(tensor, count)
    return fitted
