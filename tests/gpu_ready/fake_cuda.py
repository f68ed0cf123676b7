"""A GPU without hardware: operations on `cuda` tensors run on shapes alone, tensors of the host keep their values.

Tensors of both devices in one operation raise, as on a GPU. What waits for a GPU is counted by the file of the package
that asks for it:

- a number read from the device (`item`, `bool`, `float`, `tolist`), and a copy to the host;
- an operation whose result has a shape that the device must tell (`nonzero`, boolean masks, `bincount`);
- a copy from the host that is not `non_blocking`, such as those of `new_tensor` and `torch.tensor(..., device="cuda")`;
- an event, unless the device has been given work after it: then the host waits while the device has something to do.

Where the result depends on data, the wait is counted and a given value returned: masks are true everywhere.

Waits that remain are meant: a training step reads the gradient's norm to decide whether it is skipped
(engine/update.py; DeepSpeed's wrappers around the optimizer read it themselves), an evaluation reads its counts once at
its end, and the loss with `validate=True` its features' norms.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from step_costs import Call, SimulatedRank
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import neuclip_ds
from neuclip_ds.distributed.communicator import Pending

T = TypeVar("T")

DEVICE = torch.device("cuda", 0)
RANKS = (1, 8)

_PACKAGE = Path(neuclip_ds.__file__).parent
_HOST = "outside the package"
_WITHOUT_STREAMS = torch.device("meta")  # where autograd believes fake tensors to be: a GPU's streams need hardware
_ATEN = torch.ops.aten
_ALLOCATIONS = {
    _ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided,
    _ATEN._unsafe_view, _ATEN.lift_fresh, _ATEN.record_stream,
}  # fmt: skip
_INDEXED = {_ATEN.index, _ATEN.index_put, _ATEN.index_put_, _ATEN._unsafe_index, _ATEN._index_put_impl_}
_PINNING = {_ATEN._pin_memory, _ATEN.pin_memory}


class FakeGpu(TorchDispatchMode):
    """Counts what is asked of the fake device; made by `fake_cuda`.

    Attributes:
        launches: operations on tensors of the device; views and allocations launch nothing.
        syncs: waits of the host for the device, by the file of the package that asks for them.
        integer: what an integer that is read from the device is.
        differentiates: whether a backward pass runs.
    """

    def __init__(self, integer: int) -> None:
        super().__init__()
        self.integer = integer
        self.launches = 0
        self.differentiates = False
        self.syncs: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.prim.device.default and (self.differentiates or torch.is_grad_enabled()):
            return _WITHOUT_STREAMS if _is_cuda(args[0]) else func(*args, **kwargs)
        if func.namespace != "aten":  # a question about a tensor
            return func(*args, **kwargs)
        if kwargs.get("device") == _WITHOUT_STREAMS:
            kwargs["device"] = DEVICE
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        target = torch.device(kwargs.get("device") or "cpu")
        if kwargs.pop("pin_memory", None) and target.type != "cpu":
            raise AssertionError(f"{func} pins memory of the device")
        if target.type == "cpu" and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            with unset_fake_temporarily():
                return args[0] if func.overloadpacket in _PINNING else func(*args, **kwargs)
        return self._on_device(func, args, kwargs, tensors)

    def _on_device(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        op, target = func.overloadpacket, kwargs.get("device")
        on_gpu = [tensor for tensor in tensors if _is_cuda(tensor)]
        if op is _ATEN._local_scalar_dense:
            self._wait(on_gpu)
            return self._value(args[0])
        if op is _ATEN._to_copy and on_gpu and target == DEVICE and kwargs.get("dtype") in (None, args[0].dtype):
            return args[0]  # is there already
        if op in _DATA_DEPENDENT:
            self._wait(on_gpu)
            self.launches += bool(on_gpu)
            return _DATA_DEPENDENT[op](*args, **kwargs)
        if op in _INDEXED:
            args = [args[0], self._plain_indices(args), *args[2:]]
        self._refuse_host_numbers(func, tensors, on_gpu)
        result = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if op in (_ATEN._to_copy, _ATEN.copy_):
            self._count_copy(op, args, kwargs, result)
        if not func.is_view and op not in _ALLOCATIONS:
            self.launches += any(map(_is_cuda, [*tensors, *results]))
        return result

    def _count_copy(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor) -> None:
        source = args[1] if op is _ATEN.copy_ else args[0]
        if _is_cuda(source) == _is_cuda(result):
            return
        non_blocking = kwargs.get("non_blocking", op is _ATEN.copy_ and len(args) > 2 and args[2])
        # to the host only into memory that is there: a new tensor would be read before it is filled
        if not non_blocking or (_is_cuda(source) and op is not _ATEN.copy_):
            self._wait([source])

    def _plain_indices(self, args: Sequence[Any]) -> list[Tensor | None]:
        """Return indices of an indexed tensor with masks written out, all true."""
        values = args[2] if len(args) > 2 else None
        is_fill = values is not None and values.numel() == 1 and not _is_cuda(values)
        plain: list[Tensor | None] = []
        for index in args[1]:
            is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
            places = [index]
            if is_mask and isinstance(index, FakeTensor):
                places = [index.new_empty(index.numel(), dtype=torch.int64) for _ in range(index.ndim)]
            elif is_mask:
                with unset_fake_temporarily():
                    places = list(index.nonzero().unbind(1))
            if index is not None and _is_cuda(args[0]) and (not _is_cuda(index) or (is_mask and not is_fill)):
                self._wait(args[:1])  # for the places, or to move them to the device
            plain.extend(place if place is None else place.to(args[0].fake_device) for place in places)
        return plain

    def _refuse_host_numbers(self, func: Any, tensors: Sequence[Tensor], on_gpu: Sequence[Tensor]) -> None:
        """Raise where a 0-dim tensor of the host meets one of the device: not every kernel takes it."""
        copies = (_ATEN._to_copy, _ATEN.copy_, *_INDEXED)
        if on_gpu and len(on_gpu) < len(tensors) and func.overloadpacket not in copies:
            raise AssertionError(f"{func} of {[(str(x.device), tuple(x.shape)) for x in tensors]} in {_asking_file()}")

    def _value(self, tensor: Tensor) -> bool | int | float:
        if tensor.dtype == torch.bool:
            return True
        return 1.0 if tensor.is_floating_point() else self.integer

    def _wait(self, on_gpu: Sequence[Tensor]) -> None:
        if on_gpu:
            self.syncs[_asking_file()] += 1

    def wait_for_event(self, recorded: int) -> None:
        """Count a wait for an event that was recorded when so many operations had been launched."""
        if recorded == self.launches:
            self.syncs[_asking_file()] += 1

    def listed(self, tensor: Tensor) -> Any:
        """Return what `tolist` gives, of one copy to the host."""
        self._wait([tensor] if _is_cuda(tensor) else [])

        def nested(shape: Sequence[int]) -> Any:
            return [nested(shape[1:]) for _ in range(shape[0])] if shape else self._value(tensor)

        return nested(tensor.shape)


class _Event:
    """A CUDA event, as far as the package uses it."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def record(self) -> None:
        self._recorded = self._gpu.launches

    def synchronize(self) -> None:
        self._gpu.wait_for_event(self._recorded)


