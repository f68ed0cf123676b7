"""Write the features of a dataset shard by shard, distributed over the ranks.

    OUT/embedding.json                  model, data and options that produced the parts
    OUT/part-00000012.parquet           index, key, uid, image, text, similarity of the samples in shard 12

Whenever a rank is free, it takes the next shard, and no rank waits for the others before the end. A shard's features
depend only on the model, the shard and the batch size, so a restarted job writes only the missing parts, with the same
contents regardless of the number of ranks. A part's file appears only after the part is complete.
"""

import json
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from neuclip_ds.data.dataset import Batch, PairDataset, Tokenize
from neuclip_ds.data.decoders import JSON
from neuclip_ds.data.images import ImageTransform
from neuclip_ds.data.loader import LoaderOptions
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.readers import ChecksumError, TarReader
from neuclip_ds.data.worker_pool import WorkerPool
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.embedding.select import IDENTITY, feature_tables
from neuclip_ds.errors import UserError, explained
from neuclip_ds.evaluation.encoding import Encode, encode_batch
from neuclip_ds.files import atomic_write, explain_disk

log = logging.getLogger(__name__)

_NUMBER = re.compile(r"part-(\d{8})\.parquet")
_EVERY = 10.0  # seconds between progress lines


class Summary(NamedTuple):
    """Totals over all ranks for one call to `embed`."""

    shards: int  # shards whose parts this call wrote
    samples: int  # samples in these parts
    bad: int  # samples that were omitted
    unreadable: list[str]  # shards that could not be read, with the reasons
    seconds: float


class Block(NamedTuple):
    """Consecutive samples of a shard that are encoded together."""

    shard: int  # number in the manifest
    start: int  # global index of the first sample
    stop: int


class Rows(NamedTuple):
    """The samples of a block."""

    block: Block
    batch: Batch
    key: Sequence[str] = ()
    uid: Sequence[str | None] = ()  # 32 hex digits
    unreadable: str | None = None  # the reason why the shard cannot be read, if any


class RowReader:
    """Reads blocks in loader processes; `uid_key` is the key of the uid in a sample's JSON."""

    def __init__(
        self, manifest: Manifest, transform: ImageTransform, tokenize: Tokenize, uid_key: str, options: LoaderOptions
    ) -> None:
        self._starts, self._uid_key = manifest.starts, uid_key
        self._pairs = PairDataset(manifest, transform, tokenize, captions=options.captions, cache=options.cache)
        self._reader = TarReader(manifest, (JSON,), options.cache)

    def __call__(self, block: Block) -> Rows:
        """Read a block's samples; raise UserError if the shard does not match the manifest."""
        first, indices = int(self._starts[block.shard]), range(block.start, block.stop)
        batch = self._pairs.batch([(0, index) for index in indices])
        if failed := next((bad.reason for bad in batch.bad if bad.cause == "read failed"), None):
            return Rows(block, batch, unreadable=failed)
        try:
            keys = self._reader.keys(block.shard, slice(block.start - first, block.stop - first))
            return Rows(block, batch, keys, [self._uid(index) for index in indices])
        except OSError as error:
            return Rows(block, batch, unreadable=str(error))

    def _uid(self, index: int) -> str | None:
        """Return the uid of a sample as 32 hex digits, or None if the uid cannot be read."""
        try:
            return "{:016x}{:016x}".format(*self._reader.uid(index, self._uid_key))
        except ChecksumError:
            return None


