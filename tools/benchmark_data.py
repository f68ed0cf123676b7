"""For developers of neuclip_ds: measure sample readers, the sample order and the store of per-sample statistics.

The part `raw` compares our reader of raw samples with webdataset and MosaicML streaming. The part `order` uses a
billion samples; so does the part `store`, unless you set --rows. Contenders run interleaved in new processes; results
are medians (`store` runs once). MosaicML streaming is omitted if it is not installed (`make peers`).
tools/benchmark_streaming.py measures loaders.

Example: python tools/benchmark_data.py '/data/flickr8k/train' --parts raw --repeats 5
"""

import argparse
import os
import resource
import signal
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from benchmarking import in_new_process, sync
from benchmarking.mosaic import has_mosaic, write_mds
from torch import Tensor

from neuclip_ds.cli.program import exit_on_mistake
from neuclip_ds.data.build import build_manifest, write_manifest
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.manifest_file import load_manifest
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.data.readers import TarReader
from neuclip_ds.data.scan import ScanOptions
from neuclip_ds.data.shards import resolve_shards
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.losses.sample_store import SampleStore
from neuclip_ds.state.shards import ShardFiles, shard_files, table_shards

PARTS = ("raw", "order", "store")
BILLION = 1_000_000_000
SHARDS = 100_000


class Setting(argparse.Namespace):
    """Options, and locations of the samples; the same for all contenders."""

    paths: list[str]
    manifest: str  # folder, which contains sample tables
    mds: str  # folder with the same samples in MosaicML's format
    epochs: int  # passes over the shards in one measurement


# raw bytes: each function reads every sample `epochs` times and returns samples per second


def page_cache(setting: Setting) -> float:
    """Measure the upper limit: copy the shards' bytes from the page cache without parsing them."""
    n = build_manifest(setting.paths).n
    return n * setting.epochs / _seconds(lambda: _read_plainly(setting.paths * setting.epochs, 1 << 20))


def ours_in_sequence(setting: Setting) -> float:
    """Measure reads in order at the manifest's offsets."""
    manifest = load_manifest(setting.manifest)
    return _ours(setting, manifest, np.arange(manifest.n))


def ours_at_random(setting: Setting) -> float:
    manifest = load_manifest(setting.manifest)
    return _ours(setting, manifest, np.random.default_rng(0).permutation(manifest.n))


def ours_walking_headers(setting: Setting) -> float:
    """Measure reads in order without offsets in the manifest, as in a node's first pass over a shard."""
    manifest = build_manifest(setting.paths)
    return _ours(setting, manifest, np.arange(manifest.n))


def _ours(setting: Setting, manifest: Manifest, order: np.ndarray) -> float:
    indices = order.tolist()

    def read() -> None:
        for _ in range(setting.epochs):
            with tempfile.TemporaryDirectory(dir=Path(setting.manifest).parent) as folder:
                tempfile.tempdir = folder  # empty, as on a node that has not yet stored any sample tables
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

    dataset = StreamingDataset(local=setting.mds, batch_size=256, shuffle=False)
    total = dataset.num_samples * setting.epochs
    return total / _seconds(lambda: [dataset[index] for _ in range(setting.epochs) for index in range(len(dataset))])


# a billion samples


def order_of_a_billion(share: float) -> tuple[float, float]:
    """Return the milliseconds to compute a batch from scratch, and the peak MB including the shard table.

    The batch is the one after a fraction `share` of epoch 3.
    """
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
    """Measure a store of two float32 fields for n samples on one rank, and return the lines of its report."""
    store = SampleStore(n, {"log_u_image": -np.inf, "log_u_text": -np.inf}, Communicator())
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, n, (4096,), generator=generator) for _ in range(200)]
    lines: list[str] = []
    for when in ("first visit", "again"):
        lines += _visit(store, batches, when)
    with _forked_process():
        lines += _visit(store, [n - 1 - index for index in batches], "with a forked process")
    # plain writes before and after ours, because a disk's first write to a block may be slower
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        plain = _seconds(lambda: _write_plainly(folder / "plain", 8 * n))
        (folder / "plain").unlink()
        began = time.perf_counter()
        for file in shard_files(table_shards({"samples": store.rows()}), {}, Communicator()):
            file.write(folder)
        (saved,) = folder.glob("*.safetensors")
        sync(saved)
        save = time.perf_counter() - began
        sync(saved, forget=True)
        load = _seconds(lambda: ShardFiles(folder).fill({"samples": store.rows()}))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        sync(saved, forget=True)
        plain_read = _seconds(lambda: _read_plainly([str(saved)], 64 << 20))
        saved.unlink()
        again = _seconds(lambda: _write_plainly(folder / "plain", 8 * n))
    lines.append(f"peak memory {peak:.1f} GB")
    for verb, ours, theirs in (("save", save, (plain + again) / 2), ("load", load, plain_read)):
        speed = 8 * n / 1e9 / theirs
        lines.append(
            f"{verb} {8 * n / 1e9 / ours:.2f} GB/s, {theirs / ours:.2f} times the plain rate, {speed:.2f} GB/s"
        )
    return lines


