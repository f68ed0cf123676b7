"""All collectives of the objectives, the normalisers and the per-sample state, counted by purpose.

Bytes are those of the ring algorithms (what one rank puts on and takes off the comm_dtype), so that they can be
compared between methods whatever the backend does inside.
"""

from __future__ import annotations

import functools
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from neuclip_ds.distributed.ranges import purpose_range
from neuclip_ds.distributed.ring import ring_bytes
from neuclip_ds.errors import UserError

T = TypeVar("T")


@dataclass
class Traffic:
    """What one purpose has cost this rank so far; its seconds are those that computation does not hide."""

    calls: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float = 0.0


class Pending:
    """A collective on its way, which computation may hide."""

    def __init__(
        self,
        result: Tensor,
        work: dist.Work | None = None,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """
        Args:
            result: tensor that it fills.
            work: torch's handle; None where the result is there already.
            waiting: measures the time that `wait` takes.
        """
        self._result, self._work, self._waiting = result, work, waiting

    def wait(self) -> Tensor:
        """The result; on a GPU later kernels wait for it, not the host."""
        if self._work is not None:
            with self._waiting():
                self._work.wait()
            self._work = None
        return self._result


class Communicator:
    """Collectives over all ranks of the process group; with one rank every call is free and local.

    Needs an initialised `torch.distributed` process group when more than one rank runs.

    Attributes:
        rank: this process, 0 <= rank < world_size.
        device: where tensors that travel live.
        traffic: purpose -> `Traffic`; call `collect_times()` before reading times on a GPU.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        connected = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if connected else 0
        self.world_size: int = dist.get_world_size() if connected else 1
        self.device = torch.device(device)
        self.traffic: defaultdict[str, Traffic] = defaultdict(Traffic)
        self._untimed: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def all_gather(self, x: Tensor, purpose: str) -> Tensor:
        """(b, ...) of every rank -> (K b, ...) in rank order; shapes must be equal on all ranks."""
        return self.begin_all_gather(x, purpose).wait()

    def begin_all_gather(self, x: Tensor, purpose: str) -> Pending:
        """`all_gather` that goes on while this rank computes; ranks begin and wait in the same order."""
        if self.world_size == 1:
            return Pending(x)
        result = x.new_empty((self.world_size * x.shape[0], *x.shape[1:]))
        launch = functools.partial(dist.all_gather_into_tensor, result, x.contiguous(), async_op=True)
        return self._begin("all_gather", x, purpose, result, launch)

    def all_reduce(self, x: Tensor, purpose: str) -> Tensor:
        """Sum of x over ranks, the same bits on each; x itself is left as it is."""
        return self.begin_all_reduce(x, purpose).wait()

    def begin_all_reduce(self, x: Tensor, purpose: str) -> Pending:
        """`all_reduce` that goes on while this rank computes."""
        if self.world_size == 1:
            return Pending(x)
        result = x.clone(memory_format=torch.contiguous_format)
        return self._begin("all_reduce", x, purpose, result, functools.partial(dist.all_reduce, result, async_op=True))

    def reduce_scatter(self, x: Tensor, purpose: str) -> Tensor:
        """(K b, ...) of every rank -> (b, ...): this rank's rows of the sum over ranks."""
        return self.begin_reduce_scatter(x, purpose).wait()

    def begin_reduce_scatter(self, x: Tensor, purpose: str) -> Pending:
        """`reduce_scatter` that goes on while this rank computes."""
        if self.world_size == 1:
            return Pending(x)
        if x.shape[0] % self.world_size:
            raise ValueError(f"reduce_scatter of {x.shape[0]} rows over {self.world_size} ranks: not divisible")
        result = x.new_empty((x.shape[0] // self.world_size, *x.shape[1:]))
        launch = functools.partial(dist.reduce_scatter_tensor, result, x.contiguous(), async_op=True)
        return self._begin("reduce_scatter", x, purpose, result, launch)

    def barrier(self) -> None:
        if self.world_size > 1:
            with purpose_range("control"):
                dist.barrier()

    def on_rank_zero(self, work: Callable[[], T]) -> T:
        """Runs `work` on rank 0 and gives its (picklable) result to all ranks.

        A `UserError` of rank 0 is raised on every rank, so that none waits for a rank that has given up.
        """
        if self.world_size == 1:
            return work()
        outcome: list[object] = [None]
        if self.rank == 0:
            try:
                outcome = [work()]
            except UserError as error:
                outcome = [error]
        with purpose_range("control"):
            dist.broadcast_object_list(outcome, src=0)
        if isinstance(outcome[0], UserError):
            raise outcome[0]
        return outcome[0]  # type: ignore[return-value]

    def gather_objects(self, x: T) -> list[T]:
        """The (picklable) x of every rank, in rank order, on all ranks; for small things at long intervals."""
        found: list[Any] = [x]
        if self.world_size > 1:
            found = [None] * self.world_size
            with purpose_range("control"):
                dist.all_gather_object(found, x)
        return found

    def agree(self, problem: str | None) -> None:
        """Raises `UserError` on all ranks when any rank has a problem, with the first such rank, its host and words."""
        for rank, (host, found) in enumerate(self.gather_objects((socket.gethostname(), problem))):
            if found is not None:
                raise UserError(found if self.world_size == 1 else f"rank {rank} on {host}: {found}")

    def ranks_of_node(self) -> list[int]:
        """The ranks on this rank's host, which share its disks, whatever order the launcher gave them; on all ranks."""
        hosts = self.gather_objects(socket.gethostname())
        return [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]

    def collect_times(self) -> None:
        """Waits for the GPU and adds the times of the calls made since the last `collect_times`."""
        for purpose, start, end in self._untimed:
            end.synchronize()
            self.traffic[purpose].seconds += start.elapsed_time(end) / 1e3
        self._untimed.clear()

    def seconds(self) -> float:
        """What all counted calls have taken so far."""
        self.collect_times()
        return sum(traffic.seconds for traffic in self.traffic.values())

    def close(self) -> None:
        """Leaves the process group; a process that ends with its threads running would abort instead of exiting."""
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()

    def _begin(
        self, op: str, x: Tensor, purpose: str, result: Tensor, launch: Callable[[], dist.Work | None]
    ) -> Pending:
        """Counts a collective and launches it."""
        share = ring_bytes(op, x.numel() * x.element_size(), self.world_size)
        traffic = self.traffic[purpose]
        traffic.calls += 1
        traffic.bytes_sent += share
        traffic.bytes_received += share
        timed = functools.partial(self._timed, purpose)
        with purpose_range(purpose), timed():
            return Pending(result, launch(), timed)

    @contextmanager
    def _timed(self, purpose: str) -> Iterator[None]:
        """Adds what this rank spends launching a collective or waiting for it: what computation hides costs nothing."""
        if self.device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._untimed.append((purpose, start, end))
            if len(self._untimed) > 4096:  # a run that never asks for times must not hoard events
                self.collect_times()
        else:
            began = time.perf_counter()
            yield
            self.traffic[purpose].seconds += time.perf_counter() - began
