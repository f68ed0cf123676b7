"""Simulate a GPU: operations on `cuda` tensors compute only shapes, and tensors on the host keep their values.

An operation that mixes tensors of both devices raises, as on a GPU. Waits for the GPU are counted for each file of this
package or of DeepSpeed that causes them. The following count as waits:

- reading a number from the device (`item`, `bool`, `float`, `tolist`), and a blocking copy to the host;
- a copy from the host that is not `non_blocking`, as in `new_tensor` and `torch.tensor(..., device="cuda")`, or that
  moves more than 64 KB from memory that is not pinned, because CUDA copies it in pieces through pinned memory;
- a synchronization with the device or a stream, or with an event. Events are not counted if the device has received
  more work since the event was recorded, because the device is then busy while the host waits.

Streams have no effect on the order of operations, but events and copies to the host remember their stream.

If a result depends on data, a fixed value is returned; for example, no gradient overflows in DeepSpeed. An operation
whose result has a data-dependent shape (`nonzero`, boolean masks, `bincount`) raises. Within `fake_ranks`, DeepSpeed's
engine also runs on the device.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch
from weakref import WeakSet

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import real_accelerator
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from deepspeed.runtime.zero import partitioned_param_coordinator
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import neuclip_ds
from neuclip_ds.distributed.communicator import Communicator, Pending

T = TypeVar("T")

DEVICE = torch.device("cuda", 0)
RANKS = (1, 8)

_OURS = Path(neuclip_ds.__file__).parent
_DEEPSPEED = Path(deepspeed.__file__).parent
_PACKAGES = {_OURS: _OURS, _DEEPSPEED: _DEEPSPEED.parent}  # package -> folder to which its files' names are relative
_HOST = "outside the package"
_WITHOUT_STREAMS = torch.device("meta")  # the device that autograd sees for fake tensors: a GPU's streams need hardware
_ATEN = torch.ops.aten
_DEVICE_QUERY = torch.ops.prim.device.default
_ALLOCATIONS = {
    _ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided,
    _ATEN._unsafe_view, _ATEN.lift_fresh, _ATEN.record_stream,
}  # fmt: skip
_INDEXED = {_ATEN.index, _ATEN.index_put, _ATEN.index_put_, _ATEN._unsafe_index, _ATEN._index_put_impl_}
_PINNING = {_ATEN._pin_memory, _ATEN.pin_memory}
_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_STAGED = 65_536  # bytes that CUDA copies in one piece from memory that is not pinned


class FakeGpu(TorchDispatchMode):
    """Dispatch mode that counts operations on the fake device and waits for it; `fake_cuda` creates the mode.

    Attributes:
        launches: number of operations on device tensors, excluding views and allocations.
        syncs: number of host waits for the device, for each file of this package or DeepSpeed that causes them.
        integer: value of every integer that is read from the device.
        differentiates: whether a backward pass is running.
        default_stream, current_stream: the streams of the device, and of the next operations.
        host_copies: the stream of each asynchronous copy to the host.
        awaited: the stream of each event that the host waited for.
    """

    def __init__(self, integer: int) -> None:
        super().__init__()
        self.integer = integer
        self.launches = 0
        self.differentiates = False
        self.syncs: Counter[str] = Counter()
        self.default_stream = _Stream(self)
        self.current_stream = self.default_stream
        self.host_copies: list[_Stream] = []
        self.awaited: list[_Stream] = []
        self._pinned: WeakSet[torch.UntypedStorage] = WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is _DEVICE_QUERY and _is_cuda(args[0]):
            if self.differentiates or torch.is_grad_enabled():
                return _WITHOUT_STREAMS
            if not args[0].fake_mode.in_kernel_invocation:
                return args[0].fake_device  # as `func` would, which takes longer
        if func.namespace != "aten":  # a query about a tensor
            return func(*args, **kwargs)
        # DeepSpeed keeps shapes as zeros_like(..., device="meta")
        if kwargs.get("device") == _WITHOUT_STREAMS and func.overloadpacket is not _ATEN.zeros_like:
            kwargs["device"] = DEVICE
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        target = torch.device(kwargs.get("device") or "cpu")
        pins = kwargs.pop("pin_memory", None) or func.overloadpacket in _PINNING
        if pins and (target.type != "cpu" or any(map(_is_cuda, tensors))):
            raise AssertionError(f"{func} pins memory of the device")
        if func.overloadpacket is _ATEN.is_pinned:
            return args[0].untyped_storage() in self._pinned
        if target.type == "cpu" and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            with unset_fake_temporarily():
                result = args[0].clone() if func.overloadpacket in _PINNING else func(*args, **kwargs)
            if pins:
                self._pinned.add(result.untyped_storage())
            return result
        return self._on_device(func, args, kwargs, tensors)

    def _on_device(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        op = func.overloadpacket
        target = kwargs.get("device")
        on_gpu = [tensor for tensor in tensors if _is_cuda(tensor)]
        if op is _ATEN._local_scalar_dense:
            if on_gpu:
                self.wait()
            return self._value_of(args[0])
        if op is _ATEN._to_copy and on_gpu and target == DEVICE and kwargs.get("dtype") in (None, args[0].dtype):
            return args[0]  # already on the device
        if op in _INDEXED:
            args = [args[0], self._indices_on_one_device(args), *args[2:]]
        self._refuse_mixed_devices(func, tensors, on_gpu)
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
        if _is_cuda(source):
            assert op is _ATEN.copy_ or not non_blocking, "the host may read a new tensor before it is filled"
            waits = False
            if non_blocking:
                self.host_copies.append(self.current_stream)
        else:
            waits = source.nbytes > _STAGED and source.untyped_storage() not in self._pinned
        if waits or not non_blocking:
            self.wait()

    def _indices_on_one_device(self, args: Sequence[Any]) -> list[Tensor | None]:
        """Return the indices on the device of the indexed tensor, and count a wait for each index that is copied."""
        for index in args[1]:
            if index is not None and _is_cuda(args[0]) and not _is_cuda(index):
                self.wait()  # for the copy of the index to the device
        return [index if index is None else index.to(args[0].fake_device) for index in args[1]]

    def _refuse_mixed_devices(self, func: Any, tensors: Sequence[Tensor], on_gpu: Sequence[Tensor]) -> None:
        """Raise if an operation combines a 0-dim host tensor with device tensors, which not every kernel accepts."""
        copies = (_ATEN._to_copy, _ATEN.copy_, *_INDEXED)
        if on_gpu and len(on_gpu) < len(tensors) and func.overloadpacket not in copies:
            operands = [(str(x.device), tuple(x.shape)) for x in tensors]
            raise AssertionError(f"{func} of {operands} in {calling_file()}")

    def _value_of(self, tensor: Tensor) -> bool | int | float:
        if tensor.dtype in (torch.bool, torch.uint8):
            return not calling_file().startswith("deepspeed")  # DeepSpeed asks whether a gradient overflows
        return 1.0 if tensor.is_floating_point() else self.integer

    def wait(self, *_: Any) -> None:
        """Count a wait for the device."""
        self.syncs[calling_file()] += 1

    @contextmanager
    def on_stream(self, stream: _Stream) -> Iterator[None]:
        """Run the enclosed operations on a stream."""
        before = self.current_stream
        self.current_stream = stream
        try:
            yield
        finally:
            self.current_stream = before

    def to_list(self, tensor: Tensor) -> Any:
        """Return the result of `tolist`, and count one copy to the host."""
        if _is_cuda(tensor):
            self.wait()

        def nested(shape: Sequence[int]) -> Any:
            if not shape:
                return self._value_of(tensor)
            return [nested(shape[1:]) for _ in range(shape[0])]

        return nested(tensor.shape)


class _Event:
    """Fake CUDA event with the methods that this package and DeepSpeed use."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self._launches_before = gpu.launches
        self._stream = gpu.current_stream

    def record(self, stream: _Stream | None = None) -> None:
        self._launches_before = self._gpu.launches
        self._stream = self._gpu.current_stream if stream is None else stream

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._gpu.awaited.append(self._stream)
        if self._launches_before == self._gpu.launches:
            self._gpu.wait()


