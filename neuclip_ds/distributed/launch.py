"""Launch of a run: the ranks rendezvous, compare their code and config, join one process group and end together.

The rendezvous takes place before the process group is created, because torch would wait half an hour for a missing
rank without naming it, and would deadlock if the ranks ran different configs.
"""

import difflib
import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.launcher.runner import fetch_hostfile

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.environment import (
    RankEnvironment,
    complete_environment,
    read_environment,
    refuse_missing_gpus,
    use_interface_of,
)
from neuclip_ds.distributed.failure_detector import FailureDetector
from neuclip_ds.errors import UserError, explained

TIMEOUT = timedelta(minutes=5)  # longest time between the arrivals of the first rank and the last rank
_COLLECTIVE_LIMIT = timedelta(minutes=30)
_SEEN_WITHIN = 15.0  # longest time in seconds until a network file system shows a file from another node


@contextmanager
def process_group(task: str, max_outage: float = 0.0) -> Iterator[Communicator]:
    """Join the launched ranks in a process group for the duration of the block.

    Within the block, this thread and the threads that it starts flush subnormal numbers to zero. The moments of weights
    that no longer receive gradients decay to subnormal numbers, which slow down CPUs.

    Args:
        task: description of the work as lines of text, such as a config; it must be identical on all ranks.
        max_outage: longest time in seconds that a node may wait for its storage while others wait in a collective.

    Raises:
        UserError: ranks are missing, have no GPU although others do, or run different code or a different task.
    """
    complete_environment()
    if "RANK" not in os.environ:  # mpirun set no address
        deepspeed.comm.mpi_discovery(int(os.environ.get("MASTER_PORT", "29500")), verbose=False)
    environment = read_environment()
    problem = ""
    try:
        _choose_device(environment.local_rank)
    except UserError as error:
        if environment.world_size == 1:
            raise
        problem = str(error)  # rank 0 reports it, so that the other nodes do not wait for this rank
    with ExitStack() as stack:
        store = detector = None
        if environment.world_size > 1:
            store = open_store(environment.rank)
            address = rendezvous(store, environment, _facts(task), problem)
            use_interface_of(address)
            detector = FailureDetector(environment, open_store(environment.rank, serve=False), address)
            stack.enter_context(detector)
        else:
            stack.callback(leave)
        stack.callback(torch.set_flush_denormal, bool(torch.tensor(2.0**-126).div(2) == 0))
        torch.set_flush_denormal(True)
        communicator = join(max_outage, store)
        communicator.barrier()  # NCCL connects some ranks only in their first collective
        if detector is not None:
            detector.communicator = communicator
        yield communicator
        leave()  # not after a failure: the other ranks would fail before they learned the reason


def join(max_outage: float = 0.0, store: dist.Store | None = None) -> Communicator:
    """Join the launcher's process group, or reuse one that exists; DeepSpeed's engine uses the same group."""
    accelerator = get_accelerator()
    device = torch.device(accelerator.current_device_name())
    limit = _COLLECTIVE_LIMIT + timedelta(seconds=max_outage)
    if not dist.is_initialized():
        # NCCL connects a rank at once if the group is bound to the rank's GPU
        bound = device if device.type == "cuda" and read_environment().world_size > 1 else None
        dist.init_process_group(accelerator.communication_backend_name(), timeout=limit, device_id=bound)
    if device.type == "cpu" or dist.get_world_size() == 1:
        return Communicator("cpu" if device.type == "cpu" else device, store=store)
    # through this group, ranks exchange host data, such as which rows are valid, without waiting for the GPUs
    hosts: Any = dist.new_group(backend="gloo", timeout=limit)
    return Communicator(device, host_group=hosts, store=store)


def leave() -> None:
    """Leave the process group and drop DeepSpeed's references to it.

    If a process ends while the group's threads are still running, it aborts instead of exiting cleanly.
    """
    if deepspeed.comm.is_initialized():
        deepspeed.comm.destroy_process_group()
    elif dist.is_initialized():
        dist.destroy_process_group()


def _choose_device(local_rank: int) -> None:
    """Assign each rank on a node its own GPU before anything uses a GPU."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        refuse_missing_gpus(_torch_build())
        return
    count = accelerator.device_count()
    if local_rank >= count:
        raise UserError(
            f"{socket.gethostname()} shows {count} GPUs, too few for local rank {local_rank}: start one rank per "
            "GPU (slots in the hostfile), and let each rank see all GPUs (srun --gpus-per-node, not --gpus-per-task)."
        )
    accelerator.set_device(local_rank)


def _facts(task: str) -> dict[str, str]:
    """Return the devices, library versions, code hash and config, which must be the same on all ranks."""
    package = Path(__file__).parents[1]
    code = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        code.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    accelerator = get_accelerator()
    devices = f"{accelerator.device_name()}, {accelerator.communication_backend_name()}"
    if accelerator.device_name() == "cuda":
        devices += f" {'.'.join(map(str, torch.cuda.nccl.version()))}"
    versions = f"{_torch_build()}, deepspeed {deepspeed.__version__}"
    facts = {"devices": devices, "version of the libraries": versions}
    return {**facts, "neuclip_ds": code.hexdigest()[:12], "config": task}


def _torch_build() -> str:
    toolkits = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    built_for = [f"{name} {version}" for name, version in toolkits.items() if version]
    return f"torch {torch.__version__} for {' '.join(built_for) or 'CPUs only'}"


def open_store(rank: int, timeout: timedelta = TIMEOUT, serve: bool = True) -> dist.Store:
    """Connect to the ranks' shared store: torchrun's, or one that rank 0 opens and the process group will also use.

    Args:
        timeout: longest time to wait for rank 0.
        serve: if False, open a second connection, whose calls do not wait for calls on the first connection.

    Raises:
        UserError: rank 0 cannot listen on MASTER_PORT, or cannot be reached at MASTER_ADDR.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = serve and rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = dist.TCPStore(host, port, None, serves, timeout, wait_for_workers=False, multi_tenant=True)
    except (OSError, dist.DistError) as error:
        failed = "cannot listen" if serves else f"waited {timeout.total_seconds():.0f} s for rank 0"
        fix = "that no other run uses the port (the launcher's --master_port)"
        if not serves:
            fix = "rank 0's log, the address (the launcher's --master_addr) and the firewall"
        reason = " ".join(str(error).split("\n")[0].split())
        raise UserError(f"Rank {rank} {failed} at {host}:{port} ({reason}). Check {fix}.") from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives the ranks
    return dist.PrefixStore(f"neuclip_ds/{attempt}", store)


