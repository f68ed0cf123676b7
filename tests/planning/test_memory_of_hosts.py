"""Check the estimate of the loaders' memory against the shared memory that real loaders on two ranks use."""

import os
import time
from contextlib import closing
from pathlib import Path
from shutil import disk_usage

import pytest
import torch
from ranks import run_ranks
from tars import write_pairs

from neuclip_ds.config import Config
from neuclip_ds.data.build import build_manifest
from neuclip_ds.data.dataset import PairDataset
from neuclip_ds.data.decoders import decode_pil
from neuclip_ds.data.images import train_transform
from neuclip_ds.data.loader import Loader, LoaderOptions, train_jobs
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.data.shards import resolve_shards
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.limits import shared_memory_shortage
from neuclip_ds.planning import host_memory
from neuclip_ds.planning.host_memory import LoaderMemory, loader_memory, shortages
from neuclip_ds.planning.memory import MemoryAccount, MemoryQuery
from neuclip_ds.recipe import parse

IMAGE_SIZE = 96
CONTEXT_LENGTH = 40
WORKERS = 2
PREFETCH = 3
LIMIT = 60.0  # seconds


def query(*options: str, world_size: int = 2, device: str = "cpu") -> MemoryQuery:
    return MemoryQuery(parse(["demo", "--data.zero_shot=", *options]).config, world_size, device=device)


def small(world_size: int = 2) -> MemoryQuery:
    sizes = [f"--model.vision.image_size={IMAGE_SIZE}", f"--model.text.context_length={CONTEXT_LENGTH}"]
    loaders = [f"--data.workers={WORKERS}", f"--data.prefetch={PREFETCH}", "--data.batch_size=32", "--data.val="]
    return query(*sizes, *loaders, world_size=world_size)


def shared_bytes() -> int:
    """Return the bytes of the tensors in shared memory of this process and its loaders, counting each file once."""
    bytes_by_file: dict[int, int] = {}
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    for process in ("self", *children):
        for line in Path(f"/proc/{process}/maps").read_text().splitlines():
            if "/dev/shm/torch" in line:
                fields = line.split()
                start, stop = (int(edge, 16) for edge in fields[0].split("-"))
                bytes_by_file[int(fields[4])] = stop - start  # by inode
        for handle in Path(f"/proc/{process}/fd").iterdir():
            try:
                if str(handle.readlink()).startswith("/dev/shm/torch"):
                    bytes_by_file[handle.stat().st_ino] = handle.stat().st_blocks * 512
            except FileNotFoundError:  # closed in the meantime
                pass
    return sum(bytes_by_file.values())


def tokenize(captions: list[str]) -> torch.Tensor:
    return torch.zeros(len(captions), CONTEXT_LENGTH, dtype=torch.int64)


def fill(communicator: Communicator, shards: str, config: Config) -> int:
    """Take a batch, wait until the loader processes have filled their queues, and return the bytes in shared memory."""
    manifest = build_manifest(resolve_shards(shards), processes=1)
    order = GlobalOrder(manifest.starts, manifest.sizes, config.data.batch_size, 0)
    options = LoaderOptions(workers=config.data.workers, prefetch=config.data.prefetch)
    pairs = PairDataset(manifest, train_transform(IMAGE_SIZE, 0.9, decode_pil), tokenize)
    jobs = train_jobs(order, communicator.rank, communicator.world_size, 0, 0, 20)
    with closing(Loader(options, {"train": pairs})) as loader:
        batches = loader.batches("train", jobs)
        batch = next(batches)
        size_of_batch = sum(part.nbytes for part in (batch.image, batch.tokens, batch.index, batch.valid))
        full = (WORKERS * PREFETCH + 1) * size_of_batch
        deadline = time.monotonic() + LIMIT
        in_use = shared_bytes()
        while in_use < full and time.monotonic() < deadline:
            time.sleep(0.05)
            in_use = shared_bytes()
        time.sleep(0.5)  # any batch beyond the limit would appear now
        return max(in_use, shared_bytes())


def test_loaders_of_two_ranks_use_the_estimated_shared_memory(tmp_path: Path) -> None:
    shards = write_pairs(tmp_path / "shards", [40, 40])
    small_query = small()
    estimate = loader_memory(small_query, ranks=2).shared
    in_use = run_ranks(2, fill, str(shards), small_query.config)
    assert 0.8 * estimate < sum(in_use) <= estimate, "all but the second batch that training may hold"


PIXELS = 3 * 224**2  # bytes of a 224 x 224 image
LARGE = ["--model.vision.image_size=224", "--data.workers=8", "--data.prefetch=4"]


def test_loaders_of_eight_gpus_keep_640_images_of_150_kb_per_part() -> None:
    options = [*LARGE, "--data.batch_size=5120"]
    on_gpu = loader_memory(query(*options, "--data.val=", world_size=8, device="cuda"), ranks=8)
    assert on_gpu.shared == pytest.approx(8 * 32 * 640 * PIXELS, rel=0.01)
    assert on_gpu.total == pytest.approx(8 * ((32 + 34 + 8) * 640 * PIXELS + 8 * 300e6), rel=0.01)
    assert "--shm-size=25g" in on_gpu.describe()
    features = 2 * 512 * 2  # bytes of a pair, in float16
    with_features = loader_memory(query(*options, "--data.val=", world_size=8, device="cuda"), 8, features)
    assert with_features.shared - on_gpu.shared == 8 * 32 * 640 * features
    # queues in shared and pinned memory, a part that each worker builds, the batches in use, and joined copies
    assert with_features.total - on_gpu.total == 8 * (32 + 32 + 8 + 2 + 4) * 640 * features
    with_evaluation = loader_memory(query(*options, world_size=8, device="cuda"), ranks=8)
    assert with_evaluation.shared == 2 * on_gpu.shared
    on_cpu = loader_memory(query(*options, "--data.val=", world_size=8), ranks=8)
    assert on_cpu.shared == 34 * on_gpu.shared // 32


def test_a_machine_with_less_memory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    free = disk_usage("/dev/shm").free
    nothing = MemoryAccount({}, {}, {"in the towers": 0})
    assert shortages(nothing, LoaderMemory(free // 2, 0, 2), "cpu") == []
    assert shared_memory_shortage(free // 2) is None
    assert "--shm-size" in str(shared_memory_shortage(2 * free))
    (warning,) = shortages(nothing, LoaderMemory(2 * free, 0, 2), "cpu")
    assert f"with --shm-size={-(-2 * free // 10**9)}g, or lower data.workers" in warning
    monkeypatch.setattr(host_memory, "SHARED_MEMORY", Path("/nowhere"))
    assert shortages(nothing, LoaderMemory(2 * free, 0, 2), "cpu") == []
    (warning,) = shortages(nothing._replace(moments={"in the towers": 10**15}), LoaderMemory(0, 0, 1), "cpu")
    assert "1,000,000.00 GB (computed), but this machine" in warning
