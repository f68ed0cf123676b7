"""Where a run's data lie: paths, the splits beside them, and the rendered demo."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from neuclip_ds.config import Config, DataConfig
from neuclip_ds.data.build import open_manifest
from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.demo import demo_split
from neuclip_ds.data.loader import LoaderOptions
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.data.prefetch import Prefetcher, StoredShard
from neuclip_ds.data.scan import ScanOptions
from neuclip_ds.data.shards import is_local
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.training.data_position import DataPosition

CACHE = Path(".cache")


def find_split(source: str, name: str, train: str) -> str:
    """Where a held-out set lies: as named, or for `auto` the folder `name` beside the training data if there is one."""
    if source != "auto":
        return source
    if train.startswith("demo:"):
        return f"demo:{name}"
    beside = Path(train).parent / name
    return str(beside) if beside.is_dir() else ""


def resolve(source: str) -> str:
    """A path; the demo's splits are rendered where they are absent."""
    return str(demo_split(source, CACHE)) if source.startswith("demo:") else source


def open_data(source: str, data: DataConfig, communicator: Communicator, folder: Path) -> Manifest:
    """The manifest of a data set, the same on all ranks; rank 0 builds it in the run's folder where there is none."""
    options = ScanOptions(tuple(data.captions))
    manifest = communicator.on_rank_zero(lambda: open_manifest(resolve(source), folder / "manifests", options=options))
    first_of_node = communicator.rank == communicator.ranks_of_node()[0]
    communicator.agree(_missing_here(manifest) if first_of_node else None)
    return manifest


def _missing_here(manifest: Manifest) -> str | None:
    """Which local shards this node lacks; folders are listed, which is faster than asking for each of many shards."""
    paths = [Path(shard.path) for shard in manifest.shards if is_local(shard.path) and not shard.removed]
    folders = {path.parent for path in paths}
    present = {path for folder in folders if folder.is_dir() for path in folder.iterdir()}
    missing = [path for path in paths if path not in present]
    if not missing:
        return None
    return (
        f"{len(missing)} of {len(paths)} shards are not here, such as {missing[0]}; local data must lie under the same "
        "path on every node."
    )


def open_order(config: Config, manifest: Manifest) -> GlobalOrder:
    """The order of a run's samples.

    Raises:
        UserError: the batch size suits neither the data nor its own slots.
    """
    data = config.data
    order = GlobalOrder(
        manifest.starts,
        manifest.sizes,
        data.batch_size,
        config.run.seed,
        streams=data.shard_streams,
        shuffle_block=data.shuffle_block,
        tail=data.last_batch,
    )
    if order.last_batch_size < 2:
        raise UserError(
            f"data.batch_size={data.batch_size} leaves one of {order.n} samples for the last batch of an epoch, where "
            "it would contrast with nothing; choose another batch size or data.last_batch=drop."
        )
    return order


def open_cache(data: DataConfig, manifest: Manifest) -> ShardCache | None:
    """The node's cache of remote shards; None where all shards are local."""
    if all(is_local(shard.path) for shard in manifest.shards):
        return None
    folder = data.cache_dir or Path(tempfile.gettempdir()) / "neuclip_ds_shards"
    # with all its tries, a fetch gives up before the loader gives up the worker that waits for it
    return ShardCache(folder, int(data.cache_gb * 1e9), timeout=data.timeout / 10)


def loader_options(data: DataConfig, manifest: Manifest, communicator: Communicator) -> LoaderOptions:
    """How the batches of `manifest` are made."""
    return LoaderOptions(
        data.workers,
        data.prefetch,
        data.timeout,
        data.restarts,
        data.reader,
        tuple(data.captions),
        open_cache(data, manifest),
        pin_memory=communicator.device.type == "cuda",
    )


@contextmanager
def prefetching(
    cache: ShardCache,
    manifest: Manifest,
    order: GlobalOrder,
    position: DataPosition,
    rows: slice,
    done: int,
    total: int,
) -> Iterator[Callable[[int], None]]:
    """Fetches the shards that a node's rows of the batches need ahead of training, from step `done` to `total`.

    Yields:
        what is to be told of every training step that begins.
    """
    epoch, step = position.at(done)
    before = epoch * order.steps_per_epoch + step - done  # batches of the order that were no steps of this run
    shards = [StoredShard(shard.path, shard.bytes) for shard in manifest.shards]
    with Prefetcher(cache, order, shards, epoch=epoch, step=step, rows=rows, total_steps=before + total) as prefetcher:
        yield lambda number: prefetcher.advance(before + number)
