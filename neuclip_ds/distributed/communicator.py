"""Collectives of the objectives, the normalizers and the per-sample state, counted by purpose."""

import copy
import functools
import json
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from neuclip_ds.distributed.host_copies import to_device
from neuclip_ds.errors import UserError

T = TypeVar("T")
ProcessGroup = dist.ProcessGroup

# ranges in a profiler's trace: a training step, one of its phases, which do not nest, and the purpose of a collective
STEP, PHASE, PURPOSE = "train step", "phase: ", "purpose: "


def ring_bytes(op: str, size: int, world_size: int) -> int:
    """Return the bytes that a rank sends in the ring algorithm, whichever the backend uses.

    Args:
        op: all_gather, all_reduce, reduce_scatter, all_to_all, or reduce and broadcast, whose ranks differ and for
            which it is the mean over ranks; others (barrier) count 0.
        size: bytes of a rank's input: local rows for all_gather, the whole tensor for the others.
        world_size: number of ranks K.
    """
    once = ("reduce_scatter", "reduce", "broadcast", "all_to_all")
    rounds = {"all_gather": world_size, "all_reduce": 2, **dict.fromkeys(once, 1)}
    return rounds.get(op, 0) * (world_size - 1) * size // world_size


@dataclass
class Traffic:
    """What one purpose has cost this rank so far: bytes by `ring_bytes`, seconds that overlap no computation."""

    calls: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float = 0.0


@dataclass(eq=False)
class Pending:
    """A collective in progress, which may overlap computation."""

    _result: Tensor  # that the collective fills
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


