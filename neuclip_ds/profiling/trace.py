"""Training steps in a Chrome trace from `torch.profiler`: computation, and every collective with its purpose.

On a CPU, computation is the time in operators, such as ATen's. On a GPU, it is the time in kernels other than NCCL's,
in memsets and in copies within the GPU. A collective that a `Communicator` launched has the purpose that was passed to
the call; the purpose of any other collective, such as DeepSpeed's, is inferred from the operation and the phase of the
step.
"""

import gzip
import json
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuclip_ds.distributed.communicator import PHASE, STEP, ring_bytes
from neuclip_ds.distributed.traffic import PURPOSE
from neuclip_ds.profiling.intervals import Interval, Timeline, intersection, length, union
from neuclip_ds.profiling.launches import Event, Launch, Thread, find_launches, launching_calls, read_events

log = logging.getLogger(__name__)

Phase = tuple[Interval, str]

_SCALARS = 64  # reductions of at most this many elements in the optimizer phase are norms and overflow flags
_WRAPPERS = ("c10d", "autograd", "torch")  # operators that only wait, or that enclose other operators and Python code
_WORK = ("kernel", "gpu_memset")  # events that count as a phase's work; copies may belong to the next batch
_TRANSFERS = ("Memcpy HtoD", "Memcpy DtoH")  # copies between host and GPU, which are not computation
_ITEM_SIZES = {
    **dict.fromkeys(("double", "long int", "long", "complexfloat"), 8),
    **dict.fromkeys(("float", "int", "unsigned int"), 4),
    **dict.fromkeys(("bfloat16", "half", "short", "short int"), 2),
    **dict.fromkeys(("bool", "byte", "char", "unsigned char", "signed char", "float8_e4m3fn", "float8_e5m2"), 1),
}


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective as executed by one rank."""

    purpose: str
    op: str  # as in `ring_bytes`
    size: int  # bytes of the rank's input
    sent: int  # bytes by the ring algorithm; equal to the bytes received
    intervals: tuple[Interval, ...]  # when it was executed, in seconds; empty if not in the trace


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """A training step as executed by one rank; times are in seconds on the profiler's clock."""

    window: Interval
    computation: list[Interval]  # disjoint, within the window
    collectives: list[Collective]
    phases: dict[str, float]  # name -> seconds (on a GPU, from the start of the phase's work to its end)


def read_trace(path: Path) -> list[StepTrace]:
    """Return the training steps of a trace file, which may be gzipped."""
    data = path.read_bytes()
    return parse_trace(json.loads(gzip.decompress(data) if path.suffix == ".gz" else data))


def parse_trace(trace: Mapping[str, Any]) -> list[StepTrace]:
    """Return the training steps of a trace that `torch.profiler.profile.export_chrome_trace` wrote."""
    events = read_events(trace)
    world_size = int(trace.get("distributedInfo", {}).get("world_size", 1))
    annotations = [event for event in events if event.category == "user_annotation"]
    host_phases = _split_around_nested(_annotated(events, "user_annotation"))
    executed_phases = _executed(host_phases, events)
    computation = union(_computing(events))
    launches = find_launches(events)

    # a launch is a point in time on the host: the range around it names its purpose or its phase
    named_ranges: defaultdict[Thread, list[tuple[Interval, str]]] = defaultdict(list)
    for event in annotations:
        if event.name.startswith(PURPOSE):
            named_ranges[event.thread].append((event.span, event.name.removeprefix(PURPOSE)))
    purposes = {thread: Timeline(entries) for thread, entries in named_ranges.items()}
    phases = Timeline(host_phases)

    def collective_of(launch: Launch) -> Collective:
        moment = launch.span[0]
        purpose = purposes[launch.thread].at(moment) if launch.thread in purposes else None
        if not purpose:
            purpose = engine_purpose(phases.at(moment), launch.op, launch.elements)
        size = launch.elements * _item_size(launch.dtype) if launch.elements else 0
        return Collective(
            purpose=purpose,
            op=launch.op,
            size=size,
            sent=ring_bytes(launch.op, size, world_size),
            intervals=tuple(launch.executed),
        )

    steps = []
    for event in annotations:
        if event.name != STEP:
            continue
        start, end = event.span
        collectives = [collective_of(launch) for launch in launches if start <= launch.span[0] <= end]
        spans: defaultdict[str, list[Interval]] = defaultdict(list)
        for span, name in executed_phases:
            if start <= span[0] <= end:
                spans[name].append(span)
        steps.append(
            StepTrace(
                window=event.span,
                computation=intersection(computation, [event.span]),
                collectives=collectives,
                phases={name: length(union(parts)) for name, parts in spans.items()},
            )
        )
    return steps


