"""Parse handwritten traces with gloo and NCCL: steps, computation, and collectives with purposes and bytes."""

import json
from typing import Any

import pytest

from neuclip_ds.distributed.communicator import PHASE, STEP
from neuclip_ds.distributed.traffic import PURPOSE
from neuclip_ds.profiling.breakdown import COLUMNS, breakdown, rank_record, step_seconds
from neuclip_ds.profiling.trace import StepTrace, parse_trace

MAIN, BACKWARD, GLOO, STREAM = 1, 2, 7, 20


def event(category: str, name: str, start: float, end: float, thread: int = MAIN, **arguments: Any) -> dict[str, Any]:
    """Return a trace event; times are in microseconds, as in a trace."""
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start,
        "dur": end - start,
        "pid": 0 if thread == STREAM else 9,
        "tid": thread,
        "args": arguments,
    }


def note(name: str, start: float, end: float, thread: int = MAIN) -> dict[str, Any]:
    return event("user_annotation", name, start, end, thread)


def launch(name: str, start: float, end: float, shapes: list[Any], types: list[str], thread: int = MAIN) -> Any:
    return event("cpu_op", f"c10d::{name}", start, end, thread, **{"Input Dims": shapes, "Input type": types})


def gloo(name: str, start: float, end: float, shape: list[int], dtype: str) -> dict[str, Any]:
    return event("user_annotation", f"gloo:{name}", start, end, GLOO, **{"Input Dims": [shape], "Input type": [dtype]})


def trace(events: list[dict[str, Any]], world_size: int = 4) -> dict[str, Any]:
    return {"distributedInfo": {"world_size": world_size}, "traceEvents": [{"ph": "M", "name": "process"}, *events]}


GRADIENTS = gloo("all_reduce", 62, 78, [1000], "float")

# A step of 100 us on 4 ranks; gloo's reduce-scatter is an all-reduce, as torch 2.15 runs it.
GLOO_STEP = [
    note(STEP, 0, 100),
    note(PHASE + "forward", 0, 20),
    event("cpu_op", "aten::mm", 0, 20),
    event("cpu_op", "aten::copy_", 5, 10),  # within the matrix product, so its time is counted once
    note(PHASE + "objective", 20, 50),
    note(PURPOSE + "features", 20, 30),
    launch("_allgather_base_", 20, 21, [[16, 8], [4, 8], []], ["c10::BFloat16", "c10::BFloat16", ""]),
    gloo("all_gather", 22, 29, [4, 8], "c10::BFloat16"),
    event("cpu_op", "aten::copy_", 23, 25, GLOO),  # part of the collective
    note(PURPOSE + "state", 31, 40),
    launch("_reduce_scatter_base_", 31, 32, [[4, 2], [16, 2], []], ["float", "float", ""]),
    gloo("all_reduce", 33, 39, [16, 2], "float"),
    note(PHASE + "backward", 50, 80),
    event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 50, 79),  # contains hooks that wait
    event("cpu_op", "aten::mm", 50, 75),
    launch("allreduce_", 60, 61, [[[1000]], []], ["TensorList", ""]),
    GRADIENTS,
    note(PHASE + "optimizer", 80, 95),
    launch("allreduce_", 81, 82, [[[]], []], ["TensorList", ""]),
    gloo("all_reduce", 82, 84, [], "double"),
    launch("_allgather_base_", 86, 87, [[1000], [250], []], ["float", "float", ""]),
    gloo("all_gather", 87, 90, [250], "float"),
    launch("broadcast_", 95.5, 96, [[[3]], []], ["TensorList", ""]),
    gloo("broadcast", 96, 97, [3], "long int"),
]


def by_purpose(step: StepTrace) -> dict[str, tuple[str, int, int]]:
    return {one.purpose: (one.op, one.size, one.sent) for one in step.collectives}


