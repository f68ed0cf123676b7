"""Open the data of a run: its paths, splits and manifests, the order of its samples, and the rendered demo data."""

import logging
import shutil
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from neuclip_ds.checkpoint.integrity import read_meta
from neuclip_ds.config import CLIP_BPE, Config, DataConfig, TextConfig
from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.decoders import Captions, CaptionSources
from neuclip_ds.data.images import DECODERS, train_transform
from neuclip_ds.data.interleave import Interleave
from neuclip_ds.data.loader import LoaderOptions
from neuclip_ds.data.manifest import Manifest, indices_at
from neuclip_ds.data.manifest_file import check_distinct
from neuclip_ds.data.readers import TarReader
from neuclip_ds.data.shards import is_local
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.files import explain_disk, private_folder
from neuclip_ds.models.bpe import train_bpe
from neuclip_ds.models.source import ModelSource
from neuclip_ds.models.tokenizer import CaptionTokenizer
from neuclip_ds.training.batches import TrainingData
from neuclip_ds.training.data_order import LEAST_PAIRS, TrainingSet, find_validation, needs_cache, open_order
from neuclip_ds.training.run_folder import TOKENIZER, link_or_copy

log = logging.getLogger(__name__)

CACHE = Path(".cache")
_SHARDS_FOR_CAPTIONS = 100
_CHECKED = 50  # samples that are read to find unused caption sources
_TOKENIZER_CAPTIONS = 200_000  # enough for a vocabulary of CLIP's size


def open_training_data(
    config: Config,
    source: ModelSource,
    communicator: Communicator,
    staged: Path,
    resumed: Path | None,
) -> TrainingData:
    """Open the training data of a run, and create a tokenizer if the model has none.

    New files are written to `staged` instead of the run's folder. If the run resumes from the checkpoint `resumed`, the
    checkpoint determines the order of the samples.
    """
    data, preprocessing = config.data, source.preprocessing
    meta = communicator.on_rank_zero(lambda: read_meta(resumed) if resumed is not None else None)
    saved = None if meta is None else dict(meta["data"]["held_out"])
    training_set = TrainingSet(data, lambda source: open_data(source, data, communicator, staged), saved)
    manifest = training_set.manifest
    if communicator.rank == 0 and data.val == "auto" and not find_validation(data, manifest):
        log.warning(
            "no training pairs are held out for validation, because there are %d, fewer than %d: name other pairs "
            "with data.val, or set data.val=N to hold out N",
            *(manifest.n_used, LEAST_PAIRS),
        )
    if training_set.sources:
        communicator.on_rank_zero(lambda: check_distinct(manifest))
    loading = loader_options(data, communicator, manifest)
    if communicator.rank == 0 and (unused := unused_sources(manifest, data.captions, loading.cache)):
        log.warning(
            "data.captions names %s, which none of %d samples has: correct the name, or omit it", unused, _CHECKED
        )
    nodes = communicator.world_size // len(communicator.ranks_of_node())
    facts = None if meta is None else meta["facts"]
    interleave = None if facts is None else Interleave(facts["shard_streams"], facts["shuffle_block_size"])
    order = communicator.on_every_rank(lambda: open_order(config, training_set, nodes, interleave))
    transform = train_transform(preprocessing.size, data.crop_scale, DECODERS[data.decoder], preprocessing.squash)

    def kept_tokenizer() -> CaptionTokenizer:
        """Return the checkpoint's tokenizer, CLIP's tokenizer, or a new one trained on the captions."""
        text, kept = config.model.text, staged / TOKENIZER

        def make() -> None:
            with explain_disk(kept):
                if resumed is not None:
                    # hard links, which work on a full disk
                    shutil.copytree(resumed / TOKENIZER, kept, copy_function=link_or_copy)
                else:
                    captions = iter_captions(manifest, _TOKENIZER_CAPTIONS, loading.captions, loading.cache)
                    _new_tokenizer(text, captions).save(kept)

        communicator.on_rank_zero(make)
        return CaptionTokenizer.load(kept, text.context_length)

    return TrainingData(manifest, order, loading, transform, source.tokenizer(kept_tokenizer))


def _new_tokenizer(text: TextConfig, captions: Iterator[str]) -> CaptionTokenizer:
    """Return CLIP's tokenizer if the config names it and open_clip is installed, else train a BPE tokenizer."""
    reason = "model.text.tokenizer is not set"
    if text.tokenizer == CLIP_BPE:
        if find_spec("open_clip"):
            from neuclip_ds.models.pretrained.open_clip_models import clip_bpe  # optional dependency

            return clip_bpe(text.context_length)
        reason = "open_clip_torch, which has CLIP's vocabulary, is not installed"
    log.info("a BPE of up to %d tokens is trained on the captions: %s", text.vocab_size, reason)
    return train_bpe(captions, text.vocab_size, text.context_length)


