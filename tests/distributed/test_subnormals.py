"""Subnormal numbers are zero in every thread of a rank, and outside its block what they were."""

from __future__ import annotations

import threading

import pytest
import torch
from ranks import run_ranks

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.subnormals import flushed_subnormals

pytestmark = pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this CPU cannot flush subnormal numbers")
SMALL = 2.0**-126


def subnormals_left(size: int = 1) -> int:
    return int((torch.full((size,), SMALL) / 2).count_nonzero())


def in_every_thread(communicator: Communicator) -> dict[str, int]:
    """How many of the results that should be zero are not."""
    torch.set_num_threads(4)
    with flushed_subnormals():
        found = {"parallel": subnormals_left(2**20)}
        x = torch.full((2**20,), SMALL, requires_grad=True)
        (x / 2).sum().mul(SMALL).backward()
        assert x.grad is not None
        found["backward"] = int(x.grad.count_nonzero())
        thread = threading.Thread(target=lambda: found.update(thread=subnormals_left()))
        thread.start()
        thread.join()
    return found


def test_they_are_zero_in_every_thread() -> None:
    """Four threads share the parallel operations; without the block a quarter or more would be left."""
    for found in run_ranks(1, in_every_thread):
        assert found == {"parallel": 0, "backward": 0, "thread": 0}


@pytest.mark.parametrize("before", [False, True])
def test_the_block_leaves_the_thread_as_it_was(before: bool) -> None:
    torch.set_flush_denormal(before)
    try:
        with flushed_subnormals():
            assert not subnormals_left()
        assert bool(subnormals_left()) is not before
    finally:
        torch.set_flush_denormal(False)
