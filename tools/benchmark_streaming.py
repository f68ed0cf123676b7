"""For developers of neuclip_ds: compare our loader with webdataset and MosaicML streaming, from disk and from S3.

All contenders read the same samples (JPEG and txt pairs) with the same transform, workers, batch size and prefetch;
each shuffles in its own way. A new process measures one epoch, and a second one measures the first batch of an epoch
that is resumed in the middle. Shards on disk are first dropped from the page cache. S3 is a server on this machine with
latency and limited bandwidth; local caches of shards start empty, and webdataset reads from the server with curl.
MosaicML streaming is omitted if it is not installed (`make peers`).

Example: python tools/benchmark_streaming.py '/data/flickr8k/train' --repeats 3 --out streaming.json
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import torch
from benchmarking import in_new_process, machine, sync
from benchmarking.mosaic import has_mosaic, payload_bytes, samples_of, write_mds
from benchmarking.object_store import Counters, Store, object_store
from torch import Tensor

from neuclip_ds.cli.program import exit_on_mistake
from neuclip_ds.data.build import write_manifest
from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.dataset import PairDataset
from neuclip_ds.data.images import DECODERS, ImageTransform, train_transform
from neuclip_ds.data.loader import Loader, LoaderOptions, train_jobs
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.manifest_file import load_manifest, write_shards
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.data.prefetch import Prefetcher, early_samples, shards_ahead
from neuclip_ds.data.scan import ScanOptions
from neuclip_ds.data.shards import resolve_shards
from neuclip_ds.errors import UserError

COLUMNS = (
    ("samples_per_second", "samples/s", ",.0f"),
    ("ours_over_it", "ours / this row", ".2f"),
    ("first_batch_seconds", "first batch, s", ".2f"),
    ("resumed_seconds", "resumed, s", ".2f"),
    ("megabytes_before_first_batch", "MB before the first batch", ".1f"),
    ("fetched_over_used", "bytes fetched / used", ".2f"),
    ("requests", "requests", ".0f"),
)


class Setting(argparse.Namespace):
    """Options that all contenders share."""

    data: str
    batch: int
    workers: int
    prefetch: int
    image_size: int
    decoder: str
    latency_ms: float
    bandwidth_mb: float
    repeats: int
    out: Path | None

    @property
    def transform(self) -> ImageTransform:
        return train_transform(self.image_size, 0.9, DECODERS[self.decoder])

    @property
    def torch_workers(self) -> dict[str, int]:
        """Worker and prefetch arguments for a torch loader."""
        return {"num_workers": self.workers} | ({"prefetch_factor": self.prefetch} if self.workers else {})


class Storage(NamedTuple):
    """A storage location of the samples."""

    name: str
    tars: list[str]  # paths or URLs
    manifest: str  # folder
    mds: str  # folder or URL
    store: Store | None = None  # None for the disk


class Start(NamedTuple):
    """State from which a contender starts."""

    batches: int  # number of the epoch's batches to skip, as if an earlier process had read them
    copies: Path  # empty folder for local copies of shards


class Run(NamedTuple):
    """One measurement of a contender."""

    first_seconds: float  # from before the loader is built to its first batch
    first_samples: int  # samples in the first batch
    first_fetched: Counters  # the store's counters when the first batch arrives
    seconds: float  # from the first batch to the end
    samples: int  # total number of samples
    fetched: Counters  # the store's counters at the end

    @property
    def rate(self) -> float:
        """Samples per second after the first batch."""
        return (self.samples - self.first_samples) / self.seconds


class Turn(NamedTuple):
    """The two measurements of a contender in one repeat: a full epoch, and the first batch of a resumed epoch."""

    epoch: Run
    resumed: Run  # only its first batch


Contender = Callable[[Setting, Storage, Start], Callable[[], Iterator[int]]]


# contenders: each imports its library and returns a function that builds its loader and yields the batch sizes


def ours(setting: Setting, storage: Storage, start: Start) -> Callable[[], Iterator[int]]:
    if storage.store is not None:
        fsspec.get_filesystem_class("s3")  # imports s3fs, as a run does when it checks its options

    def sizes() -> Iterator[int]:
        manifest = load_manifest(storage.manifest)
        order = GlobalOrder(manifest.starts, manifest.sizes, setting.batch)
        first = start.batches
        steps = order.steps_per_epoch
        options = LoaderOptions(workers=setting.workers, prefetch=setting.prefetch)
        with ExitStack() as stack:
            prefetcher = None
            if storage.store is not None:
                cache = ShardCache(start.copies, 4 * sum(shard.bytes for shard in manifest.shards))
                options = replace(options, cache=cache)
                rows = [slice(0, setting.batch)]
                prefetcher = Prefetcher(
                    cache,
                    partial(shards_ahead, order, 0, first, rows),
                    manifest.shards,
                    begin=first,
                    end=steps,
                    ahead=steps,
                    early_samples=early_samples(cache, manifest, options.captions, order, rows),
                )
                stack.enter_context(prefetcher)
            pairs = PairDataset(manifest, setting.transform, _lengths, cache=options.cache)
            loader = stack.enter_context(closing(Loader(options, {"train": pairs})))
            batches = loader.batches("train", train_jobs(order, 0, 1, 0, first, steps - first))
            for number, batch in enumerate(batches, first):
                if prefetcher is not None:
                    prefetcher.advance(number)
                yield int(batch.valid.sum())

    return sizes


def _lengths(captions: list[str]) -> Tensor:
    """Return caption lengths instead of tokens, because this benchmark does not measure tokenizers."""
    return torch.tensor([len(caption) for caption in captions]).reshape(-1, 1)


def webdataset(setting: Setting, storage: Storage, start: Start) -> Callable[[], Iterator[int]]:
    """Resume without saved state: each worker rereads its share of the earlier samples without decoding them."""
    from webdataset import WebDataset, WebLoader

    def sizes() -> Iterator[int]:
        dataset = (
            WebDataset(storage.tars, shardshuffle=len(storage.tars), nodesplitter=None)
            .shuffle(1000)
            .slice(start.batches * setting.batch // max(1, setting.workers), None)
            .to_tuple("jpg", "txt")
            .map_tuple(setting.transform, len)
            .batched(setting.batch)
        )
        loader: Any = WebLoader(dataset, batch_size=None, **setting.torch_workers)
        return (len(images) for images, _ in loader)

    return sizes


def mosaic(setting: Setting, storage: Storage, start: Start) -> Callable[[], Iterator[int]]:
    from streaming import StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()  # otherwise the library uses the state of the previous process
    transform = setting.transform

    class Pairs(StreamingDataset):
        def __getitem__(self, at: Any) -> Any:
            sample = super().__getitem__(at)
            return transform(sample["jpg"], int(at)), len(sample["txt"])

    def sizes() -> Iterator[int]:
        remote = {} if storage.store is None else {"remote": storage.mds}
        local = storage.mds if storage.store is None else str(start.copies)
        dataset = Pairs(local=local, batch_size=setting.batch, shuffle=True, **remote)
        for stream in dataset.streams:  # forked workers would share the connection and mix up shards (0.13.0)
            stream._downloader.clean_up()
        loader: Any = StreamingDataLoader(dataset, batch_size=setting.batch, **setting.torch_workers)
        if start.batches:
            state = dataset.state_dict(start.batches * setting.batch, from_beginning=True)
            loader.load_state_dict({**state, "epoch": 0})  # the epoch is -1 until a dataset is read
        return (len(images) for images, _ in loader)

    return sizes


# measurements


def measure(contender: Contender, setting: Setting, storage: Storage, batches: int, most: int | None) -> Run:
    """Time an epoch after its first `batches` batches: all the remaining batches, or at most `most` of them."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = contender(setting, storage, Start(batches, Path(folder)))
        before = _counters(storage)
        began = time.perf_counter()
        iterator = sizes()
        first = next(iterator)
        first_seconds = time.perf_counter() - began
        first_fetched = _counters(storage).since(before)
        began = time.perf_counter()
        samples = first + sum(itertools.islice(iterator, None if most is None else most - 1))
        seconds = time.perf_counter() - began
        fetched = _counters(storage).since(before)
        del iterator
        return Run(first_seconds, first, first_fetched, seconds, samples, fetched)


