"""For developers of neuclip_ds: measure the data engine against webdataset and MosaicML streaming, as ratios.

Parts: `raw` (bytes of samples), `loader` (shards to batches of tensors, the same transform for all), `resume` (time to
the first batch in the middle of an epoch), `order` and `store` (a billion samples). Each contender works in a process
of its own, in turns; the median of the turns counts. Where MosaicML streaming is not installed it is left out, and the
output says so (`make peers` installs it).

Example: python tools/benchmark_data.py '../shared/data/flickr8k/train' --parts raw loader resume --repeats 5
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from neuclip_ds.cli.program import exit_on_mistake
from neuclip_ds.data.build import build_manifest, write_manifest
from neuclip_ds.data.decoders import find_decoder
from neuclip_ds.data.loader import LoaderOptions, train_loader
from neuclip_ds.data.manifest import Manifest, load_manifest
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.data.readers import TarReader
from neuclip_ds.data.shards import resolve_shards
from neuclip_ds.data.transforms import ImageTransform, train_transform
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.state.partition import load_rows, save_rows
from neuclip_ds.state.sample_store import SampleStore

PARTS = ("raw", "loader", "resume", "order", "store")
BILLION, SHARDS = 1_000_000_000, 100_000


class Setting(NamedTuple):
    """What all contenders are told."""

    paths: list[str]
    manifest: str  # folder, with sample tables
    mds: str  # folder with the same samples in MosaicML's format
    batch: int
    workers: int
    image_size: int
    decoder: str
    epochs: int  # passes over the shards in one measurement

    @property
    def transform(self) -> ImageTransform:
        return train_transform(self.image_size, 0.9, find_decoder(self.decoder))


def tokenize(captions: list[str]) -> Tensor:
    """Nothing to speak of: tokenisers are not what is measured."""
    return torch.tensor([len(caption) for caption in captions]).reshape(-1, 1)


# raw bytes: each function reads every sample `epochs` times and returns samples a second


def page_cache(setting: Setting) -> float:
    """The limit: the shards' bytes copied out of the page cache, nothing looked at."""
    n = build_manifest(setting.paths).n
    buffer = memoryview(bytearray(1 << 20))

    def read() -> None:
        for path in setting.paths * setting.epochs:
            with Path(path).open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    return n * setting.epochs / _seconds(read)


def ours_in_sequence(setting: Setting) -> float:
    """The offsets are the manifest's."""
    manifest = load_manifest(setting.manifest)
    return _ours(setting, manifest, np.arange(manifest.n))


def ours_at_random(setting: Setting) -> float:
    manifest = load_manifest(setting.manifest)
    return _ours(setting, manifest, np.random.default_rng(0).permutation(manifest.n))


def ours_walking_headers(setting: Setting) -> float:
    """Without offsets in the manifest: what the first pass over a shard costs."""
    manifest = build_manifest(setting.paths)
    return _ours(setting, manifest, np.arange(manifest.n))


def _ours(setting: Setting, manifest: Manifest, order: np.ndarray) -> float:
    indices = order.tolist()

    def read() -> None:
        for _ in range(setting.epochs):
            reader = TarReader(manifest)
            for index in indices:
                reader.read(index)

    return len(indices) * setting.epochs / _seconds(read)


def webdataset_raw(setting: Setting) -> float:
    import webdataset

    dataset = webdataset.WebDataset(setting.paths, shardshuffle=False).repeat(setting.epochs)
    began = time.perf_counter()
    count = sum(len(sample["jpg"]) > 0 for sample in dataset)
    return count / (time.perf_counter() - began)


def mosaic_raw(setting: Setting) -> float:
    from streaming import StreamingDataset

    dataset = StreamingDataset(local=setting.mds, batch_size=setting.batch, shuffle=False)
    total = dataset.num_samples * setting.epochs
    return total / _seconds(lambda: [dataset[index] for _ in range(setting.epochs) for index in range(len(dataset))])


