"""Open datasets on all ranks: render demo splits, open manifests, choose the loader's options, and sample captions."""

import logging
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from neuclip_ds.config import DataConfig
from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.decoders import Captions, CaptionSources
from neuclip_ds.data.feature_table import FeatureTable, find_table
from neuclip_ds.data.loader import LoaderOptions
from neuclip_ds.data.manifest import Manifest, indices_at
from neuclip_ds.data.readers import TarReader
from neuclip_ds.data.shards import is_local
from neuclip_ds.data.stored_towers import CONTENTS
from neuclip_ds.data.training_set import needs_cache
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import counted
from neuclip_ds.files import private_folder

log = logging.getLogger(__name__)

CACHE = Path(".cache")
CHECKED_SAMPLES = 50  # maximum number of samples that are read to find unused caption sources
_SHARDS_FOR_CAPTIONS = 100


def resolve(source: str) -> str:
    """Return the path of a source; if it is a demo split that does not exist yet, render the demo dataset first.

    Raises UserError if there is no demo split of this name, or if it cannot be rendered.
    """
    if not source.startswith("demo:"):
        return source
    from neuclip_ds.data.demo import demo_split  # imports the renderer, which only demo runs need

    return str(demo_split(source, CACHE))


def open_data(source: str, data: DataConfig, communicator: Communicator, folder: Path) -> Manifest:
    """Open the manifest of a dataset on all ranks; if there is none, rank 0 builds it in a subfolder of `folder`.

    Raises UserError on all ranks if the data cannot be used, or if a node lacks some of the local shards.
    """

    def read() -> dict[str, Any]:
        from neuclip_ds.data.build import open_manifest  # scans shards, which only rank 0 does
        from neuclip_ds.data.scan import ScanOptions

        options = ScanOptions(captions=tuple(data.captions))
        return open_manifest(resolve(source), folder / "manifests", options=options).to_json()

    manifest = Manifest.from_json(communicator.on_rank_zero(read))
    first_of_node = communicator.rank == communicator.ranks_of_node()[0]
    communicator.raise_if_any_rank_failed(_missing_shards(manifest) if first_of_node else None)
    return manifest


def _missing_shards(manifest: Manifest) -> str | None:
    """Return a message about local shards that are missing on this node, or None."""
    paths = [Path(shard.path) for shard in manifest.shards if is_local(shard.path)]
    present: set[Path] = set()
    for folder in {path.parent for path in paths}:
        if folder.is_dir():
            present.update(folder.iterdir())  # faster than a stat call per shard
    missing = [path for path in paths if path not in present]
    if not missing:
        return None
    return (
        f"This node lacks {len(missing)} of {counted(len(paths), 'local shard')}, such as {missing[0]}. Local shards "
        "must exist under the same path on every node."
    )


def loader_options(data: DataConfig, communicator: Communicator, *manifests: Manifest) -> LoaderOptions:
    """Return the options of a loader that reads these manifests, with a shard cache if any shard is remote.

    Raises the same errors as `open_cache`.
    """
    cache = open_cache(data) if any(map(needs_cache, manifests)) else None
    return LoaderOptions(
        workers=data.workers,
        prefetch=data.prefetch,
        timeout=data.timeout,
        captions=data.captions,
        cache=cache,
        pin_memory=communicator.device.type == "cuda",
    )


def open_cache(data: DataConfig) -> ShardCache:
    """Open this node's cache of remote shards and features; raise UserError if its folder or size cannot be used."""
    return ShardCache(
        data.cache_dir or private_folder(),
        int(data.cache_gb * 1e9),
        timeout=data.timeout / 10,  # so that a stalled download fails long before the loader's own timeout
        downloads=data.downloads,
        max_outage=data.max_outage,
    )


def open_tables(
    folders: Mapping[str, str],
    manifest: Manifest,
    captions: CaptionSources,
    communicator: Communicator,
    cache: ShardCache | None,
) -> dict[str, FeatureTable]:
    """Open feature tables on all ranks; `folders` maps the name of each table to its folder.

    Raises UserError if a folder cannot be read, or if `FeatureTable` rejects it, for example because its features
    belong to other data.
    """
    tables = {}
    for name, folder in folders.items():
        stored = communicator.on_rank_zero(partial(find_table, folder))  # so that only one rank lists the folder
        tables[name] = FeatureTable(stored, manifest, list(captions), cache, CONTENTS.get(name))
    return tables


def iter_captions(
    manifest: Manifest, limit: int, captions: CaptionSources = ("txt",), cache: ShardCache | None = None
) -> Iterator[str]:
    """Yield all captions of up to `limit` samples, evenly spaced within at most 100 evenly spaced shards.

    The same arguments always yield the same captions, except that captions that cannot be read are omitted (a warning
    is logged). Raises UserError in the same cases as `Captions`, `TarReader` and `TarReader.read`.
    """
    sources = Captions(captions)
    for texts in _iter_texts(manifest, limit, sources, cache, _SHARDS_FOR_CAPTIONS):
        yield from sources.all_captions(texts)


def unused_sources(manifest: Manifest, captions: CaptionSources, cache: ShardCache | None = None) -> list[str]:
    """Return the caption sources without a caption in any checked sample; a single source is not checked.

    The samples come from up to 50 shards or, if there is a `cache`, from only one shard, because it may be remote.
    Returns [] if none of the samples can be read. Raises UserError in the same cases as `iter_captions`.
    """
    if len(captions) < 2:
        return []
    unused = {name: Captions([name]) for name in captions}
    most_shards = 1 if cache else CHECKED_SAMPLES
    has_read = False  # unreadable samples do not show that a source is unused
    for texts in _iter_texts(manifest, CHECKED_SAMPLES, Captions(captions), cache, most_shards):
        has_read = True
        unused = {name: source for name, source in unused.items() if not source.all_captions(texts)}
    return list(unused) if has_read else []


def _iter_texts(
    manifest: Manifest, limit: int, captions: Captions, cache: ShardCache | None, most_shards: int
) -> Iterator[Mapping[str, bytes]]:
    """Yield the caption files (tar members) of the samples that `evenly_spaced_indices` returns.

    Samples that cannot be read are skipped, with one warning per shard.
    """
    reader = TarReader(manifest, captions.extensions, cache)
    indices = evenly_spaced_indices(manifest, limit, most_shards)
    unreadable: set[int] = set()
    for index in indices.tolist():
        try:
            texts = reader.read(index, with_image=False).texts
        except OSError as error:
            shard, _ = manifest.locate(index)
            if shard not in unreadable:
                path = manifest.shards[shard].path
                log.warning(
                    "some captions in shard %s cannot be read (%s), so they are not used to train the tokenizer or to "
                    "check data.captions; check the storage",
                    path,
                    error,
                )
            unreadable.add(shard)
        else:
            yield texts


def evenly_spaced_indices(manifest: Manifest, limit: int, most_shards: int = _SHARDS_FOR_CAPTIONS) -> np.ndarray:
    """Return the indices (q,) of at most `limit` samples in use, evenly spaced within at most `most_shards` shards."""
    nonempty = np.flatnonzero(manifest.sizes)
    shards = nonempty[_evenly_spaced(len(nonempty), most_shards)]
    sizes = manifest.sizes[shards]
    return indices_at(manifest.starts[shards], sizes, _evenly_spaced(int(sizes.sum()), limit))


def _evenly_spaced(n: int, count: int) -> np.ndarray:
    """Return min(n, count) evenly spaced integers from 0 to n - 1, distinct and in ascending order."""
    count = min(n, count)
    return np.arange(count) * n // max(count, 1)