class _Stream:
    """Fake CUDA stream with the methods that this package and DeepSpeed use."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self.synchronize = gpu.wait
        self.waits_for: list[_Stream] = []  # other streams whose work this stream waits for

    def record_event(self, event: _Event | None = None) -> _Event:
        recorded = _Event(self._gpu) if event is None else event
        recorded.record(self)
        return recorded

    def wait_event(self, event: _Event) -> None:
        pass

    def wait_stream(self, stream: _Stream) -> None:
        self.waits_for.append(stream)


class _Accelerator(CUDA_Accelerator):
    """DeepSpeed's interface to the fake device."""

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device_name(self) -> str:
        return str(DEVICE)

    def current_device(self) -> int:
        return 0

    def set_device(self, device_index: int) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        pass

    def total_memory(self, device_index: int | None = None) -> int:
        return 80 * 10**9

    def memory_allocated(self, device_index: int | None = None) -> int:
        return 0


def _is_cuda(tensor: Tensor) -> bool:
    """Return whether a tensor is on the fake device, without the dispatch that `Tensor.is_cuda` causes."""
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda"


def calling_file() -> str:
    """Return the innermost file of either package on the stack, such as `engine/engine.py` or `deepspeed/...`."""
    frame = sys._getframe()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        is_dispatch_mode = frame.f_code.co_name == "__torch_dispatch__"
        for package, shown_from in _PACKAGES.items():
            if path.is_relative_to(package) and not is_dispatch_mode:
                return path.relative_to(shown_from).as_posix()
        frame = frame.f_back  # type: ignore[assignment]
    return _HOST


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **options: Any,
) -> Tensor:
    """Call the kernel that a GPU uses if there is no mask; both such kernels store O(T) values per head."""
    if not _is_cuda(query) or attn_mask is not None:
        return _ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **options)
    if query.element_size() == 2:
        outputs = _ATEN._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
    else:
        no_bias = None
        keeps_log_sum = True
        outputs = _ATEN._scaled_dot_product_efficient_attention(
            query, key, value, no_bias, keeps_log_sum, dropout_p, is_causal, scale=scale
        )
    attended: Tensor = outputs[0]
    return attended


