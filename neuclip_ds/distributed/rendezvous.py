"""The ranks meet before they start work, and compare what they were started with.

This comes before the process group, which would wait for half an hour without saying for whom, and whose ranks would
wait for each other where one of them runs another config.
"""

from __future__ import annotations

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

LIMIT = timedelta(minutes=5)  # between the first rank that is ready and the last one


class Arrival(NamedTuple):
    """What a rank says of itself when it comes."""

    rank: int
    world_size: int
    host: str
    facts: dict[str, str]

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


def rendezvous(environment: RankEnvironment, facts: Mapping[str, str], limit: timedelta = LIMIT) -> dist.Store:
    """Waits for all ranks at MASTER_ADDR:MASTER_PORT and compares them; the store they share there.

    Args:
        environment: this rank.
        facts: what must be equal on all ranks, by a name that a message can use.
        limit: how long to wait for the others.

    Raises:
        UserError: on every rank that has come: some have not come, two claim one rank, or their facts differ.
    """
    own = Arrival(environment.rank, environment.world_size, socket.gethostname(), dict(facts))
    store = _open(own, limit)
    store.set(f"arrival/{store.add('arrivals', 1)}", json.dumps(own))
    if environment.rank == 0:
        problem = _look_over(_arrivals(store, limit), own, limit)
        store.set("verdict", problem)
        if problem:
            _let_them_read(store)
    else:
        problem = _verdict(store, own, 2 * limit)  # rank 0's own wait may have begun later than this one
    if problem:
        raise UserError(problem)
    return store


def _open(own: Arrival, limit: timedelta) -> dist.Store:
    """The store of the launch: torchrun's, else one of rank 0's that the process group is going to share."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = own.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = dist.TCPStore(host, port, None, serves, limit, wait_for_workers=False, multi_tenant=True)
    except dist.DistError as error:
        reason = " ".join(str(error).split("\n")[0].split())
        if serves:
            raise UserError(
                f"Rank 0 cannot listen at port {port}, which another run may have: choose one by the launcher's "
                f"--master_port, or MASTER_PORT ({reason})."
            ) from error
        raise UserError(
            f"Rank {own.rank} waited {limit.total_seconds():.0f} s for rank 0 at {host}:{port}: has its node started, "
            f"is that its address (the launcher's --master_addr), does a firewall lie between? ({reason})"
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives the ranks
    return dist.PrefixStore(f"neuclip_ds/{attempt}", store)


def _arrivals(store: dist.Store, limit: timedelta) -> Iterator[Arrival]:
    """The ranks in the order in which they come, until the limit."""
    deadline = time.monotonic() + limit.total_seconds()
    number = 0
    while True:
        number += 1
        left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
        try:
            store.wait([f"arrival/{number}"], left)
        except dist.DistError:
            return
        yield Arrival(*json.loads(store.get(f"arrival/{number}")))


def _look_over(arrivals: Iterator[Arrival], own: Arrival, limit: timedelta) -> str:
    """Why the ranks cannot work together; empty when they can."""
    here: dict[int, Arrival] = {}
    for arrival in arrivals:
        if arrival.rank in here:
            hosts = f"{here[arrival.rank].host} and {arrival.host}"
            return f"Two processes are rank {arrival.rank}, on {hosts}: give each node its own --node_rank."
        if arrival.world_size != own.world_size:
            sizes = f"{arrival} is one of {arrival.world_size} ranks, {own} one of {own.world_size}"
            return f"{sizes}: start all nodes with the same hostfile and number of slots."
        for name, value in own.facts.items():
            if arrival.facts.get(name) != value:
                found = _difference(value, arrival.facts.get(name, "none"))
                return f"{arrival} has another {name} than {own}: {found}; it must be the same on all nodes."
        here[arrival.rank] = arrival
        if len(here) == own.world_size:
            return ""
    missing = [rank for rank in range(own.world_size) if rank not in here]
    return (
        f"{own} waited {limit.total_seconds():.0f} s for {own.world_size} ranks; {_spans(missing)} "
        "did not come: see what their nodes have printed."
    )


def _difference(expected: str, found: str) -> str:
    """The first line that differs."""
    ours, theirs = expected.splitlines(), found.splitlines()
    pairs = [(theirs[i : i + 1], ours[i : i + 1]) for i in range(max(len(ours), len(theirs)))]
    line, instead_of = next((pair for pair in pairs if pair[0] != pair[1]), ([found], [expected]))
    return f"{' '.join(line).strip() or 'nothing'} instead of {' '.join(instead_of).strip() or 'nothing'}"


def _spans(ranks: list[int]) -> str:
    """`rank 3` or `ranks 8-15, 17`."""
    starts = [rank for rank in ranks if rank - 1 not in ranks]
    ends = [rank for rank in ranks if rank + 1 not in ranks]
    spans = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(spans)}"


def _verdict(store: dist.Store, own: Arrival, limit: timedelta) -> str:
    try:
        store.wait(["verdict"], limit)
        problem = store.get("verdict").decode()
        store.add("read", 1)
    except dist.DistError as error:
        raise UserError(
            f"Rank {own.rank} met rank 0, which ended before all ranks had come: see what its node printed."
        ) from error
    return problem


def _let_them_read(store: dist.Store, seconds: float = 3.0) -> None:
    """The store ends with rank 0, which therefore waits until those who have come know why."""
    deadline = time.monotonic() + seconds
    while store.add("read", 0) < store.add("arrivals", 0) - 1 and time.monotonic() < deadline:
        time.sleep(0.05)
