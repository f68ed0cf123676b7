"""When the phases of a step run: on a CPU the host's ranges, on a GPU the time of the work that they launch.

A GPU works tens of milliseconds behind the host. The profiler repeats a host range as `gpu_user_annotation`, but only
from the work that the range's own thread launches directly: not what autograd's thread launches in the backward pass
(github.com/pytorch/kineto/issues/1022), nor what a nested range does. Such work is found by the correlation number of
the call that has launched it.
"""

from collections.abc import Sequence

from neuclip_ds.distributed.ranges import PHASE
from neuclip_ds.profiling.intervals import Interval, Timeline
from neuclip_ds.profiling.launches import Event, launching_calls, span_of

Phase = tuple[Interval, str]

_WORK = ("kernel", "gpu_memset")  # copies may belong to the next batch


def host_phases(events: Sequence[Event]) -> list[Phase]:
    """Return the phases as the host goes through them, in the trace's unit."""
    return _annotated(events, "user_annotation")


def executed_phases(events: Sequence[Event]) -> list[Phase]:
    """Return the phases as their work is executed, in the trace's unit; those of a GPU may overlap."""
    host = host_phases(events)
    return _annotated(events, "gpu_user_annotation") + _launched_in(host, events) or host


def _annotated(events: Sequence[Event], category: str) -> list[Phase]:
    ranges = (e for e in events if e.get("cat") == category and e["name"].startswith(PHASE))
    return [(span_of(event), event["name"].removeprefix(PHASE)) for event in ranges]


def _launched_in(host: Sequence[Phase], events: Sequence[Event]) -> list[Phase]:
    """Return each phase from the first start to the last end of the GPU's work that any thread launches during it."""
    calls, timeline = launching_calls(events), Timeline((phase[0], phase) for phase in host)
    spans: dict[Phase, Interval] = {}
    for event in events:
        call = calls.get(event.get("args", {}).get("correlation")) if event.get("cat") in _WORK else None
        phase = timeline.at(call["ts"]) if call is not None else None
        if phase is not None:
            start, end = span_of(event)
            first, last = spans.get(phase, (start, end))
            spans[phase] = min(first, start), max(last, end)
    return [(span, name) for (_, name), span in spans.items()]
