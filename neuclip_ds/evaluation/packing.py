"""Rows of Python objects with tensors of one shape, as few bytes and one tensor that processes hand over at once.

Handed over row by row, each tensor would take one file descriptor and one system call.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Pickler(pickle.Pickler):
    """Pickles tensors as their place in `tensors`."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Tensor):
            return None
        self.tensors.append(obj)
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Tensor) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, place: int) -> Tensor:
        return self._tensors[place]


class Packed(NamedTuple):
    """Rows that go from one process to another."""

    pickled: bytes  # with places of tensors
    tensors: Tensor  # (n, ...)

    @classmethod
    def of(cls, rows: list[Any]) -> Packed:
        """Pack rows whose tensors have one shape and dtype."""
        pickler = _Pickler(file := io.BytesIO())
        pickler.dump(rows)
        return cls(file.getvalue(), torch.stack(pickler.tensors) if pickler.tensors else torch.empty(0))

    def rows(self) -> list[Any]:
        """Return the rows; their tensors are views of `tensors`."""
        unpickled: list[Any] = _Unpickler(io.BytesIO(self.pickled), self.tensors).load()
        return unpickled