def resolve(source: str) -> str:
    """Return the path of a source; if it is a demo split that does not exist yet, render the split first."""
    if not source.startswith("demo:"):
        return source
    from neuclip_ds.data.demo import demo_split  # imports the renderer, which only demo runs need

    return str(demo_split(source, CACHE))


def open_data(source: str, data: DataConfig, communicator: Communicator, folder: Path) -> Manifest:
    """Open the manifest of a dataset on all ranks; rank 0 builds it in `folder` if it does not exist."""

    def read() -> dict[str, Any]:
        from neuclip_ds.data.build import open_manifest  # scans shards, which only rank 0 does
        from neuclip_ds.data.scan import ScanOptions

        options, path = ScanOptions(tuple(data.captions)), resolve(source)
        return open_manifest(path, folder / "manifests", options=options).to_json()

    manifest = Manifest.from_json(communicator.on_rank_zero(read))
    first_of_node = communicator.rank == communicator.ranks_of_node()[0]
    communicator.raise_if_any_rank_failed(_missing_here(manifest) if first_of_node else None)
    return manifest


def _missing_here(manifest: Manifest) -> str | None:
    """Return a message about local shards that are missing on this node, or None."""
    paths = [Path(shard.path) for shard in manifest.shards if is_local(shard.path)]
    folders = {path.parent for path in paths}  # listing them is faster than a stat call per shard
    present = {path for folder in folders if folder.is_dir() for path in folder.iterdir()}
    missing = [path for path in paths if path not in present]
    if not missing:
        return None
    return (
        f"{len(missing)} of {len(paths)} shards are missing on this node, such as {missing[0]}. Put local "
        "data under the same path on every node."
    )


def loader_options(data: DataConfig, communicator: Communicator, *manifests: Manifest) -> LoaderOptions:
    """Return the options of a loader that reads these manifests, with a shard cache if any shard is remote."""
    cache = None
    if any(map(needs_cache, manifests)):
        folder = data.cache_dir or private_folder()
        # a stalled download fails long before the loader's own timeout
        cache = ShardCache(
            folder,
            int(data.cache_gb * 1e9),
            timeout=data.timeout / 10,
            downloads=data.downloads,
            max_outage=data.max_outage,
        )
    return LoaderOptions(
        data.workers,
        data.prefetch,
        data.timeout,
        data.captions,
        cache,
        pin_memory=communicator.device.type == "cuda",
    )


def iter_captions(
    manifest: Manifest, limit: int, captions: CaptionSources = ("txt",), cache: ShardCache | None = None
) -> Iterator[str]:
    """Yield all captions of up to `limit` samples, evenly spaced within at most 100 evenly spaced shards.

    The same manifest always yields the same captions, unless a shard cannot be read (a warning is logged).
    """
    sources = Captions(captions)
    for texts in _iter_texts(manifest, limit, sources, cache, _SHARDS_FOR_CAPTIONS):
        yield from sources.of(texts)


def unused_sources(manifest: Manifest, captions: CaptionSources, cache: ShardCache | None = None) -> list[str]:
    """Given several caption sources, return those that all checked samples lack; read at most one remote shard."""
    if len(captions) < 2:
        return []
    sources = {name: Captions([name]) for name in captions}
    for texts in _iter_texts(manifest, _CHECKED, Captions(captions), cache, 1 if cache else _CHECKED):
        sources = {name: source for name, source in sources.items() if not source.of(texts)}
    return list(sources)


def _iter_texts(
    manifest: Manifest, limit: int, captions: Captions, cache: ShardCache | None, most_shards: int
) -> Iterator[Mapping[str, bytes]]:
    """Yield the caption files (tar members) of evenly spaced samples, chosen as in `iter_captions`."""
    reader = TarReader(manifest, captions.extensions, cache)
    filled = np.flatnonzero(manifest.sizes)
    shards = filled[_evenly_spaced(len(filled), most_shards)]
    sizes = manifest.sizes[shards]
    indices = indices_at(manifest.starts[shards], sizes, _evenly_spaced(int(sizes.sum()), limit))
    unreadable: set[int] = set()
    for index in indices.tolist():
        try:
            texts = reader.read(index, with_image=False).texts
        except OSError as error:
            shard, _ = manifest.locate(index)
            if shard not in unreadable:
                log.warning(
                    "cannot read captions of shard %s, which is skipped: %s", manifest.shards[shard].path, error
                )
            unreadable.add(shard)
        else:
            yield texts


def _evenly_spaced(n: int, count: int) -> np.ndarray:
    """Return min(n, count) evenly spaced integers from 0 to n - 1, distinct and in ascending order."""
    count = min(n, count)
    return np.arange(count) * n // max(count, 1)
