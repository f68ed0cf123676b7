"""Count the work that the host launches in a training step."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

LAUNCHES = "launches.json"
ON_GPU = "kernels, copies and memsets launched per step (profiler)"
ON_CPU = "aten operations per step (without views and allocations)"
# calls of CUDA's runtime and driver; the names of some end in a version
_CALLS = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync")
_ALLOCATIONS = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
}


class _Operations(TorchDispatchMode):
    """Counts aten operations, except views and allocations, which launch nothing on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_counted = func.namespace == "aten" and not func.is_view and func.overloadpacket not in _ALLOCATIONS
        self.count += is_counted
        return func(*args, **(kwargs or {}))


def count_launches(step: Callable[[], object]) -> int:
    """Run a step; return its number of launches on a GPU (`ON_GPU`), or of operations on a CPU (`ON_CPU`).

    On a CPU, compiled code runs uncompiled while its operations are counted.
    """
    if torch.cuda.is_available():
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            step()
            torch.cuda.synchronize()
        return sum(event.count for event in profiler.key_averages() if event.key.startswith(_CALLS))
    with _Operations() as operations:
        step()
    return operations.count


def record_launches(step: Callable[[], object], folder: Path, rank: int, compiles: bool) -> None:
    """Run a step and write its number of launches to the folder, for `read_launches`; all ranks call this together.

    On a CPU, do nothing if the towers are compiled (`compiles`), because the count would be that of uncompiled code.
    """
    if compiles and not torch.cuda.is_available():
        return
    count = count_launches(step)
    if rank == 0:
        (folder / LAUNCHES).write_text(json.dumps(count), encoding="utf-8")


def read_launches(folder: Path) -> int | None:
    """Return the count that a program wrote to its folder, or None if it did not count."""
    path = folder / LAUNCHES
    count: int | None = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    return count
