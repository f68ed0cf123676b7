"""The account of the loaders' memory, against what real loaders on two ranks hold in shared memory."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from tars import write_pairs

from neuclip_ds.config import Config
from neuclip_ds.data.build import build_manifest
from neuclip_ds.data.decoders import find_decoder
from neuclip_ds.data.loader import LoaderOptions, train_loader
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.data.shards import resolve_shards
from neuclip_ds.data.transforms import train_transform
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.planning import memory_check
from neuclip_ds.planning.loader_memory import LoaderMemory, loader_memory
from neuclip_ds.planning.memory import MemoryQuery
from neuclip_ds.recipe import parse

SIDE, TOKENS, WORKERS, PREFETCH = 96, 40, 2, 3
LIMIT = 60.0  # seconds


def query(*options: str, world_size: int = 2, device: str = "cpu") -> MemoryQuery:
    return MemoryQuery(parse(["demo", "--data.zero_shot=", *options]).config, world_size, device=device)


def small(world_size: int = 2) -> MemoryQuery:
    sizes = [f"--model.vision.image_size={SIDE}", f"--model.text.context_length={TOKENS}"]
    loaders = [f"--data.workers={WORKERS}", f"--data.prefetch={PREFETCH}", "--data.batch_size=32", "--data.val="]
    return query(*sizes, *loaders, world_size=world_size)


def shared_bytes() -> int:
    """Bytes of the tensors that this process and its loader processes have in shared memory, each file once."""
    found: dict[int, int] = {}
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    for process in ("self", *children):
        for line in Path(f"/proc/{process}/maps").read_text().splitlines():
            if "/dev/shm/torch" in line:
                span, *_, number, _, _ = line.split()
                start, stop = (int(edge, 16) for edge in span.split("-"))
                found[int(number)] = stop - start
        for handle in Path(f"/proc/{process}/fd").iterdir():
            try:
                if str(handle.readlink()).startswith("/dev/shm/torch"):
                    found[handle.stat().st_ino] = handle.stat().st_blocks * 512
            except FileNotFoundError:  # closed meanwhile
                pass
    return sum(found.values())


def tokenize(captions: list[str]) -> torch.Tensor:
    return torch.zeros(len(captions), TOKENS, dtype=torch.int64)


def fill(communicator: Communicator, shards: str, config: Config) -> int:
    """Take a batch and keep it until the loader processes have prepared all that they may; the bytes then."""
    manifest = build_manifest(resolve_shards(shards), processes=1)
    order = GlobalOrder(manifest.starts, manifest.sizes, config.data.batch_size, 0)
    options = LoaderOptions(config.data.workers, config.data.prefetch)
    transform = train_transform(SIDE, 0.9, find_decoder("pil"))
    rank, size = communicator.rank, communicator.world_size
    batches = train_loader(manifest, order, transform, tokenize, rank=rank, world_size=size, steps=20, options=options)
    batch = next(batches)
    size_of_batch = sum(part.nbytes for part in batch[:4])
    enough, deadline = (WORKERS * PREFETCH + 1) * size_of_batch, time.monotonic() + LIMIT
    while (held := shared_bytes()) < enough and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)  # more than they may would come now
    return max(held, shared_bytes())


def test_two_ranks_hold_what_is_predicted(tmp_path: Path) -> None:
    shards, asked = write_pairs(tmp_path / "shards", [40, 40]), small()
    predicted = loader_memory(asked, ranks_of_node=2)
    held = run_ranks(2, fill, str(shards), asked.config)
    assert 0.8 * predicted.shared < min(held), "all but the second batch that training may hold"
    assert max(held) <= predicted.shared
    assert predicted.shared_of_node == 2 * predicted.shared


PIXELS = 3 * 224**2  # bytes of an image of 224 pixels
LARGE = ["--model.vision.image_size=224", "--data.workers=8", "--data.prefetch=4"]


def test_640_images_of_150_kb_on_eight_gpus() -> None:
    options = [*LARGE, "--data.batch_size=5120"]
    found = loader_memory(query(*options, "--data.val=", world_size=8, device="cuda"), ranks_of_node=8)
    assert found.shared == pytest.approx(32 * 640 * PIXELS, rel=0.01)
    assert found.shared_of_node / 1e9 == pytest.approx(24.7, abs=0.3)
    assert found.advice == "--shm-size=25g"
    assert found.private > 8 * 640 * PIXELS
    assert found.pinned == pytest.approx(34 * 2**27, rel=0.01), "96 MB take a block of 128 MB"
    evaluated = loader_memory(query(*options, world_size=8, device="cuda"), ranks_of_node=8)
    assert evaluated.shared == 2 * found.shared
    (line,) = found.lines()
    assert "4.57 GB of pinned memory" in line
    assert "(in a container --shm-size=25g)" in line
    on_cpu = loader_memory(query(*options, "--data.val=", world_size=8), ranks_of_node=8)
    assert (on_cpu.shared, on_cpu.pinned) == (34 * found.shared // 32, 0)


def test_a_large_batch_is_loaded_in_parts_and_held_once() -> None:
    """524,288 images of a rank: 79 GB pinned, and what is ready is bounded by parts of 134 MB."""
    options = [*LARGE, "--data.batch_size=4194304", "--data.micro_batch=2048"]
    found = loader_memory(query(*options, world_size=8, device="cuda"), ranks_of_node=8)
    batch = 524_288 * PIXELS
    assert found.shared < 2 * 32 * 140e6
    assert batch < found.pinned < batch + 10e9
    assert 600e9 < found.of_node < 850e9
    assert found.lines()[1] == "at most 5% of a batch is loaded while a step runs; data.prefetch raises it"
    one_pass = loader_memory(query(*LARGE, "--data.batch_size=4194304", world_size=8, device="cuda"), ranks_of_node=8)
    assert one_pass.pinned > 2 * batch


def test_without_loader_processes_nothing_is_shared() -> None:
    found = loader_memory(query("--data.workers=0"), ranks_of_node=8)
    assert found.of_node == 0
    assert found.lines() == ["none, batches are loaded in the training process (data.workers=0)"]
    pinned = loader_memory(query("--data.workers=0", device="cuda"), ranks_of_node=8)
    assert pinned.of_node == 8 * pinned.pinned > 0


def test_a_machine_with_less_shared_memory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    status = os.statvfs("/dev/shm")
    free = status.f_bavail * status.f_frsize
    assert memory_check._short_shared_memory(LoaderMemory(free // 2, 0, 2, ranks_of_node=1)) is None
    said = memory_check._short_shared_memory(LoaderMemory(free // 2, 0, 2, ranks_of_node=3))
    assert said is not None
    assert f"with --shm-size={-(-3 * (free // 2) // 10**9)}g, or lower data.workers" in said
    monkeypatch.setattr(memory_check, "SHARED_MEMORY", Path("/nowhere"))
    assert memory_check._short_shared_memory(LoaderMemory(2 * free, 0, 2, ranks_of_node=1)) is None