def test_a_gloo_step_has_its_collectives_and_times() -> None:
    after = [launch("barrier", 300, 301, [[1]], ["float"]), gloo("barrier", 301, 305, [], "")]
    (step,) = parse_trace(trace([*GLOO_STEP, *after]))
    assert by_purpose(step) == {
        "features": ("all_gather", 64, 3 * 64),
        "state": ("reduce_scatter", 128, 3 * 128 // 4),
        "gradient reduce": ("all_reduce", 4000, 6000),
        "norm and overflow": ("all_reduce", 8, 12),
        "parameter gather": ("all_gather", 1000, 3000),
        "broadcast outside the phases": ("broadcast", 24, 18),
    }
    seconds = {name: 1e6 * value for name, value in step_seconds(step).items()}
    communication = 7 + 6 + 16 + 2 + 3 + 1
    assert seconds == pytest.approx(
        {
            "total": 100,
            "computation": 45,
            "communication": communication,
            "overlap": 13,  # with the gradients' all-reduce, from 62 to 75 us
            "pure_communication": communication - 13,
            "others": 100 - 45 - (communication - 13),
        }
    )
    assert {name: 1e6 * value for name, value in step.phases.items()} == pytest.approx(
        {"forward": 20, "objective": 30, "backward": 30, "optimizer": 15}
    )


def test_a_breakdown_averages_over_steps_and_ranks() -> None:
    """Use two steps, the second three times as slow; in the first, the second rank is last to reduce gradients."""
    later = [{**one, "ts": 3 * one["ts"] + 1000, "dur": 3 * one["dur"]} for one in GLOO_STEP]
    late = [gloo("all_reduce", 74, 78, [1000], "float") if one == GRADIENTS else one for one in GLOO_STEP]
    first, second = (rank_record(parse_trace(trace([*later, *step]))) for step in (GLOO_STEP, late))
    combined = breakdown([first, second])
    assert (combined["steps"], combined["world_size"]) == (2, 2)
    assert combined["seconds"]["total"] == pytest.approx({"mean": 200e-6, "deviation": 200e-6 / 2**0.5})
    assert combined["purposes"]["gradient reduce"] == pytest.approx(
        {
            "calls": 1,
            "bytes_sent": 6000,
            "seconds": (48 + (16 + 4) / 2) / 2 * 1e-6,
            "transfer_seconds": (48 + 4) / 2 * 1e-6,
            "hidden_seconds": (39 + (13 + 1) / 2) / 2 * 1e-6,
        }
    )
    assert sum(record["calls"] for record in combined["purposes"].values()) == 6
    assert combined["collectives"][0] == {
        "purpose": "features",
        "op": "all_gather",
        "size": 64,
        "calls": 1,
        "transfer_seconds": pytest.approx(14e-6),
    }
    for rank in combined["ranks"]:
        for step in rank:
            assert set(step) == set(COLUMNS)
            assert step["total"] == pytest.approx(step["computation"] + step["pure_communication"] + step["others"])
            assert step["communication"] == pytest.approx(step["pure_communication"] + step["overlap"])
    json.dumps(combined)


def nccl(kind: str, start: float, end: float, correlation: int, **arguments: Any) -> dict[str, Any]:
    name = f"ncclDevKernel_{kind}_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    return event("kernel", name, start, end, STREAM, correlation=correlation, **arguments)


def described(start: float, end: float, dtype: str, group: int, thread: int) -> dict[str, Any]:
    return event("cpu_op", "record_param_comms", start, end, thread, dtype=dtype, **{"Group size": group})


def start_kernel(at: float, correlation: int, thread: int = MAIN) -> dict[str, Any]:
    return event("cuda_runtime", "cudaLaunchKernelExC", at, at + 1, thread, correlation=correlation)


# Kernels run after their launch, on the GPU's streams; autograd launches the gradients' reduction from its own thread.
NCCL_STEP = [
    note(STEP, 0, 200),
    event("gpu_user_annotation", STEP, 5, 199, STREAM),
    note(PHASE + "objective", 0, 30),
    event("cpu_op", "aten::mm", 0, 5),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 2, 9, STREAM),
    event("kernel", "sm90_xmma_gemm_bf16", 10, 60, STREAM, correlation=1),
    note(PURPOSE + "features", 10, 16),
    launch("_allgather_base_", 10, 15, [[16, 8], [8, 8], []], ["c10::BFloat16", "c10::BFloat16", ""]),
    described(11, 14, "BFloat16", 2, MAIN),
    start_kernel(12, 2),
    nccl("AllGather", 70, 80, 2),
    note(PHASE + "backward", 30, 120),
    launch("allreduce_", 40, 45, [[[1000]], []], ["TensorList", ""], BACKWARD),
    described(41, 44, "BFloat16", 2, BACKWARD),
    start_kernel(42, 3, BACKWARD),
    event("kernel", "vectorized_elementwise_kernel", 100, 130, STREAM, correlation=4),
    nccl("AllReduce_Sum_bf16", 110, 150, 3),
    note(PHASE + "optimizer", 120, 200),
    # a group of two calls is one kernel, launched after the operators have returned
    launch("_allgather_base_", 130, 131, [[200], [100], []], ["float", "float", ""]),
    launch("_allgather_base_", 132, 133, [[400], [200], []], ["float", "float", ""]),
    start_kernel(135, 5),
    nccl("AllGather", 160, 170, 5),
    nccl("AllReduce_Sum_f32", 180, 185, 99),  # its launch is not in the trace
]


