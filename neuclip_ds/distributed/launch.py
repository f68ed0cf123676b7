"""Launch of a run: the ranks rendezvous, compare their code and config, join one process group and end together.

The rendezvous takes place before the process group is created, because torch would wait half an hour for a missing
rank without naming it, and would deadlock if the ranks ran different configs.
"""

import codecs
import ctypes
import difflib
import hashlib
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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
    find_orphans,
    read_environment,
    refuse_missing_gpus,
    refuse_missing_hostfile,
    use_interface_of,
)
from neuclip_ds.distributed.failure_detector import FailureDetector
from neuclip_ds.distributed.store_entries import read_address, read_entry, write_entry
from neuclip_ds.errors import UserError, counted, explained

log = logging.getLogger(__name__)

TIMEOUT = timedelta(minutes=5)  # longest time that rank 0 waits for the other ranks, and that they wait for rank 0
_COLLECTIVE_LIMIT = timedelta(minutes=30)  # longest wait for another rank in a collective, without `max_outage`
_FILE_DELAY = 15.0  # longest time in seconds until a network file system shows a file from another node
_CONNECT_LIMIT = 10.0  # longest time in seconds of one attempt to connect to the store
_POLL_INTERVAL = 0.1  # seconds between reads of the store
_STORE_DELAY = 3.0  # longest time in seconds that rank 0 keeps the store open for the ranks to read the verdict
# options of glibc's `mallopt` (malloc.h), and the largest value of its parameter, an int
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_LARGEST_REUSED_BLOCK = 2**31 - 1  # bytes
_LARGEST_THRESHOLD_OF_OLD_GLIBC = 2**25  # bytes
_MAX_CHANGES = 300  # maximum number of characters with which a message shows a difference between two ranks

_joined: dist.ProcessGroup | None = None  # the process group that `join` has created, until `leave`


@contextmanager
def process_group(task: str, max_outage: float = 0.0) -> Iterator[Communicator]:
    """Connect the launched ranks in a process group for the duration of the block, and yield its communicator.

    Within the block, this thread and the threads that it starts flush subnormal numbers to zero. The moments of weights
    that no longer receive gradients decay to subnormal numbers, which slow down CPUs.

    Args:
        task: description of the work as lines of text, such as a config; it must be identical on all ranks.
        max_outage: longest time in seconds that a node may wait for its storage while others wait in a collective.

    Raises:
        UserError: the hostfile does not exist; the launcher's variables are invalid, or incomplete without MPI's help;
            MASTER_PORT is in use, or the store on it contains unreadable entries; or ranks are missing, appear twice,
            cannot be reached or have no usable GPU, or differ in their world size, devices, library versions, code or
            task.
    """
    refuse_missing_hostfile()
    before = os.environ.copy()
    complete_environment()
    if "RANK" not in os.environ:  # mpirun set no address
        _discover_with_mpi()
    environment = read_environment()
    if environment.local_rank == 0:
        _name_orphans()
    with ExitStack() as stack:
        if environment.world_size == 1:
            stack.callback(_restore_variables, before)  # programs started later must not see a launcher's variables
        problem = ""
        try:
            _choose_device(environment.local_rank)
        except UserError as error:
            if environment.world_size == 1:
                raise
            problem = str(error)  # rank 0 reports it, so that the other nodes do not wait for this rank
        store: dist.Store | None = None
        group_store: dist.Store | None = None
        detector: FailureDetector | None = None
        if environment.world_size > 1:
            shared_store = open_store(environment.rank)
            joined = rendezvous(shared_store, environment, _fingerprint(task), problem)
            use_interface_of(joined.address)
            store = dist.PrefixStore(joined.attempt, shared_store)
            connections = [open_store(environment.rank, serve=False) for _ in range(2)]
            detector_store, group_store = [dist.PrefixStore(joined.attempt, connection) for connection in connections]
            detector = FailureDetector(environment, detector_store, joined.address)
            stack.enter_context(detector)
        else:
            # torch's hook writes the rank before each line of a traceback, once for each group that was ever joined
            stack.callback(setattr, sys, "excepthook", sys.excepthook)
            stack.callback(leave)
        flushed_before = bool(torch.tensor(2.0**-126).div(2) == 0)
        stack.callback(torch.set_flush_denormal, flushed_before)
        torch.set_flush_denormal(True)
        communicator = join(max_outage, store, group_store)
        communicator.barrier()  # NCCL connects some ranks only in their first collective
        if detector is not None:
            detector.communicator = communicator
        yield communicator
        leave()  # not after a failure: the other ranks would fail before they learned the reason


