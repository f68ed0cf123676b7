"""State files that are sharded by row; any number of ranks can write them, and any number can read them.

A folder written by K ranks contains

    RRRRR-of-KKKKK.safetensors    rank R's shards, with the keys below
    index.json                    the `keys` of each file, and the writer's metadata

with the keys

    KIND/NAME/START-STOP    rows [START, STOP) of the tensor NAME; KIND contains no slash
    KIND/NAME/whole         a whole tensor that is equal on all ranks; only in rank 0's file

Together, the shards of a tensor in all files cover each row exactly once. A reader opens only the files that it needs.
"""

import bisect
import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError, explained
from neuclip_ds.state.partition import RowTable
from neuclip_ds.state.tensor_file import BytesFile, StateFile, TensorFile, row_chunks

INDEX = "index.json"
TABLE = "table"  # kind of the row tables' tensors, which are named TABLE/TENSOR
_WHOLE = "whole"
_FIX = "restore it, or delete its checkpoint to resume from an older one"

Shards = dict[str, Tensor]
"""A rank's shards by key."""


def shard_key(kind: str, name: str, start: int, stop: int) -> str:
    """Return the key of rows [start, stop) of a tensor."""
    return f"{kind}/{name}/{start}-{stop}"


def whole(kind: str, tensors: Mapping[str, Tensor]) -> Shards:
    """Return the shards of tensors that are equal on all ranks; only rank 0 writes these shards."""
    return {f"{kind}/{name}/{_WHOLE}": tensor for name, tensor in tensors.items()}


def table_shards(tables: Mapping[str, RowTable]) -> Shards:
    """Return the shards with this rank's rows of partitioned tables; `tables` maps names to tables."""
    return {
        shard_key(TABLE, f"{name}/{key}", table.partition.start, table.partition.stop): tensor
        for name, table in tables.items()
        for key, tensor in table.tensors.items()
        if table.partition.size and table.saved
    }


def shard_files(shards: Shards, facts: Mapping[str, Any], communicator: Communicator) -> list[StateFile]:
    """Return the files for this rank to write; the index stores rank 0's `facts`. All ranks call this together."""
    keys = communicator.gather_objects(list(shards))
    files: list[StateFile] = [TensorFile(_file_name(communicator.rank, communicator.world_size), shards)]
    if communicator.rank == 0:
        files.append(BytesFile(INDEX, json.dumps({**facts, "keys": keys}).encode()))
    return files


class ShardFiles:
    """Reader of shards that any number of ranks wrote; each file is opened when it is first needed.

    Raises `UserError` if a file is missing or cannot be read.

    Attributes:
        folder: folder of the files.
        facts: metadata that the writer stored in the index.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with explained(f"{folder / INDEX} cannot be read", _FIX):
            self.facts: dict[str, Any] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            keys = self.facts.pop("keys")
        self._count = len(keys)
        self._files: dict[int, Any] = {}  # open files by number
        self._wholes: defaultdict[str, list[str]] = defaultdict(list)  # kind -> names
        # name -> kind -> (start, stop, number of the file) in order of start
        self._places: defaultdict[str, dict[str, list[tuple[int, int, int]]]] = defaultdict(dict)
        for number, of_file in enumerate(keys):
            for key in of_file:
                kind, _, rest = key.partition("/")
                name, _, place = rest.rpartition("/")
                if place == _WHOLE:
                    self._wholes[kind].append(name)
                else:
                    start, stop = map(int, place.split("-"))
                    bisect.insort(self._places[name].setdefault(kind, []), (start, stop, number))

    def kinds(self, name: str) -> list[str]:
        """Return the kinds of sharded tensors stored under a name."""
        return sorted(self._places.get(name, ()))

    def names(self, kind: str) -> list[str]:
        """Return the names under which sharded tensors of a kind are stored."""
        return sorted(name for name, kinds in self._places.items() if kind in kinds)

    def whole(self, kind: str, prefix: str = "") -> Shards:
        """Return the unsharded tensors of a kind whose names begin with a prefix, keyed by the rest of the name."""
        names = [name for name in self._wholes.get(kind, ()) if name.startswith(prefix)]
        return {name.removeprefix(prefix): self._file(0).get_tensor(f"{kind}/{name}/{_WHOLE}") for name in names}

    def read(self, name: str, kind: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Read rows [start, stop) of a tensor (by default, all rows) from disk, without reading other rows."""
        places = self._places.get(name, {}).get(kind, [])
        stop = max((last for _, last, _ in places), default=0) if stop is None else stop
        parts, filled = [], start
        for first, last, number in places:
            low, high = max(first, filled), min(last, stop)
            if low >= high:
                continue
            if low > filled:
                break
            parts.append(self._file(number).get_slice(shard_key(kind, name, first, last))[low - first : high - first])
            filled = high
        if filled < stop:
            raise UserError(
                f"{self.folder} lacks rows {filled} to {stop} of {name} ({kind}): it was written with other data or "
                "settings, or files are missing; start a new run, or restore the folder."
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0)

    def fill(self, tables: Mapping[str, RowTable]) -> None:
        """Read this rank's rows into the tensors of partitioned tables.

        Raises:
            UserError: the files do not cover the rows, or their tensors do not match the tables.
        """
        for table_name, table in tables.items():
            prefix = f"{table_name}/"
            known = {name.removeprefix(prefix) for name in self.names(TABLE) if name.startswith(prefix)}
            if known != set(table.tensors):
                raise UserError(
                    f"{self.folder} contains {sorted(known)}, but this run needs {sorted(table.tensors)}; set "
                    "objective.method to that of the checkpoint."
                )
            for key, target in table.tensors.items():
                self._fill(prefix + key, target, table)

    @torch.no_grad()
    def _fill(self, name: str, target: Tensor, table: RowTable) -> None:
        at, stop = table.partition.start, table.partition.stop
        if at >= stop:
            return
        like = self.read(name, TABLE, at, at + 1)
        if like.shape[1:] != target.shape[1:] or like.dtype != target.dtype:
            raise UserError(
                f"{self.folder}: {name} has rows of {tuple(like.shape[1:])} {like.dtype}, but this run has rows of "
                f"{tuple(target.shape[1:])} {target.dtype}; set the options of the checkpoint's run."
            )
        for chunk in row_chunks(target[: stop - at]):
            chunk.copy_(self.read(name, TABLE, at, at + len(chunk)))
            at += len(chunk)

    def _file(self, number: int) -> Any:
        if number not in self._files:
            path = self.folder / _file_name(number, self._count)
            with explained(f"{path} cannot be read", _FIX):
                self._files[number] = safe_open(path, framework="pt")
        return self._files[number]


def _file_name(rank: int, files: int) -> str:
    return f"{rank:05d}-of-{files:05d}.safetensors"
