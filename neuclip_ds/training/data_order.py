"""The order of a run's samples: chosen when the run starts, kept by its checkpoints."""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from neuclip_ds.config import Config, DataConfig
from neuclip_ds.data.interleave import WINDOWS, DataSize, Interleave, choose_interleave, first_interleave
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.order import BatchOrder, GlobalOrder
from neuclip_ds.data.shards import is_local
from neuclip_ds.errors import UserError
from neuclip_ds.training.data_sources import TrainingSet

log = logging.getLogger(__name__)

_UNSTAGGERED = 1  # version of the order in checkpoints that do not say


class SavedOrder(NamedTuple):
    """What a checkpoint tells about its order."""

    facts: Mapping[str, Any]
    shards: int  # of its manifest

    def interleave(self, batch_size: int) -> Interleave:
        """Return the interleave of the run that wrote the checkpoint."""
        streams, block = self.facts["shard_streams"], self.facts["shuffle_block"]
        if self.facts.get("order", _UNSTAGGERED) == _UNSTAGGERED:
            return first_interleave(self.shards, batch_size, streams, block)
        return Interleave(streams, block)


def open_order(
    config: Config, training_set: TrainingSet, nodes: int = 1, saved: SavedOrder | None = None
) -> BatchOrder:
    """Return the order of a run's samples, that of its checkpoint where there is one.

    Raises:
        UserError: the batch does not fit the data or streams, or a new run needs more shards at a time than the cache
            holds.
    """
    data, manifest = config.data, training_set.manifest
    need = _CacheDemand(training_set, nodes)
    cache = data.cache_gb * 1e9 if needs_cache(data, manifest) else None
    if saved is None:
        interleave = need.choose(data, cache)
    else:
        interleave = saved.interleave(data.batch_size)
        _check_same(config, interleave)
    if cache is not None:
        _check_cache(data, need, interleave, cache, refuses=saved is None)
    if training_set.sources:
        return training_set.mixture(data.batch_size, config.run.seed, interleave, data.stratified)
    order = GlobalOrder(
        manifest.starts, manifest.sizes, data.batch_size, config.run.seed, interleave, tail=data.last_batch
    )
    if order.last_batch_size < 2:
        raise UserError(
            f"data.batch_size={data.batch_size} leaves one of {order.n} samples for the last batch of an epoch, "
            "which has no negatives. Choose another batch size or data.last_batch=drop."
        )
    return order


class _CacheDemand:
    """What a node needs of a run's shards at a time."""

    def __init__(self, training_set: TrainingSet, nodes: int) -> None:
        in_use = bytes_in_use(training_set.manifest)
        self.nodes, self._set = nodes, training_set
        self._sizes = [
            DataSize(int(part.sum()), int(np.count_nonzero(part)), int(in_use[part > 0].sum()))
            for part in training_set.parts
        ]
        self.total = DataSize(*(sum(values) for values in zip(*self._sizes, strict=True)))

    def bytes(self, interleave: Interleave) -> int:
        parts = zip(self._sizes, self._set.interleaves(interleave), strict=True)
        return sum(size.resident_bytes(own, self.nodes) for size, own in parts if size.shards)

    def choose(self, data: DataConfig, cache: float | None, *, keeps: bool = True) -> Interleave:
        """Choose an interleave; `keeps` tells whether what the user has chosen is kept."""
        chosen = {"streams": data.shard_streams, "block": data.shuffle_block} if keeps else {}
        for part in (1.0, 0.5, 0.25, 0.1):  # every source of a mixture has shards that only begin or end a block
            planned = None if cache is None else part * cache
            found = choose_interleave(self.total, data.batch_size, nodes=self.nodes, cache_bytes=planned, **chosen)
            if cache is None or self.bytes(found) <= cache:
                break
        return found


def _check_same(config: Config, interleave: Interleave) -> None:
    for name, found in order_facts(interleave).items():
        wanted = getattr(config.data, name, None)
        if wanted not in (None, found):
            raise UserError(
                f"The run was started with data.{name}={found}, but this start has data.{name}={wanted}: set it back, "
                "or give the run another name (--run.name)."
            )


def bytes_in_use(manifest: Manifest) -> NDArray[np.int64]:
    """Return the bytes of each shard, (n_shards,), 0 for those that hold no sample in use."""
    return np.array([shard.bytes if shard.n and not shard.removed else 0 for shard in manifest.shards], dtype=np.int64)


def needs_cache(data: DataConfig, manifest: Manifest) -> bool:
    """Return whether a node keeps copies of shards."""
    return data.cache_local or not all(is_local(shard.path) for shard in manifest.shards)


def _check_cache(data: DataConfig, need: _CacheDemand, interleave: Interleave, cache: float, refuses: bool) -> None:
    """Raise `UserError`, or warn, if a node's cache cannot hold what it reads at a time."""
    needed = need.bytes(interleave)
    if needed > cache:
        problem = (
            f"Each of {need.nodes} nodes reads from {needed / 1e9:,.3g} GB of shards at a time "
            f"(data.shard_streams={interleave.streams}, data.shuffle_block={interleave.block}), but "
            f"data.cache_gb={data.cache_gb:g}, so shards would be fetched again and again: "
        )
        if refuses:
            fitting = need.choose(data, cache, keeps=False)
            raise UserError(
                f"{problem}set data.shard_streams={fitting.streams} and data.shuffle_block={fitting.block}, or "
                f"data.cache_gb={needed / 1e9:.3g} or more."
            )
        log.warning("%sset data.cache_gb=%.3g or more", problem, needed / 1e9)
    elif refuses and data.shuffle_block is None and interleave.window < min(WINDOWS[-1], need.total.samples):
        wanted = need.bytes(interleave._replace(block=WINDOWS[-1] // interleave.streams))
        log.warning(
            "data.cache_gb=%g: only %s samples are shuffled together; %.3g GB would be enough for %s",
            *(data.cache_gb, f"{interleave.window:,}", 1.25 * wanted / 1e9, f"{WINDOWS[-1]:,}"),
        )


def with_order(config: Config, interleave: Interleave) -> Config:
    """Return the config with the interleave that was chosen."""
    chosen = {"shard_streams": interleave.streams, "shuffle_block": interleave.block}
    return config.model_copy(update={"data": config.data.model_copy(update=chosen)})


def order_facts(interleave: Interleave) -> dict[str, Any]:
    """Return what a checkpoint keeps of the interleave."""
    return {
        "shard_streams": interleave.streams,
        "shuffle_block": interleave.block,
        "order": _UNSTAGGERED + interleave.staggered,
    }