def join(
    max_outage: float = 0.0, store: dist.Store | None = None, group_store: dist.Store | None = None
) -> Communicator:
    """Join the launcher's process group, or reuse an existing one, and return a communicator between its ranks.

    DeepSpeed's engine uses the same group.

    Args:
        max_outage: as for `process_group`.
        store: store for the communicator's counters.
        group_store: a dedicated connection to the store through which several ranks connect; by default, a new
            connection to MASTER_ADDR.
    """
    global _joined
    accelerator = get_accelerator()
    device = torch.device(accelerator.current_device_name())
    timeout = _COLLECTIVE_LIMIT + timedelta(seconds=max_outage)
    if not dist.is_initialized():
        environment = read_environment()
        backend = accelerator.communication_backend_name()
        bound_device = None
        if device.type == "cuda" and environment.world_size > 1:
            bound_device = device  # NCCL connects a rank at once if the group is bound to the rank's GPU
        if environment.world_size == 1:
            # without a port: a command that this process starts inherits MASTER_PORT and would find the port in use
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        elif group_store is None:
            dist.init_process_group(backend, timeout=timeout, device_id=bound_device)
        else:
            group_store.set_timeout(timeout)
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("process_group", group_store),
                rank=environment.rank,
                world_size=environment.world_size,
                timeout=timeout,
                device_id=bound_device,
            )
        _joined = dist.group.WORLD
    if device.type == "cpu":
        return Communicator("cpu", store=store)
    if dist.get_world_size() == 1:
        return Communicator(device, store=store)
    # through this group, ranks exchange host data, such as which rows are valid, without waiting for the GPUs
    host_group: Any = dist.new_group(backend="gloo", timeout=timeout)
    return Communicator(device, host_group=host_group, store=store)


def _discover_with_mpi() -> None:
    """Let MPI find the address of rank 0; raise `UserError` if mpi4py is missing or belongs to another MPI library."""
    launched = read_environment()
    fix = "install mpi4py for the launcher's MPI library, or set MASTER_ADDR and MASTER_PORT on each rank"
    with explained("MASTER_ADDR or MASTER_PORT is not set, and mpi4py cannot find the address of rank 0", fix):
        deepspeed.comm.mpi_discovery(int(os.environ.get("MASTER_PORT", "29500")), verbose=False)
    in_mpi = read_environment()
    if (in_mpi.rank, in_mpi.world_size) != (launched.rank, launched.world_size):
        raise UserError(
            f"The launcher started rank {launched.rank} of {launched.world_size}, but mpi4py finds rank {in_mpi.rank} "
            f"of {in_mpi.world_size}, probably because it is built for another MPI library: {fix}."
        )


def _name_orphans() -> None:
    """Log a warning that names ranks whose launcher was killed: they may still use GPUs, the port or the run."""
    orphans = " ".join(str(pid) for pid in find_orphans())
    if orphans:
        log.warning(
            "These processes on %s are ranks whose launcher has ended, and may still be training: %s. If nobody needs "
            "them, run: kill %s",
            socket.gethostname(),
            orphans,
            orphans,
        )


def leave() -> None:
    """Leave the process group and drop DeepSpeed's references to it, unless the group existed before `join`.

    If a process ends while the group's threads are still running, it aborts instead of exiting cleanly.
    """
    global _joined
    if not dist.is_initialized() or dist.group.WORLD is not _joined:
        return
    _joined = None
    if deepspeed.comm.is_initialized():
        deepspeed.comm.destroy_process_group()
    else:
        dist.destroy_process_group()


