"""Write the features of a data set, shard by shard, on many ranks.

The next shard goes to whichever rank asks first, and no rank waits for another before the end. A shard's features
depend on the model, the shard and the batch size alone, so a job that is started again, on any number of ranks, writes
the parts that are missing and the same files.
"""

import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from neuclip_ds.data.disk import explain_disk
from neuclip_ds.data.loader import LoaderOptions
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.worker_pool import WorkerPool
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.embedding.parts import IMAGE, TEXT, Part, Parts
from neuclip_ds.embedding.rows import BadRow, Block, RowReader, Rows, blocks_of
from neuclip_ds.evaluation import Encode

log = logging.getLogger(__name__)

_EVERY = 10.0  # seconds between lines of progress


class Summary(NamedTuple):
    """What all ranks have done."""

    shards: int  # whose parts were written now
    samples: int  # in them
    bad: int  # that were left out
    unreadable: list[str]  # of shards without a part, with the reasons
    seconds: float


def embed(
    encode: Encode,
    reader: RowReader,
    manifest: Manifest,
    parts: Parts,
    batch_size: int,
    options: LoaderOptions,
    communicator: Communicator,
) -> Summary:
    """Write the parts that are missing; all ranks call it together and receive the same summary.

    Args:
        encode: of a model without collectives; it is called as often as a rank has batches.
        batch_size: rows that are encoded at once.
        options: how many processes load, and what they wait for.

    Raises:
        UserError: a shard differs from the manifest, the disk is full, or loader processes die repeatedly.
    """
    present = set(communicator.on_rank_zero(lambda: parts.numbers))
    missing = [n for n, shard in enumerate(manifest.shards) if n not in present and not shard.removed]
    progress = _Progress(communicator, len(missing), int(manifest.sizes[missing].sum()))

    def jobs() -> Iterator[Block]:
        while (turn := progress.take_turn()) < len(missing):
            yield from blocks_of(manifest, missing[turn], batch_size)

    writer = _Writer(encode, manifest, parts)
    with closing(WorkerPool(reader, options)) as pool:
        for rows in pool.run(jobs(), lambda number: f"batch {number} of the shards in {_folder_of(manifest)}"):
            done = writer.add(rows)
            if done is not None:
                progress.add(*done)
    unreadable = [line for lines in communicator.gather_objects(writer.unreadable) for line in lines]
    return progress.summary(unreadable)


class _Writer:
    """Encodes blocks and writes a part when its last block has come."""

    def __init__(self, encode: Encode, manifest: Manifest, parts: Parts) -> None:
        self._encode, self._manifest, self._parts = encode, manifest, parts
        self._rows: list[tuple[Rows, dict[str, Tensor]]] = []  # of the shard in progress, with features by kind
        self.unreadable: list[str] = []

    def add(self, rows: Rows) -> tuple[int, int] | None:
        """Take the next block; return the numbers of samples and of bad ones of a shard that is complete with it."""
        number = rows.block.shard
        self._rows.append((rows, self._features(rows)))
        if rows.block.stop < self._manifest.starts[number] + self._manifest.sizes[number]:
            return None
        blocks, self._rows = self._rows, []
        path = self._manifest.shards[number].path
        problem = next((one.unreadable for one, _ in blocks if one.unreadable is not None), None)
        if problem is not None:
            self.unreadable.append(f"{path}: {problem}")
            return None
        bad = [row for one, _ in blocks for row in one.bad]
        _report_bad(path, bad, rows.block.stop - int(self._manifest.starts[number]))
        part = _join(blocks, self._parts.kinds, int(self._parts.identity["dim"]))
        with explain_disk(self._parts.folder, "choose another --out"):
            self._parts.write(number, part)
        return len(part.index), len(bad)

    def _features(self, rows: Rows) -> dict[str, Tensor]:
        """Encode the usable rows; the features stay on the device until the shard is complete."""
        if not rows.index:
            return {}
        found = dict(zip((IMAGE, TEXT), self._encode(rows.image, rows.tokens), strict=True))
        return {kind: features for kind, features in found.items() if features is not None}


def _join(blocks: list[tuple[Rows, dict[str, Tensor]]], kinds: list[str], dim: int) -> Part:
    rows = [one for one, _ in blocks]
    empty = [torch.zeros(0, dim)]
    features = {
        kind: torch.cat([found[kind].float() for _, found in blocks if kind in found] or empty) for kind in kinds
    }
    similarity = None
    if IMAGE in features and TEXT in features:
        similarity = (features[IMAGE] * features[TEXT]).sum(dim=1).cpu().numpy()
    return Part(
        [index for one in rows for index in one.index],
        [key for one in rows for key in one.key],
        [uid for one in rows for uid in one.uid],
        {kind: found.cpu().numpy() for kind, found in features.items()},
        similarity,
    )


def _report_bad(path: str, bad: list[BadRow], samples: int) -> None:
    if bad:
        causes = Counter(row.reason.partition(":")[0] for row in bad)
        counted = ", ".join(f"{cause} ({count})" for cause, count in causes.most_common(3))
        log.warning("%s: %d of %d samples are left out: %s; such as %s", path, len(bad), samples, counted, bad[0].key)


class _Progress:
    """Which shard is next, and what all ranks have done so far, which rank 0 logs now and then."""

    def __init__(self, communicator: Communicator, shards: int, samples: int) -> None:
        self._communicator, self._all_shards, self._all_samples = communicator, shards, samples
        self._name = communicator.on_rank_zero(lambda: f"embed-{secrets.token_hex(4)}")
        self._began = self._logged = time.monotonic()

    def take_turn(self) -> int:
        """Return 0, 1, 2, ... to whichever rank asks next."""
        return self._count("turns", 1) - 1

    def add(self, samples: int, bad: int) -> None:
        """Count a shard."""
        shards, done, now = self._count("shards", 1), self._count("samples", samples), time.monotonic()
        done += self._count("bad", bad)
        if self._communicator.rank or now - self._logged < _EVERY:
            return
        self._logged = now
        rate = done / (now - self._began)
        log.info(
            "%d of %d shards, %d of %d samples, %.0f samples/s, %.2f h left",
            shards, self._all_shards, done, self._all_samples, rate, (self._all_samples - done) / rate / 3600,
        )  # fmt: skip

    def summary(self, unreadable: list[str]) -> Summary:
        """Return the totals; called after all ranks are done."""
        shards, samples, bad = (self._count(name, 0) for name in ("shards", "samples", "bad"))
        return Summary(shards, samples, bad, unreadable, time.monotonic() - self._began)

    def _count(self, name: str, amount: int) -> int:
        return self._communicator.count(f"{self._name}/{name}", amount)


def _folder_of(manifest: Manifest) -> str:
    return str(Path(manifest.shards[0].path).parent)
