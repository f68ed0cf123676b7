"""Phases in hand-made traces: of a GPU that works tens of milliseconds behind the host, and of a CPU."""

from __future__ import annotations

from typing import Any

import pytest

from neuclip_ds.distributed.ranges import PHASE, PURPOSE, STEP
from neuclip_ds.profiling.phases import executed_phases
from neuclip_ds.profiling.trace import parse_trace

MS = 1000.0  # of a trace's unit, the microsecond
HOST, AUTOGRAD, STREAM, NCCL_STREAM = 1, 2, 7, 20


def event(category: str, name: str, start: float, end: float, thread: int, **arguments: Any) -> dict[str, Any]:
    """Times in milliseconds."""
    pid = 0 if thread in (STREAM, NCCL_STREAM) else 9
    span = {"ts": start * MS, "dur": (end - start) * MS}
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": thread, "args": arguments, **span}


def host(name: str, start: float, end: float) -> dict[str, Any]:
    return event("user_annotation", name, start, end, HOST)


def on_gpu(name: str, start: float, end: float, stream: int = STREAM) -> dict[str, Any]:
    return event("gpu_user_annotation", name, start, end, stream)


def kernel(launched: float, start: float, end: float, number: int, thread: int = HOST) -> list[dict[str, Any]]:
    call = event("cuda_runtime", "cudaLaunchKernel", launched, launched + 0.01, thread, correlation=number)
    return [call, event("kernel", "gemm", start, end, STREAM, correlation=number)]


# The host has launched the whole step after 12 ms and waits for the GPU, which takes 100.
GPU_STEP = [
    host(STEP, 0, 101),
    host(PHASE + "forward", 0, 3),
    on_gpu(PHASE + "forward", 2, 40),
    *kernel(1, 2, 20, 1),
    *kernel(2, 20, 40, 2),
    host(PHASE + "objective", 3, 5),
    *kernel(3.5, 40, 44, 3),
    on_gpu(PHASE + "objective", 40, 44),  # it ends where a nested range begins
    host(PURPOSE + "normalizer", 4, 4.5),
    *kernel(4.2, 46, 48, 4),
    host(PHASE + "backward", 5, 9),  # autograd's thread launches it, so there is no range of the GPU
    *kernel(6, 48, 70, 5, AUTOGRAD),
    *kernel(8, 70, 90, 6, AUTOGRAD),
    host(PHASE + "optimizer", 9, 12),
    on_gpu(PHASE + "optimizer", 90, 95),
    on_gpu(PHASE + "optimizer", 94, 99, NCCL_STREAM),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 3, 90, STREAM, correlation=7),  # of the next batch
    event("cuda_runtime", "cudaMemcpyAsync", 2.5, 2.6, HOST, correlation=7),
]


def phases(events: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Return each step's phases, in milliseconds."""
    steps = parse_trace({"traceEvents": events})
    return [{name: 1e3 * seconds for name, seconds in step.phases.items()} for step in steps]


def test_a_gpu_that_lags_behind_the_host() -> None:
    """Host ranges would be 3, 2, 4 and 3 ms; ranges of the GPU alone would lack the backward pass."""
    assert phases(GPU_STEP) == [pytest.approx({"forward": 38, "objective": 8, "backward": 42, "optimizer": 9})]


def test_ranges_of_the_gpu_alone() -> None:
    ranges = [host(STEP, 0, 80), host(PHASE + "forward", 0, 5), host(PHASE + "backward", 5, 9)]
    ranges += [on_gpu(PHASE + "forward", 30, 50), on_gpu(PHASE + "backward", 50, 75)]
    assert phases(ranges) == [pytest.approx({"forward": 20, "backward": 25})]


def test_a_step_gets_what_the_gpu_does_within_it() -> None:
    """Steps end with a synchronisation; the second has two micro-batches."""
    later = [{**one, "ts": one["ts"] + 200 * MS} for one in GPU_STEP]
    for one in later:
        one["args"] = {key: value + 100 for key, value in one["args"].items()}
    second_pass = [host(PHASE + "forward", 212.5, 213), *kernel(212.6, 299, 300, 200)]
    first, second = phases([*second_pass, *later, *GPU_STEP])
    assert first["forward"] == pytest.approx(38)
    assert second["forward"] == pytest.approx(39)
    assert {name: first[name] for name in first if name != "forward"} == pytest.approx(
        {name: second[name] for name in second if name != "forward"}
    )


def test_without_a_gpu_the_host_works() -> None:
    ranges = [host(PHASE + "forward", 0, 3), host(PHASE + "backward", 3, 10)]
    assert executed_phases(ranges) == [((0, 3 * MS), "forward"), ((3 * MS, 10 * MS), "backward")]