@contextmanager
def fake_cuda(integer: int = 1) -> Iterator[FakeGpu]:
    """Run with a fake device `cuda:0`; every integer that is read from the device has the value `integer`."""
    gpu = FakeGpu(integer)
    run_backward = torch.autograd._engine_run_backward

    def run_fake_backward(*args: Any, **kwargs: Any) -> Any:
        gpu.differentiates = True
        try:
            return run_backward(*args, **kwargs)
        finally:
            gpu.differentiates = False

    with ExitStack() as stack:
        stack.enter_context(patch.object(FakeTensor, "tolist", lambda tensor: gpu.to_list(tensor)))
        stack.enter_context(patch.object(torch.cuda, "Event", lambda **_: _Event(gpu)))
        stack.enter_context(patch.object(torch.cuda, "Stream", lambda device=None: _Stream(gpu)))
        stack.enter_context(patch.object(torch.cuda, "current_stream", lambda device=None: gpu.current_stream))
        stack.enter_context(patch.object(torch.cuda, "default_stream", lambda device=None: gpu.default_stream))
        stack.enter_context(patch.object(torch.cuda, "stream", gpu.on_stream))
        stack.enter_context(patch.object(torch.cuda, "synchronize", gpu.wait))
        stack.enter_context(patch.object(torch.cuda, "manual_seed", lambda seed: None))
        stack.enter_context(patch.object(torch.nn.functional, _ATTENTION.__name__, _attention))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(patch.object(Tensor, "record_stream", lambda tensor, stream: None))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(patch.object(torch.autograd, "_engine_run_backward", run_fake_backward))
        stack.enter_context(gpu)
        yield gpu


@contextmanager
def fake_ranks(rank: int, world_size: int, on_gpu: bool = True) -> Iterator[None]:
    """Run as one of several ranks that all have the same values; collectives do not communicate."""
    coordinator = patch.object(partitioned_param_coordinator, "assert_ints_same_as_other_ranks", lambda ints: None)
    accelerator = patch.object(real_accelerator, "ds_accelerator", _Accelerator())
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with coordinator, patch.dict("os.environ", LOCAL_RANK="0"), accelerator if on_gpu else nullcontext():
            yield
    finally:
        if deepspeed.comm.is_initialized():
            deepspeed.comm.destroy_process_group()
        else:
            dist.destroy_process_group()


class GpuRank(Communicator):
    """The middle one of `world_size` ranks, each with a fake GPU; host tensors are the same on all ranks.

    Collectives of device tensors return results of the right shape and device, without values. The ranks have a group
    for host tensors, unless `only_nccl`.
    """

    def __init__(self, world_size: int, only_nccl: bool = False) -> None:
        super().__init__(DEVICE)
        self.rank = world_size // 2
        self.world_size = world_size
        if only_nccl:
            self._host = DEVICE

    def _begin(self, op: str, x: Tensor, purpose: str, result: Tensor, launch: Any, *inputs: Tensor) -> Pending:
        if x.is_cuda:
            return Pending(result)
        if op == "all_gather":
            result.copy_(torch.cat([x] * self.world_size))
        elif op == "all_reduce":
            result.mul_(self.world_size)
        else:  # a reduce-scatter
            result.copy_(x[: len(result)] * self.world_size)
        return Pending(result)

    def gather_objects(self, x: T) -> list[T]:
        return [x] * self.world_size
