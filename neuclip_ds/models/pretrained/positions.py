"""Resample learned position embeddings to another image size or context length, by the same methods as open_clip.

Embeddings of image patches are resampled by antialiased bicubic interpolation, and embeddings of tokens by linear
interpolation. Embeddings that precede the embeddings of patches, such as the class token's, are unchanged.
"""

import math
from collections.abc import Mapping

from timm.layers import resample_abs_pos_embed
from torch import Tensor
from torch.nn.functional import interpolate

# endings of the names of position embeddings in transformers, timm and open_clip
_POSITION_EMBEDDINGS = ("position_embedding.weight", "pos_embed", "positional_embedding")
_TEXT = "text"  # the names of a text tower's tensors start with this in each library, and in a dual encoder


def resample_positions(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with position embeddings resampled to the expected shapes.

    Other tensors, and position embeddings that cannot be resampled, are returned unchanged.

    Args:
        tensors: the tensors of a dual encoder by name.
        expected: tensors with the shapes of the dual encoder's tensors; they may be on the meta device.
    """
    resampled = dict(tensors)
    for name, target in expected.items():
        table = tensors.get(name)
        if table is None or table.shape == target.shape or not name.endswith(_POSITION_EMBEDDINGS):
            continue
        rows = table.reshape(-1, table.shape[-1])
        count = target.numel() // target.shape[-1]
        if name.startswith(_TEXT):
            rows = resample_tokens(rows, count)
        else:
            rows = resample_patches(rows, count)
        resampled[name] = rows.reshape(*table.shape[:-2], *rows.shape)
    return resampled


def resample_patches(table: Tensor, count: int) -> Tensor:
    """Resample the (n, width) position embeddings of an image to `count` rows, for a square grid of patches.

    The table may begin with embeddings of other tokens. Their number is inferred: the smallest number that leaves a
    square if it is subtracted from n, and from `count`. If there is none, the table is returned unchanged.
    """
    for prefix in range(min(len(table), count)):
        old_side = math.isqrt(len(table) - prefix)
        new_side = math.isqrt(count - prefix)
        if old_side**2 == len(table) - prefix and new_side**2 == count - prefix:
            size = [new_side, new_side]
            resampled: Tensor = resample_abs_pos_embed(table.float()[None], size, num_prefix_tokens=prefix)
            return resampled[0]
    return table


def resample_tokens(table: Tensor, count: int) -> Tensor:
    """Resample the (n, width) position embeddings of a caption's tokens to `count` rows."""
    columns = table.float().T[None]
    return interpolate(columns, size=count, mode="linear", align_corners=False)[0].T.contiguous()