def _counters(storage: Storage) -> Counters:
    return Counters(0, 0) if storage.store is None else storage.store.counters()


def in_turns(
    setting: Setting, contenders: Mapping[str, Contender], storage: Storage, half: int
) -> dict[str, list[Turn]]:
    """Measure the contenders, interleaved and several times (`repeats`); return the measurements by contender.

    `half` is the number of batches in the first half of an epoch, which a resumed epoch skips.
    """
    turns: dict[str, list[Turn]] = {name: [] for name in contenders}
    for _ in range(setting.repeats):
        for name, contender in contenders.items():
            runs = []
            for batches, most in ((0, None), (half, 1)):
                for path in [*map(Path, storage.tars), *Path(storage.mds).glob("*")] if storage.store is None else []:
                    sync(path, forget=True)
                runs.append(in_new_process(measure, contender, setting, storage, batches, most))
            turns[name].append(Turn(*runs))
    return turns


def transform_rate(setting: Setting, storage: Storage) -> float:
    """Return the samples/s of the transform alone, in one process: a worker's upper limit."""
    samples = samples_of(load_manifest(storage.manifest))
    images = [sample.image or b"" for sample in itertools.islice(samples, 1000)]
    transform = setting.transform
    began = time.perf_counter()
    for number, data in enumerate(images):
        transform(data, number)
    return len(images) / (time.perf_counter() - began)


