"""Batches split into parts give the same training as whole batches, and a 65,536-pair step fits in 8 GB on a CPU."""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from small_runs import SMALL, TINY, TRAIN, records, start
from tars import jpeg, write_tar

from neuclip_ds.data import loader
from neuclip_ds.distributed.environment import RankEnvironment
from neuclip_ds.recipe import parse
from neuclip_ds.training.hooks import Hook
from neuclip_ds.training.trainer import Loop, StepResult, train

PAIRS, SHARDS, PICTURES = 65_536, 16, 256


class Losses(Hook):
    """Hook that records the loss and the samples of every step, and the number of parts of each batch."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, list[int]]] = []
        self.parts: set[int] = set()

    def on_batch(self, loop: Loop, batch: loader.RankBatch) -> None:
        self.parts.add(len(batch.pieces(slice(0, len(batch)))))

    def after_step(self, loop: Loop, result: StepResult) -> None:
        self.steps.append((result.loss, result.batch.index.tolist()))


def test_a_batch_loaded_in_parts_trains_like_a_batch_loaded_at_once(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--data.batch_size=8", "--data.micro_batch=2", "--data.workers=1", "--data.val="]
    options += ["--data.zero_shot=", "--max_steps=3", f"--data.train={shards}", f"--run.output_dir={tmp_path}"]
    found = []
    for name, limit in (("whole", loader.PART_BYTES), ("parts", 3 * 3 * 16**2)):
        monkeypatch.setattr(loader, "PART_BYTES", limit)
        hook = Losses()
        train(parse(["demo", *SMALL, *options, f"--run.name={name}"]).config, RankEnvironment(0, 0, 1), [hook])
        found.append(hook)
    assert [hook.parts for hook in found] == [{1}, {3}]
    assert found[0].steps == found[1].steps


def write_shards(folder: Path) -> Path:
    """Write shards that repeat a few pictures, which takes only seconds."""
    folder.mkdir()
    pictures = [jpeg(number) for number in range(PICTURES)]
    for shard in range(SHARDS):
        numbers = range(shard * PAIRS // SHARDS, (shard + 1) * PAIRS // SHARDS)
        pairs = ((number, pictures[number % PICTURES]) for number in numbers)
        members = ((f"{n:06d}.{kind}", data) for n, image in pairs for kind, data in _members(n, image))
        write_tar(folder / f"{shard:05d}.tar", members)
    return folder


def _members(number: int, image: bytes) -> list[tuple[str, bytes]]:
    return [("jpg", image), ("txt", f"picture {number % PICTURES}, number {number}".encode())]


@contextmanager
def peak_memory(pid: int) -> Iterator[list[int]]:
    """Yield a list whose only element is the peak memory (PSS) of a process and its children so far, in bytes."""
    peak, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            with suppress(psutil.Error):
                processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
                peak[0] = max(peak[0], sum(one.memory_full_info().pss for one in processes))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


@pytest.mark.slow
def test_a_step_of_65536_pairs_fits_in_8_gb(tmp_path: Path) -> None:
    options = [
        *TINY,
        "--objective.method=openclip",
        f"--data.train={write_shards(tmp_path / 'shards')}",
        f"--data.batch_size={PAIRS}",
        "--data.micro_batch=1024",
        "--data.workers=2",
        "--model.vision.image_size=32",
        f"--run.output_dir={tmp_path}",
        "--run.name=run",
        "--run.log_every=1",
        "--max_steps=1",
    ]
    (program,) = start(TRAIN, *options)
    with peak_memory(program.pid) as peak:
        done = program.wait(timeout=1200)
    assert done.returncode == 0, done.stderr
    lines = records(tmp_path / "run" / "metrics.jsonl")
    (line,) = [line for line in lines if "loss" in line]
    print(f"peak {peak[0] / 1e9:.2f} GB, loss {line['loss']:.4f}")
    assert line["skipped_steps"] == 0
    temperature = parse(options).config.objective.temperature.initial
    assert temperature is not None
    # similarities differ by at most 2; the pictures and most words repeat, so the loss may exceed log B
    assert 0 < line["loss"] < math.log(PAIRS) + 2 / temperature
    assert 0.2e9 < peak[0] < 8e9
