"""Signals in every phase of a run: one line, one exit code on all ranks, a checkpoint, nothing left behind."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
from forks import Program, fork
from small_runs import SMALL, demo_shards, environment, start, training
from tars import tokenize

import neuclip_ds
from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.children import killed_with_parent
from neuclip_ds.data.loader import LoaderOptions, train_loader
from neuclip_ds.data.manifest import Manifest, Shard
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.data.prefetch import Prefetcher
from neuclip_ds.data.transforms import EvalTransform
from neuclip_ds.distributed.stop_signals import STOP_SIGNALS, raising_interrupted
from neuclip_ds.errors import Interrupted

ENDLESS = 1_000_000


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(demo_shards(tmp_path_factory.mktemp("data"), 64))


def wait_for(condition: Callable[[], object], programs: list[Program]) -> None:
    limit = time.monotonic() + 120
    while not condition():
        assert all(program.running for program in programs), [program.printed() for program in programs]
        assert time.monotonic() < limit, "too slow"
        time.sleep(0.01)


def ends(programs: list[Program]) -> list[CompletedProcess[str]]:
    try:
        return [program.wait(60) for program in programs]
    finally:
        for program in programs:
            program.kill()


def assert_stopped(done: list[CompletedProcess[str]], number: int) -> str:
    """All ranks have the signal's exit code and one of them has said so; returns what they said."""
    said = "".join(one.stderr for one in done)
    assert [one.returncode for one in done] == [128 + number] * len(done), said
    assert "Traceback" not in said
    assert said.count(f"by {signal.Signals(number).name}; the same command resumes.") == 1, said
    return said


@pytest.mark.parametrize(
    ("ranks", "number"),
    [(1, signal.SIGINT), (1, signal.SIGUSR1), (2, signal.SIGTERM)],
)
def test_a_signal_in_the_loop_saves(ranks: int, number: int, data: str, tmp_path: Path) -> None:
    programs = start("train.py", *training(tmp_path, data, ENDLESS), "--run.log_every=2", ranks=ranks)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.is_file() and metrics.read_text().count("\n") > 2, programs)
    os.kill(programs[-1].pid, number)
    said = assert_stopped(ends(programs), number)
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step_*")
    assert f"Stopped after step {int(checkpoint.name[5:])} by" in said
    assert "Stopped after step" in (tmp_path / "run" / "log.txt").read_text()


def test_a_second_signal_does_not_wait(data: str, tmp_path: Path) -> None:
    (program,) = start("train.py", *training(tmp_path, data, ENDLESS), "--run.log_every=1000000")
    log = tmp_path / "run" / "log.txt"
    wait_for(lambda: log.is_file() and "step 1/" in log.read_text(), [program])  # step 1 logs, and looks for signals
    program.terminate()
    time.sleep(1.2)
    assert program.running, "it waits for the next step that logs"
    program.terminate()
    assert ends([program])[0].returncode == -signal.SIGTERM


def children_of(parent: int) -> list[int]:
    """All living descendants of a process."""
    found = []
    for children in Path(f"/proc/{parent}/task").glob("*/children"):
        with suppress(OSError):  # it has ended meanwhile
            found += [int(pid) for pid in children.read_text().split()]
    return found + [further for pid in found for further in children_of(pid)]


SLOW = pytest.mark.slow