# loaders: samples a second from the first batch's arrival to the last one's


def transform_alone(setting: Setting) -> float:
    """One process, bytes in memory: what a worker cannot do better than."""
    reader = TarReader(build_manifest(setting.paths))
    images = [reader.read(index).image or b"" for index in range(0, 1000)]
    transform = setting.transform
    return len(images) / _seconds(lambda: [transform(data, number) for number, data in enumerate(images)])


def our_loader(setting: Setting) -> float:
    manifest = build_manifest(setting.paths)
    order = GlobalOrder(manifest.starts, manifest.sizes, setting.batch, 0, tail="drop")
    steps = setting.epochs * order.steps_per_epoch
    options = LoaderOptions(workers=setting.workers)
    return _throughput(
        len(batch.image) for batch in train_loader(
            manifest, order, setting.transform, tokenize, steps=steps, options=options
        )
    )  # fmt: skip


def webdataset_loader(setting: Setting) -> float:
    import webdataset

    dataset = (
        webdataset.WebDataset(setting.paths, shardshuffle=len(setting.paths), nodesplitter=None)
        .repeat(setting.epochs)
        .shuffle(1000)
        .to_tuple("jpg", "txt")
        .map_tuple(setting.transform, len)
        .batched(setting.batch, partial=False)
    )
    loader: Any = webdataset.WebLoader(dataset, num_workers=setting.workers, batch_size=None)
    return _throughput(len(images) for images, _ in loader)


def mosaic_loader(setting: Setting) -> float:
    from streaming import StreamingDataset

    transform = setting.transform

    class Pairs(StreamingDataset):
        def __getitem__(self, at: Any) -> Any:
            sample = super().__getitem__(at)
            return transform(sample["jpg"], int(at)), len(sample["txt"])

    dataset = Pairs(local=setting.mds, batch_size=setting.batch, shuffle=True)
    loader: Any = DataLoader(dataset, batch_size=setting.batch, num_workers=setting.workers, drop_last=True)
    batches = (len(images) for _ in range(setting.epochs) for images, _ in loader)
    return _throughput(batches)


def _throughput(sizes: Iterator[int]) -> float:
    next(sizes)
    began = time.perf_counter()
    count = sum(sizes)
    return count / (time.perf_counter() - began)


# resuming: seconds to the first batch at a share of the first epoch


def resume_ours(setting: Setting, share: float) -> float:
    manifest = build_manifest(setting.paths)

    def first_batch() -> None:
        order = GlobalOrder(manifest.starts, manifest.sizes, setting.batch, 0, tail="drop")
        step = int(share * order.steps_per_epoch)
        options = LoaderOptions(workers=setting.workers)
        batches = train_loader(manifest, order, setting.transform, tokenize, step=step, steps=2, options=options)
        next(batches)

    return _seconds(first_batch)


def resume_webdataset(setting: Setting, share: float) -> float:
    import webdataset

    skipped = int(share * build_manifest(setting.paths).n / setting.batch) * setting.batch

    def first_batch() -> None:
        raw = iter(webdataset.WebDataset(setting.paths, shardshuffle=False))
        rest = itertools.islice(raw, skipped, skipped + setting.batch)
        for number, sample in enumerate(rest):
            setting.transform(sample["jpg"], number)

    return _seconds(first_batch)


# a billion samples


