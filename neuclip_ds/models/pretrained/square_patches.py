"""Embeddings of SigLIP 2's NaFlex image tower for a batch of square images of one size."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class SquarePatches(nn.Module):
    """Patch and position embeddings that take images: (b, 3, H, H) pixels to (b, n, d).

    The library's own take patches of images of any shape and resize the positions for each image, with a wait for the
    device. Here they are resized once a batch, to the same values. Parameters keep their names.

    Args:
        library: transformers' Siglip2VisionEmbeddings, whose parameters are used.
    """

    def __init__(self, library: Any) -> None:
        super().__init__()
        self.patch_embedding: nn.Linear = library.patch_embedding
        self.position_embedding: nn.Embedding = library.position_embedding
        self._patch, self._trained = int(library.patch_size), int(library.position_embedding_size)

    def forward(self, pixels: Tensor, spatial_shapes: None = None) -> Tensor:
        patches = functional.pixel_unshuffle(pixels, self._patch)  # (b, 3 p p, side, side), each patch as (3, p, p)
        rows, side = pixels.shape[0], patches.shape[-1]
        patches = patches.reshape(rows, 3, -1, side * side).permute(0, 3, 2, 1)  # the library's order is (p, p, 3)
        return self.patch_embedding(patches.reshape(rows, side * side, -1)) + self._positions(side, pixels.device)

    def _positions(self, side: int, device: torch.device) -> Tensor:
        # through the module's forward, for which ZeRO-3 gathers its weights
        table = self.position_embedding(torch.arange(self._trained**2, device=device))
        if side == self._trained:
            return table
        grid = table.float().T.reshape(1, -1, self._trained, self._trained)
        fitted = functional.interpolate(grid, size=(side, side), mode="bilinear", antialias=True, align_corners=False)
        return fitted.flatten(2)[0].T.to(table.dtype)
