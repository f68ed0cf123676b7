"""Collectives of the objectives, the normalizers and the per-sample state, counted by purpose; copies to a GPU."""

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

_STAGED = 64 << 10  # bytes of pageable memory that CUDA copies asynchronously; the host waits for larger copies

# ranges in a profiler's trace: a training step, and one of its phases
STEP, PHASE = "train step", "phase: "


def ring_bytes(op: str, size: int, world_size: int) -> int:
    """Return the bytes that a rank sends in the ring algorithm, whichever the backend uses.

    Args:
        op: all_gather, all_reduce, reduce_scatter, all_to_all, or reduce and broadcast, whose ranks differ and for
            which it is the mean over ranks; others (barrier) count 0.
        size: bytes of a rank's input: local rows for all_gather, the whole tensor for the others; all_to_all's has
            nothing for the rank itself.
        world_size: number of ranks K.
    """
    if op == "all_to_all":
        return size
    once = ("reduce_scatter", "reduce", "broadcast")
    rounds = {"all_gather": world_size, "all_reduce": 2, **dict.fromkeys(once, 1)}
    return rounds.get(op, 0) * (world_size - 1) * size // world_size


@dataclass
class Traffic:
    """Cost of one purpose on this rank so far: bytes by `ring_bytes`, and seconds not overlapped by computation."""

    calls: int = 0
    bytes_sent: int = 0  # as many are received
    seconds: float = 0.0


@dataclass(eq=False)
class Pending:
    """A collective in progress, which may overlap computation."""

    _result: Tensor  # filled by the collective
    _work: dist.Work | None = None  # torch's handle; None if the result is ready
    _waiting: Callable[[], AbstractContextManager[None]] = nullcontext  # times `wait` in the traffic

    to_host: bool = False  # `wait` blocks the host until the device has finished

    def wait(self) -> Tensor:
        """Wait for the result and return it; on a GPU later kernels wait, not the host."""
        if self._work is not None:
            with self._waiting():
                self._work.wait()
            self._work = None
        return self._result.cpu() if self.to_host else self._result


