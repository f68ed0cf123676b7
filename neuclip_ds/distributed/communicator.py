"""Collectives that record their traffic by purpose, and copies between host and GPU memory."""

import functools
import socket
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor
from torch.profiler import record_function

from neuclip_ds.distributed.exchange import (
    CONTROL,
    all_gather_single,
    broadcast_message,
    decode,
    encode,
    error_as_object,
    error_from_object,
    gather_messages,
    reduce_scatter_single,
)
from neuclip_ds.distributed.traffic import PURPOSE, Traffic, TrafficCounter, ring_bytes
from neuclip_ds.errors import UserError

T = TypeVar("T")
J = TypeVar("J", bound=bool | int | float | str | list[Any] | dict[str, Any] | None)  # types that JSON preserves
ProcessGroup = dist.ProcessGroup

_MAX_PAGEABLE = 64 << 10  # maximum bytes that CUDA copies asynchronously from pageable memory

# names of ranges in a profiler's trace
STEP = "train step"
PHASE = "phase: "  # prefix of a phase of the step


@dataclass(eq=False)
class Pending:
    """A collective in progress, which may overlap computation."""

    _result: Tensor  # filled by the collective
    _work: dist.Work | None = None  # torch's handle; None if the result is ready
    _waiting: Callable[[], AbstractContextManager[None]] = nullcontext  # adds the time of `wait` to the traffic

    _host_copy: "HostCopy | None" = None  # copy of a result that is on a GPU but needed in host memory

    def wait(self) -> Tensor:
        """Wait for the result and return it; on a GPU, later kernels wait but the host does not.

        For a tensor in host memory that is sent through a GPU, the host waits, but not for the kernels of the current
        stream.
        """
        if self._work is not None:
            with self._waiting():
                self._work.wait()
            self._work = None
        return self._result if self._host_copy is None else self._host_copy.wait()


