"""Read the launcher's environment variables, and check this machine for GPUs, orphaned ranks and the hostfile.

The module does not import torch, so it reports errors at once.
"""

import os
import re
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

import psutil

from neuclip_ds.errors import UserError


class _Variables(NamedTuple):
    """Names of the environment variables in which a launcher passes a rank's numbers."""

    rank: str
    local_rank: str
    world_size: str


_TORCH = _Variables("RANK", "LOCAL_RANK", "WORLD_SIZE")  # of DeepSpeed's and torch's launchers
# SLURM_NTASKS does not identify an srun step, because it is also set in a batch script, which is a single process.
_SLURM = _Variables("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")
_MPI = (
    _Variables("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    _Variables("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_SIZE"),  # MVAPICH
    _Variables("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),  # MPICH and Intel MPI
    _Variables("PMI_RANK", "PMI_LOCAL_RANK", "PMI_SIZE"),  # HPE Cray
)
_BARE_PMI = _Variables("PMI_RANK", "LOCAL_RANK", "PMI_SIZE")  # older process managers do not set a local rank
# rank variables of launchers for which this module knows no variable for the number of ranks
_OTHER_RANKS = ("PMI_RANK", "PMIX_RANK", "MPI_LOCALRANKID", "ALPS_APP_PE", "FLUX_TASK_RANK", "JSM_NAMESPACE_RANK")

_LAUNCHER_NAMES = ("deepspeed", "ds", "deepspeed.launcher.runner")
_DRIVER = Path("/proc/driver/nvidia/version")


class RankEnvironment(NamedTuple):
    """Rank, local rank and world size of this process."""

    rank: int
    local_rank: int
    world_size: int


def read_environment(env: MutableMapping[str, str] = os.environ) -> RankEnvironment:
    """Return the rank, local rank and world size; without a launcher, return (0, 0, 1).

    Raises `UserError` if the launcher's variables do not describe a rank, or lack the number of ranks.
    """
    names = _variables_of_launcher(env)
    if names is None:
        for name in _OTHER_RANKS:
            if name in env:
                raise UserError(
                    f"{name}={env[name]} shows that a launcher started this process, but not how many ranks there are: "
                    f"set {', '.join(_TORCH)}, MASTER_ADDR and MASTER_PORT in a script that each rank runs."
                )
        return RankEnvironment(rank=0, local_rank=0, world_size=1)
    values = [env.get(name, "0") for name in names]
    are_numbers = all(value.isdigit() for value in values)
    if not are_numbers or int(values[0]) >= int(values[2]):
        settings = ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
        raise UserError(
            f"The values {settings} do not describe a rank; start the program with a launcher, which sets these "
            "variables, or unset them."
        )
    rank, local_rank, world_size = values
    return RankEnvironment(int(rank), int(local_rank), int(world_size))


def local_ranks(env: Mapping[str, str] = os.environ) -> int:
    """Return the number of launched ranks that run on this machine, or 1 if the launcher does not report it."""
    return int(env.get("LOCAL_WORLD_SIZE") or env.get("LOCAL_SIZE") or 1)  # torchrun's, DeepSpeed's


def complete_environment(env: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that torch's process group reads, if the launcher has not set them.

    Without a launcher, or under mpirun with a single rank, MASTER_ADDR is this machine, and MASTER_PORT is a free port.
    An srun step uses its first node and a port derived from the job ID. If several ranks run under mpirun, MPI can
    provide a missing address, so nothing is set.

    Call `read_environment` first: it refuses a launcher that does not set the number of ranks, whereas this function
    would make each of that launcher's ranks a separate run.

    Raises `UserError` if another launcher sets no address, if a launcher that sets only PMI_RANK and PMI_SIZE sets no
    local rank, or if the launcher's variables do not describe a rank.
    """
    names = _variables_of_launcher(env)
    if names is None or (names not in (_TORCH, _SLURM) and read_environment(env).world_size == 1):
        env.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        return
    if names == _SLURM:
        nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", ""))  # such as gpu[01-04,07],cpu3
        first_of_each_range = re.sub(r"\[(\d+)[^]]*]", r"\1", nodes)  # such as gpu01,cpu3
        job = int(env.get("SLURM_JOB_ID", "0"))
        env.setdefault("MASTER_ADDR", first_of_each_range.split(",")[0])
        env.setdefault("MASTER_PORT", str(20_000 + job % 10_000))
    if env.get("MASTER_ADDR") and env.get("MASTER_PORT", "").isdigit():
        if names == _BARE_PMI and "LOCAL_RANK" not in env:
            raise UserError(
                "The launcher sets PMI_RANK, but not the rank within the node: set LOCAL_RANK on each rank."
            )
        environment = read_environment(env)
        env["RANK"] = str(environment.rank)
        env["LOCAL_RANK"] = str(environment.local_rank)
        env["WORLD_SIZE"] = str(environment.world_size)
    elif names in (_TORCH, _SLURM):
        raise UserError("MASTER_ADDR and MASTER_PORT must give the address of rank 0: set both on each rank.")


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
    """Raise `UserError` if training on the CPU is a mistake; call this if DeepSpeed has found no GPU.

    It is a mistake if the machine has GPUs or if the process was started by `deepspeed --num_gpus N`. The alias
    `--num_accelerators` is allowed, because it can also mean CPU ranks. If DS_ACCELERATOR is set, nothing is checked.

    Args:
        torch_build: torch's version and the platform that it was built for.
    """
    if os.environ.get("DS_ACCELERATOR"):
        return
    gpus = find_gpus()
    if gpus:
        raise UserError(
            f"{socket.gethostname()} has GPUs ({', '.join(gpus)}), but torch cannot use them: this is {torch_build}"
            f"{_advice_on_gpus(gpus)} To use the CPU, set DS_ACCELERATOR=cpu."
        )
    for parent in psutil.Process().parents():
        with suppress(psutil.Error):  # the process has ended
            command = " ".join(parent.cmdline())
            launched = re.search(r"[/ ](?:deepspeed|ds)(?:\.launcher\.runner)? .*--num_gpus[ =](\d+)", command)
            if launched:
                raise UserError(
                    f"--num_gpus {launched[1]} requests GPUs, but {socket.gethostname()} has no visible GPU: check "
                    "nvidia-smi and CUDA_VISIBLE_DEVICES, and that torch is built for GPUs; or train on CPU cores with "
                    f"deepspeed --num_accelerators {launched[1]}."
                )


def _advice_on_gpus(gpus: Sequence[str]) -> str:
    """Return the end of the message about GPUs that torch cannot use: NVIDIA's driver, if any, and advice."""
    if not any("nvidia" in gpu for gpu in gpus):
        return ". Check rocm-smi and HIP_VISIBLE_DEVICES; install torch for ROCm (pytorch.org)."
    driver = None
    if _DRIVER.is_file():
        driver = re.search(r"\b\d{3,}\.[\d.]+", _DRIVER.read_text())
    return (
        f", and NVIDIA's driver is {driver[0] if driver else 'not loaded'}. Check nvidia-smi and CUDA_VISIBLE_DEVICES; "
        "install a newer driver, or torch for an older CUDA: pip install 'torch<2.16' torchvision --index-url "
        "https://download.pytorch.org/whl/cu126."
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


def refuse_missing_hostfile() -> None:
    """Raise `UserError` if DeepSpeed's launcher was given a hostfile that does not exist.

    The launcher only warns, and starts this node alone.
    """
    for parent in psutil.Process().parents():
        with suppress(psutil.Error):  # the process has ended
            hostfile = _hostfile_of(parent.cmdline())
            folder = parent.cwd()
            if hostfile and not (Path(folder) / hostfile).is_file():
                raise UserError(
                    f"The hostfile {hostfile} does not exist (in {folder}), so deepspeed has started only this node: "
                    "correct --hostfile, or omit it to train on one node."
                )


def _hostfile_of(command: Sequence[str]) -> str:
    """Return the hostfile that a command gives to DeepSpeed's launcher, or "" for any other command."""
    starts = [number for number, word in enumerate(command[:3]) if Path(word).name in _LAUNCHER_NAMES]
    if not starts:
        return ""
    words = command[starts[0] + 1 :]
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in ("-H", "--hostfile"):
            return value if equals else words[number + 1]
        if word.endswith(".py") or word == "--module":  # the options of the script follow
            break
    return ""


def find_orphans() -> list[int]:
    """Return the IDs of this user's processes on this machine that are ranks whose launcher has ended."""
    me = psutil.Process()
    orphans = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # the process has ended, or belongs to another user
            command = process.cmdline()  # empty if the process is a zombie
            if process.uids().real != me.uids().real or process == me or "python" not in "".join(command[:1]):
                continue
            if _variables_of_launcher(process.environ()) is not None and _is_orphan(process):
                orphans.append(process.pid)
    return orphans


def _is_orphan(rank: psutil.Process) -> bool:
    """Return whether a rank's launcher has ended, so that PID 1, the system's first process, has adopted the rank.

    The `deepspeed` command starts `deepspeed.launcher.launch`, which starts the ranks and keeps running if only the
    command is killed; PID 1 then adopts it instead of the ranks.
    """
    parent = rank.parent()
    if parent is not None and "deepspeed.launcher.launch" in parent.cmdline():
        parent = parent.parent()
    if parent is None:
        return True
    is_first = parent.pid == 1 or parent.name() == "systemd"
    # in a container, a launcher may be the first process
    return is_first and not re.search("deepspeed|torchrun|torch.distributed|mpi|slurm", " ".join(parent.cmdline()))


def _variables_of_launcher(env: Mapping[str, str]) -> _Variables | None:
    """Return the launcher's variables for rank, local rank and world size, or None without a launcher."""
    if "RANK" in env and "WORLD_SIZE" in env:
        return _TORCH
    mpi = next((names for names in _MPI if all(name in env for name in names)), None)
    if mpi is None and "PMI_RANK" in env and "PMI_SIZE" in env:
        mpi = _BARE_PMI
    if all(name in env for name in _SLURM):
        if mpi is None or mpi == _BARE_PMI:
            return _SLURM
        # mpirun may start its ranks through srun, whose variables then describe mpirun's own processes
        has_same_rank = env[mpi.rank] == env[_SLURM.rank]
        has_same_world_size = env[mpi.world_size] == env[_SLURM.world_size]
        return _SLURM if has_same_rank and has_same_world_size else mpi
    return mpi
