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
from dataclasses import dataclass
from itertools import chain
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

_PART_NAME = re.compile(r"part-(\d{8})\.parquet")
_LOG_INTERVAL = 10.0  # seconds between progress lines


@dataclass(frozen=True, kw_only=True)
class Summary:
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


@dataclass(frozen=True, kw_only=True)
class BlockSamples:
    """The samples of a block."""

    block: Block
    batch: Batch
    keys: Sequence[str] = ()
    uids: Sequence[str | None] = ()  # 32 hex digits
    unreadable: str | None = None  # the reason why the shard cannot be read, if any


@dataclass(frozen=True, kw_only=True)
class EncodedShard:
    """All blocks of a shard, with their features on the device."""

    shard: int  # number in the manifest
    blocks: list[BlockSamples]
    image: list[Tensor]  # (b, d) float32 features of each block
    text: list[Tensor]


class RowReader:
    """Reads blocks in loader processes; `uid_key` is the key of the uid in a sample's JSON."""

    def __init__(
        self, manifest: Manifest, transform: ImageTransform, tokenize: Tokenize, uid_key: str, options: LoaderOptions
    ) -> None:
        self._starts = manifest.starts
        self._uid_key = uid_key
        self._pairs = PairDataset(manifest, transform, tokenize, captions=options.captions, cache=options.cache)
        self._reader = TarReader(manifest, (JSON,), options.cache)

    def __call__(self, block: Block) -> BlockSamples:
        """Read a block's samples; raise UserError if the shard does not match the manifest."""
        indices = range(block.start, block.stop)
        batch = self._pairs.batch([(0, index) for index in indices])
        for bad in batch.bad:
            if bad.cause == "read failed":
                return BlockSamples(block=block, batch=batch, unreadable=bad.reason)
        first_of_shard = int(self._starts[block.shard])
        rows_of_shard = slice(block.start - first_of_shard, block.stop - first_of_shard)
        try:
            keys = self._reader.keys(block.shard, rows_of_shard)
            uids = [self._uid(index) for index in indices]
        except OSError as error:
            return BlockSamples(block=block, batch=batch, unreadable=str(error))
        return BlockSamples(block=block, batch=batch, keys=keys, uids=uids)

    def _uid(self, index: int) -> str | None:
        """Return the uid of a sample as 32 hex digits, or None if the uid cannot be read."""
        try:
            high, low = self._reader.uid(index, self._uid_key)
        except ChecksumError:
            return None
        return f"{high:016x}{low:016x}"


