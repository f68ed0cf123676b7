"""The training set of a run (one dataset or a weighted mixture) and the order of its samples.

The order's interleave is chosen when the run starts, and is stored in the run's checkpoints.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from neuclip_ds.config import Config, DataConfig
from neuclip_ds.data.interleave import FULL, Interleave, choose_interleave, in_gigabytes
from neuclip_ds.data.manifest import Manifest, join
from neuclip_ds.data.mixture import BatchOrder, MixtureOrder
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.data.shards import is_local
from neuclip_ds.errors import UserError, counted

log = logging.getLogger(__name__)

# `data.val=auto` holds out one pair in a thousand, within these bounds
_HOLD_OUT_EVERY = 1000
_FEWEST_HELD_OUT = 200
_MOST_HELD_OUT = 10_000
FEWEST_PAIRS = 10 * _FEWEST_HELD_OUT  # smallest training set from which `auto` holds out pairs
# maximum number of shards from which pairs are held out, unless the shards are small; each may have to be fetched
_HELD_OUT_SHARDS = 100


class TrainingSet:
    """The training shards of all sources of a run.

    Attributes:
        manifest: the concatenated manifests of all sources; its `held_out` counts the pairs that are not trained on.
        sources: options of each source; empty for a single dataset.
        sizes_by_source: for each source, an (n_shards,) array of the number of samples used from each shard (0 for the
            shards of other sources).
    """

    def __init__(
        self, data: DataConfig, open_one: Callable[[str], Manifest], held_out: Mapping[int, int] | None = None
    ) -> None:
        """Open all sources with `open_one`; `held_out` contains a resumed run's held-out counts by shard number.

        Raises `UserError` if `data.train` is empty, if `open_one` or `join` raises it, or if `data.val` is more than
        half of the pairs or, in a resumed run, a different number than was held out.
        """
        if not data.train_paths:
            raise UserError("Set the training data: --data.train=FOLDER_OF_TARS (or demo:train).")
        self.sources = data.sources
        manifests = [open_one(path) for path in data.train_paths]
        all_pairs = join(manifests) if self.sources else manifests[0]
        if held_out is None:
            held_out = _choose_held_out(data, all_pairs.sizes)
        elif isinstance(data.val, int) and data.val != sum(held_out.values()):
            raise UserError(
                f"data.val={data.val}, but the run held out {counted(sum(held_out.values()), 'training pair')} when it "
                f"started: set data.val={sum(held_out.values())}, "
                "or give the run another name (--run.name)."
            )
        self.manifest = Manifest(all_pairs.shards, all_pairs.samples, held_out)
        source_of_shard = np.repeat(np.arange(len(manifests)), [manifest.n_shards for manifest in manifests])
        self.sizes_by_source = [
            np.where(source_of_shard == source, self.manifest.sizes, 0) for source in range(len(manifests))
        ]

    def weights(self) -> list[float]:
        """Return the weight of each source of a mixture, by default its number of samples."""
        weights = []
        for source, sizes in zip(self.sources, self.sizes_by_source, strict=True):
            weights.append(float(sizes.sum()) if source.weight is None else source.weight)
        return weights

    def smallest_source(self) -> tuple[str, int] | None:
        """Return the path and the number of samples of a mixture's smallest source with a positive weight.

        Returns None for a single dataset, or if no weight is positive.
        """
        if not self.sources:
            return None
        in_use = []
        for source, sizes, weight in zip(self.sources, self.sizes_by_source, self.weights(), strict=True):
            if weight > 0:
                in_use.append((source.path, int(sizes.sum())))
        return min(in_use, key=lambda source: source[1], default=None)

    def interleaves(self, interleave: Interleave) -> list[Interleave]:
        """Return each source's interleave, with a block size proportional to the source's weight.

        For a single dataset, the result contains only `interleave`.
        """
        if not self.sources:
            return [interleave]
        weights = np.array(self.weights())
        shares = weights / max(sum(weights), 1e-300)
        blocks = np.maximum(1, np.round(interleave.block * shares)).astype(int)
        return [Interleave(streams=interleave.streams, block=int(block)) for block in blocks]

    def orders(self, batch_size: int, seed: int, interleave: Interleave) -> list[GlobalOrder]:
        """Return a list with one order per source; a single dataset is one source. `data.drop_last` is not applied.

        Raises `UserError` if a source has fewer than 2 samples.
        """
        return [
            GlobalOrder(self.manifest.starts, sizes, batch_size, seed, interleave_of_source)
            for sizes, interleave_of_source in zip(self.sizes_by_source, self.interleaves(interleave), strict=True)
        ]

    def mixture(self, batch_size: int, seed: int, interleave: Interleave) -> MixtureOrder:
        """Return the order of a mixture's samples.

        Raises `UserError` if the weights are invalid, or if a source has fewer than 2 samples.
        """
        return MixtureOrder(self.orders(batch_size, seed, interleave), self.weights(), interleave)

    def describe(self) -> list[str]:
        """Return a line for each source of a mixture, with its number of samples and its share of each batch."""
        weights = self.weights()
        lines = []
        for source, sizes, weight in zip(self.sources, self.sizes_by_source, weights, strict=True):
            share = weight / sum(weights)
            lines.append(f"  {source.path:<12} {int(sizes.sum()):,} samples, {share:.1%} of each batch")
        return lines


def find_split(source: str | int, name: str, train_paths: Sequence[str]) -> str:
    """Return a held-out set's path: `source` or, for `auto`, the folder `name` next to the first training set.

    For `auto` with a demo split as the training set, this is the demo split `name`. Returns "" if there is no such
    folder, or if `source` is a number of pairs.
    """
    if source != "auto":
        return source if isinstance(source, str) else ""
    first_path = next(iter(train_paths), "")
    if first_path.startswith("demo:"):
        return f"demo:{name}"
    folder = Path(first_path).parent / name
    return str(folder) if folder.is_dir() else ""


def find_validation(data: DataConfig, training: Manifest | None) -> str | int:
    """Return the path of a run's validation pairs, the number of held-out training pairs, or "" for neither.

    `training` is the training data, or None to consider only separate validation pairs.
    """
    path = find_split(data.val, "val", data.train_paths)
    if path:
        return path
    if training is None or data.val == "":
        return ""
    return sum(training.held_out.values()) or ""


def _choose_held_out(data: DataConfig, sizes: NDArray[np.int64]) -> dict[int, int]:
    """Return the number of samples that a new run holds out from each shard, keyed by shard; `sizes` is (n_shards,).

    The samples come from evenly spaced shards, because data may be sorted. Shards without held-out samples are omitted.
    Raises UserError if `data.val` is more than half of the samples.
    """
    n = int(sizes.sum())
    total = data.val
    if total == "auto" and not find_split(total, "val", data.train_paths) and n >= FEWEST_PAIRS:
        total = min(max(n // _HOLD_OUT_EVERY, _FEWEST_HELD_OUT), _MOST_HELD_OUT)
    if isinstance(total, str) or not total:
        return {}
    if total > n // 2:
        raise UserError(
            f"data.val={total} would hold out more than half of the {counted(n, 'training pair')}; set it to at most "
            f"{n // 2}."
        )

    # take at most a tenth of the samples of each chosen shard, or use all shards
    nonempty = np.flatnonzero(sizes)
    spacing = -(-len(nonempty) // _HELD_OUT_SHARDS)
    shards = nonempty[::spacing]
    if sizes[shards].sum() < 10 * total:
        shards = nonempty

    # each shard's count is proportional to its size, and the counts sum to the total
    ends = np.cumsum(sizes[shards])
    counts = np.diff(total * ends // ends[-1], prepend=0)
    return {int(shard): int(count) for shard, count in zip(shards, counts, strict=True) if count}


def open_order(
    config: Config,
    training_set: TrainingSet,
    nodes: int = 1,
    saved: Interleave | None = None,
    feature_bytes: NDArray[np.int64] | None = None,
    reads_shards: bool = True,
) -> BatchOrder:
    """Return the order of a run's samples, with the `saved` interleave if the run resumes.

    `feature_bytes` (n_shards,) are the bytes of remote features that the cache must hold in addition to each shard, or
    instead of it if training reads only stored features (`reads_shards` is false).

    Raises:
        UserError: a source has fewer than 2 samples; a source of a new run's mixture has fewer samples than
            `data.shard_streams`; the batch size is incompatible with the number of samples or with
            `data.shard_streams`; the weights of a mixture are invalid; or the files that a new run reads at the same
            time do not fit in the cache.
    """
    data = config.data
    seed = config.run.seed
    manifest = training_set.manifest
    cached_bytes = np.zeros(manifest.n_shards, dtype=np.int64)
    if reads_shards and needs_cache(manifest):
        cached_bytes += [shard.bytes for shard in manifest.shards]
    if feature_bytes is not None:
        cached_bytes += feature_bytes
    cache_bytes = data.cache_gb * 1e9 if cached_bytes.any() else None

    def resident_bytes(interleave: Interleave, nodes: int) -> int:
        orders = training_set.orders(data.batch_size, seed, interleave)
        return sum(order.resident_bytes(cached_bytes.tolist(), nodes) for order in orders)

    # each stream needs a shard and, in a mixture, at least one sample of every source
    most_streams = int(np.count_nonzero(manifest.sizes))
    smallest = training_set.smallest_source()
    if smallest is not None:
        most_streams = min(most_streams, smallest[1])
    interleave = saved or choose_interleave(
        most_streams,
        data.batch_size,
        nodes=nodes,
        cache_bytes=cache_bytes,
        resident_bytes=resident_bytes,
        streams=data.shard_streams,
        block=data.shuffle_block_size,
    )
    if cache_bytes is not None:
        _check_cache(data, interleave, resident_bytes(interleave, nodes), is_new=saved is None)
        if saved is None and data.shuffle_block_size is None:
            without_cache = choose_interleave(most_streams, data.batch_size, nodes=nodes, streams=data.shard_streams)
            if interleave.window < min(without_cache.window, int(manifest.sizes.sum())):
                log.warning(
                    "the cache limits the shuffle buffer to %s samples: raise data.cache_gb (now %g) to shuffle more "
                    "samples together",
                    f"{interleave.window:,}",
                    data.cache_gb,
                )

    if training_set.sources:
        mixture = training_set.mixture(data.batch_size, seed, interleave)
        if smallest is not None and interleave.streams > smallest[1]:
            path, size = smallest
            problem = (
                f"The source {path} of data.train contains {counted(size, 'sample')}, fewer than the "
                f"{interleave.streams} shard streams, so a part of each batch would be padding"
            )
            if saved is None:
                raise UserError(
                    f"{problem}: omit data.shard_streams, set it to a divisor of data.batch_size that is at most "
                    f"{size}, or remove the source."
                )
            log.warning("%s: to avoid this, start a new run", problem)
        return mixture
    order = GlobalOrder(manifest.starts, manifest.sizes, data.batch_size, seed, interleave, drop_last=data.drop_last)
    if order.last_batch_size < 2:
        raise UserError(
            f"data.batch_size={data.batch_size} leaves one of {order.n} samples for an epoch's last batch, which "
            "would have no negatives. Choose another data.batch_size, or set data.drop_last=true."
        )
    return order


def _check_cache(data: DataConfig, interleave: Interleave, needed_bytes: int, is_new: bool) -> None:
    """Check that a node's cache has room for the `needed_bytes` of files that the node reads at the same time.

    If not, raises UserError if the run is new, and logs a warning if it resumes.
    """
    if needed_bytes <= data.cache_gb * 1e9:
        return
    problem = (
        f"Each node reads from {in_gigabytes(needed_bytes)} GB of remote files at the same time "
        f"(data.shard_streams={interleave.streams}, data.shuffle_block_size={interleave.block}), but "
        f"data.cache_gb={data.cache_gb:g}, so files would be fetched repeatedly: set "
        f"data.cache_gb={in_gigabytes(needed_bytes / FULL)} or more"
    )
    if is_new:
        raise UserError(f"{problem}, or lower data.shuffle_block_size.")
    log.warning("%s", problem)


def needs_cache(manifest: Manifest) -> bool:
    """Return whether any shard is remote, in which case each node caches shards."""
    return not all(is_local(shard.path) for shard in manifest.shards)


def interleave_settings(interleave: Interleave) -> dict[str, int]:
    """Return the options of the interleave in the form that a checkpoint stores."""
    return {"shard_streams": interleave.streams, "shuffle_block_size": interleave.block}


def source_settings(data: DataConfig) -> dict[str, object]:
    """Return the weights of a mixture's sources in the form that a checkpoint stores; empty for a single dataset."""
    if not data.sources:
        return {}
    return {"sources": [source.model_dump(mode="json", exclude={"path"}) for source in data.sources]}
