"""Simulated ranks: threads of this process that meet at a barrier for each collective."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from neuclip_ds.errors import UserError


class FakeRank:
    """Rank `rank` of `world_size`; `slots` and `barrier` are shared with the others."""

    def __init__(self, rank: int, world_size: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.world_size, self.device = rank, world_size, torch.device("cpu")
        self._slots, self._barrier = slots, barrier

    def all_gather(self, x: Tensor, purpose: str) -> Tensor:
        return torch.cat(self._exchange(x, purpose))

    def all_reduce(self, x: Tensor, purpose: str) -> Tensor:
        return torch.stack(self._exchange(x, purpose)).sum(dim=0)

    def agree(self, problem: str | None) -> None:
        for rank, found in enumerate(self._meet(problem)):
            if found is not None:
                raise UserError(f"rank {rank}: {found}")

    def _exchange(self, x: Tensor, purpose: str) -> list[Tensor]:
        assert purpose == "evaluation"
        everyones = self._meet(x)
        assert len({(part.shape, part.dtype) for part in everyones}) == 1
        return everyones

    def _meet(self, x: Any) -> list[Any]:
        self._slots[self.rank] = x
        self._barrier.wait(timeout=10)
        everyones = list(self._slots)
        self._barrier.wait(timeout=10)
        return everyones


def _run_ranks(world_size: int, work: Callable[[FakeRank], Any]) -> list[Any]:
    """`work(communicator)` on every rank at once; the results in rank order.

    A rank that fails alone leaves the others at the barrier until it times out, so an error that is raised here
    was raised by all.
    """
    slots, barrier = [None] * world_size, threading.Barrier(world_size)
    with ThreadPoolExecutor(world_size) as pool:
        ranks = [FakeRank(rank, world_size, slots, barrier) for rank in range(world_size)]
        futures = [pool.submit(work, rank) for rank in ranks]
        errors = [future.exception() for future in futures]
    assert len({type(error) for error in errors}) == 1, f"the ranks ended differently: {errors}"
    return [future.result() for future in futures]


@pytest.fixture(scope="session")
def run_ranks() -> Callable[[int, Callable[[FakeRank], Any]], list[Any]]:
    return _run_ranks