def order_of_a_billion(share: float) -> tuple[float, float]:
    """Milliseconds to any step's batch from nothing, and MB that it takes at most, the table of shards included."""
    sizes = np.full(SHARDS, BILLION // SHARDS)
    starts = np.cumsum(sizes) - sizes
    GlobalOrder([0, 9], [9, 9], 2, 0).batch(0, 0)  # numpy loads parts of itself at first use

    def start() -> None:
        order = GlobalOrder(starts, sizes, 4096, 0)
        order.batch(3, int(share * order.steps_per_epoch))

    milliseconds = 1000 * _seconds(start)
    tracemalloc.start()
    start()
    return milliseconds, (tracemalloc.get_traced_memory()[1] + starts.nbytes + sizes.nbytes) / 1e6


class StoreFigures(NamedTuple):
    read_ms: float
    write_ms: float
    save_gb_s: float
    plain_write_gb_s: float
    load_gb_s: float
    plain_read_gb_s: float
    peak_gb: float


def store_of(n: int) -> StoreFigures:
    """Two float32 fields for n samples on one rank."""
    store = SampleStore(n, {"log_u_image": -np.inf, "log_u_text": -np.inf}, Communicator())
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, n, (4096,), generator=generator) for _ in range(200)]
    values = torch.randn(4096, 2)
    read = statistics.median(_seconds(partial(_read_rows, store, index)) for index in batches)
    write = statistics.median(_seconds(partial(store.write, index, values)) for index in batches)
    gigabytes = 8 * n / 1e9
    # plain writes before and after ours: a disk's first write to a place may be slower
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        plain = _seconds(lambda: _synced(folder, lambda: _write_plainly(folder / "plain", 8 * n)))
        (folder / "plain").unlink()
        save = _seconds(lambda: _synced(folder, lambda: save_rows(folder, "samples", store.rows())))
        (saved,) = folder.iterdir()
        _forget(saved)
        load = _seconds(lambda: load_rows(folder, "samples", store.rows()))
        peak = _peak_mb() / 1000
        _forget(saved)
        plain_read = _seconds(lambda: _read_plainly(saved))
        saved.unlink()
        again = _seconds(lambda: _synced(folder, lambda: _write_plainly(folder / "plain", 8 * n)))
    figures = (gigabytes / save, 2 * gigabytes / (plain + again), gigabytes / load, gigabytes / plain_read)
    return StoreFigures(1000 * read, 1000 * write, *figures, peak)


def _synced(folder: Path, work: Callable[[], object]) -> None:
    work()
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _write_plainly(path: Path, size: int) -> None:
    piece = np.random.default_rng(0).bytes(64 << 20)
    with path.open("wb", buffering=0) as file:
        for start in range(0, size, len(piece)):
            file.write(piece[: size - start])


def _read_plainly(path: Path) -> None:
    buffer = memoryview(bytearray(64 << 20))
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _forget(path: Path) -> None:
    """Has the kernel drop a file from the page cache, so that it is read from the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_rows(store: SampleStore, index: torch.Tensor) -> torch.Tensor:
    return store.begin_read(index).wait()


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


# the runs


def alone(work: Callable[..., Any], *arguments: Any) -> Any:
    """`work(*arguments)` in a new process."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=_report, args=(results, work, arguments))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{work.__name__} failed with exit code {process.exitcode}.")
    return results.get()


def _report(results: Any, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    multiprocessing.set_start_method("fork", force=True)  # of loader workers, as in training
    torch.set_num_threads(1)
    results.put(work(*arguments))


def in_turns(contenders: Sequence[Callable[[Setting], float]], setting: Setting, repeats: int) -> dict[str, float]:
    """Median samples a second of each contender that can run here."""
    rates: dict[str, list[float]] = {}
    for _ in range(repeats):
        for contender in contenders:
            if contender.__name__.startswith("mosaic") and not setting.mds:
                continue
            rates.setdefault(contender.__name__, []).append(alone(contender, setting))
    return {name: statistics.median(values) for name, values in rates.items()}


def print_rates(title: str, rates: dict[str, float], ours: str) -> None:
    print(f"\n{title}\n\n| contender | samples/s | {ours} / it |\n|---|---|---|")
    for name, rate in rates.items():
        print(f"| {name} | {rate:,.0f} | {rates[ours] / rate:.2f} |")


def write_mds(paths: list[str], folder: str) -> str:
    """The samples in MosaicML's format; empty where its library is not installed."""
    if importlib.util.find_spec("streaming") is None:
        print("MosaicML streaming is not installed: left out.")
        return ""
    from streaming import MDSWriter

    manifest = build_manifest(paths)
    reader = TarReader(manifest)
    with MDSWriter(out=folder, columns={"jpg": "bytes", "txt": "str"}) as out:
        for index in range(manifest.n):
            sample = reader.read(index)
            out.write({"jpg": sample.image, "txt": sample.texts["txt"].decode()})
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", nargs="?", default="", help="JPEG and txt pairs, for raw, loader and resume")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--decoder", choices=("pil", "torchvision", "simplejpeg"), default="pil")
    parser.add_argument("--epochs", type=int, default=2, help="passes over the shards in a measurement (2)")
    parser.add_argument("--repeats", type=int, default=3, help="turns (3)")
    parser.add_argument("--rows", type=int, default=BILLION, help="samples of the store (1e9: 8 GB of memory and disk)")
    options = parser.parse_args()
    exit_on_mistake(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if {"raw", "loader", "resume"} & set(options.parts):
            paths = resolve_shards(options.shards)
            write_manifest(Path(folder) / "manifest", paths, ThreadPoolExecutor(1), samples=True)
            mds = write_mds(paths, f"{folder}/mds")
            setting = Setting(
                paths, f"{folder}/manifest", mds, options.batch, options.workers, options.image_size, options.decoder,
                options.epochs,
            )  # fmt: skip
            _run_peers(setting, options.parts, options.repeats)
    if "order" in options.parts:
        print(f"\nOrder of {BILLION:,} samples in {SHARDS:,} shards, B = 4096: from nothing to a step's batch\n")
        for share in (0.0, 0.37, 0.99):
            found = [alone(order_of_a_billion, share) for _ in range(options.repeats)]
            milliseconds, megabytes = (statistics.median(column) for column in zip(*found, strict=True))
            print(f"at {share:4.0%} of epoch 3: {milliseconds:.1f} ms, {megabytes:.0f} MB")
    if "store" in options.parts:
        found = alone(store_of, options.rows)
        print(f"\nStore of 2 float32 fields for {options.rows:,} samples on one rank, 4,096 random rows a step\n")
        print(f"read {found.read_ms:.2f} ms, write {found.write_ms:.2f} ms; peak memory {found.peak_gb:.1f} GB")
        for verb in ("save", "load"):
            ours = getattr(found, f"{verb}_gb_s")
            plain = found.plain_write_gb_s if verb == "save" else found.plain_read_gb_s
            print(f"{verb} {ours:.2f} GB/s, {ours / plain:.2f} of the disk's plain {plain:.2f} GB/s")


def _run_peers(setting: Setting, parts: Sequence[str], repeats: int) -> None:
    if "raw" in parts:
        raw = (page_cache, ours_in_sequence, ours_at_random, ours_walking_headers, webdataset_raw, mosaic_raw)
        print_rates("Raw bytes, one process", in_turns(raw, setting, repeats), "ours_in_sequence")
    if "loader" in parts:
        contenders = (transform_alone, our_loader, webdataset_loader, mosaic_loader)
        rates = in_turns(contenders, setting, repeats)
        title = f"Loader, {setting.workers} workers, batch {setting.batch}, {setting.image_size} px, {setting.decoder}"
        print_rates(title, rates, "our_loader")
        share = rates["our_loader"] / setting.workers / rates["transform_alone"]
        print(f"\nour_loader / (workers x transform_alone) = {share:.2f}")
    if "resume" in parts:
        print(
            "\nSeconds to the first batch\n\n| position in the epoch | ours, workers and all | webdataset, skipping |"
        )
        print("|---|---|---|")
        for share in (0.0, 0.5, 0.9):
            ours, theirs = (
                statistics.median(alone(work, setting, share) for _ in range(repeats))
                for work in (resume_ours, resume_webdataset)
            )
            print(f"| {share:.0%} | {ours:.2f} | {theirs:.2f} |")


if __name__ == "__main__":
    main()
