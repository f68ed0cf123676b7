"""Entries that ranks write to their shared store and read from it: dataclasses as JSON."""

import json
from dataclasses import asdict
from ipaddress import ip_address
from typing import Any, TypeVar

import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError

from neuclip_ds.errors import UserError

T = TypeVar("T")
_MAX_SHOWN = 60  # bytes of an entry in a message


def write_entry(store: dist.Store, key: str, entry: Any) -> None:
    """Write a dataclass to the store."""
    store.set(key, json.dumps(asdict(entry)))


def read_entry(store: dist.Store, key: str, kind: type[T]) -> T:
    """Wait until a rank has written an entry, and return it as an instance of `kind`.

    Raises `UserError` if the entry is not JSON that is valid for `kind`, and torch's `DistError` if the store closes or
    its timeout passes first.
    """
    return parse_entry(store.get(key), key, kind)


def parse_entry(content: bytes, key: str, kind: type[T]) -> T:
    """Return the content that `write_entry` wrote as an instance of `kind`.

    Raises `UserError` if the content is not JSON that is valid for `kind`.
    """
    try:
        return TypeAdapter(kind).validate_json(content, strict=True)
    except ValidationError:
        raise _unreadable(key, content) from None


def read_address(store: dist.Store, key: str) -> str:
    """Return the IP address that a rank has written; raise `UserError` if the entry is not an IP address."""
    content = store.get(key)
    try:
        return str(ip_address(content.decode()))
    except ValueError:
        raise _unreadable(key, content) from None


def _unreadable(key: str, content: bytes) -> UserError:
    return UserError(
        f"The ranks' store contains an unreadable entry {key!r} ({content[:_MAX_SHOWN]!r}): another program or another "
        "version of neuclip_ds uses the store. Install the same version on all nodes, and choose another port (the "
        "launcher's --master_port, or MASTER_PORT under srun or mpirun)."
    )
