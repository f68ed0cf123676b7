"""State shards: pieces of state that any number of ranks can write to files, and any number of ranks can read.

A state shard is a range of a tensor's rows, or a complete tensor that is equal on all ranks (replicated). A folder
written by K ranks contains

    RRRRR-of-KKKKK.safetensors    rank R's state shards, with the keys below
    index.json                    the `keys` of each file, and the writer's metadata

with the keys

    KIND/NAME/START-STOP    rows [START, STOP) of the tensor NAME; KIND contains no slash
    KIND/NAME/whole         a replicated tensor; only in rank 0's file

Together, the shards of a tensor in all files cover each row exactly once. A reader opens only the files that it needs.
"""

import bisect
import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError, explained
from neuclip_ds.state.partition import RowTable
from neuclip_ds.state.tensor_file import BytesFile, StateFile, TensorFile, row_chunks

INDEX = "index.json"
TABLE = "table"  # KIND of the row tables' tensors; their NAME is the table's name, a slash and the tensor's name
_REPLICATED = "whole"  # end of a replicated tensor's key
_FIX = "restore the file, or use an older checkpoint"

Shards = dict[str, Tensor]
"""A rank's state shards by key."""


def shard_key(kind: str, name: str, start: int, stop: int) -> str:
    """Return the key of rows [start, stop) of a tensor."""
    return f"{kind}/{name}/{start}-{stop}"


def replicated_shards(kind: str, tensors: Mapping[str, Tensor]) -> Shards:
    """Return the state shards of tensors that are equal on all ranks, for rank 0's file; call this only on rank 0."""
    return {f"{kind}/{name}/{_REPLICATED}": tensor for name, tensor in tensors.items()}


def table_shards(tables: Mapping[str, RowTable]) -> Shards:
    """Return the state shards with this rank's rows of partitioned tables; `tables` maps names to tables."""
    shards = {}
    for table_name, table in tables.items():
        if table.partition.size == 0 or not table.saved:
            continue
        for key, tensor in table.tensors.items():
            name = f"{table_name}/{key}"
            shards[shard_key(TABLE, name, table.partition.start, table.partition.stop)] = tensor
    return shards


def shard_files(shards: Shards, metadata: Mapping[str, Any], communicator: Communicator) -> list[StateFile]:
    """Return the files that this rank writes: its state shards and, on rank 0, an index that also stores `metadata`.

    All ranks call this together.
    """
    keys = communicator.gather_objects(list(shards))
    files: list[StateFile] = [TensorFile(_file_name(communicator.rank, communicator.world_size), shards)]
    if communicator.rank == 0:
        files.append(BytesFile(INDEX, json.dumps({**metadata, "keys": keys}).encode()))
    return files


class _StoredRows(NamedTuple):
    """Rows [start, stop) of a tensor and the number of the file that stores them; instances sort by `start`."""

    start: int
    stop: int
    file: int


