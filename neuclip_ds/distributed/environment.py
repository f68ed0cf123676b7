"""Read the launcher's environment variables. The module does not import torch, so it reports errors at once."""

import os
import re
import socket
from collections.abc import MutableMapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

import psutil

from neuclip_ds.errors import UserError

# Variables for rank, local rank and world size, set by DeepSpeed's and torch's launchers, Open MPI, and SLURM's srun.
# SLURM_NTASKS does not identify an srun step, because it is also set in a batch script, which is a single process.
_SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")
_LAUNCHERS = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    _SLURM,
)

_DRIVER = Path("/proc/driver/nvidia/version")


class RankEnvironment(NamedTuple):
    """Rank, local rank and world size of this process."""

    rank: int
    local_rank: int
    world_size: int


def read_environment(env: MutableMapping[str, str] = os.environ) -> RankEnvironment:
    """Return the rank, local rank and world size; without a launcher, return (0, 0, 1)."""
    names = _variables_of_launcher(env)
    if names is None:
        return RankEnvironment(rank=0, local_rank=0, world_size=1)
    values = [env.get(name, "0") for name in names]
    are_numbers = all(value.isdigit() for value in values)
    if not are_numbers or int(values[0]) >= int(values[2]):
        settings = ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
        raise UserError(f"{settings} does not describe a rank; start with a launcher, which sets these variables.")
    rank, local_rank, world_size = values
    return RankEnvironment(int(rank), int(local_rank), int(world_size))


def complete_environment(env: MutableMapping[str, str] = os.environ) -> None:
    """Set the process-group variables that the launcher has not set (for a single rank or an srun step).

    An srun step uses its first node as MASTER_ADDR and a port derived from the job ID. Under mpirun, MPI can provide a
    missing address, so nothing is set; under other launchers, a missing address raises `UserError`.
    """
    names = _variables_of_launcher(env)
    if names is None:
        env.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        return
    if names == _SLURM:
        nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", ""))  # such as gpu[01-04,07],cpu3
        first_of_each_range = re.sub(r"\[(\d+)[^]]*]", r"\1", nodes)  # such as gpu01,cpu3
        job = int(env.get("SLURM_JOB_ID", "0"))
        env.setdefault("MASTER_ADDR", first_of_each_range.split(",")[0])
        env.setdefault("MASTER_PORT", str(20_000 + job % 10_000))
    if env.get("MASTER_ADDR") and env.get("MASTER_PORT", "").isdigit():
        environment = read_environment(env)
        env["RANK"] = str(environment.rank)
        env["LOCAL_RANK"] = str(environment.local_rank)
        env["WORLD_SIZE"] = str(environment.world_size)
    elif names[0].startswith(("RANK", "SLURM")):
        raise UserError("MASTER_ADDR and MASTER_PORT, the address of rank 0, are not set: start with a launcher.")


def find_gpus(devices: Path = Path("/dev")) -> list[str]:
    """Return the device files of NVIDIA's and AMD's compute drivers; skip dri/, whose files may belong to displays."""
    return sorted(str(path) for path in devices.glob("*") if re.fullmatch(r"nvidia\d+|kfd", path.name))


def let_idle_threads_sleep(env: MutableMapping[str, str] = os.environ) -> None:
    """Let idle OpenMP threads sleep in a CPU run unless the user configured them; call this before importing torch.

    Threads that spin until the next parallel region take cores away from other ranks and from data loaders.
    """
    set_by_user = env.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}
    if not set_by_user and (env.get("DS_ACCELERATOR") == "cpu" or not find_gpus()):
        env["OMP_WAIT_POLICY"] = "PASSIVE"


def refuse_missing_gpus(torch_build: str) -> None:
    """Raise `UserError` if DeepSpeed finds no GPU and would train on the CPU by mistake.

    This is a mistake if the machine has GPUs or if the process was started by `deepspeed --num_gpus N`. The alias
    `--num_accelerators` is allowed, because it can also mean CPU ranks. DS_ACCELERATOR=cpu disables these checks.

    Args:
        torch_build: torch's version and the platform that it was built for.
    """
    if os.environ.get("DS_ACCELERATOR"):
        return
    gpus = find_gpus()
    if gpus:
        driver = None
        if _DRIVER.is_file():
            driver = re.search(r"\b\d{3,}\.[\d.]+", _DRIVER.read_text())
        raise UserError(
            f"{socket.gethostname()} has GPUs ({', '.join(gpus)}), but torch cannot use them: this is {torch_build}, "
            f"and NVIDIA's driver is {driver[0] if driver else 'not loaded'}. Check nvidia-smi and "
            "CUDA_VISIBLE_DEVICES; install a newer driver, or torch for an older CUDA: pip install 'torch<2.16' "
            "torchvision --index-url https://download.pytorch.org/whl/cu126. DS_ACCELERATOR=cpu trains on the CPU."
        )
    for parent in psutil.Process().parents():
        with suppress(psutil.Error):  # the process has ended
            command = " ".join(parent.cmdline())
            launched = re.search(r"[/ ](?:deepspeed|ds)(?:\.launcher\.runner)? .*--num_gpus[ =](\d+)", command)
            if launched:
                raise UserError(
                    f"--num_gpus {launched[1]} asks for GPUs, but {socket.gethostname()} shows none: check nvidia-smi, "
                    "CUDA_VISIBLE_DEVICES and that torch is built for them, or train on CPU cores with deepspeed "
                    f"--num_accelerators {launched[1]}."
                )


def use_interface_of(address: str) -> None:
    """Make gloo use the network interface that has this address, unless GLOO_SOCKET_IFNAME is set.

    By default, gloo uses the interface of the address that the host name resolves to. That address may belong to a
    different network or, like Debian's 127.0.1.1, be local to this machine.
    """
    wanted = ip_address(address)
    for interface, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            candidate = ip_address(entry.address.partition("%")[0])  # a link-local address ends with %INTERFACE
            if candidate == wanted or (candidate.is_loopback and wanted.is_loopback):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def free_port() -> int:
    """Return a free TCP port on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _variables_of_launcher(env: MutableMapping[str, str]) -> tuple[str, str, str] | None:
    """Return the launcher's variables for rank, local rank and world size, or None without a launcher."""
    for names in _LAUNCHERS:
        rank, _, world_size = names
        if rank in env and world_size in env:
            return names
    return None
