"""The launch: separate processes rendezvous, compare what they run, join one process group and end together."""

import hashlib
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.environment import complete_environment, read_environment, refuse_missing_gpus
from neuclip_ds.distributed.failure_detector import FailureDetector
from neuclip_ds.distributed.rendezvous import open_store, rendezvous
from neuclip_ds.distributed.secret import SEEN_WITHIN, launch_key, not_shared
from neuclip_ds.distributed.subnormals import flushed_subnormals
from neuclip_ds.errors import UserError

_COLLECTIVE_LIMIT = timedelta(minutes=30)
_PORT = 29500


@contextmanager
def connected(task: str, folder: Path = Path(), max_outage: float = 0.0) -> Iterator[Communicator]:
    """Join the ranks of the launch in a process group, which ends with the block.

    `task` is that of all ranks, in lines such as a config's; `folder` is one that all nodes share; `max_outage` is the
    seconds that a node may wait for its storage while the others wait in a collective. Raises `UserError` where ranks
    are missing, or run other code or another task. Subnormal numbers count as zero in the block.
    """
    complete_environment()
    if "RANK" not in os.environ:  # MPI's launchers set no address
        deepspeed.comm.mpi_discovery(int(os.environ.get("MASTER_PORT", _PORT)), verbose=False)
    environment = read_environment()
    _choose_device(environment.local_rank)
    if environment.world_size == 1:
        try:
            with flushed_subnormals():
                yield join(max_outage)
        finally:
            leave()
        return
    store = open_store(environment.rank)
    with launch_key(store, environment.rank, folder) as key:
        rendezvous(store, key, environment, _facts(task))
    with FailureDetector(environment, store, key), flushed_subnormals():
        yield join(max_outage)
        leave()


def join(max_outage: float = 0.0) -> Communicator:
    """Join the launcher's process group, or the one that there is; DeepSpeed's engine shares it."""
    accelerator = get_accelerator()
    device = torch.device(accelerator.current_device_name())
    limit = _COLLECTIVE_LIMIT + timedelta(seconds=max_outage)
    if not dist.is_initialized():
        # bound to its GPU, a rank connects at once
        bound = device if device.type == "cuda" and read_environment().world_size > 1 else None
        dist.init_process_group(accelerator.communication_backend_name(), timeout=limit, device_id=bound)
    if device.type == "cpu" or dist.get_world_size() == 1:
        return Communicator("cpu" if device.type == "cpu" else device)
    # what the hosts know, such as which rows count, travels between them without a wait for the GPUs
    hosts: Any = dist.new_group(backend="gloo", timeout=limit)
    return Communicator(device, host_group=hosts)


def leave() -> None:
    """Leave the process group, also DeepSpeed's references to it.

    A process that ends with the group's threads running would abort instead of exiting.
    """
    if deepspeed.comm.is_initialized():
        deepspeed.comm.destroy_process_group()
    elif dist.is_initialized():
        dist.destroy_process_group()


def _choose_device(local_rank: int) -> None:
    """Give each rank of a node a separate GPU, before anything touches one."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        refuse_missing_gpus()
        return
    count = accelerator.device_count()
    if local_rank >= count:
        raise UserError(
            f"{socket.gethostname()} shows {count} GPUs, too few for local rank {local_rank}: start as many ranks as "
            "it has (slots of the hostfile), and let each see all of them (srun --gpus-per-node, not --gpus-per-task)."
        )
    accelerator.set_device(local_rank)


def _facts(task: str) -> dict[str, str]:
    """Return what must be equal on all ranks."""
    package = Path(__file__).parents[1]
    code = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        code.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    versions = f"torch {torch.__version__}, deepspeed {deepspeed.__version__}"
    return {"version of the libraries": versions, "neuclip_ds": code.hexdigest()[:12], "config": task}


def check_shared(folder: Path, communicator: Communicator) -> None:
    """Raise `UserError` on all ranks unless the run's folder is the same on all nodes."""

    def leave_mark() -> str:
        name = f".shared-{secrets.token_hex(8)}"
        (folder / name).touch()
        return name

    mark = folder / communicator.on_rank_zero(leave_mark)
    deadline, problem = time.monotonic() + SEEN_WITHIN, None
    while not mark.exists():
        if time.monotonic() > deadline:
            problem = not_shared(folder)
            break
        time.sleep(0.2)
    communicator.agree(problem)
    communicator.on_rank_zero(mark.unlink)
