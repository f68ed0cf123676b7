"""Write the features of a dataset shard by shard, distributed over the ranks.

    OUT/embedding.json                  model, data and options that produced the parts
    OUT/part-00000012.safetensors       features of the samples in shard 12 (neuclip_ds/data/feature_parts.py)
    OUT/part-00000012.parquet           index, key, uid and, for joint features, similarity of these samples

The similarity is that of a sample's first stored view and first stored caption.

Whenever a rank is free, it takes the next shard, and no rank waits for the others before the end. A shard's features
depend neither on other shards nor on the number of ranks, so a restarted job writes only the missing parts. The table
of a part is written last, so that a part with a table is complete.
"""

import json
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from neuclip_ds.data.feature_parts import (
    EMBEDDING,
    FORMAT,
    LAYOUT,
    PART_BYTES,
    PART_SUFFIX,
    TRUNK_OUTPUTS,
    FeaturePart,
    job_hash,
    part_name,
    write_part,
)
from neuclip_ds.data.loader import LoaderOptions
from neuclip_ds.data.manifest import Manifest, has_same_layout
from neuclip_ds.data.worker_pool import WorkerPool
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.embedding.encoders import EncodeOne, FeatureEncoders
from neuclip_ds.embedding.reader import Block, BlockSamples, RowReader
from neuclip_ds.embedding.select import feature_tables
from neuclip_ds.errors import UserError, counted, explained
from neuclip_ds.files import atomic_write, explain_disk
from neuclip_ds.models.pretrained.text_encoder import PADDING

log = logging.getLogger(__name__)