class Parts:
    """The part files in a folder of features."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder, self._identity = folder, identity

    def create(self, manifest: Manifest) -> list[int]:
        """Open or create the folder, and return the numbers of its parts; raise UserError if another job wrote them."""
        written = {**self._identity, "shards": manifest.n_shards, "data": manifest.content_hash}
        path = self.folder / IDENTITY
        if path.is_file():
            with explained(f"{path} cannot be read", "choose another --out, or delete it"):
                found = json.loads(path.read_text(encoding="utf-8"))
                known = {**written, "shards": found["shards"], "data": manifest.hash_of_first(found["shards"])}
            if name := next((name for name in known if found.get(name) != known[name]), None):
                raise UserError(
                    f"{self.folder} has features with {name}={found.get(name)}, not {known[name]}: choose another --out"
                )
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
        tables = (_NUMBER.fullmatch(table.name) for table in feature_tables(self.folder))
        return [int(match[1]) for match in tables if match]

    def write(self, number: int, rows: list[Rows], features: list[tuple[Tensor, Tensor]]) -> int:
        """Write a shard's part from the shard's blocks and (b, d) float32 features; return the number of samples."""
        valid = torch.cat([one.batch.valid for one in rows]).numpy()
        image, text = (torch.cat(found).cpu()[valid] for found in zip(*features, strict=True))
        columns: dict[str, pa.Array] = {
            "index": pa.array(torch.cat([one.batch.index for one in rows]).numpy()[valid]),
            "key": pa.array([key for one in rows for key in one.key], pa.string()).filter(valid),
            "uid": pa.array([uid for one in rows for uid in one.uid], pa.string()).filter(valid),
        }
        for kind, values in (("image", image), ("text", text)):
            array = values.numpy().astype(self._identity["dtype"])
            columns[kind] = pa.FixedSizeListArray.from_arrays(pa.array(array.reshape(-1)), array.shape[1])
        columns["similarity"] = pa.array((image * text).sum(dim=1).numpy())
        with atomic_write(self.folder / f"part-{number:08d}.parquet") as temporary:
            pq.write_table(pa.table(columns), temporary, compression="zstd", use_dictionary=False)
        return int(valid.sum())


def embed(
    encode: Encode,
    reader: RowReader,
    manifest: Manifest,
    parts: Parts,
    batch_size: int,
    options: LoaderOptions,
    communicator: Communicator,
) -> Summary:
    """Write the missing parts; all ranks call this function together and receive the same summary.

    `encode` must not run collectives, because ranks call it different numbers of times. Raises UserError if the folder
    has features from a different job, a shard differs from the manifest, the disk is full, or loaders die repeatedly.
    """
    present = {*communicator.on_rank_zero(lambda: parts.create(manifest))}
    missing = [n for n, size in enumerate(manifest.sizes.tolist()) if size and n not in present]
    turns = communicator.on_rank_zero(lambda: f"embed-{secrets.token_hex(4)}")  # name of the counter of shards begun
    began = logged = time.monotonic()
    written, samples, bad, unreadable = 0, 0, 0, list[str]()

    def jobs() -> Iterator[Block]:
        while (turn := communicator.count(turns) - 1) < len(missing):
            shard = missing[turn]
            start, stop = int(manifest.starts[shard]), int(manifest.starts[shard] + manifest.sizes[shard])
            for low in range(start, stop, batch_size):  # blocks do not depend on the ranks
                yield Block(shard, low, min(low + batch_size, stop))

    with closing(WorkerPool(reader, options)) as pool:
        results = pool.run(jobs(), "batch {} of the shards".format, Path(manifest.shards[0].path).parent)
        for number, rows, features in _by_shard(results, encode, manifest):
            path = manifest.shards[number].path
            if reason := next((one.unreadable for one in rows if one.unreadable is not None), None):
                unreadable.append(f"{path}: {reason}")
                continue
            with explain_disk(parts.folder, "choose another --out"):
                samples += parts.write(number, rows, features)
            written += 1
            if omitted := [sample for one in rows for sample in one.batch.bad]:
                bad += len(omitted)
                causes = Counter(sample.cause for sample in omitted).most_common(3)
                log.warning("%s: %d samples are omitted: %s, ...", path, len(omitted), dict(causes))
            if communicator.rank == 0 and time.monotonic() - logged > _EVERY:
                logged, begun = time.monotonic(), min(communicator.count(turns, 0), len(missing))
                rate = samples / (logged - began)
                log.info("%d of %d shards begun; rank 0: %.0f samples/s", begun, len(missing), rate)
    written, samples, bad = map(sum, zip(*communicator.gather_objects([written, samples, bad]), strict=True))
    lines = [line for lines in communicator.gather_objects(unreadable) for line in lines]
    return Summary(written, samples, bad, lines, time.monotonic() - began)


def _by_shard(
    results: Iterable[Rows], encode: Encode, manifest: Manifest
) -> Iterator[tuple[int, list[Rows], list[tuple[Tensor, Tensor]]]]:
    """Encode blocks; for each complete shard, yield the shard's number, blocks and features (on the device)."""
    blocks, features = list[Rows](), list[tuple[Tensor, Tensor]]()
    for rows in results:
        image, text, *_ = encode_batch(encode, rows.batch)
        blocks.append(rows)
        features.append((image.float(), text.float()))
        number = rows.block.shard
        if rows.block.stop == manifest.starts[number] + manifest.sizes[number]:
            yield number, blocks, features
            blocks, features = [], []