class ShardFiles:
    """Reader of state shards that any number of ranks wrote; each file is opened when it is first needed.

    Raises `UserError` if a file is missing or cannot be read.

    Attributes:
        folder: folder of the files.
        metadata: metadata that the writer stored in the index.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with explained(f"{folder / INDEX} cannot be read", _FIX):
            self.metadata: dict[str, Any] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            keys = self.metadata.pop("keys")
        self._file_count = len(keys)
        self._open_files: dict[int, Any] = {}  # by number
        self._replicated_names: defaultdict[str, list[str]] = defaultdict(list)  # by kind
        # name -> kind -> row ranges in order of their start
        self._rows: defaultdict[str, dict[str, list[_StoredRows]]] = defaultdict(dict)
        for file, file_keys in enumerate(keys):
            for key in file_keys:
                kind, _, name_and_rows = key.partition("/")
                name, _, rows = name_and_rows.rpartition("/")
                if rows == _REPLICATED:
                    self._replicated_names[kind].append(name)
                else:
                    start, stop = map(int, rows.split("-"))
                    bisect.insort(self._rows[name].setdefault(kind, []), _StoredRows(start, stop, file))

    def kinds(self, name: str) -> list[str]:
        """Return the kinds of sharded tensors stored under a name."""
        return sorted(self._rows.get(name, ()))

    def names(self, kind: str) -> list[str]:
        """Return the names under which sharded tensors of a kind are stored."""
        return sorted(name for name, kinds in self._rows.items() if kind in kinds)

    def replicated(self, kind: str, prefix: str = "") -> dict[str, Tensor]:
        """Return the replicated tensors of a kind whose names begin with a prefix, keyed by the remaining name."""
        tensors = {}
        for name in self._replicated_names.get(kind, ()):
            if name.startswith(prefix):
                stored = self._file(0).get_tensor(f"{kind}/{name}/{_REPLICATED}")
                # a copy, because the file is memory-mapped and a run may save into the folder that it has loaded
                tensors[name.removeprefix(prefix)] = stored.clone()
        return tensors

    def read(self, name: str, kind: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Read rows [start, stop) of a tensor (by default, all rows) from disk, without reading other rows.

        Raises `UserError` if a row is missing. Without rows to read, the result has the shape (0,).
        """
        stored_rows = self._rows.get(name, {}).get(kind, [])
        if stop is None:
            stop = max((stored.stop for stored in stored_rows), default=0)
        pieces = []
        next_row = start  # rows [start, next_row) have been read
        for stored in stored_rows:
            low = max(stored.start, next_row)
            high = min(stored.stop, stop)
            if low >= high:
                continue
            if low > next_row:  # a gap
                break
            shard = self._file(stored.file).get_slice(shard_key(kind, name, stored.start, stored.stop))
            pieces.append(shard[low - stored.start : high - stored.start])
            next_row = high
        if next_row < stop:
            raise UserError(
                f"{self.folder} lacks the rows [{next_row}, {stop}) of {name} ({kind}): the folder was written with "
                "other data or settings, or is damaged. Use the data and settings of the run that wrote the folder, "
                "restore the folder, or start a new run under another name (run.name)."
            )
        if not pieces:
            return torch.empty(0, device="cpu")
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces)

    def fill(self, tables: Mapping[str, RowTable]) -> None:
        """Read this rank's rows into the tensors of partitioned tables.

        Raises:
            UserError: the files do not cover the rows, or their tensors do not match the tables.
        """
        for table_name, table in tables.items():
            prefix = f"{table_name}/"
            stored = {name.removeprefix(prefix) for name in self.names(TABLE) if name.startswith(prefix)}
            if stored != set(table.tensors):
                raise UserError(
                    f"{self.folder} contains these tensors of the loss's state: {', '.join(sorted(stored)) or 'none'}; "
                    f"this run needs {', '.join(sorted(table.tensors))}. Set the options of the loss (objective.*) as "
                    "in the run that wrote the folder."
                )
            for key, target in table.tensors.items():
                self._fill(prefix + key, target, table)

    @torch.no_grad()
    def _fill(self, name: str, target: Tensor, table: RowTable) -> None:
        """Read this rank's rows of a partitioned tensor into `target`, in chunks."""
        start = table.partition.start
        stop = table.partition.stop
        if start >= stop:
            return
        first_row = self.read(name, TABLE, start, start + 1)
        if first_row.shape[1:] != target.shape[1:] or first_row.dtype != target.dtype:
            raise UserError(
                f"{self.folder}: the rows of {name} have shape {tuple(first_row.shape[1:])} and dtype "
                f"{first_row.dtype}, but this run needs {tuple(target.shape[1:])} and {target.dtype}; use the options "
                "of the run that wrote the checkpoint."
            )
        row = start
        for chunk in row_chunks(target[: stop - start]):
            chunk.copy_(self.read(name, TABLE, row, row + len(chunk)))
            row += len(chunk)

    def _file(self, number: int) -> Any:
        if number not in self._open_files:
            path = self.folder / _file_name(number, self._file_count)
            with explained(f"{path} cannot be read", _FIX):
                self._open_files[number] = safe_open(path, framework="pt")
        return self._open_files[number]


def _file_name(rank: int, file_count: int) -> str:
    return f"{rank:05d}-of-{file_count:05d}.safetensors"
