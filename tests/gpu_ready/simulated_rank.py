"""One of K ranks, each with a fake GPU: its collectives give results of the right shape and device."""

from __future__ import annotations

from typing import Any, TypeVar

from fake_cuda import DEVICE
from torch import Tensor

from neuclip_ds.distributed.communicator import Pending
from neuclip_ds.planning.cost_model import Call
from neuclip_ds.planning.objective_cost import SimulatedRank

T = TypeVar("T")

RANKS = (1, 8, 64)


class GpuRank(SimulatedRank):
    """The middle one of `world_size` ranks; on the host all of them hold the same values."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.rank, self.device = world_size // 2, DEVICE

    def _begin(self, op: str, x: Tensor, purpose: str, result: Tensor, launch: Any, *inputs: Tensor) -> Pending:
        if not x.is_cuda:
            return super()._begin(op, x, purpose, result, launch, *inputs)
        self.calls.append(Call(purpose, op, x.numel() * x.element_size()))
        return Pending(result)

    def gather_objects(self, x: T) -> list[T]:
        return [x] * self.world_size