_PART_NAME = re.compile(r"part-(\d{8})\.parquet")
_LOG_INTERVAL = 10.0  # seconds between progress lines
_HASHES = {  # fields of EMBEDDING that contain hashes -> what another value means
    "data": "other data, or of the shards in a different order",
    LAYOUT: "shards with the same names and sizes, but with other samples or with the samples in a different order",
    "trunk_weights": "a model with other weights",
}


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Totals over all ranks for one call to `embed`."""

    shards: int  # shards whose parts this call wrote
    samples: int  # samples in these parts
    bad: int  # samples that were omitted
    unreadable: list[str]  # shards that could not be read, with the reasons
    seconds: float  # duration of the call on this rank


@dataclass(frozen=True, kw_only=True)
class EncodedShard:
    """All blocks of a shard, with the features of their n samples on the device."""

    shard: int  # number in the manifest
    blocks: list[BlockSamples]
    # None if there is no encoder, or no usable sample
    image: Tensor | None  # (n, crops, d) float32
    text: Tensor | None  # (m, d) float32, captions sample after sample


class Parts:
    """The part files in a folder of features.

    Args:
        folder: the folder.
        identity: JSON-compatible description of the job, with at least the fields `output`, `dtype`, `crops`,
            `captions`, `all_captions`, `image_width` and `text_width`.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder = folder
        self._identity = {"format": FORMAT, **identity}
        self._job = job_hash(self._identity)
        self._views = max(1, int(identity["crops"]))
        self._layout: str | None = None  # hash of the layout of the encoded samples; None if it is not known

    def finish(self, manifest: Manifest) -> None:
        """Record the parts' sizes in bytes, which readers need if a server with a copy of the folder cannot list it."""
        sizes = {path.name: path.stat().st_size for path in self.folder.glob(f"part-*{PART_SUFFIX}")}
        part_bytes = [sizes.get(part_name(shard), 0) for shard in range(manifest.n_shards)]
        content = {**self._identity_for(manifest), LAYOUT: self._layout, PART_BYTES: part_bytes}
        _write_json(self.folder / EMBEDDING, content)

    def _identity_for(self, manifest: Manifest) -> dict[str, Any]:
        return {
            **self._identity,
            "shards": manifest.n_shards,
            "data": manifest.content_hash,
            LAYOUT: manifest.layout_of_first(manifest.n_shards),
        }

    def create(self, manifest: Manifest) -> list[int]:
        """Open or create the folder, and return the numbers of the shards that have parts.

        Raises UserError if another job wrote the folder, if its embedding.json cannot be read, or if the folder cannot
        be written.
        """
        identity = self._identity_for(manifest)
        path = self.folder / EMBEDDING
        stored: Mapping[str, Any] = {}
        if path.is_file():
            stored = self._check_identity(path, identity, manifest)
        with explain_disk(self.folder, "choose another --out"):
            self.folder.mkdir(parents=True, exist_ok=True)
            shards = self._shards_with_parts()
            self._layout = identity[LAYOUT]
            if shards and stored.get(LAYOUT) is None:
                self._layout = None  # the parts may have been made from other samples
            elif self._layout is None and stored.get("shards") == manifest.n_shards:
                self._layout = stored[LAYOUT]
            _write_json(path, {**identity, LAYOUT: self._layout})
        return shards

    def _shards_with_parts(self) -> list[int]:
        """Return the numbers of the shards that have parts; a part consists of a table and a file with the features."""
        matches = [_PART_NAME.fullmatch(table.name) for table in feature_tables(self.folder)]
        shards = [int(match[1]) for match in matches if match]
        return [shard for shard in shards if (self.folder / part_name(shard)).is_file()]

    def _check_identity(self, path: Path, identity: Mapping[str, Any], manifest: Manifest) -> dict[str, Any]:
        """Return the content of the file; raise UserError if it cannot be read or describes a different job.

        Shards may have been appended to the dataset since the file was written.
        """
        with explained(f"{path} cannot be read", f"choose another --out, or delete {self.folder}"):
            stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            shards = stored["shards"]
            expected = {**identity, "shards": shards, "data": manifest.hash_of_first(shards)}
            layout = manifest.layout_of_first(shards)
            expected[LAYOUT] = stored.get(LAYOUT) if has_same_layout(stored.get(LAYOUT), layout) else layout
            expected.pop(TRUNK_OUTPUTS, None)
        for name, value in expected.items():
            if stored.get(name) == value:
                continue
            problem = f"a job with {name}={stored.get(name)}, but this job uses {name}={value}"
            if name in _HASHES:
                problem = _HASHES[name]
            raise UserError(f"{self.folder} contains features of {problem}: choose another --out.")
        return stored

    def write(self, encoded: EncodedShard, manifest: Manifest) -> int:
        """Write a shard's part; return its number of samples.

        Raises UserError if a feature is not finite in the dtype of the files.
        """
        index = torch.cat([block.index for block in encoded.blocks]).numpy()
        captions = [block.captions for block in encoded.blocks if block.captions is not None]
        text_start = None
        first_caption = None
        if captions:
            counts = torch.cat([rows.counts for rows in captions]).numpy()
            text_start = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
            first_caption = torch.cat([rows.first for rows in captions]).numpy()
        image = self._on_host(encoded.image, "image_width", [self._views])
        text = self._on_host(encoded.text, "text_width", [])
        path = manifest.shards[encoded.shard].path
        part = FeaturePart(
            job=self._job,
            shard=encoded.shard,
            samples=manifest.shards[encoded.shard].n,
            index=index,
            image=self._to_stored(image, path),
            text=self._to_stored(text, path),
            text_start=text_start,
            first_caption=first_caption,
        )
        write_part(self.folder, part)

        keys = chain.from_iterable(block.keys for block in encoded.blocks)
        uids = chain.from_iterable(block.uids for block in encoded.blocks)
        columns: dict[str, pa.Array] = {
            "index": pa.array(index),
            "key": pa.array(list(keys), pa.string()),
            "uid": pa.array(list(uids), pa.string()),
        }
        if self._identity["output"] == "joint" and image is not None and text is not None and text_start is not None:
            first_texts = text[torch.from_numpy(text_start[:-1])]
            columns["similarity"] = pa.array((image[:, 0] * first_texts).sum(dim=1).numpy())
        with atomic_write(self.folder / f"part-{encoded.shard:08d}.parquet") as temporary:
            pq.write_table(pa.table(columns), temporary, compression="zstd", use_dictionary=False)
        return len(index)

    def _on_host(self, features: Tensor | None, width: str, middle: list[int]) -> Tensor | None:
        """Copy features to the host.

        Returns an empty tensor if the encoder got no usable sample, or None if this job has no such encoder.
        """
        if self._identity[width] is None:
            return None
        return torch.empty(0, *middle, self._identity[width]) if features is None else features.cpu()

    def _to_stored(self, features: Tensor | None, shard: str) -> NDArray[np.floating] | None:
        """Return features, if given, in the dtype of the files; raise UserError if any is not finite in this dtype."""
        if features is None:
            return None
        dtype = self._identity["dtype"]
        with np.errstate(over="ignore"):  # reported below
            stored = features.numpy().astype(dtype)
        if not np.isfinite(stored).all():
            cause = f"exceed the range of {dtype}: set --dtype float32 and another --out"
            if not features.isfinite().all():
                cause = "are not finite: check the model's weights"
                if self._identity.get("precision") != "float32":
                    cause += ", or set --precision float32 and another --out"
            raise UserError(f"Features of shard {shard} {cause}.")
        return stored


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def embed(
    encoders: FeatureEncoders,
    reader: RowReader,
    manifest: Manifest,
    parts: Parts,
    batch_size: int,
    options: LoaderOptions,
    communicator: Communicator,
) -> Summary:
    """Write the missing parts; all ranks call this function together and receive the same totals.

    The encoders must not run collectives, because the number of calls differs between ranks; they get at most
    `batch_size` images or captions at once. Raises UserError if the folder contains features from a different job or
    cannot be written, a shard differs from the manifest, a feature is not finite, or as in `WorkerPool.run`. Errors
    after the folder has been opened are raised only on the rank where they occur.
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
        folder = manifest.shards[0].path.rpartition("/")[0]
        blocks = pool.run(blocks_to_read(), "batch {} of the shards".format, folder)
        for encoded in _encode_shards(blocks, encoders, manifest, batch_size):
            path = manifest.shards[encoded.shard].path
            reasons = [block.unreadable for block in encoded.blocks if block.unreadable is not None]
            if reasons:
                unreadable.append(f"{path}: {reasons[0]}")
                continue
            with explain_disk(parts.folder, "choose another --out"):
                samples += parts.write(encoded, manifest)
            written += 1
            omitted = list(chain.from_iterable(block.bad for block in encoded.blocks))
            if omitted:
                bad += len(omitted)
                common = Counter(sample.cause for sample in omitted).most_common(3)
                causes = ", ".join(f"{cause} ({count:,})" for cause, count in common)
                omitted_samples = counted(len(omitted), "sample")
                log.warning("%s: %s omitted; the most frequent causes: %s", path, omitted_samples, causes)
            if communicator.rank == 0 and time.monotonic() - last_log_time > _LOG_INTERVAL:
                last_log_time = time.monotonic()
                rate = samples / (last_log_time - start_time)
                started = min(communicator.count(started_shards, 0), len(missing))
                log.info("%d of %d shards started; rank 0 encodes %.0f samples/s", started, len(missing), rate)

    counts: dict[str, Any] = {"shards": written, "samples": samples, "bad": bad, "unreadable": unreadable}
    counts_of_ranks = communicator.gather_objects(counts)

    def finish() -> None:
        with explain_disk(parts.folder, "choose another --out"):
            parts.finish(manifest)

    communicator.on_rank_zero(finish)
    return Summary(
        shards=sum(counts["shards"] for counts in counts_of_ranks),
        samples=sum(counts["samples"] for counts in counts_of_ranks),
        bad=sum(counts["bad"] for counts in counts_of_ranks),
        unreadable=list(chain.from_iterable(counts["unreadable"] for counts in counts_of_ranks)),
        seconds=time.monotonic() - start_time,
    )


def _encode_shards(
    blocks: Iterable[BlockSamples], encoders: FeatureEncoders, manifest: Manifest, batch_size: int
) -> Iterator[EncodedShard]:
    """Encode the images of each block and, after a shard's last block, its captions; then yield the shard."""
    blocks_of_shard: list[BlockSamples] = []
    images: list[Tensor] = []
    for block_samples in blocks:
        shard = block_samples.block.shard
        blocks_of_shard.append(block_samples)
        if encoders.image is not None and block_samples.views is not None and len(block_samples.index):
            crops = block_samples.views.shape[1]
            pieces = block_samples.views.flatten(0, 1).split(batch_size)
            encoded = torch.cat([encoders.image(piece) for piece in pieces])
            images.append(encoded.unflatten(0, (-1, crops)))
            blocks_of_shard[-1] = replace(block_samples, views=None)  # free the pixels
        if block_samples.block.stop == manifest.starts[shard] + manifest.sizes[shard]:
            yield EncodedShard(
                shard=shard,
                blocks=blocks_of_shard,
                image=torch.cat(images) if images else None,
                text=None if encoders.text is None else _encode_captions(blocks_of_shard, encoders.text, batch_size),
            )
            blocks_of_shard = []
            images = []


