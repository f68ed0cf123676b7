"""Rendezvous of the ranks: wait until all are there and check that they run the same code and config.

This precedes the process group, which would wait half an hour without naming the missing rank, and deadlock if ranks
run different configs. The store is open to whoever reaches its port, so arrivals and the verdict are signed.
"""

import json
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from neuclip_ds.distributed.authentication import CHANGED, sign, verify
from neuclip_ds.distributed.environment import RankEnvironment
from neuclip_ds.distributed.listening import listen_at
from neuclip_ds.distributed.secret import SEEN_WITHIN, without_secret
from neuclip_ds.errors import UserError

log = logging.getLogger(__name__)

TIMEOUT = timedelta(minutes=5)  # between the first rank and the last one


class Arrival(NamedTuple):
    """What a rank reports when it arrives."""

    rank: int
    world_size: int
    host: str
    fingerprint: dict[str, str]

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


def open_store(rank: int, timeout: timedelta = TIMEOUT) -> dist.Store:
    """Open the store of the launch: torchrun's, or rank 0's, which the process group will share.

    Raises `UserError` if rank 0 cannot listen at MASTER_ADDR:MASTER_PORT, or is not there.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        listening = listen_at(host, port).detach() if serves else None
        store = dist.TCPStore(
            host, port, None, serves, timeout, wait_for_workers=False, multi_tenant=True, master_listen_fd=listening
        )
    except (OSError, dist.DistError) as error:
        reason = " ".join(str(error).split("\n")[0].split())
        if serves:
            raise UserError(
                f"Rank 0 cannot listen at port {port}, which another run may use ({reason}); set another one with the "
                "launcher's --master_port or with MASTER_PORT."
            ) from error
        raise UserError(
            f"Rank {rank} waited {timeout.total_seconds():.0f} s for rank 0 at {host}:{port} ({reason}); check "
            "that its node has started, that the address is right (the launcher's --master_addr), and the firewall."
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives the ranks
    return dist.PrefixStore(f"neuclip_ds/{attempt}", store)


def rendezvous(
    store: dist.Store,
    key: bytes,
    environment: RankEnvironment,
    fingerprint: Mapping[str, str],
    timeout: timedelta = TIMEOUT,
) -> None:
    """Wait for all ranks and compare them.

    The fingerprint holds values that must be equal on all ranks, by a name for messages. Raises `UserError` on every
    rank that has arrived if ranks are missing, two have one number, or fingerprints differ.
    """
    local = Arrival(environment.rank, environment.world_size, socket.gethostname(), dict(fingerprint))
    store.set(f"arrival/{store.add('arrivals', 1)}", sign(key, "arrival", json.dumps(local)))
    if environment.rank == 0:
        problem = _find_problem(store, _arrivals(store, key, timeout), local, timeout)
        store.set("verdict", sign(key, "verdict", problem))
        if problem:
            _wait_for_readers(store)
    else:
        problem = _verdict(store, key, local, 2 * timeout)  # rank 0 may have started to wait later than this rank
    if problem:
        raise UserError(problem)


def _arrivals(store: dist.Store, key: bytes, timeout: timedelta) -> Iterator[Arrival]:
    """Yield the ranks in the order in which they arrive, until the timeout, or soon after one of them could not."""
    deadline, number = time.monotonic() + timeout.total_seconds(), 1
    while True:
        while not store.check([f"arrival/{number}"]):  # a wait that times out prints a warning
            if without_secret(store):
                deadline = min(deadline, time.monotonic() + SEEN_WITHIN)
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)
        signed = store.get(f"arrival/{number}").decode(errors="replace")
        number += 1
        try:
            yield Arrival(*json.loads(verify(key, "arrival", signed)))
        except ValueError:
            log.warning("ignored an arrival that no rank of this launch has signed")


def _find_problem(store: dist.Store, arrivals: Iterator[Arrival], local: Arrival, timeout: timedelta) -> str:
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
    return without_secret(store) or (
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


def _verdict(store: dist.Store, key: bytes, local: Arrival, timeout: timedelta) -> str:
    try:
        store.wait(["verdict"], timeout)
        problem = verify(key, "verdict", store.get("verdict").decode(errors="replace"))
        store.add("read", 1)
    except ValueError as error:
        raise UserError(CHANGED) from error
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