class Communicator(Exchange):
    """Collectives over all ranks of the process group; with one rank, calls return without communication.

    Needs an initialized `torch.distributed` process group when more than one rank runs.

    Attributes:
        traffic: purpose -> `Traffic`; call `collect_times()` before reading times on a GPU.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        group: ProcessGroup | None = None,
        host_group: ProcessGroup | None = None,
        store: dist.Store | None = None,
    ) -> None:
        """
        Args:
            device: device of the tensors.
            group: process group of the ranks; None is the default one.
            host_group: process group of the same ranks for objects and tensors in host memory; None is `group`.
            store: store of the same ranks, for `count`.
        """
        super().__init__(torch.device(device), group if host_group is None else host_group, store)
        self._group = group
        self.traffic: defaultdict[str, Traffic] = defaultdict(Traffic)
        self._unread_events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def alone(self) -> "Communicator":
        """Return a communicator of this rank alone, whose calls send nothing."""
        lone = copy.copy(self)
        lone.rank, lone.world_size, lone.traffic = 0, 1, defaultdict(Traffic)
        return lone

    @property
    def group(self) -> ProcessGroup | None:
        """Process group of the ranks, or None if none is initialized."""
        return dist.group.WORLD if self._group is None else self._group

    @functools.cached_property
    def own_group(self) -> ProcessGroup | None:
        """A process group of this rank alone, created without the other ranks.

        It uses gloo on GPUs too: NCCL would split it from the group of all ranks, so all ranks would have to take part.
        """
        if self.world_size == 1:
            return self.group
        return cast(ProcessGroup, dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True))

    def all_gather(self, x: Tensor, purpose: str) -> Tensor:
        """Gather (b, ...) of every rank to (K b, ...) in rank order; shapes must be equal on all ranks."""
        return self.begin_all_gather(x, purpose).wait()

    def begin_all_gather(self, x: Tensor, purpose: str) -> Pending:
        """Start an `all_gather` that overlaps computation; ranks begin and wait in the same order."""
        if self.world_size == 1:
            return Pending(x)
        result = x.new_empty((self.world_size * x.shape[0], *x.shape[1:]))
        return self._begin("all_gather", x, purpose, result, all_gather_single, x.contiguous())

    def begin_host_gather(self, x: Tensor, purpose: str) -> Pending:
        """Start an `all_gather` of a tensor in host memory, without the GPU.

        If the group carries only GPU tensors (NCCL), the tensor is sent through the GPU, and `wait` waits for it.
        """
        if self.world_size == 1:
            return Pending(x)
        pending = self.begin_all_gather(to_device(x, self._host), purpose)
        pending.to_host = True
        return pending

    def all_reduce(self, x: Tensor, purpose: str) -> Tensor:
        """Sum x over ranks, with the same bits on each; x itself is not changed."""
        return self.begin_all_reduce(x, purpose).wait()

    def begin_all_reduce(self, x: Tensor, purpose: str) -> Pending:
        """Start an `all_reduce` that overlaps computation."""
        if self.world_size == 1:
            return Pending(x)
        result = x.clone(memory_format=torch.contiguous_format)
        return self._begin("all_reduce", x, purpose, result, dist.all_reduce)

    def reduce_scatter(self, x: Tensor, purpose: str) -> Tensor:
        """Sum (K b, ...) over ranks and return this rank's rows (b, ...)."""
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
        """Sum x, (len(ranks) b, ...), over consecutive ranks that include this one; return this rank's rows (b, ...).

        All ranks must call it, each with its own group, because one all-to-all of all ranks serves every group.
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
            self.begun += 1
            with record_function(f"{PURPOSE}control"):
                dist.barrier(group=self._group)

    def collect_times(self) -> None:
        """Wait for the GPU and add the times of the calls since the last `collect_times`."""
        for purpose, start, end in self._unread_events:
            end.synchronize()
            self.traffic[purpose].seconds += start.elapsed_time(end) / 1e3
        self._unread_events.clear()

    def seconds(self) -> float:
        """Return the time that all counted calls have taken so far."""
        self.collect_times()
        return sum(traffic.seconds for traffic in self.traffic.values())

    def _begin(self, op: str, x: Tensor, purpose: str, result: Tensor, launch: Any, *inputs: Tensor) -> Pending:
        """Count a collective and launch it; `launch` is torch's function of the result and its inputs."""
        self.begun += 1
        traffic = self.traffic[purpose]
        traffic.calls += 1
        traffic.bytes_sent += ring_bytes(op, x.nbytes, self.world_size)
        timed = functools.partial(self._timed, purpose, result.device)
        group = self._host_group if result.device.type == "cpu" else self._group
        with record_function(PURPOSE + purpose), timed():
            return Pending(result, launch(result, *inputs, group=group, async_op=True), timed)

    @contextmanager
    def _timed(self, purpose: str, device: torch.device) -> Iterator[None]:
        """Add the time that this rank spends launching or waiting for a collective, without overlapped time."""
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
    """Return a tensor on a device, through pinned memory if it is large and comes from the host.

    torch reuses the pinned memory only after the copy.
    """
    if device.type == "cuda" and tensor.device.type == "cpu" and tensor.nbytes > _STAGED:
        tensor = tensor.pin_memory()
    # torch would not wait for a copy to the host either, so that the host could read it too early
    return tensor.to(device, non_blocking=device.type == "cuda")


class HostCopy:
    """An asynchronous copy of a tensor to host memory; a tensor that is already there is not copied."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor
        self._arrived: torch.cuda.Event | None = None
        if tensor.device.type != "cpu":
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> Tensor:
        """Wait for the copy, but not for later work of the device, and return it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy
