"""Open the data of a run: paths, splits, manifests, the order of samples, and the rendered demo."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, cast

from neuclip_ds.config import Config, DataConfig
from neuclip_ds.data.build import open_manifest
from neuclip_ds.data.cache import ShardCache, private_folder
from neuclip_ds.data.dataset import iter_captions
from neuclip_ds.data.decoders import find_decoder
from neuclip_ds.data.demo import demo_split
from neuclip_ds.data.file_systems import shared_file_system
from neuclip_ds.data.loader import LoaderOptions, train_loader
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.order import BatchOrder
from neuclip_ds.data.rank_batch import RankBatch, join_parts, part_count
from neuclip_ds.data.repeats import check_distinct
from neuclip_ds.data.scan import ScanOptions
from neuclip_ds.data.shards import is_local
from neuclip_ds.data.transforms import EvalTransform, RandomCrop, train_transform
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.models.source import ModelSource
from neuclip_ds.models.tokenizer import CaptionTokenizer, ModelTokenizer
from neuclip_ds.training.data_order import SavedOrder, needs_cache, open_order
from neuclip_ds.training.data_sources import TrainingSet
from neuclip_ds.training.tokenizer import place_tokenizer

log = logging.getLogger(__name__)

CACHE = Path(".cache")
_TOKENIZER_CAPTIONS = 200_000  # enough for a vocabulary of CLIP's size; more only takes longer


class TrainingData(NamedTuple):
    """The training samples of a run, their order, and what turns them into batches."""

    manifest: Manifest
    order: BatchOrder
    loading: LoaderOptions
    transform: RandomCrop | EvalTransform
    tokenizer: ModelTokenizer

    def of_sizes(self, image_size: int | None, context_length: int | None) -> "TrainingData":
        """Return the same samples as images and rows of tokens of other sizes; None keeps a size."""
        transform = self.transform if image_size is None else self.transform.at_size(image_size)
        tokenizer = self.tokenizer
        if context_length is not None:
            tokenizer = cast(CaptionTokenizer, tokenizer).of_length(context_length)  # others have no phases
        return self._replace(transform=transform, tokenizer=tokenizer)

    def batches(
        self, communicator: Communicator, order: BatchOrder, epoch: int, step: int, steps: int
    ) -> Iterator[RankBatch]:
        """Yield a rank's next `steps` batches from a place in an order."""
        parts = part_count(order.batch_size // communicator.world_size, self.transform.image_size)
        loaded = train_loader(
            self.manifest,
            order,
            self.transform,
            self.tokenizer,
            rank=communicator.rank,
            world_size=communicator.world_size,
            epoch=epoch,
            step=step,
            steps=steps,
            parts=parts,
            options=self.loading,
        )
        return join_parts(loaded, parts)


def open_training_data(
    config: Config,
    source: ModelSource,
    communicator: Communicator,
    folder: Path,
    staged: Path,
    resumed: Path | None,
    saved: SavedOrder | None,
) -> TrainingData:
    """Open the training data of a run; a tokenizer is trained on their captions where the model names none.

    What is new goes to `staged` instead of the run's folder; `resumed` is the checkpoint that the run resumes from, and
    `saved` what it tells about the order of samples.
    """
    data, preprocessing = config.data, source.preprocessing
    training_set = TrainingSet(data, lambda source: open_data(source, data, communicator, staged))
    manifest = training_set.manifest
    if training_set.sources:
        communicator.on_rank_zero(lambda: check_distinct(manifest))
    loading = loader_options(data, manifest, communicator)
    _advise_on_cache(data, manifest, communicator)
    nodes = communicator.world_size // len(communicator.ranks_of_node())
    order = communicator.on_every_rank(lambda: open_order(config, training_set, nodes, saved))
    transform = train_transform(preprocessing.size, data.crop_scale, find_decoder(data.decoder), preprocessing.squash)

    def captions() -> Iterator[str]:
        return iter_captions(manifest, _TOKENIZER_CAPTIONS, loading.captions, loading.cache)

    def trained_tokenizer() -> CaptionTokenizer:
        text, identity = config.model.text, {"data": manifest.content_hash, "captions": list(loading.captions)}
        place = communicator.on_rank_zero(lambda: place_tokenizer(text, identity, captions, folder, staged, resumed))
        return CaptionTokenizer.load(place, text.context_length)

    return TrainingData(manifest, order, loading, transform, source.tokenizer(trained_tokenizer))


def find_split(source: str, name: str, train_paths: Sequence[str]) -> str:
    """Return the path of a held-out set: as named, or for `auto` the folder `name` next to the first training data."""
    train = next(iter(train_paths), "")
    if source != "auto":
        return source
    if train.startswith("demo:"):
        return f"demo:{name}"
    beside = Path(train).parent / name
    return str(beside) if beside.is_dir() else ""


def resolve(source: str) -> str:
    """Return the path of a source, after rendering a demo split that is absent."""
    return str(demo_split(source, CACHE)) if source.startswith("demo:") else source


def open_data(source: str, data: DataConfig, communicator: Communicator, folder: Path) -> Manifest:
    """Open the manifest of a data set on all ranks; rank 0 builds it in `folder` where there is none."""
    options = ScanOptions(tuple(data.captions))
    commands = data.allow_commands
    manifest = communicator.on_rank_zero(
        lambda: open_manifest(resolve(source), folder / "manifests", options=options, allow_commands=commands)
    )
    first_of_node = communicator.rank == communicator.ranks_of_node()[0]
    communicator.agree(_missing_here(manifest) if first_of_node else None)
    return manifest


def _missing_here(manifest: Manifest) -> str | None:
    """Return which local shards this node lacks, if any."""
    paths = [Path(shard.path) for shard in manifest.shards if is_local(shard.path) and not shard.removed]
    folders = {path.parent for path in paths}  # listed, which is faster than a stat call per shard
    present = {path for folder in folders if folder.is_dir() for path in folder.iterdir()}
    missing = [path for path in paths if path not in present]
    if not missing:
        return None
    return (
        f"{len(missing)} of {len(paths)} shards are missing on this node, such as {missing[0]}. Put local "
        "data under the same path on every node."
    )


def _advise_on_cache(data: DataConfig, manifest: Manifest, communicator: Communicator) -> None:
    """Log where a cache would help, or does not, because nodes share a file system; called by all ranks."""
    nodes_share = len(communicator.ranks_of_node()) < communicator.world_size
    if communicator.rank or not nodes_share:
        return
    first = next((shard.path for shard in manifest.shards if is_local(shard.path) and not shard.removed), None)
    if not data.cache_local and first is not None and (kind := shared_file_system(first)):
        log.warning(
            "the shards are on %s, which all nodes read at random places: --data.cache-local=true copies each shard to "
            "the node's disk in one sequential read (data.cache_dir, data.cache_gb)",
            kind,
        )
    if data.cache_dir is not None and (kind := shared_file_system(data.cache_dir)):
        log.warning("data.cache_dir=%s is on %s; name a folder on each node's own disk", data.cache_dir, kind)


def loader_options(data: DataConfig, manifest: Manifest, communicator: Communicator) -> LoaderOptions:
    """Return how batches of `manifest` are loaded; a node has a cache of shards where some are read through it."""
    cache = None
    if needs_cache(data, manifest):
        folder = data.cache_dir or private_folder()
        # a fetch with all its retries times out before the loader's own time-out
        cache = ShardCache(
            folder,
            int(data.cache_gb * 1e9),
            timeout=data.timeout / 10,
            min_rate=data.min_rate * 1e6,
            transfers=data.transfers,
            max_outage=data.max_outage,
            copies_files=data.cache_local,
        )
    return LoaderOptions(
        data.workers,
        data.prefetch,
        data.timeout,
        data.restarts,
        data.reader,
        data.captions,
        cache,
        pin_memory=communicator.device.type == "cuda",
    )
