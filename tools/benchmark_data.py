"""For developers of neuclip_ds: measure the data engine against webdataset and MosaicML streaming, as ratios.

Parts: `raw` (bytes of samples), `loader` (shards to batches of tensors, the same transform for all), `resume` (time to
the first batch in the middle of an epoch), `order` and `store` (a billion samples). Each contender works in a process
of its own, in turns; the median of the turns counts. Where MosaicML streaming is not installed it is left out, and the
output says so (`make peers` installs it).

Example: python tools/benchmark_data.py '../shared/data/flickr8k/train' --parts raw loader resume --repeats 5
"""

import argparse
import importlib.util
import itertools
import multiprocessing
import os
import resource
import signal
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from neuclip_ds.cli.program import exit_on_mistake
from neuclip_ds.data.build import build_manifest, write_manifest
from neuclip_ds.data.decoders import find_decoder
from neuclip_ds.data.loader import Batch, LoaderOptions, train_loader
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


class Setting(argparse.Namespace):
    """What all contenders are told: the options, and where the samples are."""

    paths: list[str]
    manifest: str  # folder, with sample tables
    mds: str  # folder with the same samples in MosaicML's format; empty without its library
    batch: int
    workers: int
    image_size: int
    decoder: str
    epochs: int  # passes over the shards in one measurement

    @property
    def transform(self) -> ImageTransform:
        return train_transform(self.image_size, 0.9, find_decoder(self.decoder))


# raw bytes: each function reads every sample `epochs` times and returns samples a second


def page_cache(setting: Setting) -> float:
    """The limit: the shards' bytes copied out of the page cache, nothing looked at."""
    n = build_manifest(setting.paths).n
    return n * setting.epochs / _seconds(lambda: _read_plainly(setting.paths * setting.epochs, 1 << 20))


def ours_in_sequence(setting: Setting) -> float:
    """The offsets are the manifest's."""
    manifest = load_manifest(setting.manifest)
    return _ours(setting, manifest, np.arange(manifest.n))


def ours_at_random(setting: Setting) -> float:
    manifest = load_manifest(setting.manifest)
    return _ours(setting, manifest, np.random.default_rng(0).permutation(manifest.n))


def ours_walking_headers(setting: Setting) -> float:
    """Without offsets in the manifest: what a node's first pass over a shard costs."""
    manifest = build_manifest(setting.paths)
    return _ours(setting, manifest, np.arange(manifest.n))


def _ours(setting: Setting, manifest: Manifest, order: np.ndarray) -> float:
    indices = order.tolist()

    def read() -> None:
        for _ in range(setting.epochs):
            with tempfile.TemporaryDirectory(dir=Path(setting.manifest).parent) as folder:
                tempfile.tempdir = folder  # of a node that has no sample tables yet
                reader = TarReader(manifest)
                for index in indices:
                    reader.read(index)

    return len(indices) * setting.epochs / _seconds(read)


def webdataset_raw(setting: Setting) -> float:
    import webdataset

    dataset = webdataset.WebDataset(setting.paths, shardshuffle=False).repeat(setting.epochs)
    began = time.perf_counter()
    return sum(len(sample["jpg"]) > 0 for sample in dataset) / (time.perf_counter() - began)


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
    return _throughput(len(batch.image) for batch in _our_batches(setting, 0.0, setting.epochs))


def _our_batches(setting: Setting, share: float, epochs: float) -> Iterator[Batch]:
    """Begin at a share of the first epoch."""
    manifest = build_manifest(setting.paths)
    order = GlobalOrder(manifest.starts, manifest.sizes, setting.batch, 0, tail="drop")
    step, steps = (int(part * order.steps_per_epoch) for part in (share, epochs))
    options = LoaderOptions(workers=setting.workers)
    return train_loader(manifest, order, setting.transform, _tokenize, step=step, steps=max(2, steps), options=options)


def _tokenize(captions: list[str]) -> Tensor:
    """Nothing to speak of: tokenisers are not what is measured."""
    return torch.tensor([len(caption) for caption in captions]).reshape(-1, 1)


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
    return _throughput(len(images) for _ in range(setting.epochs) for images, _ in loader)


def _throughput(sizes: Iterator[int]) -> float:
    next(sizes)
    began = time.perf_counter()
    return sum(sizes) / (time.perf_counter() - began)


# resuming: seconds to the first batch at a share of the first epoch


def resume_ours(setting: Setting, share: float) -> float:
    return _seconds(lambda: next(_our_batches(setting, share, 0.0)))


def resume_webdataset(setting: Setting, share: float) -> float:
    import webdataset

    skipped = int(share * build_manifest(setting.paths).n / setting.batch) * setting.batch

    def first_batch() -> None:
        transform = setting.transform
        raw = iter(webdataset.WebDataset(setting.paths, shardshuffle=False))
        for number, sample in enumerate(itertools.islice(raw, skipped, skipped + setting.batch)):
            transform(sample["jpg"], number)

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


def store_of(n: int) -> list[str]:
    """What is printed of two float32 fields for n samples on one rank."""
    store = SampleStore(n, {"log_u_image": -np.inf, "log_u_text": -np.inf}, Communicator())
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, n, (4096,), generator=generator) for _ in range(200)]
    lines = [f"{_huge_pages():.0%} of the process's memory is in huge pages"]
    for when in ("first visit", "again"):
        lines += _visit(store, batches, when)
    with _forked_process():
        lines += _visit(store, [n - 1 - index for index in batches], "with a forked process")
    # plain writes before and after ours: a disk's first write to a place may be slower
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        plain = _seconds(lambda: _write_plainly(folder / "plain", 8 * n))
        (folder / "plain").unlink()
        began = time.perf_counter()
        save_rows(folder, "samples", store.rows())
        (saved,) = folder.iterdir()
        _sync(saved)
        save = time.perf_counter() - began
        _sync(saved, forget=True)
        load = _seconds(lambda: load_rows(folder, "samples", store.rows()))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        _sync(saved, forget=True)
        plain_read = _seconds(lambda: _read_plainly([str(saved)], 64 << 20))
        saved.unlink()
        again = _seconds(lambda: _write_plainly(folder / "plain", 8 * n))
    lines.append(f"peak memory {peak:.1f} GB")
    for verb, ours, theirs in (("save", save, (plain + again) / 2), ("load", load, plain_read)):
        speed = 8 * n / 1e9 / theirs
        lines.append(f"{verb} {8 * n / 1e9 / ours:.2f} GB/s, {theirs / ours:.2f} of the disk's plain {speed:.2f} GB/s")
    return lines


def _visit(store: SampleStore, batches: list[Tensor], when: str) -> Iterator[str]:
    """Read the rows of all batches, then write them; time and page faults that need no disk, of one call."""
    values = torch.randn(4096, 2)
    works = {"read": lambda index: store.begin_read(index).wait(), "write": lambda index: store.write(index, values)}
    for verb, work in works.items():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        times = sorted(1000 * _seconds(partial(work, index)) for index in batches)
        faults = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / len(batches)
        low, high = statistics.median(times), times[int(0.95 * len(times))]
        yield f"{verb}, {when}: {low:.2f} ms (fastest {times[0]:.2f}, 95 % below {high:.2f}), {faults:,.1f} page faults"


def _huge_pages() -> float:
    """Share of this process's resident memory in huge pages."""
    sizes = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    huge, resident = (int(sizes[name].split()[0]) for name in ("AnonHugePages", "Rss"))
    return huge / resident


@contextmanager
def _forked_process() -> Iterator[None]:
    """A process that has this one's memory and waits, as a loader worker has and does."""
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _write_plainly(path: Path, size: int) -> None:
    piece = np.random.default_rng(0).bytes(64 << 20)
    with path.open("wb", buffering=0) as file:
        for start in range(0, size, len(piece)):
            file.write(piece[: size - start])
    _sync(path)


def _read_plainly(paths: Sequence[str], at_once: int) -> None:
    buffer = memoryview(bytearray(at_once))
    for path in paths:
        with Path(path).open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _sync(path: Path, forget: bool = False) -> None:
    """Write a file to the disk, and have the kernel drop it from the page cache if it is to be read from there."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if forget:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# the runs


def alone(work: Callable[..., Any], *arguments: Any) -> Any:
    """`work(*arguments)` in a new process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_prepare) as pool:
        return pool.submit(work, *arguments).result()


def _prepare() -> None:
    multiprocessing.set_start_method("fork", force=True)  # of loader workers, as in training
    torch.set_num_threads(1)


def print_rates(title: str, contenders: Sequence[Callable[[Setting], float]], ours: str, setting: Setting) -> Any:
    """Print the table of the contenders that can run here, and return their median samples a second."""
    able = [one for one in contenders if setting.mds or not one.__name__.startswith("mosaic")]
    turns = [[alone(one, setting) for one in able] for _ in range(setting.repeats)]
    rates = dict(zip((one.__name__ for one in able), map(statistics.median, zip(*turns, strict=True)), strict=True))
    print(f"\n{title}\n\n| contender | samples/s | {ours} / it |\n|---|---|---|")
    for name, rate in rates.items():
        print(f"| {name} | {rate:,.0f} | {rates[ours] / rate:.2f} |")
    return rates


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
    setting = parser.parse_args(namespace=Setting())
    with exit_on_mistake():
        run(setting)


def run(setting: Setting) -> None:
    if {"raw", "loader", "resume"} & set(setting.parts):
        with tempfile.TemporaryDirectory() as folder:
            setting.paths, setting.manifest = resolve_shards(setting.shards), f"{folder}/manifest"
            write_manifest(Path(setting.manifest), setting.paths, ThreadPoolExecutor(1), samples=True)
            setting.mds = write_mds(setting.paths, f"{folder}/mds")
            run_peers(setting)
    if "order" in setting.parts:
        print(f"\nOrder of {BILLION:,} samples in {SHARDS:,} shards, B = 4096: from nothing to a step's batch\n")
        for share in (0.0, 0.37, 0.99):
            found = [alone(order_of_a_billion, share) for _ in range(setting.repeats)]
            milliseconds, megabytes = (statistics.median(column) for column in zip(*found, strict=True))
            print(f"at {share:4.0%} of epoch 3: {milliseconds:.1f} ms, {megabytes:.0f} MB")
    if "store" in setting.parts:
        lines = alone(store_of, setting.rows)
        print(f"\nStore of 2 float32 fields for {setting.rows:,} samples on one rank, 4,096 random rows a step\n")
        print("\n".join(lines))


def run_peers(setting: Setting) -> None:
    if "raw" in setting.parts:
        raw = (page_cache, ours_in_sequence, ours_at_random, ours_walking_headers, webdataset_raw, mosaic_raw)
        print_rates("Raw bytes, one process", raw, "ours_in_sequence", setting)
    if "loader" in setting.parts:
        contenders = (transform_alone, our_loader, webdataset_loader, mosaic_loader)
        title = f"Loader, {setting.workers} workers, batch {setting.batch}, {setting.image_size} px, {setting.decoder}"
        rates = print_rates(title, contenders, "our_loader", setting)
        share = rates["our_loader"] / setting.workers / rates["transform_alone"]
        print(f"\nour_loader / (workers x transform_alone) = {share:.2f}")
    if "resume" in setting.parts:
        print(
            "\nSeconds to the first batch\n\n| position in the epoch | ours, workers and all | webdataset, skipping |"
        )
        print("|---|---|---|")
        for share in (0.0, 0.5, 0.9):
            works = (resume_ours, resume_webdataset)
            ours, theirs = (statistics.median(alone(x, setting, share) for _ in range(setting.repeats)) for x in works)
            print(f"| {share:.0%} | {ours:.2f} | {theirs:.2f} |")


if __name__ == "__main__":
    main()
