"""Encoding of any number of images and texts in batches of one shape, equally often on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.evaluation import Encode


class BatchEncoder:
    """Model that is called equally often, with equal shapes, on every rank, as ZeRO-3 requires.

    Attributes:
        size: rows of every call.
    """

    def __init__(
        self, encode: Encode, tokenize: Callable[[list[str]], Tensor], communicator: Communicator, size: int
    ) -> None:
        """
        Args:
            encode: gives the features of a batch; see `Encode`.
            tokenize: n texts -> (n, T) tokens.
            communicator: the ranks, which call `encode_images` and `encode_texts` together.
            size: rows of every call.
        """
        self.size = size
        self._encode, self._tokenize, self._communicator = encode, tokenize, communicator

    def encode_images(self, rows: Sequence[Tensor]) -> Tensor:
        """Encode n >= 1 images (3, H, W) to (n, d) features; n may differ between ranks."""
        return self._encode_batches(lambda batch: self._encode(torch.stack(batch), None)[0], rows)

    def encode_texts(self, rows: Sequence[str]) -> Tensor:
        """Encode n >= 1 texts to (n, d) features; n may differ between ranks."""
        return self._encode_batches(lambda batch: self._encode(None, self._tokenize(batch))[1], rows)

    def _encode_batches(self, encode: Callable[[list], Tensor | None], rows: Sequence) -> Tensor:
        """Encode batches that are padded with the first row, as many as the rank with the most rows needs."""
        local = torch.tensor([len(rows)], device=self._communicator.device)
        most = int(self._communicator.all_gather(local, "evaluation").max())
        features = []
        for low in range(0, most, self.size):
            batch = list(rows[low : low + self.size])
            found = encode(batch + [rows[0]] * (self.size - len(batch)))
            assert found is not None
            features.append(found)
        return torch.cat(features)[: len(rows)]