def _restore_variables(before: Mapping[str, str]) -> None:
    """Restore the variables that `complete_environment` sets to their values in `before`."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if name in before:
            os.environ[name] = before[name]
        else:
            os.environ.pop(name, None)


def _choose_device(local_rank: int) -> None:
    """Select the GPU of this rank before anything uses a GPU; without GPUs, prepare for training on a CPU.

    Raises `UserError` if the node has too few GPUs or has GPUs that torch cannot use, or if GPUs were requested
    (`deepspeed --num_gpus`) but none is visible.
    """
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        refuse_missing_gpus(_torch_build())
        reuse_freed_memory()
        return
    count = accelerator.device_count()
    if local_rank >= count:
        raise UserError(
            f"Local rank {local_rank} on {socket.gethostname()} sees only {counted(count, 'GPU')} (local ranks count "
            "from 0): start one rank per GPU (slots in the hostfile), and let each rank see all GPUs of its node (srun "
            "--gpus-per-node, not --gpus-per-task)."
        )
    accelerator.set_device(local_rank)


def reuse_freed_memory() -> None:
    """Let this process keep freed memory for its next tensors, if the C library is glibc.

    By default, glibc maps each block of more than 32 MB from the kernel and returns it when it is freed. Each new
    tensor then takes a page fault per 4 KB, in which the kernel zeroes the page. Blocks of 2 GB or more are still
    returned. Old versions of glibc, such as 2.33, refuse a threshold above 32 MiB, so they still return larger blocks.
    Settings in the environment (`MALLOC_MMAP_THRESHOLD_`, `GLIBC_TUNABLES` and so on) take precedence.
    """
    is_set_by_user = any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ)
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if is_set_by_user or set_option is None:
        return
    if not set_option(_MMAP_THRESHOLD, _LARGEST_REUSED_BLOCK):
        set_option(_MMAP_THRESHOLD, _LARGEST_THRESHOLD_OF_OLD_GLIBC)
    set_option(_TRIM_THRESHOLD, _LARGEST_REUSED_BLOCK)


def _fingerprint(task: str) -> dict[str, str]:
    """Return the devices, library versions, code hash and config, which must be the same on all ranks."""
    package = Path(__file__).parents[1]
    code = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        code.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    accelerator = get_accelerator()
    devices = f"{accelerator.device_name()}, {accelerator.communication_backend_name()}"
    if accelerator.device_name() == "cuda":
        devices += f" {'.'.join(map(str, torch.cuda.nccl.version()))}"
    return {
        "devices": devices,
        "library versions": f"{_torch_build()}, deepspeed {deepspeed.__version__}",
        "code of neuclip_ds": code.hexdigest()[:12],
        "config": task,
    }


def _torch_build() -> str:
    """Return torch's version and the platform that it was built for."""
    platform = "CPUs only"
    if torch.version.cuda:
        platform = f"CUDA {torch.version.cuda}"
    elif torch.version.hip:
        platform = f"ROCm {torch.version.hip}"
    return f"torch {torch.__version__} for {platform}"


def open_store(rank: int, timeout: timedelta = TIMEOUT, serve: bool = True) -> dist.Store:
    """Connect to the ranks' shared store: torchrun's, or one that rank 0 opens and the process group will also use.

    Args:
        timeout: longest time to wait for rank 0.
        serve: if False, open a second connection, whose calls do not wait for calls on the first connection.

    Raises:
        UserError: rank 0 cannot listen on MASTER_PORT, or cannot be reached at MASTER_ADDR.
    """
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    is_server = serve and rank == 0 and not _torchrun_serves()
    try:
        if not is_server:
            _wait_for_server(host, port, timeout)
        store = dist.TCPStore(host, port, None, is_server, timeout, wait_for_workers=False, multi_tenant=True)
    except (OSError, dist.DistError) as error:
        if is_server:
            problem = "cannot listen"
            fix = (
                "that this is an address of rank 0's machine and that no other run uses the port, or choose another "
                "port (the launcher's --master_port, or MASTER_PORT under srun or mpirun)"
            )
        else:
            problem = f"waited {timeout.total_seconds():.0f} s for rank 0"
            fix = (
                "rank 0's log, the address (the launcher's --master_addr, or MASTER_ADDR under srun or mpirun) and the "
                "firewall"
            )
        reason = " ".join(str(error).split("\n")[0].split())
        raise UserError(f"Rank {rank} {problem} at {host}:{port} ({reason}). Check {fix}.") from error
    return dist.PrefixStore("neuclip_ds", store)


def _torchrun_serves() -> bool:
    """Return whether torchrun serves the ranks' store, which then outlives the ranks that torchrun restarts."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _wait_for_server(host: str, port: int, timeout: timedelta) -> None:
    """Wait until the store accepts connections; raise `OSError` after `timeout`.

    `TCPStore` would also wait, but a signal could not end that wait, because `TCPStore` does not return to Python.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            with socket.create_connection((host, port), timeout=_CONNECT_LIMIT):
                return
        except OSError:  # rank 0 has not started, or its address is not known yet
            if time.monotonic() > deadline:
                raise
        time.sleep(_POLL_INTERVAL)


