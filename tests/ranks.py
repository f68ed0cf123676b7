"""Run a function on several real ranks, with gloo on CPUs or NCCL on GPUs, and collect the results.

If there are fewer GPUs than ranks, the ranks share the GPUs, and gloo sends tensors through host memory.
"""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forks import ON_CPU, fork, kill

from neuclip_ds.distributed.environment import free_port
from neuclip_ds.distributed.launch import join

_LIMIT = 300.0  # seconds


def run_ranks(world_size: int, work: Callable[..., Any], *args: Any, device: str = "cpu") -> list[Any]:
    """Run `work(communicator, *args)` on each rank; return the results in rank order, with their tensors on the CPU.

    `work` must be a module-level function. With enough GPUs, the ranks connect in the same way as under a launcher.

    Raises:
        RuntimeError: a rank failed, in which case the other ranks are killed, or a rank took too long.
    """
    # without the name of the loopback interface, gloo looks up the machine's hostname, which may fail or be slow
    common = {**os.environ, "WORLD_SIZE": str(world_size), "GLOO_SOCKET_IFNAME": "lo"}
    common |= ON_CPU if device == "cpu" else {"DS_ACCELERATOR": device}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        try:
            for rank in range(world_size):
                variables = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(fork(_rank, rank, world_size, folder, work, args, variables=variables))
            _join(processes)
        finally:
            for process in processes:
                kill(process)
        failures = [path.read_text() for path in Path(folder).glob("*.txt")]
        if failures or any(process.exitcode for process in processes):
            codes = [process.exitcode for process in processes]
            raise RuntimeError("\n".join([f"the ranks' exit codes are {codes}", *failures]))
        saved = [Path(folder) / f"{rank}.pt" for rank in range(world_size)]
        return [torch.load(path, map_location="cpu", weights_only=False) for path in saved]


def _join(processes: list[Any]) -> None:
    """Wait until all processes succeed, one of them fails, or the time limit is reached."""
    deadline = time.monotonic() + _LIMIT
    running = {process.sentinel: process for process in processes}
    while running:
        ended = wait(list(running), deadline - time.monotonic())
        if not ended or any(running.pop(sentinel).exitcode for sentinel in ended):
            return


def _rank(rank: int, world_size: int, folder: str, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    backend = "gloo"
    gpus = 0
    if os.environ["DS_ACCELERATOR"] == "cuda":
        backend = "cpu:gloo,cuda:gloo"
        gpus = torch.cuda.device_count()
        os.environ["LOCAL_RANK"] = str(rank % gpus)  # ranks may share a GPU, whose index DeepSpeed reads here
        torch.cuda.set_device(rank % gpus)
    store = dist.FileStore(f"{folder}/store", world_size)
    if gpus < world_size:
        limit = timedelta(seconds=120)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    try:
        torch.save(work(join(store=store), *args), Path(folder) / f"{rank}.pt")
    except BaseException:
        Path(folder, f"{rank}.txt").write_text(f"rank {rank}: {traceback.format_exc()}")
        raise
    dist.barrier()
    dist.destroy_process_group()
