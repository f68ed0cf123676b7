"""A hook that logs the sample indices of every step, and a function that reads the logs of a run."""

import heapq
import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from neuclip_ds.data.loader import RankBatch
from neuclip_ds.files import records
from neuclip_ds.reporting.metrics import drop_from
from neuclip_ds.training.hooks import Hook
from neuclip_ds.training.trainer import Loop


class LogSamples(Hook):
    """Hook that writes lines `{"step": 17, "indices": [...]}` to samples/rankRRRRR.jsonl, with index -1 for padding."""

    in_recovery = True

    def start(self, loop: Loop) -> None:
        folder, communicator = loop.folder / "samples", loop.context.communicator
        folder.mkdir(exist_ok=True)

        def drop() -> None:
            for path in folder.glob("rank*.jsonl"):  # including ranks that only an earlier launch had
                drop_from(path, loop.done + 1)

        communicator.on_rank_zero(drop)
        self._file = (folder / f"rank{communicator.rank:05d}.jsonl").open("a", buffering=1)

    def on_batch(self, loop: Loop, batch: RankBatch) -> None:
        self._file.write(json.dumps({"step": loop.done + 1, "indices": batch.index.tolist()}) + "\n")

    def close(self, loop: Loop, error: BaseException | None) -> None:
        self._file.close()


def read_samples(folder: Path) -> Iterator[tuple[int, list[int]]]:
    """Yield (step, indices of the global batch, including padding) in step order, merged from all ranks' files."""
    lines = heapq.merge(*(_lines(path, rank) for rank, path in enumerate(sorted(folder.glob("rank*.jsonl")))))
    for step, parts in groupby(lines, key=lambda line: line[0]):
        yield step, [index for _, _, indices in parts for index in indices]


def _lines(path: Path, rank: int) -> Iterator[tuple[int, int, list[int]]]:
    for _, record in records(path, "step"):
        yield record["step"], rank, record["indices"]
