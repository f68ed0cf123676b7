"""Simulated ranks: threads of this process that synchronize at a barrier in each collective."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from neuclip_ds.distributed.communicator import Communicator, Pending
from neuclip_ds.errors import UserError


class FakeRank(Communicator):
    """A simulated rank; all ranks share the same `values` and `barrier`."""

    def __init__(self, rank: int, world_size: int, values: list[Any], barrier: threading.Barrier) -> None:
        super().__init__()
        self.rank = rank
        self.world_size = world_size
        self._values = values
        self._barrier = barrier
        self.purposes: set[str] = set()

    def begin_all_gather(self, x: Tensor, purpose: str) -> Pending:
        return Pending(torch.cat(self._exchange(x, purpose)))

    begin_host_gather = begin_all_gather

    def begin_all_reduce(self, x: Tensor, purpose: str) -> Pending:
        return Pending(torch.stack(self._exchange(x, purpose)).sum(dim=0))

    def begin_reduce_scatter(self, x: Tensor, purpose: str) -> Pending:
        return Pending(self.all_reduce(x, purpose).chunk(self.world_size)[self.rank])

    def raise_if_any_rank_failed(self, problem: str | None) -> None:
        for rank, problem_of_rank in enumerate(self._gather(problem)):
            if problem_of_rank is not None:
                raise UserError(f"rank {rank}: {problem_of_rank}")

    def gather_objects(self, x: Any) -> list[Any]:
        return self._gather(x)

    def _exchange(self, x: Tensor, purpose: str) -> list[Tensor]:
        self.purposes.add(purpose)
        if self.world_size == 1:  # a single rank
            return [x]
        gathered = self._gather(x)
        assert len({(part.shape, part.dtype) for part in gathered}) == 1
        return gathered

    def _gather(self, x: Any) -> list[Any]:
        self._values[self.rank] = x
        self._barrier.wait(timeout=10)
        gathered = list(self._values)
        self._barrier.wait(timeout=10)
        return gathered


def _run_ranks(world_size: int, work: Callable[[FakeRank], Any]) -> list[Any]:
    """Run `work(communicator)` on all ranks at once, and return the results in rank order.

    If only one rank fails, the others time out at the barrier; the test then fails because their errors differ.
    """
    values = [None] * world_size
    barrier = threading.Barrier(world_size)
    with ThreadPoolExecutor(world_size) as pool:
        ranks = [FakeRank(rank, world_size, values, barrier) for rank in range(world_size)]
        futures = [pool.submit(work, rank) for rank in ranks]
        errors = [future.exception() for future in futures]
    assert len({type(error) for error in errors}) == 1, f"the ranks ended differently: {errors}"
    return [future.result() for future in futures]


@pytest.fixture(scope="session")
def run_ranks() -> Callable[[int, Callable[[FakeRank], Any]], list[Any]]:
    return _run_ranks
