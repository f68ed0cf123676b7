"""A simulated rank among many: it records what it would send, and nothing travels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from neuclip_ds.distributed.communicator import Communicator, Pending


class Call(NamedTuple):
    """Equal collectives of a step."""

    purpose: str
    op: str  # as in `ring_bytes`
    size: int  # bytes that a rank puts in
    times: float = 1.0  # a step, on average


class SimulatedRank(Communicator):
    """Rank 0 of `world_size` ranks that all hold the same numbers.

    Attributes:
        calls: the collectives so far, in order.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__("cpu")
        self.rank, self.world_size = 0, world_size
        self.calls: list[Call] = []

    def _begin(self, op: str, x: Tensor, purpose: str, result: Tensor, launch: Any, *inputs: Tensor) -> Pending:
        self.calls.append(Call(purpose, op, x.numel() * x.element_size()))
        if op == "all_gather":
            result.copy_(torch.cat([x] * self.world_size))
        elif op == "all_reduce":
            result.mul_(self.world_size)
        else:
            result.copy_(x[: len(result)] * self.world_size)
        return Pending(result)