class _Stream:
    """A CUDA stream, likewise."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def record_event(self) -> _Event:
        event = _Event(self._gpu)
        event.record()
        return event

    def wait_event(self, event: _Event) -> None:
        pass


def _is_cuda(tensor: Tensor) -> bool:
    """Tell it without a dispatch, which `Tensor.is_cuda` of a fake tensor is."""
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda"


def _nonzero(x: Tensor) -> Tensor:
    return x.new_empty((x.numel(), x.ndim), dtype=torch.int64)


def _masked_select(x: Tensor, mask: Tensor) -> Tensor:
    return x.new_empty(torch.broadcast_shapes(x.shape, mask.shape).numel())


def _bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    return x.new_empty(minlength, dtype=torch.int64 if weights is None else weights.dtype)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape


_DATA_DEPENDENT = {
    _ATEN.nonzero: _nonzero,
    _ATEN.masked_select: _masked_select,
    _ATEN.bincount: _bincount,
    _ATEN.equal: _equal,
}


def _asking_file() -> str:
    """Return the innermost file of the package on the stack, as seen from the package."""
    frame = sys._getframe()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_PACKAGE):
            return path.relative_to(_PACKAGE).as_posix()
        frame = frame.f_back  # type: ignore[assignment]
    return _HOST


@contextmanager
def fake_cuda(integer: int = 1) -> Iterator[FakeGpu]:
    """Run with a fake device `cuda:0`; `integer` is what a read of an integer from it gives."""
    gpu = FakeGpu(integer)
    run_backward = torch.autograd._engine_run_backward

    def run_fake_backward(*args: Any, **kwargs: Any) -> Any:
        gpu.differentiates = True
        try:
            return run_backward(*args, **kwargs)
        finally:
            gpu.differentiates = False

    with ExitStack() as stack:
        stack.enter_context(patch.object(FakeTensor, "tolist", lambda tensor: gpu.listed(tensor)))
        stream = _Stream(gpu)
        stack.enter_context(patch.object(torch.cuda, "Event", lambda **_: _Event(gpu)))
        stack.enter_context(patch.object(torch.cuda, "Stream", lambda device: stream))
        stack.enter_context(patch.object(torch.cuda, "stream", nullcontext))
        stack.enter_context(patch.object(torch.cuda, "current_stream", lambda device: stream))
        cache = SimpleNamespace(L2_cache_size=50 << 20)  # of an H100
        stack.enter_context(patch.object(torch.cuda, "get_device_properties", lambda device: cache))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(patch.object(Tensor, "record_stream", lambda tensor, stream: None))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(patch.object(torch.autograd, "_engine_run_backward", run_fake_backward))
        stack.enter_context(gpu)
        yield gpu


class GpuRank(SimulatedRank):
    """The middle one of `world_size` ranks, each with a fake GPU; on the host all of them hold the same values.

    Collectives give results of the right shape and device.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.rank, self.device = world_size // 2, DEVICE

    def _begin(self, op: str, x: Tensor, purpose: str, result: Tensor, launch: Any, *inputs: Tensor) -> Pending:
        if not x.is_cuda:
            return super()._begin(op, x, purpose, result, launch, *inputs)
        self.calls.append(Call(purpose, op, x.numel() * x.element_size()))
        return Pending(result)

    def gather_objects(self, x: T) -> list[T]:
        return [x] * self.world_size
