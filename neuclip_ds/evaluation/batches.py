"""Encodes any number of images and texts in batches of one shape, equally often on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from neuclip_ds.evaluation import Communicator, Encode

Tokenize = Callable[[list[str]], Tensor]


class BatchEncoder:
    """A model that is called equally often, with equal shapes, on every rank, as ZeRO-3 needs it.

    Attributes:
        size: rows of every call.
    """

    def __init__(self, encode: Encode, tokenize: Tokenize, communicator: Communicator, size: int) -> None:
        """
        Args:
            encode: gives the features of a batch; see `Encode`.
            tokenize: n texts -> (n, T) tokens.
            communicator: the ranks, who call `images` and `texts` together.
            size: rows of every call.
        """
        self.size = size
        self._encode, self._tokenize, self._communicator = encode, tokenize, communicator

    def images(self, rows: Sequence[Tensor]) -> Tensor:
        """n >= 1 images (3, H, W), another n on another rank -> (n, d) features."""

        def features(low: int) -> Tensor:
            found, _ = self._encode(torch.stack(self._filled(rows, low)), None)
            assert found is not None
            return found

        return self._in_turns(features, len(rows))

    def texts(self, rows: Sequence[str]) -> Tensor:
        """n >= 1 texts, another n on another rank -> (n, d) features."""

        def features(low: int) -> Tensor:
            _, found = self._encode(None, self._tokenize(self._filled(rows, low)))
            assert found is not None
            return found

        return self._in_turns(features, len(rows))

    def _in_turns(self, features: Callable[[int], Tensor], own: int) -> Tensor:
        most = self._communicator.all_gather(torch.tensor([own], device=self._communicator.device), "evaluation").max()
        return torch.cat([features(low) for low in range(0, int(most), self.size)])[:own]

    def _filled(self, rows: Sequence, low: int) -> list:
        """Rows from `low` on, a batch of them, filled up with the first of all."""
        part = list(rows[low : low + self.size])
        return part + [rows[0]] * (self.size - len(part))