def encode_by_length(encode: EncodeOne, tokens: Tensor, batch_size: int) -> Tensor:
    """Encode (m, T) token ids, m > 0, in batches of similar length; return (m, d) features in the given order.

    Captions of fewer than T tokens end with PADDING, and each batch is cut to the length of its longest caption.
    Without PADDING, captions are encoded in the given order.
    """
    lengths = (tokens != PADDING).sum(dim=1)
    by_length = lengths.argsort(stable=True)
    pieces = []
    for rows in by_length.split(batch_size):
        pieces.append(encode(tokens[rows, : int(lengths[rows].max())]))
    encoded = torch.cat(pieces)
    result = torch.empty_like(encoded)
    result[by_length.to(encoded.device)] = encoded
    return result


def _encode_captions(blocks: Sequence[BlockSamples], encode: EncodeOne, batch_size: int) -> Tensor | None:
    """Return the (m, d) features of a shard's captions, or None if it has none."""
    tokens = [block.captions.tokens for block in blocks if block.captions is not None and len(block.captions.tokens)]
    if not tokens:
        return None
    longest = max(ids.shape[1] for ids in tokens)
    padded = [pad(ids, (0, longest - ids.shape[1]), value=PADDING) for ids in tokens]
    return encode_by_length(encode, torch.cat(padded), batch_size)
