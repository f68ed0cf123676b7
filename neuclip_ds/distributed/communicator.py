"""Collectives that record their traffic by purpose, and copies between host and GPU memory."""

import copy
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from neuclip_ds.distributed.exchange import PURPOSE, Exchange, all_gather_single, reduce_scatter_single

ProcessGroup = dist.ProcessGroup

_STAGED = 64 << 10  # maximum bytes of pageable memory that CUDA copies asynchronously; the host waits for more

# names of ranges in a profiler's trace: a training step, and the prefix of a phase of the step
STEP, PHASE = "train step", "phase: "


def ring_bytes(op: str, size: int, world_size: int) -> int:
    """Return how many bytes a rank would send with the ring algorithm, whichever algorithm the backend uses.

    Args:
        op: all_gather, all_reduce, reduce_scatter, all_to_all, reduce or broadcast. For reduce and broadcast, where
            ranks send different amounts, the mean over ranks is returned; for any other operation, 0.
        size: size of a rank's input in bytes: the local rows for all_gather, the rows sent to other ranks for
            all_to_all, and the whole tensor for the remaining operations.
        world_size: number of ranks K.
    """
    if op == "all_to_all":
        return size
    once = ("reduce_scatter", "reduce", "broadcast")
    rounds = {"all_gather": world_size, "all_reduce": 2, **dict.fromkeys(once, 1)}
    return rounds.get(op, 0) * (world_size - 1) * size // world_size


@dataclass
class Traffic:
    """This rank's traffic for one purpose: calls, bytes (see `ring_bytes`), and time not hidden by computation."""

    calls: int = 0
    bytes_sent: int = 0  # equal to the bytes received
    seconds: float = 0.0


@dataclass(eq=False)
class Pending:
    """A collective in progress, which may overlap computation."""

    _result: Tensor  # filled by the collective
    _work: dist.Work | None = None  # torch's handle; None if the result is ready
    _waiting: Callable[[], AbstractContextManager[None]] = nullcontext  # adds the time of `wait` to the traffic

    to_host: bool = False  # `wait` blocks the host until the device has finished

    def wait(self) -> Tensor:
        """Wait for the result and return it; on a GPU, later kernels wait but the host does not."""
        if self._work is not None:
            with self._waiting():
                self._work.wait()
            self._work = None
        return self._result.cpu() if self.to_host else self._result


