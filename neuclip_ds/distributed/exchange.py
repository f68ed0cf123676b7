"""Messages between ranks: small JSON objects, errors that end all ranks, and shared counters."""

import json
import socket
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from neuclip_ds.errors import UserError

T = TypeVar("T")

PURPOSE = "purpose: "  # prefix of the range that names a collective's purpose in a profiler's trace

# torch 2.14 renamed both functions and warns about the old names on every rank; torch 2.6 has only the old names
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Exchange:
    """Messages between all ranks of a process group; with one rank, nothing is sent.

    Attributes:
        rank: rank of this process, 0 <= rank < world_size.
        device: device of the tensors.
        collectives_started: number of collectives that this rank has started; ranks with a larger number wait for it.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None, store: dist.Store | None) -> None:
        connected = dist.is_initialized()
        reaches_hosts = not connected or "cpu:" in dist.get_backend_config(group)
        self.rank: int = dist.get_rank(group) if connected else 0
        self.world_size: int = dist.get_world_size(group) if connected else 1
        self.device, self.collectives_started, self._host_group = device, 0, group
        self._host = torch.device("cpu") if reaches_hosts else device  # device through which host tensors are sent
        self._store = dist.HashStore() if store is None and self.world_size == 1 else store

    def on_rank_zero(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its JSON-serializable result on all ranks.

        A `UserError` on rank 0 is raised on every rank, so that no rank waits for a failed one.
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
        """Send x as JSON and return the objects received; raise `TypeError` if x is not JSON-serializable."""
        self.collectives_started += 1
        own = torch.frombuffer(bytearray(json.dumps(x).encode()), dtype=torch.uint8).to(self._host)
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
        all_gather_single(sizes, torch.tensor([len(own)], device=own.device), group=self._host_group)
        padded = own.new_zeros(int(sizes.max()))
        padded[: len(own)] = own
        received = padded.new_empty(self.world_size * len(padded))
        all_gather_single(received, padded, group=self._host_group)
        rows = received.view(self.world_size, -1).cpu()
        return [row[:size] for row, size in zip(rows, sizes.tolist(), strict=True)]

    def raise_if_any_rank_failed(self, problem: str | None) -> None:
        """Raise `UserError` on all ranks if any rank has a problem; name the lowest such rank and its host."""
        for rank, found in enumerate(self.gather_objects({"host": socket.gethostname(), "problem": problem})):
            if (text := found["problem"]) is not None:
                raise UserError(text if self.world_size == 1 else f"rank {rank} on {found['host']}: {text}")

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
        assert self._store is not None, "with several ranks, `count` needs a store: create the Communicator with one"
        return self._store.add(f"counters/{name}", amount)

    def ranks_of_node(self) -> list[int]:
        """Return the ranks on this rank's host (not necessarily consecutive); all ranks must call this method."""
        hosts = self.gather_objects(socket.gethostname())
        return [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]


def _decode(message: Tensor, rank: int) -> Any:
    try:
        return json.loads(message.cpu().numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"Rank {rank} sent bytes that are not JSON ({error}): another program takes part in the run's collectives. "
            "Train on a network that only its users can reach."
        ) from error