@dataclass(frozen=True, kw_only=True)
class _Arrival:
    """Description of a rank, which the rank sends to rank 0 at the rendezvous."""

    rank: int
    host: str
    process: str  # random name of the process
    fingerprint: dict[str, str]  # must be equal on all ranks
    problem: str  # reason why the rank cannot take part, or ""


@dataclass(frozen=True, kw_only=True)
class Joined:
    """Result of the rendezvous on one rank."""

    address: str
    """Address of this machine on the network over which ranks reach rank 0."""
    attempt: str
    """Random name of this start of the ranks, which prefixes their keys in the store."""


def rendezvous(
    store: dist.Store,
    environment: RankEnvironment,
    fingerprint: Mapping[str, str],
    problem: str = "",
    timeout: timedelta = TIMEOUT,
) -> Joined:
    """Wait for all ranks and compare their fingerprints, which must be equal.

    Raises:
        UserError: a rank has a `problem`, is missing or appears twice, or the fingerprints differ (raised on every rank
            that arrived); rank 0 ends early or sends no result; or an entry of the store is unreadable.
    """
    with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))) as probe:
        address = probe.getsockname()[0]
        address_of_rank_0 = probe.getpeername()[0]
    is_loopback = ip_address(address).is_loopback  # if so, other nodes cannot reach it; MASTER_ADDR names this machine
    arrival = _Arrival(
        rank=environment.rank,
        host=socket.gethostname(),
        process=secrets.token_hex(8),
        fingerprint={"number of ranks": str(environment.world_size), **fingerprint},
        problem=problem,
    )

    def arrive(attempt: str) -> dist.Store:
        attempt_store = dist.PrefixStore(attempt, store)
        if not is_loopback:
            attempt_store.set("address of rank 0", address_of_rank_0)
        number = attempt_store.add("arrivals", 1)
        write_entry(attempt_store, f"arrival/{number}", arrival)
        return attempt_store

    # rank 0 names the attempt and compares the arrivals, and all ranks raise its verdict
    if environment.rank == 0:
        attempt = secrets.token_hex(8)
        attempt_store = arrive(attempt)
        store.set("attempt", attempt)
        verdict = _compare(attempt_store, environment.world_size, timeout)
        write_entry(attempt_store, "verdict", verdict)
        if verdict.problem:
            _wait_for_readers(attempt_store)
    else:
        try:
            attempt, verdict = _wait_for_verdict(store, arrival, arrive, timeout)
        except dist.DistError as error:
            raise UserError(
                f"Rank {environment.rank} reached rank 0, which ended before all ranks had arrived: check rank 0's log."
            ) from error
        attempt_store = dist.PrefixStore(attempt, store)
    if verdict.problem:
        raise UserError(verdict.problem)
    if is_loopback and attempt_store.check(["address of rank 0"]):
        address = read_address(attempt_store, "address of rank 0")
    return Joined(address=address, attempt=attempt)


@dataclass(frozen=True, kw_only=True)
class _Verdict:
    """Result of rank 0's comparison of the ranks, which it sends to all of them."""

    problem: str  # reason why the ranks cannot run together, or ""
    processes: list[str]  # names of the processes that had arrived


def _wait_for_verdict(
    store: dist.Store, arrival: _Arrival, arrive: Callable[[str], dist.Store], timeout: timedelta
) -> tuple[str, _Verdict]:
    """Join rank 0's current rendezvous attempt, and return its name and the result of rank 0's comparison.

    torchrun's store also contains the names and results of earlier attempts, in which this process took no part. This
    rank therefore joins again whenever the name of the current attempt changes. torchrun's restart counts cannot serve
    as names, because they differ between nodes. Raises `UserError` if rank 0 gives no result within twice `timeout`, or
    an unreadable one.
    """
    deadline = time.monotonic() + 2 * timeout.total_seconds()  # rank 0 may have started to wait later than this rank
    attempt = ""
    attempt_store = store
    while time.monotonic() < deadline:  # polls, because a signal could not end the rank during `store.wait`
        named = store.get("attempt").decode(errors="replace") if store.check(["attempt"]) else ""
        if named != attempt:
            attempt = named
            attempt_store = arrive(attempt)
        if attempt and attempt_store.check(["verdict"]):
            verdict = read_entry(attempt_store, "verdict", _Verdict)
            if arrival.process in verdict.processes or not _torchrun_serves():
                attempt_store.add("read", 1)
                return attempt, verdict
        time.sleep(_POLL_INTERVAL)
    raise UserError(f"Rank {arrival.rank} timed out waiting for rank 0 to compare the ranks: check rank 0's log.")


