"""Read the launcher's environment variables, without torch so that mistakes are reported at once."""

import os
import re
import socket
from collections.abc import MutableMapping
from contextlib import suppress
from typing import NamedTuple

import psutil

from neuclip_ds.errors import UserError

# (rank, local rank, world size) as the DeepSpeed and torch launchers, Open MPI and a step of SLURM's srun name them.
# SLURM_NTASKS does not mark a step: a batch script, which is one process, has it too.
_SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")
_LAUNCHERS = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    _SLURM,
)


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
    values = [env.get(name, "0") for name in names]
    if not all(map(str.isdigit, values)) or int(values[0]) >= int(values[2]):
        found = ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
        raise UserError(f"{found} is no rank of a launch; start with a launcher, which sets them.")
    return RankEnvironment(*map(int, values))


def complete_environment(env: MutableMapping[str, str] = os.environ) -> None:
    """Set what a process group needs and the launcher has not set: of one rank without a launcher, of a step of srun.

    The rendezvous of a step of srun is its first node, at a port derived from the job. Under mpirun without
    MASTER_ADDR and MASTER_PORT nothing is set: MPI must provide the address. Raises `UserError` for other launchers.
    """
    names = _launcher(env)
    if names is None:
        env.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        return
    if names == _SLURM:
        nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", ""))  # such as gpu[01-04,07],cpu3
        env.setdefault("MASTER_ADDR", re.sub(r"\[(\d+)[^]]*]", r"\1", nodes).split(",")[0])
        env.setdefault("MASTER_PORT", str(20_000 + int(env.get("SLURM_JOB_ID", "0")) % 10_000))
    if env.get("MASTER_ADDR") and env.get("MASTER_PORT", "").isdigit():
        env.update(zip(_LAUNCHERS[0], map(str, read_environment(env)), strict=True))
    elif names[0].startswith(("RANK", "SLURM")):
        raise UserError("MASTER_ADDR and MASTER_PORT, the address of rank 0, are not set: start with a launcher.")


def refuse_missing_gpus() -> None:
    """Raise `UserError` where `deepspeed --num_gpus N` has started this process, which has no GPU to use.

    DeepSpeed starts N processes on the CPU then. `--num_accelerators`, its other name, means what there is.
    """
    if os.environ.get("DS_ACCELERATOR") == "cpu":  # the user's choice
        return
    for parent in psutil.Process().parents():
        with suppress(psutil.Error):  # it has ended
            command = " ".join(parent.cmdline())
            if wanted := re.search(r"[/ ](?:deepspeed|ds)(?:\.launcher\.runner)? .*--num_gpus[ =](\d+)", command):
                raise UserError(
                    f"--num_gpus {wanted[1]} asks for GPUs, but {socket.gethostname()} shows none: check nvidia-smi, "
                    "CUDA_VISIBLE_DEVICES and that torch is built for them, or train on CPU cores with deepspeed "
                    f"--num_accelerators {wanted[1]}."
                )


def free_port() -> int:
    """Return a port that nothing listens at on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _launcher(env: MutableMapping[str, str]) -> tuple[str, str, str] | None:
    return next((names for names in _LAUNCHERS if names[0] in env and names[2] in env), None)