# inputs and results


def prepare(setting: Setting, folder: Path, store: Store, with_mds: bool) -> list[Storage]:
    """Copy the samples to the store's buckets `tars` and `mds` in `folder`; return their locations on disk and in S3.

    Each location has a separate manifest. The bucket `mds` is written only if `with_mds` is true.
    """
    tars = folder / "tars"
    mds = folder / "mds"
    tars.mkdir()
    for number, path in enumerate(resolve_shards(setting.data)):
        shutil.copyfile(path, tars / f"{number:05d}.tar")
    on_disk = folder / "manifest_disk"
    in_s3 = folder / "manifest_S3"
    with ThreadPoolExecutor(1) as executor:
        manifest = write_manifest(on_disk, resolve_shards(str(tars)), executor, ScanOptions(checksum=True))
    shutil.copytree(on_disk, in_s3)
    names = [Path(shard.path).name for shard in manifest.shards]
    moved = zip(manifest.shards, names, strict=True)
    in_bucket = Manifest([replace(shard, path=f"s3://tars/{name}") for shard, name in moved])
    tables = load_manifest(on_disk).samples
    write_shards(in_bucket, in_s3, tables.locations if tables is not None else ())
    if with_mds:
        write_mds(manifest, mds)
    return [
        Storage("disk", [shard.path for shard in manifest.shards], str(on_disk), str(mds)),
        Storage("S3", [f"{store.endpoint}/tars/{name}" for name in names], str(in_s3), "s3://mds", store),
    ]


def medians(turns: Sequence[Turn], ours: Sequence[Turn], bytes_used: float) -> dict[str, float]:
    """Return a contender's medians by column name; `bytes_used` is the mean size of a sample's image and caption."""
    each = [
        {
            "samples_per_second": epoch.rate,
            "ours_over_it": mine.epoch.rate / epoch.rate,
            "first_batch_seconds": epoch.first_seconds,
            "resumed_seconds": resumed.first_seconds,
            "megabytes_before_first_batch": epoch.first_fetched.bytes / 1e6,
            "fetched_over_used": epoch.fetched.bytes / (bytes_used * epoch.samples),
            "requests": epoch.fetched.requests,
        }
        for (epoch, resumed), mine in zip(turns, ours, strict=True)
    ]
    return {name: statistics.median(figures[name] for figures in each) for name, *_ in COLUMNS}


