"""Rendezvous of the ranks: wait until all are there and check that they run the same code and config.

This precedes the process group, which would wait half an hour without naming the missing rank, and deadlock if ranks
run different configs.
"""

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from neuclip_ds.distributed.environment import RankEnvironment
from neuclip_ds.errors import UserError

TIMEOUT = timedelta(minutes=5)  # between the first rank and the last one


class Arrival(NamedTuple):
    """What a rank reports when it arrives."""

    rank: int
    world_size: int
    host: str
    fingerprint: dict[str, str]

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


def rendezvous(
    environment: RankEnvironment, fingerprint: Mapping[str, str], timeout: timedelta = TIMEOUT
) -> dist.Store:
    """Wait for all ranks at MASTER_ADDR:MASTER_PORT, compare them, and return the store they share.

    The fingerprint holds values that must be equal on all ranks, by a name for messages. Raises `UserError` on every
    rank that has arrived if ranks are missing, two have one number, or fingerprints differ.
    """
    local = Arrival(environment.rank, environment.world_size, socket.gethostname(), dict(fingerprint))
    store = _open(local, timeout)
    store.set(f"arrival/{store.add('arrivals', 1)}", json.dumps(local))
    if environment.rank == 0:
        problem = _find_problem(_arrivals(store, timeout), local, timeout)
        store.set("verdict", problem)
        if problem:
            _wait_for_readers(store)
    else:
        problem = _verdict(store, local, 2 * timeout)  # rank 0 may have started to wait later than this rank
    if problem:
        raise UserError(problem)
    return store


def _open(local: Arrival, timeout: timedelta) -> dist.Store:
    """Open the store of the launch: torchrun's, or rank 0's, which the process group will share."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = local.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = dist.TCPStore(host, port, None, serves, timeout, wait_for_workers=False, multi_tenant=True)
    except dist.DistError as error:
        reason = " ".join(str(error).split("\n")[0].split())
        if serves:
            raise UserError(
                f"Rank 0 cannot listen at port {port}, which another run may use ({reason}); set another one with the "
                "launcher's --master_port or with MASTER_PORT."
            ) from error
        raise UserError(
            f"Rank {local.rank} waited {timeout.total_seconds():.0f} s for rank 0 at {host}:{port} ({reason}); check "
            "that its node has started, that the address is right (the launcher's --master_addr), and the firewall."
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives the ranks
    return dist.PrefixStore(f"neuclip_ds/{attempt}", store)


def _arrivals(store: dist.Store, timeout: timedelta) -> Iterator[Arrival]:
    """Yield the ranks in the order in which they arrive, until the timeout."""
    deadline = time.monotonic() + timeout.total_seconds()
    number = 0
    while True:
        number += 1
        left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
        try:
            store.wait([f"arrival/{number}"], left)
        except dist.DistError:
            return
        yield Arrival(*json.loads(store.get(f"arrival/{number}")))


def _find_problem(arrivals: Iterator[Arrival], local: Arrival, timeout: timedelta) -> str:
    """Return why the ranks cannot work together, or an empty string."""
    here: dict[int, Arrival] = {}
    for arrival in arrivals:
        if arrival.rank in here:
            hosts = f"{here[arrival.rank].host} and {arrival.host}"
            return f"Two processes are rank {arrival.rank}, on {hosts}: give each node a different --node_rank."
        if arrival.world_size != local.world_size:
            sizes = f"{arrival} is one of {arrival.world_size} ranks, {local} one of {local.world_size}"
            return f"{sizes}: start all nodes with the same hostfile and number of slots."
        for name, value in local.fingerprint.items():
            if arrival.fingerprint.get(name) != value:
                found = _difference(value, arrival.fingerprint.get(name, "none"))
                return f"{arrival} differs from {local} in {name}: {found}; it must be the same on all nodes."
        here[arrival.rank] = arrival
        if len(here) == local.world_size:
            return ""
    missing = [rank for rank in range(local.world_size) if rank not in here]
    return (
        f"{local} waited {timeout.total_seconds():.0f} s for {local.world_size} ranks; {_spans(missing)} "
        "did not arrive: check the logs of their nodes."
    )


def _difference(expected: str, found: str) -> str:
    """Describe the first line that differs."""
    ours, theirs = expected.splitlines(), found.splitlines()
    pairs = [(theirs[i : i + 1], ours[i : i + 1]) for i in range(max(len(ours), len(theirs)))]
    line, instead_of = next((pair for pair in pairs if pair[0] != pair[1]), ([found], [expected]))
    return f"{' '.join(line).strip() or 'nothing'} instead of {' '.join(instead_of).strip() or 'nothing'}"


def _spans(ranks: list[int]) -> str:
    """Format rank numbers: `rank 3` or `ranks 8-15, 17`."""
    starts = [rank for rank in ranks if rank - 1 not in ranks]
    ends = [rank for rank in ranks if rank + 1 not in ranks]
    spans = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(spans)}"


def _verdict(store: dist.Store, local: Arrival, timeout: timedelta) -> str:
    try:
        store.wait(["verdict"], timeout)
        problem = store.get("verdict").decode()
        store.add("read", 1)
    except dist.DistError as error:
        raise UserError(
            f"Rank {local.rank} reached rank 0, which ended before all ranks had arrived: check the log of its node."
        ) from error
    return problem


def _wait_for_readers(store: dist.Store, seconds: float = 3.0) -> None:
    """Wait on rank 0, whose end closes the store, until the ranks that have arrived have read the verdict."""
    deadline = time.monotonic() + seconds
    while store.add("read", 0) < store.add("arrivals", 0) - 1 and time.monotonic() < deadline:
        time.sleep(0.05)