class Communicator:
    """Collectives over all ranks of a process group.

    With a single rank, nothing is sent, the group is optional, and the result of a collective is the input tensor
    itself or, for `reduce_scatter_among`, a view of it.

    Args:
        device: device of the tensors.
        group: process group of the ranks; by default, torch's default group.
        host_group: process group of the same ranks for objects and tensors in host memory; by default, `group`.
        store: store that the same ranks share; `count` requires it if there are several ranks.
        world_size: number of ranks to use instead of the group's; this process is then rank 0. With 1, nothing is sent.
            A larger number is only for planning, in which no collective is called.

    Attributes:
        rank: rank of this process, 0 <= rank < world_size.
        world_size: number of ranks K.
        device: device of the tensors.
        collectives_started: number of collectives that this rank has started through this object; ranks that have
            started more wait for this rank. DeepSpeed's collectives are not counted.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        group: ProcessGroup | None = None,
        host_group: ProcessGroup | None = None,
        store: dist.Store | None = None,
        world_size: int | None = None,
    ) -> None:
        self.device = torch.device(device)
        self._group = group
        self._host_group = group if host_group is None else host_group
        self._host = torch.device("cpu")  # device through which host tensors are sent
        self.rank: int = 0
        self.world_size: int = 1
        if dist.is_initialized():
            self.rank = dist.get_rank(self._host_group)
            self.world_size = dist.get_world_size(self._host_group)
            if "cpu:" not in dist.get_backend_config(self._host_group):
                self._host = self.device
        if world_size is not None:
            self.rank = 0
            self.world_size = world_size
        self._store = store
        self.collectives_started = 0
        self._counter = TrafficCounter()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Communicator":
        """Return the communicator itself: process groups cannot be copied, so all copies of a loss share it."""
        return self

    def __reduce__(self) -> tuple[Callable[..., "Communicator"], tuple[torch.device, int, int]]:
        """Pickle the device, rank and world size; raise `TypeError` for a group other than torch's default."""
        if self._group is not None and self._group is not dist.group.WORLD:
            raise TypeError("A process group cannot be pickled. Use the loss's save() and load(), or state_dict().")
        return _unpickled, (self.device, self.rank, self.world_size)

    def single_rank(self) -> "Communicator":
        """Return a communicator for this rank alone; its calls send nothing."""
        return Communicator(self.device, self._group, self._host_group, self._store, world_size=1)

    @property
    def traffic(self) -> defaultdict[str, Traffic]:
        """This rank's `Traffic` by purpose; on a GPU, the times are complete after a call of `seconds`."""
        return self._counter.by_purpose

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

        If the group supports only GPU tensors (NCCL), the tensor is sent through the GPU and copied back on a side
        stream, so that `wait` does not wait for kernels that are launched between the two calls.
        """
        if self.world_size == 1:
            return Pending(x)
        pending = self.begin_all_gather(to_device(x, self._host), purpose)
        if self._host.type == "cpu":
            return pending
        side_stream = torch.cuda.Stream(self._host)
        with torch.cuda.stream(side_stream):
            gathered = pending.wait()  # makes the side stream wait for the collective
            gathered.record_stream(side_stream)
            return Pending(gathered, _host_copy=HostCopy(gathered))

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
        """Sum x, of shape (K b, ...), over all K ranks and return this rank's rows, of shape (b, ...).

        Raises `ValueError` if K does not divide the number of rows.
        """
        return self.begin_reduce_scatter(x, purpose).wait()

    def begin_reduce_scatter(self, x: Tensor, purpose: str) -> Pending:
        """Start a `reduce_scatter` that overlaps computation; raise `ValueError` as `reduce_scatter` does."""
        if self.world_size == 1:
            return Pending(x)
        if x.shape[0] % self.world_size:
            raise ValueError(f"reduce_scatter: {x.shape[0]} rows are not divisible by {self.world_size} ranks")
        result = x.new_empty((x.shape[0] // self.world_size, *x.shape[1:]))
        return self._begin("reduce_scatter", x, purpose, result, reduce_scatter_single, x.contiguous())

    def begin_reduce(self, x: Tensor, owner: int, purpose: str) -> Pending:
        """Start to replace x on rank `owner` with its sum over ranks; on other ranks, x is undefined afterward."""
        if self.world_size == 1:
            return Pending(x)
        return self._begin("reduce", x, purpose, x, functools.partial(dist.reduce, group_dst=owner))

    def reduce_scatter_among(self, ranks: range, x: Tensor, purpose: str) -> Tensor:
        """Sum x, of shape (len(ranks) b, ...), over consecutive `ranks` that include this rank; return the local rows.

        All ranks must call this method, each with the ranks of its group, and all groups must have the same size: one
        global all-to-all serves every group.
        """
        rows_by_rank = dict(zip(ranks, x.chunk(len(ranks)), strict=True))
        local_rows = rows_by_rank.pop(self.rank)
        if not rows_by_rank:
            return local_rows
        sent = torch.cat(list(rows_by_rank.values()))
        splits = [len(local_rows) if rank in rows_by_rank else 0 for rank in range(self.world_size)]
        launch = functools.partial(dist.all_to_all_single, output_split_sizes=splits, input_split_sizes=splits)
        received = self._begin("all_to_all", sent, purpose, torch.empty_like(sent), launch, sent).wait()
        return local_rows + received.view(len(rows_by_rank), *local_rows.shape).sum(dim=0)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            self.collectives_started += 1
            with record_function(CONTROL):
                dist.barrier(group=self._group)

    def seconds(self) -> float:
        """Return the total time recorded in `traffic`, in seconds; on a GPU, wait for the GPU first."""
        return self._counter.seconds()

    def gather_objects(self, x: T) -> list[T]:
        """Gather the JSON-serializable x of every rank, in rank order, on all ranks; for small, infrequent data."""
        self.collectives_started += 1
        message = encode(x, self._host)
        messages = [message]
        if self.world_size > 1:
            messages = gather_messages(message, self._host_group)
        return [decode(received, rank) for rank, received in enumerate(messages)]

    def on_rank_zero(self, work: Callable[[], J]) -> J:
        """Run `work` on rank 0 and return its JSON-serializable result on all ranks.

        JSON turns tuples into lists, and the keys of dicts into strings; `value_from_rank_zero` preserves both.

        A `UserError` on rank 0 is raised on every rank, so that no rank waits for a failed one. Ranks that have not
        imported the error's class raise an error of one of its base classes.
        """
        outcome: dict[str, Any] = {}
        if self.rank == 0:
            try:
                outcome = {"result": work()}
            except UserError as error:
                if self.world_size == 1:
                    raise
                outcome = {"error": error_as_object(error)}
        self.collectives_started += 1
        message = encode(outcome, self._host)
        if self.world_size > 1:
            message = broadcast_message(message, self._host_group)
        outcome = decode(message, rank=0)
        if "error" in outcome:
            raise error_from_object(outcome["error"])
        return cast(J, outcome["result"])

    def value_from_rank_zero(self, kind: Any, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its result, of the type `kind`, on all ranks.

        Args:
            kind: any type that pydantic converts to JSON and back, such as a dataclass, a NamedTuple or `Path | None`.
                In values of the type `Any`, infinity and NaN arrive as None.
            work: function that rank 0 calls.

        Raises:
            UserError: on all ranks, if `work` raised it on rank 0, as in `on_rank_zero`.
            ValidationError: pydantic's error, on all ranks, if the result is not of the type `kind`.
        """
        adapter = TypeAdapter(kind)
        sent = self.on_rank_zero(lambda: adapter.dump_python(work(), mode="json"))
        return cast(T, adapter.validate_python(sent))

    def raise_if_any_rank_failed(self, problem: str | None) -> None:
        """Raise `UserError` on all ranks if any rank has a `problem` (None: no problem); all ranks call this together.

        If there are several ranks, the message names the lowest rank that has a problem, and its host.
        """
        reports = self.gather_objects({"host": socket.gethostname(), "problem": problem})
        for rank, report in enumerate(reports):
            text = report["problem"]
            if text is None:
                continue
            if self.world_size > 1:
                text = f"rank {rank} on {report['host']}: {text}"
            raise UserError(text)

    def on_every_rank(self, work: Callable[[], T]) -> T:
        """Return `work()`; if it raises `UserError` on any rank, raise the lowest such rank's error on all ranks."""
        try:
            result = work()
        except UserError as error:
            self.raise_if_any_rank_failed(str(error))
            raise
        self.raise_if_any_rank_failed(None)
        return result

    def count(self, name: str, amount: int = 1) -> int:
        """Add to a counter that all ranks share and return its new value, without waiting for other ranks."""
        if self._store is None:
            assert self.world_size == 1, "with several ranks, `count` needs a store: create the Communicator with one"
            self._store = dist.HashStore()
        return self._store.add(f"counters/{name}", amount)

    def ranks_of_node(self) -> list[int]:
        """Return the ranks on this rank's host (not necessarily consecutive); all ranks must call this method."""
        hosts = self.gather_objects(socket.gethostname())
        return [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]

    def _begin(self, op: str, x: Tensor, purpose: str, result: Tensor, launch: Any, *inputs: Tensor) -> Pending:
        """Count and launch a collective; `launch` is torch's function, called with the result and the inputs."""
        self.collectives_started += 1
        self._counter.count(purpose, ring_bytes(op, x.nbytes, self.world_size))
        timed = functools.partial(self._counter.timed, purpose, result.device)
        group = self._host_group if result.device.type == "cpu" else self._group
        with record_function(PURPOSE + purpose), timed():
            work = launch(result, *inputs, group=group, async_op=True)
        return Pending(result, work, timed)


def _unpickled(device: torch.device, rank: int, world_size: int) -> Communicator:
    """Return the communicator of this process; raise `UserError` if it has another rank or world size."""
    communicator = Communicator(device)
    if (communicator.rank, communicator.world_size) != (rank, world_size):
        raise UserError(
            f"A loss that was pickled on rank {rank} of {world_size} cannot be used on rank {communicator.rank} of "
            f"{communicator.world_size}. Use its save() and load(), which allow a different number of ranks."
        )
    return communicator


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device, through pinned memory if the tensor is large and in host memory.

    torch reuses the pinned memory only after the copy has completed.
    """
    if device.type == "cuda" and tensor.device.type == "cpu" and tensor.nbytes > _MAX_PAGEABLE:
        tensor = tensor.pin_memory()
    # a non-blocking copy to the host would also return at once, and the host could read incomplete data
    return tensor.to(device, non_blocking=device.type == "cuda")


class HostCopy:
    """An asynchronous copy of a tensor to host memory; a tensor that is already in host memory is not copied."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor
        self._arrived: torch.cuda.Event | None = None
        if tensor.device.type != "cpu":
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> Tensor:
        """Wait for the copy, but not for later work on the device, and return the copy."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy
