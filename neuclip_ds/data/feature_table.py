"""Read stored features by global sample index, from a folder that `neuclip-ds embed` wrote for the same data."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.feature_parts import (
    EMBEDDING,
    FORMAT,
    LAYOUT,
    PART_BYTES,
    FeaturePart,
    job_hash,
    map_part,
    part_name,
)
from neuclip_ds.data.fetch import FetchError, open_remote
from neuclip_ds.data.manifest import Manifest, has_same_layout
from neuclip_ds.data.shards import is_local
from neuclip_ds.errors import UserError, counted, explained
from neuclip_ds.files import expand_user

_OPEN_PARTS = 256  # maximum number of local parts that a reader keeps mapped
_NAMED_SHARDS = 3  # missing shards that a message names
_LISTING_TIMEOUT = 60.0  # seconds
_AGAIN = "run neuclip-ds embed again"
_FIELDS = ("shards", "data", "captions", "all_captions", "crops", "image_width", "text_width", "dtype", "output")
_DTYPES = ("float16", "float32")

Stored = dict[str, Any]  # JSON: a table's folder, the content of its EMBEDDING, and the size in bytes of each part


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredFeatures:
    """Stored features of b samples, in the dtype of their table; `image` or `text` may be None."""

    image: Tensor | None  # (b, d)
    text: Tensor | None  # (b, d)

    def pair(self) -> tuple[Tensor, Tensor]:
        """Return the features of images and of texts; the table must have both."""
        assert self.image is not None and self.text is not None
        return self.image, self.text

    def pin_memory(self) -> "StoredFeatures":
        """Return a copy of the features in pinned memory."""
        return StoredFeatures(
            image=None if self.image is None else self.image.pin_memory(),
            text=None if self.text is None else self.text.pin_memory(),
        )


def join_features(pieces: Sequence[StoredFeatures]) -> StoredFeatures:
    """Concatenate the rows of pieces, which must come from the same table."""
    images = [piece.image for piece in pieces if piece.image is not None]
    texts = [piece.text for piece in pieces if piece.text is not None]
    return StoredFeatures(
        image=torch.cat(images) if images else None,
        text=torch.cat(texts) if texts else None,
    )


class FeatureTable:
    """Stored features of a dataset's samples, read from memory-mapped files, one per shard.

    A sample takes (crops + captions) x d values of 2 or 4 bytes, and 20 bytes for its index and the numbers of its
    captions: 2,068 bytes for an image and a caption of width 512 in float16, so 2.1 TB for a billion samples
    (calculated). In memory, a table needs 16 bytes per shard. Local files are mapped in place; the page cache shares
    them between processes. Remote files are fetched into the shard cache when training is about to read their shards
    (neuclip_ds/data/prefetch.py). They are fetched whole, because training reads the samples of a shuffle block in
    random order. The cache therefore also holds one feature file for each shard that training reads at the same time
    (21 MB for 10,000 samples of this size).

    Attributes:
        embedding: the content of the folder's embedding.json: the model, the options and the data of the job.
        job: hash of the model and the options.
        crops: number of stored views of each image.
        has_random_crops: whether the views are random crops, as in training, rather than the evaluation crop.
        image_width: width d of the image features; None if the table serves no image features.
        text_width: width of the text features; None if the table serves no text features.
        dtype: dtype of the features.
        cached_bytes: (n_shards,) bytes that each shard's feature file takes in the cache; 0 for local files.

    Raises UserError if the features belong to other data, to shards in a different order or to other captions, if any
    shard in use has no features, or if the folder is remote and there is no `cache`.
    """

    def __init__(
        self,
        stored: Stored,
        manifest: Manifest,
        captions: Sequence[str],
        cache: ShardCache | None = None,
        only: Literal["image", "text"] | None = None,
    ) -> None:
        """
        Args:
            stored: result of `find_table`.
            manifest: the dataset.
            captions: sources of the captions, as in `data.captions`.
            cache: cache for the files of a remote folder, for which it is required.
            only: serve only the features of images or of texts; by default, both.
        """
        self.folder: str = stored["folder"]
        self.embedding: Mapping[str, Any] = stored["embedding"]
        self.has_random_crops = self.embedding["crops"] > 0 and only != "text"
        self.crops = max(1, int(self.embedding["crops"]))
        self.image_width: int | None = None if only == "text" else self.embedding["image_width"]
        self.text_width: int | None = None if only == "image" else self.embedding["text_width"]
        self.dtype: torch.dtype = getattr(torch, self.embedding["dtype"])
        self.job = job_hash(self.embedding)
        self._bytes = np.array(stored["bytes"], dtype=np.int64)
        self._manifest = manifest
        self._is_local = is_local(self.folder)
        self._cache = cache
        if not self._is_local and cache is None:
            raise UserError(
                f"The features in {self.folder} are remote: pass a cache to read them, or copy them to this machine."
            )
        self._check_data()
        self._check_captions(captions)
        self._check_parts()
        self.cached_bytes = np.zeros(manifest.n_shards, dtype=np.int64)
        if not self._is_local:
            self.cached_bytes[: len(self._bytes)] = self._bytes
        # an evicted file occupies the disk until it is unmapped, so only one cached file is mapped at a time
        self._opened = lru_cache(_OPEN_PARTS if self._is_local else 1)(self._open)

    def rows(
        self, index: Tensor, crop: Tensor | None = None, caption: Tensor | None = None
    ) -> tuple[StoredFeatures, dict[int, str]]:
        """Return the features of samples, and the reason for each row that has no usable features.

        Args:
            index: (b,) int64 global indices.
            crop: (b,) int64 number of the view, less than `crops`; by default, the first view.
            caption: (b,) int64 number of the caption among all captions of the sample, as counted by
                `Captions.all_captions`; by default, the first encoded caption.

        Returns:
            The features (b, d), which are zero in rows without usable features, and the reason for each of these rows.

        Raises:
            UserError: a file has changed or is damaged, `ShardCache.open` raises it, or a caption is not stored because
                only one caption of each sample was encoded.
            IndexError: an index is not in the dataset, or a crop is not stored.
        """
        indices = index.numpy()
        if len(indices) and not 0 <= indices.min() <= indices.max() < self._manifest.n:
            raise IndexError(f"sample indices are out of range for a dataset of {self._manifest.n} samples")
        crops = np.zeros(len(indices), dtype=np.int64) if crop is None else crop.numpy()
        captions = None if caption is None else caption.numpy()
        features = StoredFeatures(
            image=self._zeros(len(indices), self.image_width), text=self._zeros(len(indices), self.text_width)
        )
        problems: dict[int, str] = {}
        for part, rows, positions, missing in self._find_by_shard(indices):
            problems.update(missing)
            if part is None:
                continue
            if features.image is not None and part.image is not None:
                features.image.numpy()[rows] = part.image[positions, crops[rows]]
            if features.text is not None and part.text is not None:
                numbers = None if captions is None else captions[rows]
                text_rows, is_encoded = self._text_rows(part, positions, numbers)
                reason = "no stored features of the caption: neuclip-ds embed did not encode it"
                problems.update(dict.fromkeys(rows[~is_encoded].tolist(), reason))
                features.text.numpy()[rows[is_encoded]] = part.text[text_rows[is_encoded]]
        of_both = [values for values in (features.image, features.text) if values is not None]
        for values in of_both:
            is_finite = values.abs().amax(dim=1).isfinite()  # several times faster than a test of each value
            not_finite = (~is_finite).nonzero().flatten()
            reason = "stored features are not finite: they contain NaN or infinity"
            problems.update(dict.fromkeys(not_finite.tolist(), reason))
        for values in of_both:
            values[list(problems)] = 0
        return features, problems

    def draw_captions(self, index: Tensor, numbers: NDArray[np.uint64]) -> Tensor:
        """Draw a caption of each sample as `Captions.draw` does without weights; all captions must be stored.

        Args:
            index: (b,) int64 global indices.
            numbers: (b,) random numbers.

        Returns:
            (b,) int64 numbers of the captions among all captions of the sample, as in `rows`; 0 for samples without
            stored captions.

        Raises:
            UserError: a file has changed or is damaged, or `ShardCache.open` raises it.
        """
        indices = index.numpy()
        drawn = np.zeros(len(indices), dtype=np.int64)
        for part, rows, positions, _ in self._find_by_shard(indices):  # `self.rows` reports samples without features
            if part is None:
                continue
            assert part.text_start is not None and part.first_caption is not None
            counts = part.text_start[positions + 1] - part.text_start[positions]
            choices = numbers[rows] % np.maximum(counts, 1).astype(np.uint64)
            drawn[rows] = part.first_caption[positions] + choices.astype(np.int64)
        return torch.from_numpy(drawn)

    def file_of(self, shard: int) -> str:
        """Return the path or URL of the file with a shard's features."""
        return f"{self.folder}/{part_name(shard)}"

    def _find_by_shard(self, indices: NDArray[np.int64]) -> Iterator["_Found"]:
        """Find the stored features of the samples with `indices` (b,); yield a result for each shard of these samples.

        Raises UserError if a file has changed or is damaged, or if `ShardCache.open` raises it.
        """
        shards = np.searchsorted(self._manifest.starts, indices, side="right") - 1
        for shard in np.unique(shards).tolist():
            rows = np.flatnonzero(shards == shard)
            try:
                part = self._part_or_retry(shard)
            except OSError as error:
                missing = dict.fromkeys(rows.tolist(), f"stored features cannot be read: {error}")
                yield _Found(part=None, rows=rows[:0], positions=rows[:0], missing=missing)
                continue
            positions, is_stored = _find(part.index, indices[rows])
            reason = "no stored features: neuclip-ds embed omitted the sample"
            missing = dict.fromkeys(rows[~is_stored].tolist(), reason)
            yield _Found(part=part, rows=rows[is_stored], positions=positions[is_stored], missing=missing)

    def _zeros(self, rows: int, width: int | None) -> Tensor | None:
        return None if width is None else torch.zeros(rows, width, dtype=self.dtype)

    def _text_rows(
        self, part: FeaturePart, positions: NDArray[np.int64], captions: NDArray[np.int64] | None
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the rows of captions in a part's text features, and which of these captions were encoded.

        Without `captions`, the rows are those of the first encoded caption of each sample. Raises UserError for any
        other caption if only one caption of each sample was encoded.
        """
        assert part.text_start is not None and part.first_caption is not None
        start = part.text_start[positions]
        if captions is None:
            return start, np.ones(len(start), dtype=bool)
        rows = start + captions - part.first_caption[positions]
        is_encoded = (start <= rows) & (rows < part.text_start[positions + 1])
        if not is_encoded.all() and not self.embedding["all_captions"]:
            raise UserError(
                f"{self.folder} contains features of only one caption per sample, but training draws from all "
                "captions: run neuclip-ds embed with --all-captions and a new --out."
            )
        return rows, is_encoded

    def _part_or_retry(self, shard: int) -> FeaturePart:
        try:
            return self._part(shard)
        except OSError:
            return self._part(shard)  # retry once: network file systems have short outages

    def _part(self, shard: int) -> FeaturePart:
        """Return a shard's features; raise the errors of `_open`, or UserError if the mapped file has been modified.

        `cp`, for example, modifies an existing file in place.
        """
        opened = self._opened(shard)
        if self._is_local and _version(Path(self.file_of(shard)).stat()) != opened.version:
            raise UserError(f"{self.file_of(shard)} has changed since it was opened: {_AGAIN} with a new --out.")
        return opened.part

    def _open(self, shard: int) -> "_OpenPart":
        """Map a shard's file; raise OSError if it cannot be read, or UserError if it is damaged or was replaced."""
        try:
            return self._map(shard)
        except UserError:
            if self._cache is None or self._is_local:
                raise
            self._cache.remove(self.file_of(shard))  # cached by an earlier run, before the file was replaced
            return self._map(shard)

    def _map(self, shard: int) -> "_OpenPart":
        path = self.file_of(shard)
        expected_bytes = int(self._bytes[shard])
        if self._cache is not None and not self._is_local:
            try:
                file = self._cache.open(path, expected_bytes)
            except FetchError as error:
                if error.damaged:
                    raise UserError(f"{error} The file has changed: {_AGAIN}, and start the run again.") from error
                raise
        else:
            file = FileIO(path)
        with file:
            status = os.fstat(file.fileno())
            file_bytes = status.st_size
            problem = f"it is {file_bytes} bytes long, but was {expected_bytes} bytes long when the run started"
            if file_bytes == expected_bytes:
                with explained(f"{path} cannot be used", f"{_AGAIN} with a new --out"):
                    part = map_part(file)
                problem = self._find_problem(part, shard)
        if problem:
            raise UserError(f"{path} has changed or is damaged: {problem}; {_AGAIN} with a new --out.")
        return _OpenPart(part=part, version=_version(status))

    def _find_problem(self, part: FeaturePart, shard: int) -> str:
        """Describe how a part differs from the one that embed wrote for the shard; return "" if it does not."""
        listed = self._manifest.shards[shard]
        if part.job != self.job:
            return f"it was not written by the job that {EMBEDDING} describes ({EMBEDDING} may have been edited)"
        if part.shard != shard or part.samples != listed.n:
            return (
                f"it belongs to shard {part.shard} with {counted(part.samples, 'sample')}, not to shard {shard} with "
                f"{counted(listed.n, 'sample')}"
            )
        index = part.index
        if len(index) and not (listed.start <= index[0] and index[-1] < listed.start + listed.n):
            return (
                f"its samples have the indices {index[0]} to {index[-1]}, but those of the shard have the indices "
                f"{listed.start} to {listed.start + listed.n - 1}"
            )
        if (np.diff(index) <= 0).any():
            return "its indices are not in ascending order"
        if self.image_width is not None:
            problem = self._find_wrong_shape(part.image, (len(index), self.crops, self.image_width))
            if problem:
                return f"its image features are {problem}"
        if self.text_width is not None:
            starts = part.text_start
            if starts is None or part.first_caption is None or len(starts) != len(index) + 1:
                return "it does not list which captions its text features belong to"
            problem = self._find_wrong_shape(part.text, (int(starts[-1]), self.text_width))
            if problem:
                return f"its text features are {problem}"
        return ""

    def _find_wrong_shape(self, features: NDArray[np.floating] | None, expected: tuple[int, ...]) -> str:
        if features is None:
            return "missing"
        if features.shape != expected or features.dtype != self.embedding["dtype"]:
            return f"{features.dtype} {features.shape}, not {self.embedding['dtype']} {expected}"
        return ""

    def _check_data(self) -> None:
        """Raise UserError unless the features belong to the first shards of the dataset, in this order."""
        shards = self.embedding["shards"]
        is_same = shards <= self._manifest.n_shards and self._manifest.hash_of_first(shards) == self.embedding["data"]
        if not is_same:
            raise UserError(
                f"The features in {self.folder} were computed for other data or for the shards in a different order "
                f"({counted(shards, 'shard')}; this dataset has {counted(self._manifest.n_shards, 'shard')}): run "
                "neuclip-ds embed on this dataset with a new --out, and use that folder instead."
            )
        if not has_same_layout(self.embedding.get(LAYOUT), self._manifest.layout_of_first(shards)):
            raise UserError(
                f"The features in {self.folder} were computed for shards with the same names and sizes, but with other "
                "samples or with the samples in a different order: run neuclip-ds embed on this dataset with a new "
                "--out."
            )

    def _check_captions(self, captions: Sequence[str]) -> None:
        if self.text_width is not None and list(captions) != self.embedding["captions"]:
            raise UserError(
                f"The features in {self.folder} were computed from the captions "
                f"{', '.join(self.embedding['captions'])}, but training draws from {', '.join(captions)}: set "
                "data.captions to the sources of the features, in the same order."
            )

    def _check_parts(self) -> None:
        """Raise UserError if shards in use have no features."""
        in_use = np.flatnonzero(self._manifest.sizes)
        has_part = np.zeros(self._manifest.n_shards, dtype=bool)
        has_part[: len(self._bytes)] = self._bytes[: self._manifest.n_shards] > 0
        missing = in_use[~has_part[in_use]]
        if len(missing):
            names = [Path(self._manifest.shards[shard].path).name for shard in missing[:_NAMED_SHARDS].tolist()]
            more = ", ..." if len(missing) > len(names) else ""
            raise UserError(
                f"{self.folder} lacks the features of {len(missing)} of {len(in_use)} shards ({', '.join(names)}"
                f"{more}): run neuclip-ds embed again, which writes the missing ones, or, if the folder is a copy, "
                "copy it again."
            )


@dataclass(frozen=True, kw_only=True)
class _OpenPart:
    """A part that is mapped into memory, and the version of its file."""

    part: FeaturePart
    version: tuple[int, int]


class _Found(NamedTuple):
    """The stored features of those of b requested samples that are in one shard."""

    part: FeaturePart | None  # None if the shard's features cannot be read
    rows: NDArray[np.int64]  # (s,) the rows, 0 ... b - 1, of the samples with stored features
    positions: NDArray[np.int64]  # (s,) the positions of these samples in the part
    missing: dict[int, str]  # the reason for each row without stored features


def _version(status: os.stat_result) -> tuple[int, int]:
    """Return a file's size and modification time, which show whether the file has changed."""
    return status.st_size, status.st_mtime_ns


def _find(ascending: NDArray[np.int64], indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the position of each index in an ascending array, and whether the array contains the index."""
    positions = np.searchsorted(ascending, indices)
    is_present = positions < len(ascending)
    is_present[is_present] = ascending[positions[is_present]] == indices[is_present]
    return positions, is_present


def find_table(folder: str) -> Stored:
    """Read the description of a folder of features and list its parts; the result can be sent to other ranks as JSON.

    `folder` is a path, or a URL that fsspec supports. Raises UserError if the folder cannot be read, if it was not
    written by `neuclip-ds embed` of a compatible version, or if it is on a web server and its embedding.json does not
    list the sizes of the parts.
    """
    folder = folder.rstrip("/")
    if is_local(folder):
        folder = str(Path(expand_user(folder)))
    has_no_listing = folder.startswith(("http://", "https://"))
    fix = "pass the --out folder of neuclip-ds embed"
    with explained(f"The features in {folder} cannot be read", fix):
        if is_local(folder):
            embedding_json = Path(folder, EMBEDDING).read_bytes()
            sizes = {path.name: path.stat().st_size for path in Path(folder).glob("part-*")}
        else:
            store, path = open_remote(folder, _LISTING_TIMEOUT)
            embedding_json = store.cat_file(f"{path}/{EMBEDDING}")
            sizes = {}
            if not has_no_listing:
                sizes = {Path(entry["name"]).name: int(entry["size"]) for entry in store.ls(path, detail=True)}
        embedding = json.loads(embedding_json)
        _check_fields(folder, embedding)
        part_bytes = embedding.pop(PART_BYTES, None)
        if not has_no_listing:
            part_bytes = [sizes.get(part_name(shard), 0) for shard in range(embedding["shards"])]
        elif part_bytes is None or len(part_bytes) != embedding["shards"]:
            raise UserError(
                f"{folder}/{EMBEDDING} does not list the sizes of the files, which a web server does not report: let "
                f"neuclip-ds embed finish in the original folder, and copy {EMBEDDING} again."
            )
    return {"folder": folder, "embedding": embedding, "bytes": part_bytes}


def _check_fields(folder: str, embedding: Mapping[str, Any]) -> None:
    """Raise UserError if EMBEDDING lacks fields that this version reads, or has values that it does not support."""
    if embedding.get("format") != FORMAT:
        raise UserError(f"{folder} has the format of another version of neuclip_ds: {_AGAIN} with a new --out.")
    problems = [f"lacks {name}" for name in _FIELDS if name not in embedding]
    if not problems and embedding["dtype"] not in _DTYPES:
        problems.append(f"lists the unknown dtype {embedding['dtype']}")
    if problems:
        raise UserError(f"{folder}/{EMBEDDING} {' and '.join(problems)}: restore it, or {_AGAIN} with a new --out.")


def cached_bytes(tables: Iterable[FeatureTable], manifest: Manifest) -> NDArray[np.int64]:
    """Return how many bytes (n_shards,) each shard's feature files from all tables take in the cache."""
    total = np.zeros(manifest.n_shards, dtype=np.int64)
    folders = {table.folder: table for table in tables}  # the tables of two towers may share a folder
    for table in folders.values():
        total += table.cached_bytes
    return total


def random_crops(tables: Mapping[str, FeatureTable], crop_scale: float, seed: int) -> int:
    """Return the number of random crops through which training cycles, so that stored features match the images.

    With N crops, epoch e uses the crops of epoch e mod N. Returns 0 if no table has features of random crops. Raises
    UserError if tables have different numbers of random crops, or if training uses another crop scale or seed.
    """
    counts = {name: table.crops for name, table in tables.items() if table.has_random_crops}
    if not counts:
        return 0
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{tables[name].folder}: {count}" for name, count in counts.items())
        raise UserError(
            f"The feature folders contain different numbers of crops of each image ({shown}): run neuclip-ds embed for "
            "all of them with the same --crops."
        )
    for name in counts:
        embedding = tables[name].embedding
        if embedding["crop_scale"] != crop_scale or embedding["seed"] != seed:
            raise UserError(
                f"The crops of {tables[name].folder} were drawn with crop scale {embedding['crop_scale']} and seed "
                f"{embedding['seed']}, but training uses data.crop_scale={crop_scale} and run.seed={seed}: set both "
                "options to the values of the stored crops, so that all features and images show the same crops."
            )
    return next(iter(counts.values()))
