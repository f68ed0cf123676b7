"""Partition rows contiguously over ranks, and save them in files that any number of ranks can read.

A table is written as one safetensors file per rank, `NAME.START-STOP.safetensors`, with rows [START, STOP) of each of
its tensors and the total number of rows as its metadata `rows`. A reader reads the byte ranges it needs from any number
of files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from neuclip_ds.errors import UserError
from neuclip_ds.state.tensor_file import TensorFile, open_tensors, row_chunks


class Partition(NamedTuple):
    """Rows [start, stop) of `rows`: rank r of K has [r * ceil(rows/K), (r+1) * ceil(rows/K)), clipped to `rows`."""

    rows: int
    start: int
    stop: int

    @classmethod
    def of(cls, rows: int, rank: int, world_size: int) -> Partition:
        """Return a rank's partition."""
        share = -(-rows // world_size)
        return cls(rows, min(rank * share, rows), min((rank + 1) * share, rows))

    @property
    def size(self) -> int:
        """Number of local rows."""
        return self.stop - self.start


class RowTable(NamedTuple):
    """This rank's rows of a partitioned table: each tensor is (partition.size, ...).

    If `grows`, files may hold fewer rows than the table, when the data set has grown since; the other rows keep their
    values.
    """

    partition: Partition
    tensors: Mapping[str, Tensor]
    grows: bool = False


def row_files(name: str, table: RowTable) -> list[TensorFile]:
    """Return the file of this rank's rows, none if it has no rows; the files of all ranks together are the table."""
    start, stop = table.partition.start, table.partition.stop
    file = f"{name}.{start:012d}-{stop:012d}.safetensors"
    return [TensorFile(file, table.tensors, {"rows": str(table.partition.rows)})] if start < stop else []


def save_rows(folder: Path, name: str, table: RowTable) -> None:
    """Save this rank's rows."""
    for file in row_files(name, table):
        file.write(folder)


def load_rows(folder: Path, name: str, table: RowTable) -> None:
    """Load this rank's rows in place from those files, written by any number of ranks, that hold them.

    Raises:
        UserError: the files do not cover the rows, or hold different tensors.
    """
    start, stop = table.partition.start, table.partition.stop
    files = _row_files(folder, name)
    needed = [file for file in files if file[0] < stop and start < file[1]]
    if table.grows and files:
        with open_tensors((needed or files)[0][2]) as file:
            stop = min(stop, int(file.metadata()["rows"]))
    filled = start
    for first, last, path in needed:
        low, high = max(first, start), min(last, stop)
        if low != filled:
            break
        _copy_rows(path, table, first, low, high)
        filled = high
    if filled < stop:
        raise UserError(
            f"The checkpoint {folder} lacks rows {filled} to {stop} of {name}: it was written with other data or "
            "settings, or files are missing; start a new run, or restore the folder."
        )


def _row_files(folder: Path, name: str) -> list[tuple[int, int, Path]]:
    pattern = re.compile(re.escape(name) + r"\.(\d+)-(\d+)\.safetensors")
    matches = ((pattern.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), int(match[2]), path) for match, path in matches if match)


def _copy_rows(path: Path, table: RowTable, first: int, low: int, high: int) -> None:
    with open_tensors(path) as file:
        known = set(file.keys())
        if known != set(table.tensors):
            raise UserError(
                f"{path} holds {sorted(known)}, but this run needs {sorted(table.tensors)}; set objective.method "
                "to that of the checkpoint."
            )
        for key, target in table.tensors.items():
            stored, at = file.get_slice(key), low - first
            like = stored[at : at + 1]
            if like.shape[1:] != target.shape[1:] or like.dtype != target.dtype:
                raise UserError(
                    f"{path}: {key} has rows of {tuple(like.shape[1:])} {like.dtype}, but this run has rows of "
                    f"{tuple(target.shape[1:])} {target.dtype}; set the options of the checkpoint's run."
                )
            with torch.no_grad():
                for chunk in row_chunks(target[low - table.partition.start : high - table.partition.start]):
                    chunk.copy_(stored[at : at + len(chunk)])
                    at += len(chunk)
