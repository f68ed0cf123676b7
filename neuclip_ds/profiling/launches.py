"""Collectives in a profiler's events: the operators that launch them, matched with their execution.

A launch is a `c10d::...` operator, whose input shapes the profiler records. With gloo, a launch executes as a
`gloo:...` range on one of gloo's threads; ranges are matched to launches in order. With NCCL, it executes as an
`nccl...` kernel with the correlation ID of the runtime call that started the kernel inside the operator.
"""

import logging
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from neuclip_ds.errors import counted
from neuclip_ds.profiling.intervals import Interval, Timeline

log = logging.getLogger(__name__)

Thread = tuple[Any, Any]

# prefix of the operator's name -> operation (as in `ring_bytes`) and position of the argument that is the rank's input
_OPERATORS: dict[str, tuple[str, int]] = {
    "allgather": ("all_gather", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "allreduce": ("all_reduce", 0),
    "reduce": ("reduce", 0),
    "broadcast": ("broadcast", 0),
    "alltoall": ("all_to_all", 1),
}
_GLOO_FAMILY = {"all_reduce": "reduce", "reduce_scatter": "reduce"}  # gloo runs a reduce-scatter as an all-reduce


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event with a duration (`ph` is X in the trace); times are in seconds on the profiler's clock."""

    category: str
    name: str
    span: Interval
    thread: Thread
    arguments: Mapping[str, Any]

    @property
    def is_nccl(self) -> bool:
        return self.category == "kernel" and self.name.startswith("nccl")

    @property
    def is_gloo(self) -> bool:
        return self.name.startswith("gloo:")


@dataclass(kw_only=True)
class Launch:
    """A collective as one rank launched and executed it."""

    op: str
    elements: int  # size of the rank's input
    dtype: str  # the profiler's name; empty while unknown
    thread: Thread
    span: Interval  # when the operator ran
    executed: list[Interval] = field(default_factory=list)


def read_events(trace: Mapping[str, Any]) -> list[Event]:
    """Return a Chrome trace's events with a duration (`ph` is X), in order of start time."""
    events = []
    for record in trace["traceEvents"]:
        if record.get("ph") != "X":
            continue
        start = float(record["ts"])  # in microseconds
        end = start + float(record.get("dur", 0))
        events.append(
            Event(
                category=record.get("cat", ""),
                name=record["name"],
                span=(start / 1e6, end / 1e6),
                thread=(record.get("pid"), record.get("tid")),
                arguments=record.get("args", {}),
            )
        )
    return sorted(events, key=lambda event: event.span[0])


def find_launches(events: Sequence[Event]) -> list[Launch]:
    """Return all collectives in launch order, with the intervals of their execution.

    Executions without a launch are omitted, and a warning gives their number.
    """
    launches = [_launch(event) for event in events if event.category == "cpu_op" and event.name.startswith("c10d::")]
    unmatched = _match_gloo(launches, events) + _match_nccl(launches, events)
    if unmatched:
        log.warning(
            "the trace contains no launch for %s, so the communication times in the profile are too low",
            counted(unmatched, "collective"),
        )
    return launches


def launching_calls(events: Iterable[Event]) -> dict[Any, Event]:
    """Return the CUDA calls of the host by correlation ID, which GPU work shares with the call that started it."""
    calls = [event for event in events if event.category in ("cuda_runtime", "cuda_driver")]
    return {event.arguments["correlation"]: event for event in calls if "correlation" in event.arguments}


def _launch(event: Event) -> Launch:
    name = event.name.removeprefix("c10d::").strip("_")
    op = name
    argument = 0  # position of the rank's input
    for prefix, (known_op, known_argument) in _OPERATORS.items():
        if name.startswith(prefix):
            op = known_op
            argument = known_argument
            break
    shapes = event.arguments.get("Input Dims", [])
    elements = 0
    if len(shapes) > argument and op != "barrier":
        elements = _elements(shapes[argument])
    types = event.arguments.get("Input type", [])
    dtype = ""
    if len(types) > argument and types[argument] not in ("TensorList", "GenericList"):
        dtype = types[argument]
    return Launch(op=op, elements=elements, dtype=dtype, thread=event.thread, span=event.span)


def _elements(shape: Sequence[Any]) -> int:
    """Return the number of elements in a tensor with this shape, or in all tensors with the listed shapes."""
    if all(isinstance(side, int) for side in shape):
        return math.prod(shape)
    return sum(_elements(part) for part in shape)


def _match_gloo(launches: Iterable[Launch], events: Iterable[Event]) -> int:
    """Add the `gloo:...` ranges to their launches; return the number of ranges without a launch."""
    waiting: defaultdict[tuple[str, int], deque[Launch]] = defaultdict(deque)  # in launch order
    for launch in launches:
        waiting[_GLOO_FAMILY.get(launch.op, launch.op), launch.elements].append(launch)
    unmatched = 0
    for event in events:
        if not event.is_gloo:
            continue
        op = event.name.removeprefix("gloo:")
        elements = _elements(event.arguments.get("Input Dims", [[0]])[:1]) if op != "barrier" else 0
        queue = waiting[_GLOO_FAMILY.get(op, op), elements]
        if queue and queue[0].span[0] <= event.span[0]:
            launch = queue.popleft()
            launch.dtype = launch.dtype or next(iter(event.arguments.get("Input type", [])), "")
            launch.executed.append(event.span)
        else:
            unmatched += 1
    return unmatched


def _match_nccl(launches: Iterable[Launch], events: Sequence[Event]) -> int:
    """Add NCCL kernels to launches (for grouped calls, to the last launch); return the number of unmatched kernels."""
    launches_by_thread: defaultdict[Thread, list[Launch]] = defaultdict(list)
    for launch in launches:
        launches_by_thread[launch.thread].append(launch)
    timelines: dict[Thread, Timeline[Launch]] = {}
    for thread, thread_launches in launches_by_thread.items():
        timelines[thread] = Timeline((launch.span, launch) for launch in thread_launches)

    def launch_around(call: Event) -> Launch | None:
        if call.thread not in timelines:
            return None
        return timelines[call.thread].at(call.span[0])

    # the event `record_param_comms` inside an operator names the element type of the operator's input
    for event in events:
        if event.name == "record_param_comms":
            launch_of_event = launch_around(event)
            if launch_of_event is not None:
                launch_of_event.dtype = launch_of_event.dtype or event.arguments.get("dtype", "")

    calls = launching_calls(events)
    unmatched = 0
    for kernel in events:
        if not kernel.is_nccl:
            continue
        call = calls.get(kernel.arguments.get("correlation"), kernel)
        launch_of_kernel = launch_around(call)
        if launch_of_kernel is None:  # a group of calls starts its kernel after the last operator has returned
            for earlier in launches_by_thread[call.thread]:
                if earlier.span[1] <= call.span[0] and not earlier.executed:
                    launch_of_kernel = earlier
        if launch_of_kernel is None:
            unmatched += 1
        else:
            launch_of_kernel.executed.append(kernel.span)
    return unmatched
