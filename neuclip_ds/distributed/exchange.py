"""Messages between ranks: JSON objects as tensors of bytes, and errors as JSON objects."""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from neuclip_ds.distributed.traffic import PURPOSE
from neuclip_ds.errors import UserError

# torch 2.14 renamed both functions and warns about the old names on every rank; torch 2.6 has only the old names
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

CONTROL = f"{PURPOSE}control"  # range in a profiler's trace for collectives that do not send training data


def encode(x: Any, device: torch.device) -> Tensor:
    """Return x as a uint8 tensor of JSON; raise `TypeError` if x is not JSON-serializable."""
    return torch.frombuffer(bytearray(json.dumps(x).encode()), dtype=torch.uint8).to(device)


def decode(message: Tensor, rank: int) -> Any:
    """Return the object that `rank` has encoded; raise `UserError` if the bytes are not JSON."""
    try:
        return json.loads(message.cpu().numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"Rank {rank} sent bytes that are not JSON ({error}): another program takes part in the run's collectives. "
            "Train on a network that other programs cannot reach."
        ) from error


def broadcast_message(message: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return rank 0's message on all ranks: its length is sent first, then its bytes."""
    with record_function(CONTROL):
        size = torch.tensor([len(message)], device=message.device)
        dist.broadcast(size, group=group, group_src=0)
        received = message if dist.get_rank(group) == 0 else message.new_empty(int(size))
        dist.broadcast(received, group=group, group_src=0)
    return received


def gather_messages(message: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Return all ranks' messages in host memory, in rank order: gather their lengths first, then their padded bytes."""
    world_size = dist.get_world_size(group)
    with record_function(CONTROL):
        sizes = torch.empty(world_size, dtype=torch.int64, device=message.device)
        all_gather_single(sizes, torch.tensor([len(message)], device=message.device), group=group)
        padded = message.new_zeros(int(sizes.max()))
        padded[: len(message)] = message
        received = padded.new_empty(world_size * len(padded))
        all_gather_single(received, padded, group=group)
    rows = received.view(world_size, -1).cpu()
    return [row[:size] for row, size in zip(rows, sizes.tolist(), strict=True)]


def error_as_object(error: UserError) -> dict[str, Any]:
    """Return a JSON-serializable description of an error, from which `error_from_object` makes an equivalent error."""
    classes = [_full_name(base) for base in type(error).__mro__ if issubclass(base, UserError)]
    return {"classes": classes, "message": str(error)}


def error_from_object(described: dict[str, Any]) -> UserError:
    """Return an error with the message of another rank's error.

    Its class is that of the other rank's error or its nearest base class that this process has already imported and
    whose constructor, like `UserError`'s, takes only the message. A message from another rank never causes an import.
    """
    imported = {_full_name(error_class): error_class for error_class in _with_subclasses(UserError)}
    for name in described["classes"]:
        error_class = imported.get(name)
        if error_class is not None and error_class.__init__ is UserError.__init__:
            return error_class(described["message"])
    return UserError(described["message"])


def _with_subclasses(error_class: type[UserError]) -> list[type[UserError]]:
    """Return a class and its subclasses of any depth."""
    classes = [error_class]
    for subclass in error_class.__subclasses__():
        classes += _with_subclasses(subclass)
    return classes


def _full_name(error_class: type) -> str:
    return f"{error_class.__module__}.{error_class.__qualname__}"