@SLOW
@pytest.mark.parametrize("told", [0, 1, None])
def test_a_signal_while_the_demo_is_rendered(told: int | None, tmp_path: Path) -> None:
    """Told are one of two ranks (rank 1 only waits for rank 0), or both; nothing is left."""
    options = ["demo", *SMALL, "--run.folder=runs", "--run.name=run"]
    programs = start("train.py", *options, folder=tmp_path, ranks=2)
    cache = tmp_path / ".cache"
    wait_for(lambda: list(cache.glob("demo.*.partial/train/*.tar")), programs)
    helpers = [pid for program in programs for pid in children_of(program.pid)]
    for program in programs if told is None else [programs[told]]:
        program.terminate()
    assert_stopped(ends(programs), signal.SIGTERM)
    assert len(helpers) >= 2
    time.sleep(1)
    assert [pid for pid in helpers if alive(pid)] == []
    assert told == 1 or not list(cache.iterdir())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_a_kill_while_the_demo_is_rendered_leaves_no_process(tmp_path: Path) -> None:
    options = ["demo", *SMALL, "--run.folder=runs", "--run.name=run"]
    cache = tmp_path / ".cache"

    def rendering() -> tuple[Program, list[Path]]:
        (program,) = start("train.py", *options, folder=tmp_path)
        before = set(cache.glob("demo.*.partial"))
        wait_for(lambda: {path.parents[1] for path in cache.glob("demo.*.partial/*/*.tar")} - before, [program])
        return program, list(cache.glob("demo.*.partial"))

    program, first = rendering()
    helpers = children_of(program.pid)
    os.kill(program.pid, signal.SIGKILL)
    time.sleep(2)
    assert helpers
    assert [pid for pid in helpers if alive(pid)] == []
    assert all(path.is_dir() for path in first)
    program, second = rendering()
    assert len(second) == 1 and second != first, "the next start has removed what was left"
    program.terminate()
    assert_stopped(ends([program]), signal.SIGTERM)
    assert not list(cache.iterdir())


def run_a_program_that_never_ends() -> None:
    subprocess.run(["sleep", "4321"], preexec_fn=killed_with_parent())


def test_a_kill_of_a_tool_ends_the_program_that_it_runs() -> None:
    process = fork(run_a_program_that_never_ends, variables=environment())
    assert process.pid is not None
    limit = time.monotonic() + 60
    while not (helpers := children_of(process.pid)) and time.monotonic() < limit:
        time.sleep(0.05)
    assert helpers
    process.kill()
    time.sleep(1)
    assert [pid for pid in helpers if alive(pid)] == []


def load_a_shard_that_never_comes(folder: Path) -> None:
    """Have a loader process and the prefetching process fetch, each by a command."""
    shards = [Shard(f"pipe:sleep 4321 | cat # {number}", 8 * number, 8, 10_000) for number in range(2)]
    order = GlobalOrder(np.array([0, 8]), np.array([8, 8]), 4)
    cache = ShardCache(folder, 10**6, timeout=100)
    options = LoaderOptions(workers=1, cache=cache)
    requests = partial(order.shards_ahead, 0, 0, [slice(0, 4)])
    with Prefetcher(cache, requests, shards, begin=0, end=4, ahead=4):
        next(train_loader(Manifest(shards), order, EvalTransform(8), tokenize, steps=4, options=options))


def test_a_kill_while_shards_are_fetched_leaves_no_process(tmp_path: Path) -> None:
    process = fork(load_a_shard_that_never_comes, tmp_path, variables=environment())
    limit = time.monotonic() + 60
    while len(list((tmp_path / "shards").glob(".*.part"))) < 2:
        assert process.exitcode is None
        assert time.monotonic() < limit
        time.sleep(0.05)
    helpers = children_of(process.pid)
    process.kill()
    time.sleep(2)
    assert len(helpers) >= 2 + 2 * 3, "loader, prefetcher, and for each fetch bash, its guard and the command"
    assert [pid for pid in helpers if alive(pid)] == []
    ShardCache(tmp_path, 10**6)
    assert not list((tmp_path / "shards").iterdir())


def train_as_a_library(data: str, runs: Path) -> None:
    """Print whether the handlers are those of before, after a run in the main thread and one in another thread."""
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    options = {option.partition("=")[0][2:]: option.partition("=")[2] for option in training(runs, data, 2)[1:]}
    options = {name: json.loads(value) if value[:1] in "[{" and value else value for name, value in options.items()}
    neuclip_ds.train("demo", **options)
    thread = threading.Thread(target=lambda: neuclip_ds.train("demo", **{**options, "run.name": "second"}))
    thread.start()
    thread.join()
    after = [signal.getsignal(number) for number in STOP_SIGNALS]
    (runs / "found").write_text(f"{before == after} {(runs / 'second' / 'checkpoints').is_dir()}")