def test_an_nccl_step_has_its_collectives_and_times(caplog: pytest.LogCaptureFixture) -> None:
    (step,) = parse_trace(trace(NCCL_STEP, world_size=2))
    assert [(one.purpose, one.op, one.size, one.sent, len(one.intervals)) for one in step.collectives] == [
        ("features", "all_gather", 128, 128, 1),
        ("gradient reduce", "all_reduce", 2000, 2000, 1),
        ("parameter gather", "all_gather", 400, 400, 0),
        ("parameter gather", "all_gather", 800, 800, 1),
    ]
    assert "the trace contains no launch for 1 collective" in caplog.text
    seconds = {name: 1e6 * value for name, value in step_seconds(step).items()}
    assert seconds == pytest.approx(
        {
            "total": 200,
            "computation": 50 + 30,
            "communication": 10 + 40 + 10,
            "overlap": 20,
            "pure_communication": 40,
            "others": 80,
        }
    )


MS = 1000.0  # in microseconds, the unit of a trace


def host(name: str, start: float, end: float) -> dict[str, Any]:
    """Return a host range; times here and in the next two functions are in milliseconds."""
    return note(name, start * MS, end * MS)


def on_gpu(name: str, start: float, end: float) -> dict[str, Any]:
    return event("gpu_user_annotation", name, start * MS, end * MS, STREAM)


def kernel(launched: float, start: float, end: float, number: int, thread: int = MAIN) -> list[dict[str, Any]]:
    call = event("cuda_runtime", "cudaLaunchKernel", launched * MS, (launched + 0.01) * MS, thread, correlation=number)
    return [call, event("kernel", "gemm", start * MS, end * MS, STREAM, correlation=number)]


# The host launches the whole step within 12 ms and then waits for the GPU, which takes 100 ms.
GPU_STEP = [
    host(STEP, 0, 101),
    host(PHASE + "forward", 0, 3),
    on_gpu(PHASE + "forward", 2, 40),
    *kernel(1, 2, 20, 1),
    *kernel(2, 20, 40, 2),
    host(PHASE + "objective", 3, 5),
    *kernel(3.5, 40, 44, 3),
    on_gpu(PHASE + "objective", 40, 44),  # ends where a nested range begins
    host(PHASE + "normalizer", 4, 4.6),
    host(PURPOSE + "normalizer", 4.1, 4.5),
    *kernel(4.2, 44, 46, 4),
    *kernel(4.7, 46, 48, 8),
    host(PHASE + "backward", 5, 9),  # launched by autograd's thread, so there is no GPU range
    *kernel(6, 48, 70, 5, BACKWARD),
    *kernel(8, 70, 90, 6, BACKWARD),
    host(PHASE + "optimizer", 9, 12),
    on_gpu(PHASE + "optimizer", 90, 95),
    on_gpu(PHASE + "optimizer", 94, 99),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 3 * MS, 90 * MS, STREAM, correlation=7),  # of the next batch
    event("cuda_runtime", "cudaMemcpyAsync", 2.5 * MS, 2.6 * MS, MAIN, correlation=7),
]


def test_phases_are_those_of_a_gpu_that_lags_behind_the_host() -> None:
    """A phase lasts as long as its work on the GPU; host ranges are shorter, and GPU ranges lack the backward pass.

    A step includes the work that the GPU starts during the step; the second step has two micro-batches.
    """
    later = [{**one, "ts": one["ts"] + 200 * MS} for one in GPU_STEP]
    for one in later:
        one["args"] = {key: value + 100 for key, value in one["args"].items()}
    second_pass = [host(PHASE + "forward", 212.5, 213), *kernel(212.6, 299, 300, 200)]
    steps = parse_trace({"traceEvents": [*second_pass, *later, *GPU_STEP]})
    first, second = ({name: 1e3 * seconds for name, seconds in step.phases.items()} for step in steps)
    assert first == pytest.approx({"forward": 38, "objective": 6, "normalizer": 2, "backward": 42, "optimizer": 9})
    assert second == pytest.approx({**first, "forward": 39})