class Communicator:
    """Collectives over all ranks of the process group; with one rank, calls return without communication.

    Needs an initialized `torch.distributed` process group when more than one rank runs.

    Attributes:
        rank: rank of this process, 0 <= rank < world_size.
        device: device of the tensors.
        traffic: purpose -> `Traffic`; call `collect_times()` before reading times on a GPU.
        begun: number of collectives that this rank has begun; the others wait for a rank with a smaller number.
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
        connected = dist.is_initialized()
        self._group = group
        self._host_group = group if host_group is None else host_group
        reaches_hosts = not connected or "cpu:" in dist.get_backend_config(self._host_group)
        self.rank: int = dist.get_rank(group) if connected else 0
        self.world_size: int = dist.get_world_size(group) if connected else 1
        self.device = torch.device(device)
        self._host = torch.device("cpu") if reaches_hosts else self.device  # device that sends tensors of the host
        self.traffic: defaultdict[str, Traffic] = defaultdict(Traffic)
        self.begun = 0
        self._unread_events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._store = dist.HashStore() if store is None and self.world_size == 1 else store

    def alone(self) -> "Communicator":
        """Return a communicator of this rank alone, with which no call communicates."""
        lone = copy.copy(self)
        lone.rank, lone.world_size, lone.traffic = 0, 1, defaultdict(Traffic)
        return lone

    @property
    def group(self) -> ProcessGroup | None:
        """The process group of the ranks; None without one."""
        return dist.group.WORLD if self._group is None else self._group

    @functools.cached_property
    def own_group(self) -> ProcessGroup | None:
        """A process group of this rank alone, made without the other ranks.

        It uses gloo on GPUs too: NCCL would split it from the group of all ranks, and all would have to take part.
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
        return self._begin("all_gather", x, purpose, result, dist.all_gather_into_tensor, x.contiguous())

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
        return self._begin("reduce_scatter", x, purpose, result, dist.reduce_scatter_tensor, x.contiguous())

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            self.begun += 1
            with record_function(f"{PURPOSE}control"):
                dist.barrier(group=self._group)

    def on_rank_zero(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its JSON-serializable result on all ranks.

        A `UserError` of rank 0 is raised on every rank, so that none waits for a failed rank.
        """
        outcome: dict[str, Any] = {}
        if self.rank == 0:
            try:
                outcome = {"result": work()}
            except UserError as error:
                if self.world_size == 1:
                    raise
                outcome = {"error": type(error).__name__, "message": str(error)}
        outcome = self._exchange(outcome, self._broadcast)[0]
        if "error" in outcome:
            kinds: list[type[UserError]] = [UserError, *UserError.__subclasses__()]
            raise next(kind for kind in kinds if kind.__name__ == outcome["error"])(outcome["message"])
        return cast(T, outcome["result"])

    def gather_objects(self, x: T) -> list[T]:
        """Gather the JSON-serializable x of every rank, in rank order, on all ranks; for small, infrequent data."""
        return self._exchange(x, self._gather)

    def _exchange(self, x: Any, collective: Callable[[Tensor], list[Tensor]]) -> list[Any]:
        """Return the objects that ranks sent in a collective of bytes; raise TypeError if x is not JSON."""
        self.begun += 1
        own = torch.frombuffer(bytearray(_encode(x)), dtype=torch.uint8).to(self._host)
        with record_function(f"{PURPOSE}control"):
            received = collective(own) if self.world_size > 1 else [own]
        return [_decode(message, rank) for rank, message in enumerate(received)]

    def _broadcast(self, own: Tensor) -> list[Tensor]:
        """Return rank 0's message on all ranks: its length is sent first, then its bytes."""
        size = torch.tensor([len(own)], device=own.device)
        dist.broadcast(size, group=self._host_group, group_src=0)
        received = own if self.rank == 0 else own.new_empty(int(size))
        dist.broadcast(received, group=self._host_group, group_src=0)
        return [received]

    def _gather(self, own: Tensor) -> list[Tensor]:
        """Return the messages of all ranks: their lengths are gathered first, then their padded bytes."""
        sizes = torch.empty(self.world_size, dtype=torch.int64, device=own.device)
        dist.all_gather_into_tensor(sizes, torch.tensor([len(own)], device=own.device), group=self._host_group)
        padded = own.new_zeros(int(sizes.max()))
        padded[: len(own)] = own
        received = padded.new_empty(self.world_size * len(padded))
        dist.all_gather_into_tensor(received, padded, group=self._host_group)
        rows = received.view(self.world_size, -1).cpu()
        return [row[:size] for row, size in zip(rows, sizes.tolist(), strict=True)]

    def agree(self, problem: str | None) -> None:
        """Raise `UserError` on all ranks if any rank has a problem, with the first such rank, its host and message."""
        for rank, found in enumerate(self.gather_objects({"host": socket.gethostname(), "problem": problem})):
            if (text := found["problem"]) is not None:
                raise UserError(text if self.world_size == 1 else f"rank {rank} on {found['host']}: {text}")

    def on_every_rank(self, work: Callable[[], T]) -> T:
        """Return the result of `work` on this rank, or raise the first rank's `UserError` on all ranks."""
        try:
            result = work()
        except UserError as error:
            self.agree(str(error))
            raise
        self.agree(None)
        return result

    def count(self, name: str, amount: int = 1) -> int:
        """Add to a counter that all ranks share, and return its new value; no rank waits for another."""
        assert self._store is not None, "several ranks count through a store: make the Communicator with one"
        return self._store.add(f"counters/{name}", amount)

    def ranks_of_node(self) -> list[int]:
        """Return the ranks on this rank's host, in whatever order the launcher assigned them; a collective call."""
        hosts = self.gather_objects(socket.gethostname())
        return [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]

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
        share = ring_bytes(op, x.numel() * x.element_size(), self.world_size)
        self.begun += 1
        traffic = self.traffic[purpose]
        traffic.calls += 1
        traffic.bytes_sent += share
        traffic.bytes_received += share
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


def _encode(x: object) -> bytes:
    return json.dumps(x).encode()


def _decode(message: Tensor, rank: int) -> Any:
    try:
        return json.loads(message.cpu().numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"Rank {rank} sent bytes that are not JSON ({error}): another program takes part in the run's collectives. "
            "Train in a network that only its users reach."
        ) from error
