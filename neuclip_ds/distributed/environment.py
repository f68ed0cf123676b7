"""Read the launcher's environment variables, without torch so that mistakes are reported at once."""

import os
import re
import socket
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import NamedTuple

from neuclip_ds.errors import UserError

# (rank, local rank, world size) as the DeepSpeed and torch launchers, Open MPI and a step of SLURM's srun name them.
# SLURM_NTASKS does not mark a step: a batch script, which is one process, has it too.
_SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")
_LAUNCHERS = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    _SLURM,
)


_DEVICE_FOLDER = Path("/dev")
_DEVICES = ("nvidia[0-9]*", "dxg", "kfd", "dri/renderD*", "accel*", "davinci*", "hl[0-9]*")


class RankEnvironment(NamedTuple):
    """Rank, local rank and world size of this process."""

    rank: int
    local_rank: int
    world_size: int


def read_environment(env: MutableMapping[str, str] = os.environ) -> RankEnvironment:
    """Return rank, local rank and world size, (0, 0, 1) without a launcher."""
    names = _launcher(env)
    if names is None:
        return RankEnvironment(0, 0, 1)
    try:
        rank, local_rank, world_size = (int(env.get(name, "0")) for name in names)
    except ValueError as error:
        raise UserError(
            f"One of {', '.join(names)} is not a number ({error}); start with a launcher, which sets them."
        ) from error
    if not 0 <= rank < world_size:
        raise UserError(f"{names[0]}={rank} is not below {names[2]}={world_size}; start with a launcher.")
    return RankEnvironment(rank, local_rank, world_size)


def complete_environment(env: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that a process group needs and the launcher has not set, unless MPI must provide the address.

    Without a launcher there is one rank. The rendezvous of a step of srun is its first node, at a port derived from the
    job; `mpirun -x MASTER_ADDR=... -x MASTER_PORT=...` names the address. Raises `UserError` where only the
    launcher knows a missing one.
    """
    names = _launcher(env)
    if names is None:
        env.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        return
    if names == _SLURM:
        nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", ""))  # such as gpu[01-04,07],cpu3
        env.setdefault("MASTER_ADDR", re.sub(r"\[(\d+)[^]]*]", r"\1", nodes).split(",")[0])
        env.setdefault("MASTER_PORT", str(20_000 + int(env.get("SLURM_JOB_ID", "0")) % 10_000))
    known = bool(env.get("MASTER_ADDR")) and env.get("MASTER_PORT", "").isdigit()
    if known:
        env.update(zip(_LAUNCHERS[0], map(str, read_environment(env)), strict=True))
    elif names[0].startswith(("RANK", "SLURM")):
        raise UserError(
            f"{names[0]} is set, but MASTER_ADDR and MASTER_PORT, the address of rank 0, are not: "
            "start with a launcher, or set them."
        )


def has_gpu_devices() -> bool:
    """Return whether this machine has the device file of a GPU or another accelerator."""
    return any(any(_DEVICE_FOLDER.glob(pattern)) for pattern in _DEVICES)


def refuse_missing_gpus(env: MutableMapping[str, str] = os.environ) -> None:
    """Raise `UserError` where `deepspeed --num_gpus N` has started this process, which has no GPU to use.

    DeepSpeed starts N processes on the CPU then. `--num_accelerators`, its other name, means what there is.
    """
    if env.get("DS_ACCELERATOR") == "cpu":  # the user's choice
        return
    wanted = next((found for arguments in _commands_above() if (found := _num_gpus(arguments)) is not None), None)
    if wanted is not None:
        raise UserError(
            f"--num_gpus {wanted} asks for GPUs, but {socket.gethostname()} shows none: check nvidia-smi, "
            "CUDA_VISIBLE_DEVICES and that torch is built for them, or train on CPU cores with deepspeed "
            f"--num_accelerators {wanted}."
        )


def _commands_above() -> Iterator[list[str]]:
    """Yield the command lines of this process's ancestors, the nearest first; nothing where /proc is missing."""
    pid = os.getppid()
    while pid > 1:
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            pid = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return
        yield arguments


def _num_gpus(arguments: list[str]) -> str | None:
    """Return the value of --num_gpus in a command line of `deepspeed`."""
    if not any(Path(argument).name in ("deepspeed", "ds", "deepspeed.launcher.runner") for argument in arguments[:3]):
        return None
    for name, value in zip(arguments, [*arguments[1:], ""], strict=True):
        if name == "--num_gpus":
            return value
        if name.startswith("--num_gpus="):
            return name.partition("=")[2]
    return None


def _launcher(env: MutableMapping[str, str]) -> tuple[str, str, str] | None:
    return next((names for names in _LAUNCHERS if names[0] in env and names[2] in env), None)


def free_port() -> int:
    """Return a port that nothing listens at on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