def rendezvous(
    store: dist.Store,
    environment: RankEnvironment,
    facts: Mapping[str, str],
    problem: str = "",
    timeout: timedelta = TIMEOUT,
) -> str:
    """Wait for all ranks and compare their `facts`, which must be equal.

    Returns:
        The address of this machine on the network over which ranks reach rank 0.

    Raises:
        UserError: a rank has a `problem`, is missing or appears twice, or the facts differ; raised on every rank that
            arrived.
    """
    with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))) as probe:
        address, of_rank_zero = probe.getsockname()[0], probe.getpeername()[0]
    is_loopback = ip_address(address).is_loopback  # if so, other nodes cannot reach it; MASTER_ADDR names this machine
    if not is_loopback:
        store.set("address of rank 0", of_rank_zero)
    arrival = [environment.rank, socket.gethostname(), {"number of ranks": str(environment.world_size), **facts}]
    store.set(f"arrival/{store.add('arrivals', 1)}", json.dumps([*arrival, problem]))
    if environment.rank == 0:
        problem = _find_problem(store, environment.world_size, timeout)
        store.set("verdict", problem)
        deadline = time.monotonic() + 3  # the store, from which the others read the verdict, closes when rank 0 ends
        while problem and store.add("read", 0) < store.add("arrivals", 0) - 1 and time.monotonic() < deadline:
            time.sleep(0.05)
    else:
        try:
            store.wait(["verdict"], 2 * timeout)  # rank 0 may have started to wait later than this rank
            problem = store.get("verdict").decode()
            store.add("read", 1)
        except dist.DistError as error:
            raise UserError(
                f"Rank {environment.rank} reached rank 0, which ended before all ranks had arrived: check rank 0's log."
            ) from error
    if problem:
        raise UserError(problem)
    known = is_loopback and store.check(["address of rank 0"])
    return store.get("address of rank 0").decode() if known else address


def _find_problem(store: dist.Store, world_size: int, timeout: timedelta) -> str:
    """Return the reason why the ranks cannot run together, or "" if they can; called on rank 0."""
    hosts: dict[int, str] = {}
    expected: dict[str, str] = {}
    deadline, number = time.monotonic() + timeout.total_seconds(), 1
    while len(hosts) < world_size:
        while not store.check([f"arrival/{number}"]):  # a wait that times out prints a warning
            if time.monotonic() > deadline:
                missing = ", ".join(str(rank) for rank in range(world_size) if rank not in hosts)
                return (
                    f"Of {world_size} ranks, these did not arrive within {timeout.total_seconds():.0f} s: {missing}. "
                    "Check the logs of their nodes."
                )
            time.sleep(0.05)
        rank, host, facts, problem = json.loads(store.get(f"arrival/{number}"))
        number += 1
        if problem:
            return f"rank {rank} on {host}: {problem}"
        if rank in hosts:
            return f"Two processes are rank {rank}, on {hosts[rank]} and {host}: give each node its own --node_rank."
        hosts[rank] = host
        expected = expected or facts
        for name, value in expected.items():
            if facts.get(name) != value:
                # the first lines that differ: `-lr: 0.001 +lr: 0.5`
                lines = difflib.unified_diff(value.splitlines(), facts.get(name, "").splitlines(), n=0, lineterm="")
                changes = " ".join(line for line in [*lines][3:] if not line.startswith("@@"))[:300]
                first, its_host = next(iter(hosts.items()))
                return (
                    f"Rank {rank} on {host} differs from rank {first} on {its_host} in {name} ({changes}): start all "
                    "nodes with the same files, options and number of slots."
                )
    return ""


def check_shared(folder: Path, communicator: Communicator) -> None:
    """Raise `UserError` on all ranks unless all nodes share the run's folder."""
    mark = folder / communicator.on_rank_zero(lambda: f".shared-{secrets.token_hex(8)}")
    if communicator.rank == 0:
        mark.touch()
    deadline, problem = time.monotonic() + _SEEN_WITHIN, None
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    if not mark.exists():
        problem = (
            f"{folder.absolute()} is not rank 0's folder of that name, but all nodes must share it: put "
            "--run.output_dir on a file system that they have in common, and start in the same folder on each."
        )
    communicator.raise_if_any_rank_failed(problem)
    communicator.on_rank_zero(mark.unlink)


def read_hostfile(path: Path) -> dict[str, int]:
    """Read each node's slots from a hostfile as DeepSpeed does; raise `UserError` if the file is missing or invalid."""
    if not path.is_file():
        raise UserError(f"The hostfile {path} does not exist; hostfiles/ has examples.")
    with explained(f"DeepSpeed cannot read the hostfile {path}", "write one line `NAME slots=N` for each node"):
        return dict(fetch_hostfile(path))
