"""Loader processes that are killed or stopped at any moment: no sample is lost or doubled, no bit of a run changes."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from small_runs import demo_shards, start, train, training
from tars import tokenize, write_pairs

from neuclip_ds.data.build import build_manifest
from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.dataset import Batch
from neuclip_ds.data.interleave import Interleave
from neuclip_ds.data.loader import LoaderOptions, eval_loader, train_loader
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.data.shards import resolve_shards
from neuclip_ds.data.transforms import EvalTransform, train_transform
from neuclip_ds.errors import UserError
from neuclip_ds.reporting.sample_log import read_samples

OPTIONS = LoaderOptions(workers=2, prefetch=2, timeout=60, restarts=50)
Load = Callable[[LoaderOptions], Iterator[Batch]]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = write_pairs(tmp_path_factory.mktemp("pairs"), [20, 30, 14])
    return build_manifest(resolve_shards(str(folder)), processes=1)


@pytest.fixture
def training_batches(manifest: Manifest) -> Load:
    order = GlobalOrder(manifest.starts, manifest.sizes, 4, 5)
    transform = train_transform(16, 0.5)
    return lambda options: train_loader(manifest, order, transform, tokenize, steps=40, options=options)


@pytest.fixture
def evaluation(manifest: Manifest) -> Load:
    return lambda options: eval_loader(manifest, EvalTransform(16), tokenize, batch_size=2, options=options)


def compute(seconds: float) -> None:
    """Run Python code in the main thread, into which a signal's handler may raise."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(100))


def workers_of(parent: int) -> list[int]:
    """The loader processes of a process, which torch gives a name."""
    found = []
    for children in Path(f"/proc/{parent}/task").glob("*/children"):
        with suppress(OSError):  # it has ended meanwhile
            found += [int(pid) for pid in children.read_text().split()]
    return [pid for pid in found if _name(pid) == "pt_data_worker"]


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


@contextmanager
def killing(parents: Callable[[], list[int]], seed: int, pause: float) -> Iterator[list[int]]:
    """Kill loader processes of these processes at random moments during the block; yields those that were."""
    draw, over, killed = random.Random(seed), threading.Event(), []

    def run() -> None:
        while not over.wait(draw.uniform(0, pause)):
            if workers := [pid for parent in parents() for pid in workers_of(parent)]:
                with suppress(ProcessLookupError):
                    os.kill(victim := draw.choice(workers), signal.SIGKILL)
                    killed.append(victim)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


def assert_same(found: list[Batch], expected: list[Batch]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(getattr(ours, name), getattr(theirs, name)) for name in ("image", "tokens", "index"))


@pytest.fixture
def pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch start its thread that pins memory, as it does where there is an accelerator."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # torch's thread that pins
@pytest.mark.parametrize("kind", ["training", pytest.param("pinning", marks=pytest.mark.slow), "evaluation"])
def test_killed_workers_are_replaced_wherever_the_main_thread_is(kind: str, request: pytest.FixtureRequest) -> None:
    load: Load = request.getfixturevalue("evaluation" if kind == "evaluation" else "training_batches")
    expected = list(load(OPTIONS._replace(workers=0)))
    if kind == "pinning":
        request.getfixturevalue("pinning")
    found = []
    with killing(lambda: [os.getpid()], seed=len(kind), pause=0.8) as killed:
        for batch in load(OPTIONS._replace(pin_memory=kind == "pinning")):
            found.append(batch)
            compute(0.03)
    assert_same(found, expected)
    assert len(killed) >= 2


def test_a_stopped_worker_is_replaced(training_batches: Load, caplog: pytest.LogCaptureFixture) -> None:
    """It has already announced batches whose memory it cannot hand over any more."""
    batches = training_batches(OPTIONS._replace(timeout=2))
    found = [next(batches)]
    compute(0.5)
    os.kill(workers_of(os.getpid())[0], signal.SIGSTOP)
    began = time.monotonic()
    found += [next(batches) for _ in range(8)]
    assert time.monotonic() - began < 15
    batches.close()
    assert_same(found, list(training_batches(OPTIONS._replace(workers=0)))[:9])
    assert "Timed out after 2 s waiting for step" in caplog.text
    assert workers_of(os.getpid()) == []


def what_was_trained(runs: Path) -> tuple[list[object], list[float]]:
    lines = [json.loads(line) for line in (runs / "run" / "metrics.jsonl").read_text().splitlines()]
    return list(read_samples(runs / "run" / "samples")), [line["loss"] for line in lines if "loss" in line]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_with_killed_workers_equals_an_undisturbed_one(ranks: int, tmp_path: Path) -> None:
    data = str(demo_shards(tmp_path / "data", 64))
    options = ["--data.workers=2", "--data.restarts=50", "--run.log_every=1"]
    steps = 100
    calm = train(tmp_path / "calm", data, steps, "--data.workers=0", "--run.log_every=1", ranks=ranks)
    assert calm.returncode == 0, calm.stderr
    seed = random.randrange(2**32)
    print(f"seed {seed}")

    programs = start("train.py", *training(tmp_path / "hit", data, steps), *options, ranks=ranks)
    with killing(lambda: [program.pid for program in programs], seed, pause=0.4) as killed:
        done = [program.wait() for program in programs]
    assert [one.returncode for one in done] == [0] * ranks, [one.stderr for one in done]
    assert len(killed) >= 2
    assert sum(one.stderr.count("restarting the loader processes") for one in done) >= 1
    assert what_was_trained(tmp_path / "hit") == what_was_trained(tmp_path / "calm")


def test_a_batch_is_waited_for_while_shards_arrive(tmp_path: Path) -> None:
    """Four shards of a batch come in turn, one a second, which is more than the time-out in all."""
    folder = write_pairs(tmp_path / "pairs", [2, 2, 2, 2])
    local = build_manifest(resolve_shards(str(folder)), processes=1)
    slow = Manifest([shard._replace(path=f"pipe:sleep 1; cat {shard.path}") for shard in local.shards])
    order = GlobalOrder(slow.starts, slow.sizes, 4, 0, Interleave(4, 80_000))
    cache = ShardCache(tmp_path / "cache", 10**6)
    options = LoaderOptions(workers=1, timeout=2, restarts=0, cache=cache)
    (batch,) = train_loader(slow, order, EvalTransform(16), tokenize, steps=1, options=options)
    assert batch.valid.all()
    cache = ShardCache(tmp_path / "other", 10**6)
    stalled = Manifest([shard._replace(path="pipe:sleep 4321") for shard in local.shards])
    with pytest.raises(UserError, match="Timed out after 2 s waiting for step 0 of epoch 0 from 1 loader processes"):
        next(train_loader(stalled, order, EvalTransform(16), tokenize, steps=1, options=options._replace(cache=cache)))