def _visit(store: SampleStore, batches: list[Tensor], when: str) -> Iterator[str]:
    """Read the rows of all batches, then write them; yield one line on the reads and one on the writes.

    A line contains the times and the page faults per call.
    """
    values = torch.randn(4096, 2)
    works = {"read": lambda index: store.begin_read(index).wait(), "write": lambda index: store.write(index, values)}
    for verb, work in works.items():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        times = sorted(1000 * _seconds(partial(work, index)) for index in batches)
        faults = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / len(batches)
        low = statistics.median(times)
        high = times[int(0.95 * len(times))]
        yield f"{verb}, {when}: median {low:.2f} ms (fastest {times[0]:.2f}, p95 {high:.2f}), {faults:,.1f} page faults"


@contextmanager
def _forked_process() -> Iterator[None]:
    """Fork a process that shares this process's memory and waits, as a loader worker does."""
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
    sync(path)


def _read_plainly(paths: Sequence[str], at_once: int) -> None:
    buffer = memoryview(bytearray(at_once))
    for path in paths:
        with Path(path).open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# the runs


def print_rates(contenders: Sequence[Callable[[Setting], float]], ours: str, setting: Setting) -> None:
    """Measure the contenders interleaved, each in new processes, and print a table of their median samples/s.

    The last column is the median of the contender that `ours` names, divided by the median of the row.
    """
    turns = [[in_new_process(one, setting) for one in contenders] for _ in range(setting.repeats)]
    rates = [statistics.median(column) for column in zip(*turns, strict=True)]
    by_name = dict(zip((one.__name__ for one in contenders), rates, strict=True))
    print(f"\nRaw bytes, one process\n\n| contender | samples/s | {ours} / this row |\n|---|---|---|")
    for name, rate in by_name.items():
        print(f"| {name} | {rate:,.0f} | {by_name[ours] / rate:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "shards",
        nargs="?",
        default="",
        help="folder, glob or brace pattern of shards with JPEG and txt members; required only by the part `raw`",
    )
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure (default: all)"
    )
    parser.add_argument("--epochs", type=int, default=2, help="passes over the shards per measurement (default: 2)")
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="times to measure each reader, interleaved, and each position in the order (default: 3)",
    )
    parser.add_argument(
        "--rows",
        type=int,
        default=BILLION,
        help="samples in the store (default: 1e9, which take 8 GB of memory, and 8 GB of disk in the current folder)",
    )
    setting = parser.parse_args(namespace=Setting())
    with exit_on_mistake():
        run(setting)


def run(setting: Setting) -> None:
    if "raw" in setting.parts:
        contenders = [page_cache, ours_in_sequence, ours_at_random, ours_walking_headers, webdataset_raw]
        with tempfile.TemporaryDirectory() as folder:
            setting.paths = resolve_shards(setting.shards)
            setting.manifest = f"{folder}/manifest"
            manifest = write_manifest(
                Path(setting.manifest), setting.paths, ThreadPoolExecutor(1), ScanOptions(checksum=True)
            )
            if has_mosaic():
                setting.mds = f"{folder}/mds"
                write_mds(manifest, Path(setting.mds))
                contenders.append(mosaic_raw)
            print_rates(contenders, "ours_in_sequence", setting)
    if "order" in setting.parts:
        print(f"\nOrder of {BILLION:,} samples in {SHARDS:,} shards, B = 4096: from scratch to a step's batch\n")
        for share in (0.0, 0.37, 0.99):
            turns = [in_new_process(order_of_a_billion, share) for _ in range(setting.repeats)]
            milliseconds, megabytes = (statistics.median(column) for column in zip(*turns, strict=True))
            print(f"at {share:4.0%} of epoch 3: {milliseconds:.1f} ms, {megabytes:.0f} MB")
    if "store" in setting.parts:
        lines = in_new_process(store_of, setting.rows)
        print(f"\nStore of 2 float32 fields for {setting.rows:,} samples on one rank, 4,096 random rows per step\n")
        print("\n".join(lines))


if __name__ == "__main__":
    main()
