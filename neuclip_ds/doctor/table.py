"""The table of checks: one file in `checks/` and one line here for each."""

from collections.abc import Callable, Iterable
from enum import Enum
from typing import NamedTuple

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.doctor.checks import (
    all_reduce,
    clocks,
    devices,
    disks,
    host_copies,
    matmul,
    memory_bandwidth,
    methods,
    open_files,
    operations,
    precision,
    shards,
    shared_memory,
    training,
    versions,
)
from neuclip_ds.doctor.finding import Finding
from neuclip_ds.doctor.request import Request


class Scope(Enum):
    """Where a check runs."""

    NODE = "node"  # in one process on each node, which joins no others
    RANK = "rank"  # in a process for each rank on its device, which joins no others
    RANKS = "ranks"  # in a process for each rank, joined as those of a run are
    LAUNCH = "launch"  # in the processes that start all others, joined by their CPUs, on every rank


class Check(NamedTuple):
    """Something that is examined."""

    name: str
    scope: Scope
    quick: bool  # whether it takes no more than a few seconds and measures nothing
    examine: Callable[[Request, Communicator], Iterable[Finding]]


CHECKS = (
    Check("devices", Scope.NODE, True, devices.examine),
    Check("versions", Scope.NODE, True, versions.examine),
    Check("DeepSpeed ops", Scope.NODE, True, operations.examine),
    Check("precision", Scope.NODE, True, precision.examine),
    Check("shared memory", Scope.NODE, True, shared_memory.examine),
    Check("open files", Scope.NODE, True, open_files.examine),
    Check("disk space", Scope.NODE, True, disks.examine_space),
    Check("disk speed", Scope.NODE, False, disks.examine_speed),
    Check("shards", Scope.NODE, False, shards.examine),
    Check("matmul", Scope.RANK, False, matmul.examine),
    Check("memory bandwidth", Scope.RANK, False, memory_bandwidth.examine),
    Check("host copies", Scope.RANK, False, host_copies.examine),
    Check("methods", Scope.RANK, False, methods.examine),
    Check("all-reduce", Scope.RANKS, False, all_reduce.examine),
    Check("clocks", Scope.LAUNCH, True, clocks.examine),
    Check("training", Scope.LAUNCH, False, training.examine),
)


def chosen(scope: Scope, request: Request) -> list[Check]:
    """Return the checks of a scope that the request asks for."""
    return [check for check in CHECKS if check.scope is scope and (check.quick or not request.quick)]
