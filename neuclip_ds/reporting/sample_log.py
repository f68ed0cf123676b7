"""Log of the samples of every step: lines `{"step": 17, "indices": [...]}` in rankRRRRR.jsonl, one file per rank.

A rank's line has the indices of its rows in their order, -1 for padding; the ranks' lines of a step, concatenated,
are the global batch. Steps count from 1, as in metrics.jsonl. A run may be resumed with another number of ranks.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from neuclip_ds.data.disk import best_effort
from neuclip_ds.reporting.step_lines import drop_from, step_records


class SampleLog:
    """Writer of one rank's lines; each has reached the operating system once `write` returns.

    The folder is shared by the ranks, and created if absent.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"rank{rank:05d}.jsonl"
        self._file = self._path.open("a", encoding="utf-8", newline="\n", buffering=1)

    def write(self, step: int, indices: Sequence[int]) -> None:
        with best_effort(self._path):
            self._file.write(json.dumps({"step": step, "indices": list(indices)}) + "\n")

    def __enter__(self) -> SampleLog:
        return self

    def __exit__(self, *exception: object) -> None:
        with best_effort(self._path):
            self._file.close()


def drop_samples_beyond(folder: Path, step: int) -> None:
    """Drop the lines after `step`, from which the run resumes, in the files of all ranks.

    One rank calls it, before any rank opens its file.
    """
    for path in _rank_files(folder):
        drop_from(path, step + 1)


def read_samples(folder: Path) -> Iterator[tuple[int, list[int]]]:
    """Yield (step, indices of its global batch, padding included) in order of steps, merged from the ranks' files."""
    lines = heapq.merge(*(_lines(path, rank) for rank, path in enumerate(_rank_files(folder))))
    for step, parts in groupby(lines, key=lambda line: line[0]):
        yield step, [index for _, _, indices in parts for index in indices]


def _lines(path: Path, rank: int) -> Iterator[tuple[int, int, list[int]]]:
    for _, record in step_records(path):
        yield record["step"], rank, record["indices"]


def _rank_files(folder: Path) -> list[Path]:
    """Return the files in order of ranks."""
    return sorted(folder.glob("rank*.jsonl"))
