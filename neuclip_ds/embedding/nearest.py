"""Find the samples whose features are nearest to a query: exactly, part by part, or with an index of FAISS."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neuclip_ds.data.atomic_write import atomic_write
from neuclip_ds.embedding.parts import Parts
from neuclip_ds.errors import UserError

_TRAINING_ROWS = 1 << 20  # that an index is trained on
_FOLDER = "faiss"


class Match(NamedTuple):
    """A sample that is near to a query."""

    similarity: float  # cosine; of a FAISS index that compresses features, an approximation
    index: int  # type: ignore[assignment]  # global index
    key: str
    uid: str | None
    part: int  # number of its shard in the manifest


def nearest(parts: Parts, kind: str, queries: Tensor, count: int) -> list[list[Match]]:
    """Return the `count` nearest samples of each query, by comparing it with all.

    Args:
        kind: whose features are searched, `image` or `text`.
        queries: (q, d) L2-normalised; parts are compared on their device.
    """
    best = torch.empty(len(queries), 0, device=queries.device)
    positions = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)
    ends = []
    for start, rows in _features(parts, kind):
        scores = queries @ torch.from_numpy(rows).to(queries.device).T
        ends.append(start + len(rows))
        found = torch.arange(start, ends[-1], device=queries.device).expand(len(queries), -1)
        best, positions = torch.cat([best, scores], dim=1), torch.cat([positions, found], dim=1)
        best, order = best.topk(min(count, best.shape[1]), dim=1)
        positions = positions.gather(1, order)
    return _matches(parts, best.cpu().numpy(), positions.cpu().numpy(), np.array(ends))


class FaissIndex:
    """An index of FAISS over the features of one kind, kept in their folder and built again when they have changed.

    Args:
        factory: description of the index as FAISS's `index_factory` takes it, such as Flat, HNSW32 or IVF4096,PQ64.
        nprobe: lists of an inverted file that each query visits; more find more of the nearest, and take longer.

    Raises:
        UserError: faiss is not installed, or it cannot build this index of these features.
    """

    def __init__(self, parts: Parts, kind: str, factory: str, nprobe: int = 32) -> None:
        self._parts, self._kind, self._factory, self._faiss = parts, kind, factory, _faiss()
        path = parts.folder / _FOLDER / f"{kind}-{re.sub(r'[^A-Za-z0-9_.-]', '_', factory)}.faiss"
        try:
            self._ends, self._index = self._open(path)
            if "IVF" in factory:
                self._faiss.extract_index_ivf(self._index).nprobe = nprobe
        except RuntimeError as error:  # of FAISS, with its source lines
            reason = " ".join(str(error).split())[-200:]
            raise UserError(
                f"FAISS cannot build or read the index {factory} at {path} ({reason}); choose another."
            ) from error

    def nearest(self, queries: Tensor, count: int) -> list[list[Match]]:
        """Return at most `count` of the nearest samples of each of (q, d) queries."""
        scores, positions = self._index.search(queries.float().cpu().numpy(), count)
        return _matches(self._parts, scores, positions, self._ends)

    def _open(self, path: Path) -> tuple[NDArray[np.int64], Any]:
        """Return the position behind each part's last row, and the index, which is built unless it is there."""
        described = path.with_suffix(".npz")
        if described.is_file():
            with np.load(described) as found:
                if found["parts"].tolist() == self._parts.numbers:
                    return found["ends"], self._faiss.read_index(str(path))
            described.unlink()
        path.parent.mkdir(exist_ok=True)
        index = self._faiss.index_factory(
            int(self._parts.identity["dim"]), self._factory, self._faiss.METRIC_INNER_PRODUCT
        )
        if not index.is_trained:
            index.train(self._sample())
        ends = []
        for _, rows in _features(self._parts, self._kind):
            index.add(rows)
            ends.append(index.ntotal)
        with atomic_write(path) as temporary:
            self._faiss.write_index(index, str(temporary))
        with atomic_write(described) as temporary, temporary.open("wb") as file:
            np.savez(file, parts=self._parts.numbers, ends=ends)
        return np.array(ends), index

    def _sample(self) -> NDArray[np.float32]:
        """Return evenly spaced rows of evenly spaced parts."""
        numbers = self._parts.numbers
        rows = self._parts.rows(numbers[0])
        wanted = min(len(numbers), max(1, -(-4 * _TRAINING_ROWS // max(rows, 1))))
        chosen = [numbers[place * len(numbers) // wanted] for place in range(wanted)]
        share = -(-_TRAINING_ROWS // wanted)
        found = [self._parts.features(number, self._kind) for number in chosen]
        return np.concatenate([part[:: max(1, len(part) // share)] for part in found]).astype(np.float32)


def _features(parts: Parts, kind: str) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield the position of each part's first row, and its features."""
    start = 0
    for number in parts.numbers:
        rows = parts.features(number, kind).astype(np.float32)
        yield start, rows
        start += len(rows)


def _matches(
    parts: Parts, scores: NDArray[np.float32], positions: NDArray[np.int64], ends: NDArray[np.int64]
) -> list[list[Match]]:
    """Look up (q, k) positions among the rows of all parts; FAISS gives -1 where it has found fewer."""
    tables: dict[int, Any] = {}

    def match(score: float, position: int) -> Match:
        place = int(np.searchsorted(ends, position, side="right"))
        number = parts.numbers[place]
        if number not in tables:
            tables[number] = parts.table(number)
        row = position - (int(ends[place - 1]) if place else 0)
        index, key, uid = (tables[number].column(name)[row].as_py() for name in ("index", "key", "uid"))
        return Match(score, index, key, uid, number)

    return [
        [match(float(score), int(position)) for score, position in zip(*row, strict=True) if position >= 0]
        for row in zip(scores, positions, strict=True)
    ]


def _faiss() -> ModuleType:
    try:
        return importlib.import_module("faiss")
    except ImportError as error:
        raise UserError("--faiss needs the package faiss: pip install '.[faiss]'.") from error
