"""Open the training data of a run: its samples, their order, how to load them, and the tokenizer of its captions."""

import logging
import shutil
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from neuclip_ds.config import CLIP_BPE, TOKENIZER, Config, DataConfig, TextConfig
from neuclip_ds.data.augment import augmented
from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.dataset import PairDataset
from neuclip_ds.data.decoders import CaptionSources
from neuclip_ds.data.feature_parts import EMBEDDING
from neuclip_ds.data.feature_table import FeatureTable, cached_bytes, random_crops
from neuclip_ds.data.images import DECODERS, EvalTransform, ImageTransform, train_transform
from neuclip_ds.data.inspection import caption_lengths, pair_warnings, size_warnings
from neuclip_ds.data.interleave import Interleave
from neuclip_ds.data.loader import Loader, LoaderOptions, RankBatch, join_parts, parts_of_rows, train_jobs
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.manifest_file import check_distinct
from neuclip_ds.data.mixture import BatchOrder
from neuclip_ds.data.open_data import (
    CHECKED_SAMPLES,
    iter_captions,
    loader_options,
    open_cache,
    open_data,
    open_tables,
    unused_sources,
)
from neuclip_ds.data.shards import is_local
from neuclip_ds.data.stored_towers import check_views, reads_captions, reads_images, reads_shards, tower_tables
from neuclip_ds.data.training_set import FEWEST_PAIRS, TrainingSet, find_validation, open_order
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.environment import local_ranks, read_environment
from neuclip_ds.errors import UserError
from neuclip_ds.files import explain_disk, link_or_copy
from neuclip_ds.limits import shared_memory_shortage
from neuclip_ds.models.bpe import train_bpe
from neuclip_ds.models.source import ModelSource
from neuclip_ds.models.tokenizer import CaptionTokenizer, ModelTokenizer, named_tokenizer

log = logging.getLogger(__name__)

