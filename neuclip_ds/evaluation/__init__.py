"""What a model is worth on held-out data: retrieval and zero-shot classification, shared by all ranks.

The evaluators know neither the model nor the process group; they are handed the two things below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Encode = Callable[[Tensor | None, Tensor | None], tuple[Tensor | None, Tensor | None]]
"""(images uint8 (b, 3, H, W) or None, tokens (b, T) or None) -> their float32 L2-normalised features (b, d) or None.

It moves its input to the model's device, puts the model into evaluation mode and may hold collectives of its own
(ZeRO-3): evaluators call it equally often, with equal shapes, on every rank.
"""


class Communicator(Protocol):
    """The part of `neuclip_ds.distributed.communicator.Communicator` that evaluation uses."""

    rank: int
    world_size: int
    device: torch.device

    def all_gather(self, x: Tensor, purpose: str) -> Tensor:
        """(b, ...) of every rank -> (K b, ...) in rank order."""

    def all_reduce(self, x: Tensor, purpose: str) -> Tensor:
        """Sum of x over ranks, the same bits on each."""

    def agree(self, problem: str | None) -> None:
        """Raises `UserError` on all ranks when any rank has a problem."""