class Communicator(Exchange):
    """Collectives over all ranks of a process group. With a single rank, nothing is sent, and the group is optional.

    Args:
        device: device of the tensors.
        group: process group of the ranks; by default, torch's default group.
        host_group: process group of the same ranks for objects and tensors in host memory; by default, `group`.
        store: store that the same ranks share; required by `count`.

    Attributes:
        traffic: maps each purpose to its `Traffic`; on a GPU, call `collect_times()` before reading the times.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        group: ProcessGroup | None = None,
        host_group: ProcessGroup | None = None,
        store: dist.Store | None = None,
    ) -> None:
        super().__init__(torch.device(device), group if host_group is None else host_group, store)
        self._group = group
        self.traffic: defaultdict[str, Traffic] = defaultdict(Traffic)
        self._unread_events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def single_rank(self) -> "Communicator":
        """Return a communicator for this rank alone; its calls send nothing."""
        lone = copy.copy(self)
        lone.rank, lone.world_size, lone.traffic = 0, 1, defaultdict(Traffic)
        return lone

    @property
    def group(self) -> ProcessGroup | None:
        """Process group of the ranks, or None if none is initialized."""
        return dist.group.WORLD if self._group is None else self._group

    @functools.cached_property
    def own_group(self) -> ProcessGroup | None:
        """Process group of this rank alone, created without the other ranks.

        It uses gloo even on GPUs: NCCL would split it from the global group, which requires all ranks to take part.
        """
        if self.world_size == 1:
            return self.group
        return cast(ProcessGroup, dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True))

    def all_gather(self, x: Tensor, purpose: str) -> Tensor:
        """Gather the (b, ...) tensors of all K ranks into (K b, ...), in rank order; all shapes must be equal."""
        return self.begin_all_gather(x, purpose).wait()

    def begin_all_gather(self, x: Tensor, purpose: str) -> Pending:
        """Start an `all_gather` that overlaps computation; ranks must begin and await collectives in the same order."""
        if self.world_size == 1:
            return Pending(x)
        result = x.new_empty((self.world_size * x.shape[0], *x.shape[1:]))
        return self._begin("all_gather", x, purpose, result, all_gather_single, x.contiguous())

    def begin_host_gather(self, x: Tensor, purpose: str) -> Pending:
        """Start an `all_gather` of a tensor in host memory, without using the GPU if possible.

        If the group supports only GPU tensors (NCCL), the tensor is sent through the GPU, and `wait` waits for the GPU.
        """
        if self.world_size == 1:
            return Pending(x)
        pending = self.begin_all_gather(to_device(x, self._host), purpose)
        pending.to_host = True
        return pending

    def all_reduce(self, x: Tensor, purpose: str) -> Tensor:
        """Return the sum of x over ranks, bit-identical on every rank; x is not modified."""
        return self.begin_all_reduce(x, purpose).wait()

    def begin_all_reduce(self, x: Tensor, purpose: str) -> Pending:
        """Start an `all_reduce` that overlaps computation."""
        if self.world_size == 1:
            return Pending(x)
        result = x.clone(memory_format=torch.contiguous_format)
        return self._begin("all_reduce", x, purpose, result, dist.all_reduce)

    def reduce_scatter(self, x: Tensor, purpose: str) -> Tensor:
        """Sum x, of shape (K b, ...), over all K ranks and return this rank's rows, of shape (b, ...)."""
        return self.begin_reduce_scatter(x, purpose).wait()

    def begin_reduce_scatter(self, x: Tensor, purpose: str) -> Pending:
        """Start a `reduce_scatter` that overlaps computation."""
        if self.world_size == 1:
            return Pending(x)
        if x.shape[0] % self.world_size:
            raise ValueError(f"reduce_scatter of {x.shape[0]} rows over {self.world_size} ranks: not divisible")
        result = x.new_empty((x.shape[0] // self.world_size, *x.shape[1:]))
        return self._begin("reduce_scatter", x, purpose, result, reduce_scatter_single, x.contiguous())

    def reduce_scatter_among(self, ranks: range, x: Tensor, purpose: str) -> Tensor:
        """Sum x, of shape (len(ranks) b, ...), over consecutive `ranks` that include this rank; return the local rows.

        All ranks must call this method, each with the ranks of its group: one global all-to-all serves every group.
        """
        parts = dict(zip(ranks, x.chunk(len(ranks)), strict=True))
        own = parts.pop(self.rank)
        if not parts:
            return own
        sent = torch.cat(list(parts.values()))
        splits = [len(own) if rank in parts else 0 for rank in range(self.world_size)]
        launch = functools.partial(dist.all_to_all_single, output_split_sizes=splits, input_split_sizes=splits)
        received = self._begin("all_to_all", sent, purpose, torch.empty_like(sent), launch, sent).wait()
        return own + received.view(len(parts), *own.shape).sum(dim=0)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            self.collectives_started += 1
            with record_function(f"{PURPOSE}control"):
                dist.barrier(group=self._group)

    def collect_times(self) -> None:
        """Wait for the GPU and add the times of the calls since the last `collect_times` to `traffic`."""
        for purpose, start, end in self._unread_events:
            end.synchronize()
            self.traffic[purpose].seconds += start.elapsed_time(end) / 1e3
        self._unread_events.clear()

    def seconds(self) -> float:
        """Return the total time recorded in `traffic`, in seconds."""
        self.collect_times()
        return sum(traffic.seconds for traffic in self.traffic.values())

    def _begin(self, op: str, x: Tensor, purpose: str, result: Tensor, launch: Any, *inputs: Tensor) -> Pending:
        """Count and launch a collective; `launch` is torch's function, called with the result and the inputs."""
        self.collectives_started += 1
        traffic = self.traffic[purpose]
        traffic.calls += 1
        traffic.bytes_sent += ring_bytes(op, x.nbytes, self.world_size)
        timed = functools.partial(self._timed, purpose, result.device)
        group = self._host_group if result.device.type == "cpu" else self._group
        with record_function(PURPOSE + purpose), timed():
            return Pending(result, launch(result, *inputs, group=group, async_op=True), timed)

    @contextmanager
    def _timed(self, purpose: str, device: torch.device) -> Iterator[None]:
        """Add to `traffic` the time spent launching a collective or waiting for it, excluding overlapped time."""
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._unread_events.append((purpose, start, end))
            if len(self._unread_events) > 4096:  # bounds memory if nobody reads the times
                self.collect_times()
        else:
            began = time.perf_counter()
            yield
            self.traffic[purpose].seconds += time.perf_counter() - began


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device, through pinned memory if the tensor is large and in host memory.

    torch reuses the pinned memory only after the copy has completed.
    """
    if device.type == "cuda" and tensor.device.type == "cpu" and tensor.nbytes > _STAGED:
        tensor = tensor.pin_memory()
    # a non-blocking copy to the host would also return at once, and the host could read incomplete data
    return tensor.to(device, non_blocking=device.type == "cuda")


class HostCopy:
    """An asynchronous copy of a tensor to host memory; a tensor that is already in host memory is not copied."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor
        self._arrived: torch.cuda.Event | None = None
        if tensor.device.type != "cpu":
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> Tensor:
        """Wait for the copy, but not for later work on the device, and return the copy."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy
