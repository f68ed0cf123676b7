"""If loader processes are killed or stopped, no sample is lost or repeated, and the results stay bit-identical."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forks import children_of
from sample_log import read_samples
from servers import files_server
from small_runs import TRAIN, records, start, train, training
from tars import assert_same, load_training, manifest_of, write_pairs

from neuclip_ds.data import worker_pool
from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.dataset import Batch
from neuclip_ds.data.images import EvalTransform, train_transform
from neuclip_ds.data.interleave import Interleave
from neuclip_ds.data.loader import LoaderOptions
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.data.worker_pool import PROCESS_NAME

OPTIONS = LoaderOptions(workers=2, prefetch=2, timeout=60)
Load = Callable[[LoaderOptions], Iterator[Batch]]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = write_pairs(tmp_path_factory.mktemp("pairs"), [20, 30, 14])
    return manifest_of(folder)


@pytest.fixture
def training_batches(manifest: Manifest) -> Load:
    order = GlobalOrder(manifest.starts, manifest.sizes, 4, 5)
    transform = train_transform(16, 0.5)
    return lambda options: load_training(manifest, order, transform, options, 40)


def compute(seconds: float) -> None:
    """Run Python code in the main thread, where a signal handler may raise an exception."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(100))


@contextmanager
def killing(parents: Callable[[], list[int]], seed: int, pause: float, age: float = 0) -> Iterator[list[int]]:
    """Kill loader processes of the parents at random moments during the block; yield the list of killed process IDs.

    Loaders younger than `age` seconds are spared, because a job that fails three times in a row ends a run.
    """
    draw, over, killed = random.Random(seed), threading.Event(), []
    seen: dict[int, float] = {}

    def run() -> None:
        while not over.wait(draw.uniform(0, pause)):
            now = time.monotonic()
            found = [pid for parent in parents() for pid in children_of(parent, PROCESS_NAME)]
            if workers := [pid for pid in found if now - seen.setdefault(pid, now) >= age]:
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


@pytest.mark.slow
def test_killed_workers_are_replaced_wherever_the_main_thread_is(
    training_batches: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed workers are replaced and no batch changes; the batches are pinned, as they are for a GPU."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())
    monkeypatch.setattr(worker_pool, "MAX_FAILURES", 50)
    expected = list(training_batches(replace(OPTIONS, workers=0)))
    found = []
    with killing(lambda: [os.getpid()], seed=16, pause=0.6) as killed:
        for batch in training_batches(replace(OPTIONS, pin_memory=True)):
            found.append(batch)
            compute(0.025)
    assert_same(found, expected)
    assert len(killed) >= 2


def test_a_stopped_worker_is_replaced(training_batches: Load, caplog: pytest.LogCaptureFixture) -> None:
    """The stopped worker has already announced batches whose memory it can no longer hand over."""
    batches = training_batches(replace(OPTIONS, timeout=2))
    found = [next(batches)]
    compute(0.5)
    os.kill(children_of(os.getpid(), PROCESS_NAME)[0], signal.SIGSTOP)
    began = time.monotonic()
    found += [next(batches) for _ in range(8)]
    assert time.monotonic() - began < 15
    batches.close()
    assert_same(found, list(training_batches(replace(OPTIONS, workers=0)))[:9])
    assert "Timed out after 2 s waiting for step" in caplog.text
    assert children_of(os.getpid(), PROCESS_NAME) == []


def what_was_trained(runs: Path) -> tuple[list[object], list[float]]:
    """Return the samples of every step and the losses of a run with `log_every=1`."""
    lines = records(runs / "run" / "metrics.jsonl")
    return list(read_samples(runs / "run" / "samples")), [line["loss"] for line in lines if "loss" in line]


@pytest.mark.slow
def test_a_run_with_killed_workers_equals_an_undisturbed_one(shards: Path, tmp_path: Path) -> None:
    options = ["--data.workers=2", "--run.log_every=1"]
    steps, ranks = 100, 2
    train(tmp_path / "calm", shards, steps, "--data.workers=0", "--run.log_every=1", ranks=ranks)
    seed = random.randrange(2**32)
    print(f"seed {seed}")

    programs = start(TRAIN, *training(tmp_path / "hit", shards, steps), *options, ranks=ranks)
    with killing(lambda: [program.pid for program in programs], seed, pause=0.4, age=0.8) as killed:
        done = [program.wait() for program in programs]
    assert [one.returncode for one in done] == [0] * ranks, [one.stderr for one in done]
    assert len(killed) >= 2
    assert sum(one.stderr.count("replacing a loader process") for one in done) >= 1
    assert what_was_trained(tmp_path / "hit") == what_was_trained(tmp_path / "calm")


def test_a_batch_is_waited_for_while_shards_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The four shards of a batch arrive one per second, which takes longer in total than the loader's timeout."""
    monkeypatch.setattr(worker_pool, "MAX_FAILURES", 1)
    folder = write_pairs(tmp_path / "pairs", [2, 2, 2, 2])
    local = manifest_of(folder)
    with files_server() as server:
        server.files, server.delay = {path.name: path.read_bytes() for path in folder.iterdir()}, 1
        slow = Manifest([replace(shard, path=server.url(Path(shard.path).name)) for shard in local.shards])
        order = GlobalOrder(slow.starts, slow.sizes, 4, 0, Interleave(4, 80_000))
        cache = ShardCache(tmp_path / "cache", 10**6)
        options = LoaderOptions(workers=1, timeout=2, cache=cache)
        (batch,) = load_training(slow, order, EvalTransform(16), options, 1)
    assert batch.valid.all()
