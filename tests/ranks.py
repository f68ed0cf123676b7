"""Runs a function on several real gloo ranks and brings their results back."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from neuclip_ds.distributed.communicator import Communicator


def run_ranks(world_size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """`work(communicator, *args)` on each rank; the ranks' results in rank order. Work must be a module's function."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (world_size, folder, work, args), nprocs=world_size)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _rank(rank: int, world_size: int, folder: str, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    # the loopback interface by name: without it gloo looks up the machine's name, which may fail or be slow
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=timedelta(seconds=120)
    )
    torch.save(work(Communicator(), *args), Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