def _wait_for_readers(store: dist.Store) -> None:
    """Wait until the other ranks have read the result from the store, which closes when rank 0 ends."""
    deadline = time.monotonic() + _STORE_DELAY
    while store.add("read", 0) < store.add("arrivals", 0) - 1 and time.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL)


def _compare(store: dist.Store, world_size: int, timeout: timedelta) -> _Verdict:
    """Wait for all ranks, and find the reason why they cannot run together, if any; called on rank 0."""
    arrivals: dict[int, _Arrival] = {}  # by rank

    def verdict(problem: str) -> _Verdict:
        return _Verdict(problem=problem, processes=[arrival.process for arrival in arrivals.values()])

    first: _Arrival | None = None
    number = 0
    deadline = time.monotonic() + timeout.total_seconds()
    while len(arrivals) < world_size:
        number += 1
        while not store.check([f"arrival/{number}"]):  # polls, because a `store.wait` that times out prints a warning
            if time.monotonic() > deadline:
                missing = ", ".join(str(rank) for rank in range(world_size) if rank not in arrivals)
                return verdict(
                    f"Some of the {world_size} ranks did not arrive within {timeout.total_seconds():.0f} s: {missing}. "
                    "Check the logs of their nodes."
                )
            time.sleep(_POLL_INTERVAL)
        try:
            arrival = read_entry(store, f"arrival/{number}", _Arrival)
        except UserError as error:
            return verdict(str(error))
        rank = arrival.rank
        former = arrivals.get(rank)
        arrivals[rank] = arrival
        if arrival.problem:
            return verdict(f"rank {rank} on {arrival.host}: {arrival.problem}")
        if former is not None and not _torchrun_serves():  # torchrun may have restarted the rank
            return verdict(
                f"Two processes are rank {rank}, on {former.host} and {arrival.host}: give each node a different "
                "--node_rank, and each run a different port (the launcher's --master_port, or MASTER_PORT under srun "
                "or mpirun)."
            )
        first = first or arrival
        difference = _find_difference(first, arrival)
        if difference:
            return verdict(difference)
    return verdict("")


def _find_difference(first: _Arrival, other: _Arrival) -> str:
    """Describe the first difference between the fingerprints of two ranks; return "" if they are equal."""
    for name, value in first.fingerprint.items():
        other_value = other.fingerprint.get(name, "")
        if other_value == value:
            continue
        header_and_lines = difflib.unified_diff(value.splitlines(), other_value.splitlines(), n=0, lineterm="")
        # the lines that differ, without three lines of header and the positions: `-lr: 0.001 +lr: 0.5`
        lines = [line for line in [*header_and_lines][3:] if not line.startswith("@@")]
        changes = " ".join(lines)[:_MAX_CHANGES]
        return (
            f"Rank {other.rank} on {other.host} differs from rank {first.rank} on {first.host} in its {name} "
            f"({changes}): use the same devices, code, libraries, options and number of slots on all nodes."
        )
    return ""


def check_shared(folder: Path, communicator: Communicator) -> None:
    """Raise `UserError` on all ranks unless `folder` is the same folder on all nodes."""
    name = communicator.on_rank_zero(lambda: f".shared-{secrets.token_hex(8)}")
    shared_file = folder / name
    if communicator.rank == 0:
        shared_file.touch()
    deadline = time.monotonic() + _FILE_DELAY
    while not shared_file.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    problem = None
    if not shared_file.exists():
        problem = (
            f"{folder.absolute()} on this node is not the same folder as on rank 0's node, but all nodes must share "
            "it: choose a folder on a shared file system (run.output_dir, or --out of `neuclip-ds embed`), and start "
            "in the same working directory on each node."
        )
    communicator.raise_if_any_rank_failed(problem)
    communicator.on_rank_zero(shared_file.unlink)


def read_hostfile(path: Path) -> dict[str, int]:
    """Read each node's slots from a hostfile as DeepSpeed does; raise `UserError` if the file is missing or invalid."""
    if not path.is_file():
        raise UserError(f"The hostfile {path} does not exist; pass a file with one line `NAME slots=N` for each node.")
    if path.read_bytes().startswith(codecs.BOM_UTF8):
        raise UserError(f"DeepSpeed reads the byte order mark of {path} as part of a name; save the file without it.")
    with explained(f"DeepSpeed cannot read the hostfile {path}", "write one line `NAME slots=N` for each node"):
        return dict(fetch_hostfile(path))