_TOKENIZER_CAPTIONS = 200_000  # maximum samples whose captions train a tokenizer; enough for CLIP's vocabulary size
_CAPTIONS_PER_ENTRY = 10  # number of these samples for each entry of a smaller vocabulary
_CHECKED_CAPTIONS = 200  # samples whose captions are checked for truncation and repetition


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The training samples of a run, their order, and how to load them.

    `tables` are stored features. Batches contain them under their names, or in place of a tower's input. `random_crops`
    is as in `PairDataset`.
    """

    manifest: Manifest
    order: BatchOrder
    loading: LoaderOptions
    transform: ImageTransform
    tokenizer: ModelTokenizer
    tables: Mapping[str, FeatureTable] = field(default_factory=dict)
    random_crops: int = 0

    @property
    def reads_shards(self) -> bool:
        """Whether training reads samples from the shards.

        False only if stored features replace both images and captions.
        """
        return reads_shards(self.tables, self.loading.captions)

    def record(self) -> dict[str, Any]:
        """Return a checkpoint's record of the data: its hashes, held-out counts, and stored features' job hashes."""
        record: dict[str, Any] = {
            "hash": self.manifest.content_hash,
            "layout": self.manifest.layout_of_first(self.manifest.n_shards),
            "held_out": sorted(self.manifest.held_out.items()),
        }
        if self.tables:
            record["features"] = {name: table.job for name, table in self.tables.items()}
        return record

    def batches(self, communicator: Communicator, begin: int, steps: int) -> Generator[RankBatch, None, None]:
        """Yield this rank's batches for `steps` training steps; `begin` is the first, counted from 0 across epochs."""
        order = self.order
        epoch, step = divmod(begin, order.steps_per_epoch)
        rank_batch = order.batch_size // communicator.world_size
        row_bytes = self._row_bytes()
        parts = parts_of_rows(rank_batch, row_bytes)
        jobs = train_jobs(order, communicator.rank, communicator.world_size, epoch, step, steps, parts)
        options = self.loading
        if read_environment().local_rank == 0:
            rows_per_part = -(-rank_batch // parts)
            ready = options.workers * options.prefetch * rows_per_part * row_bytes
            shortage = shared_memory_shortage(local_ranks() * ready)
            if shortage:
                log.warning("%s", shortage)
        pairs = PairDataset(
            self.manifest,
            self.transform,
            self.tokenizer,
            order.seed,
            options.captions,
            options.cache,
            self.tables,
            self.random_crops,
        )
        with closing(Loader(options, {"train": pairs})) as loader:
            yield from join_parts(loader.batches("train", jobs), parts)

    def _row_bytes(self) -> int:
        """Return the bytes of a row's pixels, or of the stored outputs of the trunks if there are no pixels."""
        if reads_images(self.tables):
            return 3 * self.transform.image_size**2
        size = 0
        for table in tower_tables(self.tables).values():
            size += ((table.image_width or 0) + (table.text_width or 0)) * table.dtype.itemsize
        return size


def open_training_data(
    config: Config,
    source: ModelSource,
    communicator: Communicator,
    staged: Path,
    resumed: Path | None = None,
    meta: Mapping[str, Any] | None = None,
    features: Mapping[str, str] | None = None,
) -> TrainingData:
    """Open the training data of a run, and create a tokenizer if the model has none.

    Args:
        config: config of the run.
        source: source of the run's model.
        communicator: communicator of all ranks.
        staged: folder to which new files are written, instead of the run's folder.
        resumed: the checkpoint from which the run resumes; None for a new run.
        meta: content of that checkpoint's meta.json, which determines the held-out pairs and the interleave of the
            shards; None for a new run.
        features: folders that `neuclip-ds embed` wrote for the same data, keyed by the names of their tables; none
            by default.

    Raises:
        UserError: the data, the stored features or the tokenizer cannot be used, or do not match the checkpoint.
    """
    data = config.data
    held_out = None
    interleave = None
    if meta is not None:
        held_out = dict(meta["data"]["held_out"])
        interleave = Interleave(meta["facts"]["shard_streams"], meta["facts"]["shuffle_block_size"])

    # the samples
    training_set = TrainingSet(data, lambda path: open_data(path, data, communicator, staged), held_out)
    manifest = training_set.manifest
    if communicator.rank == 0 and meta is None:
        _warn_if_none_held_out(data, manifest)
    if training_set.sources:
        communicator.on_rank_zero(lambda: check_distinct(manifest))

    # the stored features, and the cache for remote samples or features
    loading = loader_options(data, communicator, manifest)
    folders = features or {}
    if loading.cache is None and not all(map(is_local, folders.values())):
        loading = replace(loading, cache=open_cache(data))
    tables = open_tables(folders, manifest, data.captions, communicator, loading.cache)
    check_views(tables, data.crop_scale, data.captions)
    if meta is not None:
        _check_same_features(tables, meta["data"].get("features", {}))
    if communicator.rank == 0:
        _warn_about_unused_sources(manifest, data.captions, loading.cache)

    # the order
    nodes = communicator.world_size // len(communicator.ranks_of_node())
    feature_bytes = cached_bytes(tables.values(), manifest)
    needs_shards = reads_shards(tables, data.captions)
    order = communicator.on_every_rank(
        lambda: open_order(config, training_set, nodes, interleave, feature_bytes, needs_shards)
    )

    # the transform and the tokenizer
    preprocessing = source.preprocessing
    decode = DECODERS[data.decoder]
    whole = EvalTransform.of(preprocessing, decode)
    crop = train_transform(preprocessing.size, data.crop_scale, decode, whole)
    transform = augmented(crop, data.augment, preprocessing.mean)
    tokenizer = source.own_tokenizer()
    if tokenizer is None:
        tokenizer = _create_tokenizer(config.model.text, manifest, loading, communicator, staged, resumed)

    if communicator.rank == 0 and meta is None:
        for warning in size_warnings(data.batch_size, manifest.n_used):
            log.warning("%s", warning)
        if loading.cache is None and reads_captions(tables, data.captions):  # else shards would be fetched
            _warn_about_captions(manifest, data.captions, tokenizer)
    return TrainingData(
        manifest=manifest,
        order=order,
        loading=loading,
        transform=transform,
        tokenizer=tokenizer,
        tables=tables,
        random_crops=random_crops(tables, data.crop_scale, config.run.seed),
    )


def _warn_if_none_held_out(data: DataConfig, manifest: Manifest) -> None:
    """Warn if `data.val` is "auto" and there are neither separate validation pairs nor held-out training pairs."""
    if data.val == "auto" and not find_validation(data, manifest):
        log.warning(
            "no training pairs are held out for validation, because the dataset contains %d pairs, fewer than %d: set "
            "data.val to the path of other pairs, or set data.val=N to hold out N training pairs",
            manifest.n_used,
            FEWEST_PAIRS,
        )


def _warn_about_unused_sources(manifest: Manifest, captions: CaptionSources, cache: ShardCache | None) -> None:
    """Warn if some of the caption sources occur in none of the checked samples."""
    unused = unused_sources(manifest, captions, cache)
    if unused:
        log.warning(
            "data.captions names %s, but a check of up to %d samples found no such captions: correct data.captions, or "
            "check the data",
            " and ".join(unused),
            CHECKED_SAMPLES,
        )


def _warn_about_captions(manifest: Manifest, sources: CaptionSources, tokenizer: ModelTokenizer) -> None:
    """Warn if many captions of local shards are truncated or repeated."""
    captions = list(iter_captions(manifest, _CHECKED_CAPTIONS, sources))
    lengths = caption_lengths(captions, tokenizer, tokenizer.context_length)
    for warning in pair_warnings(captions, lengths):
        log.warning("%s", warning)


def _check_same_features(tables: Mapping[str, FeatureTable], recorded: Mapping[str, str]) -> None:
    """Raise UserError if features come from a different model or different options than at the start of the run."""
    for name, table in tables.items():
        if recorded.get(name, table.job) != table.job:
            raise UserError(
                f"{table.folder} no longer contains the features with which the run started (its {EMBEDDING} "
                "differs): restore the earlier folder, or give the run another name (--run.name)."
            )


def _create_tokenizer(
    text: TextConfig,
    manifest: Manifest,
    loading: LoaderOptions,
    communicator: Communicator,
    staged: Path,
    resumed: Path | None,
) -> CaptionTokenizer:
    """Save and return the checkpoint's tokenizer; in a new run, or if the checkpoint has none, use `new_tokenizer`."""
    folder = staged / TOKENIZER

    def save() -> None:
        with explain_disk(folder):
            # checkpoints of earlier versions may lack the tokenizer
            if resumed is not None and (resumed / TOKENIZER).is_dir():
                # hard links, which work on a full disk
                shutil.copytree(resumed / TOKENIZER, folder, copy_function=link_or_copy)
            else:
                most_captions = min(_TOKENIZER_CAPTIONS, _CAPTIONS_PER_ENTRY * text.vocab_size)
                captions = iter_captions(manifest, most_captions, loading.captions, loading.cache)
                new_tokenizer(text, captions).save(folder)

    communicator.on_rank_zero(save)
    return CaptionTokenizer.load(folder, text.resolved_context_length())


def new_tokenizer(text: TextConfig, captions: Iterator[str]) -> CaptionTokenizer:
    """Return the tokenizer that the config names or, without one, a BPE trained on the captions.

    Such a BPE also replaces CLIP's tokenizer if open_clip, which contains that tokenizer's vocabulary, is not
    installed. Raises UserError if the named tokenizer cannot be used, or if no BPE can be trained: no caption contains
    text, or `model.text.vocab_size` is too small.
    """
    if text.tokenizer not in (None, CLIP_BPE):
        return named_tokenizer(text)
    reason = "model.text.tokenizer is not set"
    if text.tokenizer == CLIP_BPE:
        if find_spec("open_clip"):
            from neuclip_ds.models.pretrained.open_clip_models import clip_bpe  # optional dependency

            return clip_bpe(text.resolved_context_length())
        reason = "open_clip_torch, which has CLIP's vocabulary, is not installed"
    log.info("training a BPE tokenizer of up to %d tokens on the captions, because %s", text.vocab_size, reason)
    return train_bpe(captions, text.vocab_size, text.resolved_context_length())