def line(storage: Storage, name: str, figures: Mapping[str, float]) -> str:
    """Return a row of the table; the columns about fetching do not apply to the disk."""
    cells = [
        format(figures[key], kind) if storage.store or place < 4 else "-"
        for place, (key, _, kind) in enumerate(COLUMNS)
    ]
    return f"| {' | '.join([storage.name, name, *cells])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="shards of JPEG and txt pairs: a tar, a folder or a pattern")
    parser.add_argument("--batch", type=int, default=128, help="samples per batch (default: 128)")
    parser.add_argument("--workers", type=int, default=2, help="loader processes (default: 2)")
    parser.add_argument(
        "--prefetch", type=int, default=4, help="batches that each loader process prefetches (default: 4)"
    )
    parser.add_argument(
        "--image-size", type=int, default=224, help="side length of the square crop, in pixels (default: 224)"
    )
    parser.add_argument("--decoder", choices=("pil", "simplejpeg"), default="pil", help="JPEG decoder (default: pil)")
    parser.add_argument(
        "--latency-ms", type=float, default=50, help="S3 server's latency per request, in ms (default: 50)"
    )
    parser.add_argument("--bandwidth-mb", type=float, default=20, help="S3 server's MB/s; 0 for no limit (default: 20)")
    parser.add_argument(
        "--repeats", type=int, default=3, help="times to measure each data loader, interleaved (default: 3)"
    )
    parser.add_argument("--out", type=Path, help="JSON file for the options and results")
    setting = parser.parse_args(namespace=Setting())
    with exit_on_mistake():
        run(setting)


def run(setting: Setting) -> None:
    if shutil.which("curl") is None:
        raise UserError("webdataset reads URLs with curl, which is not installed; install curl.")
    contenders: dict[str, Contender] = {"ours": ours, "webdataset": webdataset}
    if has_mosaic():
        contenders["MosaicML streaming"] = mosaic
    with (
        tempfile.TemporaryDirectory() as name,
        object_store(Path(name), setting.latency_ms, setting.bandwidth_mb) as store,
    ):
        os.environ.update(store.environment)
        storages = prepare(setting, Path(name), store, "MosaicML streaming" in contenders)
        manifest = load_manifest(storages[0].manifest)
        used = statistics.mean(map(payload_bytes, samples_of(manifest)))
        title = (
            f"{machine()}: {manifest.n:,} samples of {used:,.0f} bytes in {manifest.n_shards} shards, "
            f"{setting.workers} workers, batch {setting.batch}, {setting.image_size} px, {setting.decoder}; "
            f"S3: {setting.latency_ms:g} ms, {setting.bandwidth_mb:g} MB/s"
        )
        upper_limit = in_new_process(transform_rate, setting, storages[0])
        print(f"{title}\nTransform alone: {upper_limit:,.0f} samples/s per process\n")
        print(
            f"| storage | contender | {' | '.join(title for _, title, _ in COLUMNS)} |\n{'|---' * (2 + len(COLUMNS))}|"
        )
        rows = []
        for storage in storages:
            turns = in_turns(setting, contenders, storage, manifest.n // setting.batch // 2)
            for contender, own_turns in turns.items():
                figures = medians(own_turns, turns["ours"], used)
                rows.append({"storage": storage.name, "contender": contender, **figures, "turns": own_turns})
                print(line(storage, contender, figures), flush=True)
                _check_complete(contender, own_turns, manifest.n)
    if setting.out is not None:
        options = {key: str(value) for key, value in vars(setting).items()}
        setting.out.write_text(json.dumps({"title": title, "options": options, "rows": rows}, indent=1) + "\n")


def _check_complete(contender: str, turns: Sequence[Turn], n: int) -> None:
    """Print a message if epochs lost or repeated samples, because their rates are then not comparable."""
    wrong_sizes = {turn.epoch.samples for turn in turns} - {n}
    if wrong_sizes:
        print(
            f"{contender} is not comparable: its epochs had {', '.join(map(str, sorted(wrong_sizes)))} samples instead "
            f"of {n}."
        )


if __name__ == "__main__":
    main()
