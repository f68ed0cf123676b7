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


def query(*options: str, world_size: int = 2) -> MemoryQuery:
    return MemoryQuery(parse(["demo", "--data.zero_shot=", *options]).config, world_size)


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


def test_640_images_of_150_kb_on_eight_gpus() -> None:
    options = ["--data.batch_size=5120", "--model.vision.image_size=224", "--data.workers=8", "--data.prefetch=4"]
    found = loader_memory(query(*options, "--data.val=", world_size=8), ranks_of_node=8)
    assert found.shared == pytest.approx(34 * 640 * 3 * 224**2, rel=0.01)
    assert found.shared_of_node / 1e9 == pytest.approx(26.2, abs=0.3)
    assert found.advice == "--shm-size=27g"
    assert found.private > 8 * 640 * 3 * 224**2
    evaluated = loader_memory(query(*options, world_size=8), ranks_of_node=8)
    assert evaluated.shared == pytest.approx(66 / 34 * found.shared)
    assert "(in a container --shm-size=27g)" in found.line()


def test_without_loader_processes_nothing_is_shared() -> None:
    found = loader_memory(query("--data.workers=0"), ranks_of_node=8)
    assert found.of_node == 0
    assert found.line().startswith("none, ")


def test_a_machine_with_less_shared_memory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    status = os.statvfs("/dev/shm")
    free = status.f_bavail * status.f_frsize
    assert memory_check._short_shared_memory(LoaderMemory(free // 2, 0, 2, ranks_of_node=1)) is None
    said = memory_check._short_shared_memory(LoaderMemory(free // 2, 0, 2, ranks_of_node=3))
    assert said is not None
    assert f"with --shm-size={-(-3 * (free // 2) // 10**9)}g, or lower data.workers" in said
    monkeypatch.setattr(memory_check, "SHARED_MEMORY", Path("/nowhere"))
    assert memory_check._short_shared_memory(LoaderMemory(2 * free, 0, 2, ranks_of_node=1)) is None