class Parts:
    """The part files in a folder of features."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder = folder
        self._identity = identity

    def create(self, manifest: Manifest) -> list[int]:
        """Open or create the folder, and return the numbers of its parts; raise UserError if another job wrote them."""
        identity = {**self._identity, "shards": manifest.n_shards, "data": manifest.content_hash}
        path = self.folder / IDENTITY
        if path.is_file():
            self._check_identity(path, identity, manifest)
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps(identity, indent=2) + "\n", encoding="utf-8")
        matches = [_PART_NAME.fullmatch(table.name) for table in feature_tables(self.folder)]
        return [int(match[1]) for match in matches if match]

    def _check_identity(self, path: Path, identity: Mapping[str, Any], manifest: Manifest) -> None:
        """Raise UserError if the file describes a different job; the data may have grown since then."""
        with explained(f"{path} cannot be read", "choose another --out, or delete it"):
            stored = json.loads(path.read_text(encoding="utf-8"))
            shards = stored["shards"]
            expected = {**identity, "shards": shards, "data": manifest.hash_of_first(shards)}
        for name, value in expected.items():
            if stored.get(name) != value:
                raise UserError(
                    f"{self.folder} has features with {name}={stored.get(name)}, not {value}: choose another --out"
                )

    def write(self, encoded: EncodedShard) -> int:
        """Write a shard's part; return its number of samples."""
        valid = torch.cat([block.batch.valid for block in encoded.blocks]).numpy()
        index = torch.cat([block.batch.index for block in encoded.blocks]).numpy()
        keys = chain.from_iterable(block.keys for block in encoded.blocks)
        uids = chain.from_iterable(block.uids for block in encoded.blocks)
        image = torch.cat(encoded.image).cpu()[valid]
        text = torch.cat(encoded.text).cpu()[valid]
        columns: dict[str, pa.Array] = {
            "index": pa.array(index[valid]),
            "key": pa.array(list(keys), pa.string()).filter(valid),
            "uid": pa.array(list(uids), pa.string()).filter(valid),
            "image": self._feature_column(image),
            "text": self._feature_column(text),
            "similarity": pa.array((image * text).sum(dim=1).numpy()),
        }
        with atomic_write(self.folder / f"part-{encoded.shard:08d}.parquet") as temporary:
            pq.write_table(pa.table(columns), temporary, compression="zstd", use_dictionary=False)
        return int(valid.sum())

    def _feature_column(self, features: Tensor) -> pa.Array:
        """Return (n, d) features as a column in the dtype of the files."""
        values = features.numpy().astype(self._identity["dtype"])
        return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])


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
    written_before = set(communicator.on_rank_zero(lambda: parts.create(manifest)))
    missing = []
    for shard, size in enumerate(manifest.sizes.tolist()):
        if size > 0 and shard not in written_before:
            missing.append(shard)
    # name of a counter that all ranks share: the number of shards that have been started
    started_shards = communicator.on_rank_zero(lambda: f"embed-{secrets.token_hex(4)}")

    def blocks_to_read() -> Iterator[Block]:
        while (turn := communicator.count(started_shards) - 1) < len(missing):
            shard = missing[turn]
            start = int(manifest.starts[shard])
            stop = start + int(manifest.sizes[shard])
            for block_start in range(start, stop, batch_size):  # blocks do not depend on the ranks
                yield Block(shard, block_start, min(block_start + batch_size, stop))

    start_time = time.monotonic()
    last_log_time = start_time
    written = 0
    samples = 0
    bad = 0
    unreadable: list[str] = []
    with closing(WorkerPool(reader, options)) as pool:
        blocks = pool.run(blocks_to_read(), "batch {} of the shards".format, Path(manifest.shards[0].path).parent)
        for encoded in _encode_shards(blocks, encode, manifest):
            path = manifest.shards[encoded.shard].path
            reasons = [block.unreadable for block in encoded.blocks if block.unreadable is not None]
            if reasons:
                unreadable.append(f"{path}: {reasons[0]}")
                continue
            with explain_disk(parts.folder, "choose another --out"):
                samples += parts.write(encoded)
            written += 1
            omitted = list(chain.from_iterable(block.batch.bad for block in encoded.blocks))
            if omitted:
                bad += len(omitted)
                causes = Counter(sample.cause for sample in omitted).most_common(3)
                log.warning("%s: %d samples are omitted: %s, ...", path, len(omitted), dict(causes))
            if communicator.rank == 0 and time.monotonic() - last_log_time > _LOG_INTERVAL:
                last_log_time = time.monotonic()
                rate = samples / (last_log_time - start_time)
                started = min(communicator.count(started_shards, 0), len(missing))
                log.info("%d of %d shards begun; rank 0: %.0f samples/s", started, len(missing), rate)

    counts: dict[str, Any] = {"shards": written, "samples": samples, "bad": bad, "unreadable": unreadable}
    counts_of_ranks = communicator.gather_objects(counts)
    return Summary(
        shards=sum(counts["shards"] for counts in counts_of_ranks),
        samples=sum(counts["samples"] for counts in counts_of_ranks),
        bad=sum(counts["bad"] for counts in counts_of_ranks),
        unreadable=list(chain.from_iterable(counts["unreadable"] for counts in counts_of_ranks)),
        seconds=time.monotonic() - start_time,
    )


def _encode_shards(blocks: Iterable[BlockSamples], encode: Encode, manifest: Manifest) -> Iterator[EncodedShard]:
    """Encode blocks, and yield each shard when its last block is encoded."""
    encoded: EncodedShard | None = None
    for block_samples in blocks:
        shard = block_samples.block.shard
        if encoded is None:
            encoded = EncodedShard(shard=shard, blocks=[], image=[], text=[])
        features = encode_batch(encode, block_samples.batch)
        encoded.blocks.append(block_samples)
        encoded.image.append(features.image.float())
        encoded.text.append(features.text.float())
        if block_samples.block.stop == manifest.starts[shard] + manifest.sizes[shard]:
            yield encoded
            encoded = None