def _executed(host: list[Phase], events: Sequence[Event]) -> list[Phase]:
    """Return the intervals in which each phase's work is executed; on a GPU, the intervals may overlap.

    A GPU runs tens of milliseconds behind the host. The profiler repeats a host range as `gpu_user_annotation`, but
    only for work that the range's thread launches directly. The repeated range misses work that the autograd thread
    launches in the backward pass (github.com/pytorch/kineto/issues/1022) and work in nested ranges. This function uses
    the correlation ID of the launching call to find the missing work.
    """
    return _annotated(events, "gpu_user_annotation") + _launched_in(host, events) or host


def _split_around_nested(phases: Sequence[Phase]) -> list[Phase]:
    """Return disjoint phases: a phase that contains other phases is split around them."""
    disjoint = []
    for (start, end), name in phases:
        edges = [start]
        for nested_start, nested_end in sorted(span for span, _ in phases):
            if start < nested_start and nested_end < end:
                edges += [nested_start, nested_end]
        edges.append(end)
        for part in zip(edges[::2], edges[1::2], strict=True):
            disjoint.append((part, name))
    return disjoint


def _annotated(events: Sequence[Event], category: str) -> list[Phase]:
    ranges = (event for event in events if event.category == category and event.name.startswith(PHASE))
    return [(event.span, event.name.removeprefix(PHASE)) for event in ranges]


def _launched_in(host: Sequence[Phase], events: Sequence[Event]) -> list[Phase]:
    """Return each phase's GPU interval: from the first start to the last end of the work launched in the phase."""
    calls = launching_calls(events)
    timeline = Timeline((phase[0], phase) for phase in host)
    spans: dict[Phase, Interval] = {}
    for event in events:
        call = calls.get(event.arguments.get("correlation")) if event.category in _WORK else None
        phase = timeline.at(call.span[0]) if call is not None else None
        if phase is not None:
            start, end = event.span
            first_start, last_end = spans.get(phase, event.span)
            spans[phase] = (min(first_start, start), max(last_end, end))
    return [(span, name) for (_, name), span in spans.items()]


def engine_purpose(phase: str | None, op: str, elements: int) -> str:
    """Infer the purpose of a DeepSpeed collective, because the trace does not record it."""
    reduces = op in ("all_reduce", "reduce_scatter", "reduce")
    if phase == "optimizer" and reduces and elements <= _SCALARS:
        return "norm and overflow"
    if phase in ("backward", "optimizer") and reduces:
        return "gradient reduce"
    if phase in ("forward", "backward", "optimizer") and op in ("all_gather", "broadcast"):
        return "parameter gather"
    return f"{op} in {phase}" if phase else f"{op} outside the phases"


def _item_size(dtype: str) -> int:
    size = _ITEM_SIZES.get(dtype.removeprefix("c10::").lower())
    if size is None:
        log.warning("the profile counts no bytes for collectives with the unknown element type %r", dtype)
    return size or 0


def _computing(events: Sequence[Event]) -> list[Interval]:
    device = [event for event in events if event.category in ("kernel", "gpu_memcpy", "gpu_memset")]
    if any(event.category == "kernel" for event in device):
        return [event.span for event in device if not (event.is_nccl or event.name.startswith(_TRANSFERS))]
    gloo_threads = {event.thread for event in events if event.is_gloo}  # gloo's copies are part of a collective
    spans = []
    for event in events:
        if event.category == "cpu_op" and event.thread not in gloo_threads:
            namespace, separator, _ = event.name.partition("::")
            if separator and namespace not in _WRAPPERS:
                spans.append(event.span)
    return spans