@pytest.mark.slow
def test_training_as_a_library_restores_the_handlers(data: str, tmp_path: Path) -> None:
    process = fork(train_as_a_library, data, tmp_path, variables=environment())
    process.join(60)
    assert (tmp_path / "found").read_text() == "True True"


def test_a_signal_while_shards_are_scanned(data: str, tmp_path: Path) -> None:
    """The scan hangs in a process of its own, as the storage does."""
    shards = tmp_path / "shards"
    shards.mkdir()
    for number in range(2):
        os.mkfifo(shards / f"{number:05d}.tar")
    (program,) = start("train.py", *training(tmp_path, str(shards), 2))
    wait_for(lambda: len(children_of(program.pid)) >= 2, [program])
    helpers = children_of(program.pid)
    time.sleep(0.5)
    program.terminate()
    assert_stopped(ends([program]), signal.SIGTERM)
    assert [pid for pid in helpers if alive(pid)] == []
    assert not (tmp_path / "run").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["shards"]


class Finalized:
    """Receives a signal while it is finalized, where Python drops exceptions."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        sum(range(1000))


def test_a_signal_in_a_finalizer_is_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Interrupted), raising_interrupted():
        Finalized()
        time.sleep(5)
    assert capsys.readouterr().err == ""


def test_a_signal_in_the_evaluation(data: str, tmp_path: Path) -> None:
    """The evaluation hangs, as its loader process has been stopped."""
    options = [f"--data.val={Path(data).parent / 'val'}", "--data.workers=1", "--run.evaluate_every=3"]
    (program,) = start("train.py", *training(tmp_path, data, ENDLESS), *options)
    checkpoints = tmp_path / "run" / "checkpoints"
    workers: list[int] = []

    def stopped_in_the_evaluation() -> bool:
        found = [pid for pid in children_of(program.pid) if _name(pid) == "pt_data_worker"]
        if len(found) < 2:
            return False
        workers.append(max(found))
        os.kill(workers[0], signal.SIGSTOP)
        return True

    wait_for(stopped_in_the_evaluation, [program])
    wait_for(lambda: list(checkpoints.glob("step_*")), [program])
    time.sleep(0.5)
    began = time.monotonic()
    program.terminate()
    assert_stopped(ends([program]), signal.SIGTERM)
    assert time.monotonic() - began < 10
    assert not alive(workers[0])
    assert (checkpoints / "step_000000003").is_dir()
    assert "recall" not in (tmp_path / "run" / "metrics.jsonl").read_text()


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_at_any_moment(ranks: int, data: str, tmp_path: Path) -> None:
    """From the first import to the report: a signal to one rank ends all ranks with its code and one line."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    options = [f"--data.val={Path(data).parent / 'val'}", "--run.report=true", "--run.evaluate_every=5"]
    length = 8.0
    for number in range(12):
        runs = tmp_path / str(number)
        programs = start("train.py", *training(runs, data, 20), *options, "--data.workers=1", ranks=ranks)
        began = time.monotonic()
        time.sleep(draw.uniform(0.5, length))
        # before they are connected, ranks wait five minutes for a missing one, unless the launcher tells them too
        connected = " INFO " in programs[0].printed()[1]
        told = [draw.choice(programs)] if connected else programs
        number = draw.choice([signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
        if not all(program.running for program in programs):
            length = time.monotonic() - began
        for program in told:
            os.kill(program.pid, number) if program.running else None
        done = ends(programs)
        said = "".join(one.stderr for one in done)
        assert "Traceback" not in said, said
        codes = {one.returncode for one in done}
        assert codes in ({0}, {128 + number}), said
        lines = said.count(f"by {signal.Signals(number).name}; the same command resumes.")
        assert codes == {0} or 1 <= lines <= len(told), said
