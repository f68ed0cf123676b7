"""Test signals in every phase of a run: one message, one exit code on all ranks, and no leftover processes or files."""

import os
import random
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from subprocess import PIPE, CompletedProcess, Popen

import numpy as np
import psutil
import pytest
from forks import alive, children_of, fork
from servers import files_server
from servers import wait_for as until
from small_runs import SMALL, TRAIN, call, ends, environment, is_connected, lines_in, start, training, wait_for
from tars import load_training

from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.images import EvalTransform
from neuclip_ds.data.loader import LoaderOptions
from neuclip_ds.data.manifest import Manifest, Shard
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.data.prefetch import Prefetcher, shards_ahead
from neuclip_ds.data.worker_pool import PROCESS_NAME
from neuclip_ds.distributed.stop_signals import deferring, raising_interrupted
from neuclip_ds.errors import Interrupted
from neuclip_ds.reporting.history import read_launches

ENDLESS = 1_000_000


def assert_stopped(done: list[CompletedProcess[str]], number: int) -> str:
    """Check that all ranks have the signal's exit code and that one message reports it; return their standard error."""
    printed = "".join(rank.stderr for rank in done)
    assert [rank.returncode for rank in done] == [128 + number] * len(done), printed
    assert "Traceback" not in printed
    assert printed.count(f"by {signal.Signals(number).name}; to continue, run the same command again.") == 1, printed
    return printed


def wait_until_ended(pids: list[int]) -> None:
    until(lambda: not any(map(alive, pids)))


@pytest.mark.parametrize(("ranks", "number"), [(1, signal.SIGINT), (2, signal.SIGTERM)])
def test_a_signal_during_training_saves_a_checkpoint(ranks: int, number: int, shards: Path, tmp_path: Path) -> None:
    programs = start(TRAIN, *training(tmp_path, shards, ENDLESS), "--run.log_every=2", ranks=ranks)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: lines_in(metrics) > 2, programs)
    os.kill(programs[-1].pid, number)
    printed = assert_stopped(ends(programs), number)
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step_*")
    assert f"Stopped after step {int(checkpoint.name[5:])} by" in printed
    assert "Stopped after step" in (tmp_path / "run" / "log.txt").read_text()
    (launch,) = read_launches(tmp_path / "run")
    assert launch.last_step == int(checkpoint.name[5:])
    assert f"<p>{launch.last_step} steps in 0:" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_hangup_stops_the_program_unless_it_is_ignored_as_under_nohup(is_ignored: bool) -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    stopped = False
    try:
        with raising_interrupted():
            os.kill(os.getpid(), signal.SIGHUP)
    except Interrupted:
        stopped = True
    finally:
        signal.signal(signal.SIGHUP, former)
    assert stopped != is_ignored


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_while_the_interpreter_shuts_down_changes_nothing(number: int) -> None:
    program = """
import atexit, sys, time

def slow_exit():
    print("exiting", flush=True)
    time.sleep(0.3)

atexit.register(slow_exit)  # as libraries do, before the command runs
from neuclip_ds.cli.main import main
main(["unknown-command"])
"""
    with Popen([sys.executable, "-c", program], stdout=PIPE, stderr=PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "exiting\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors.startswith("error: ")
    assert "Traceback" not in errors


def test_a_second_signal_ends_the_run_at_once(shards: Path, tmp_path: Path) -> None:
    (program,) = start(TRAIN, *training(tmp_path, shards, ENDLESS), "--run.log_every=1000000")
    log = tmp_path / "run" / "log.txt"
    wait_for(lambda: log.is_file() and "step 1/" in log.read_text(), [program])  # step 1 logs and checks for signals
    program.terminate()
    time.sleep(1.2)
    assert program.running, "it waits for the next step that logs"
    program.terminate()
    assert ends([program])[0].returncode == -signal.SIGTERM


@pytest.mark.slow
def test_a_kill_or_a_signal_during_rendering_leaves_no_process_or_file(tmp_path: Path) -> None:
    """A single rank is killed; then rank 0 of two gets a signal while rank 1 waits. No process or file remains."""
    cache, options = tmp_path / ".cache", ["demo", *SMALL, "--run.output_dir=runs", "--run.name=run"]
    before: set[Path] = set()

    def rendering() -> set[Path]:
        with suppress(FileNotFoundError):  # the second launch removes files that the first left
            return {path.parents[1] for path in cache.glob(".demo.*.partial/*/*.tar")} - before
        return set()

    for ranks in (1, 2):
        programs = start(TRAIN, *options, folder=tmp_path, ranks=ranks)
        wait_for(rendering, programs)
        helpers = [pid for program in programs for pid in children_of(program.pid)]
        partial_sets = set(cache.glob(".demo.*.partial"))
        assert helpers and len(partial_sets) == 1 and not partial_sets & before, "the next start clears what was left"
        if ranks == 1:
            os.kill(programs[0].pid, signal.SIGKILL)
            before = partial_sets
        else:
            programs[0].terminate()
            assert_stopped(ends(programs), signal.SIGTERM)
        wait_until_ended(helpers)
    assert not list(cache.iterdir())


def load_a_shard_that_never_comes(folder: Path, urls: list[str]) -> None:
    """Start a loader process and a prefetching process, which wait for shards that do not arrive."""
    shards = [Shard(path=url, start=8 * number, n=8, bytes=10_000) for number, url in enumerate(urls)]
    order = GlobalOrder(np.array([0, 8]), np.array([8, 8]), 4)
    cache = ShardCache(folder, 10**6, timeout=100)
    options = LoaderOptions(workers=1, cache=cache)
    requests = partial(shards_ahead, order, 0, 0, [slice(0, 4)])
    with Prefetcher(cache, requests, shards, begin=0, end=4, ahead=4):
        next(load_training(Manifest(shards), order, EvalTransform(8), options, 4))


def test_a_kill_during_a_download_leaves_no_process(tmp_path: Path) -> None:
    with files_server() as server:
        server.files = {"0.tar": bytes(10_000), "1.tar": bytes(10_000)}
        server.gate.clear()
        urls = [server.url(name) for name in server.files]
        process = fork(load_a_shard_that_never_comes, tmp_path, urls, variables=environment())
        until(lambda: len(list((tmp_path / "fetching").glob("*/*"))) == 2)
        helpers = children_of(process.pid)
        process.kill()
        assert len(helpers) >= 2, "loader and prefetcher"
        wait_until_ended(helpers)
        server.gate.set()
        ShardCache(tmp_path, 10**6).path(urls[0], 10_000)
    assert not list((tmp_path / "fetching").iterdir()), "the next fetch removes what is left"


def scanners(parent: int) -> list[int]:
    """Return the spawned processes of a program, but not Python's resource tracker, which is also a child."""
    spawned = []
    for pid in children_of(parent):
        with suppress(OSError):  # the process may end in the meantime
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                spawned.append(pid)
    return spawned


def test_a_signal_during_a_scan_leaves_no_process_or_file(tmp_path: Path) -> None:
    """The scan hangs in separate processes, because the storage does not respond."""
    shards = tmp_path / "shards"
    shards.mkdir()
    for number in range(16):
        os.mkfifo(shards / f"{number:05d}.tar")
    (program,) = start(TRAIN, *training(tmp_path, str(shards), 2))
    wait_for(lambda: len(scanners(program.pid)) == 2, [program])
    helpers = scanners(program.pid)
    time.sleep(0.5)
    program.terminate()
    assert_stopped(ends([program]), signal.SIGTERM)
    assert [pid for pid in helpers if alive(pid)] == []
    assert not (tmp_path / "run").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["shards"]


class Finalized:
    """Object that sends its process a signal during the object's finalization, when Python ignores exceptions."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        sum(range(1000))


def test_a_signal_in_a_finalizer_is_neither_lost_nor_reported_as_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Interrupted), raising_interrupted():
        Finalized()
        with deferring():
            pass
    assert capfd.readouterr().err == ""


def test_a_signal_during_an_evaluation_ends_the_run_without_scores(shards: Path, tmp_path: Path) -> None:
    """The evaluation hangs, because its shard does not arrive; its loader process has also been stopped.

    Only the signal can end the run: the loaders may wait for longer than the test.
    """
    manifest = str(tmp_path / "val")
    checkpoints = tmp_path / "run" / "checkpoints"
    with files_server() as server:
        (shard,) = (shards.parent / "val").glob("*.tar")
        server.files = {shard.name: shard.read_bytes()}
        call("tools/build_manifest.py", manifest, server.url(shard.name))
        gets_before = server.gets.total()
        server.gate.clear()
        options = [f"--data.val={manifest}", "--data.workers=1", "--run.evaluate_every=3"]
        options += [f"--data.cache_dir={tmp_path / 'cache'}", "--data.cache_gb=1", "--data.timeout=1000"]
        (program,) = start(TRAIN, *training(tmp_path, shards, ENDLESS), *options)
        wait_for(lambda: server.gets.total() > gets_before, [program])
        loaders = children_of(program.pid, PROCESS_NAME)
        worker = max(loaders, key=lambda pid: psutil.Process(pid).create_time())
        os.kill(worker, signal.SIGSTOP)
        wait_for(lambda: list(checkpoints.glob("step_*")), [program])
        program.terminate()
        assert_stopped(ends([program]), signal.SIGTERM)
    assert len(loaders) == 2, "one of the training, and one of the evaluation"
    assert not alive(worker)
    assert (checkpoints / "step_000000003").is_dir()
    assert "recall" not in (tmp_path / "run" / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_a_signal_at_any_time_ends_all_ranks_with_one_exit_code(shards: Path, tmp_path: Path) -> None:
    """At any time from the first import to the report, a signal to one rank ends all ranks with the same exit code."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    options = [f"--data.val={shards.parent / 'val'}", "--run.evaluate_every=5"]
    length = 8.0
    for number in range(16):
        runs = tmp_path / str(number)
        programs = start("train.py", *training(runs, shards, 20), *options, "--data.workers=1", ranks=1 + number % 2)
        started = time.monotonic()
        time.sleep(draw.uniform(0.5, length))
        signaled = [draw.choice(programs)] if is_connected(programs[0]) else programs
        number = draw.choice([signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
        if not all(program.running for program in programs):
            length = time.monotonic() - started
        for program in signaled:
            if program.running:
                os.kill(program.pid, number)
        done = ends(programs)
        printed = "".join(rank.stderr for rank in done)
        assert "Traceback" not in printed, printed
        codes = {rank.returncode for rank in done}
        assert codes in ({0}, {128 + number}), printed
        lines = printed.count(f"by {signal.Signals(number).name}; to continue, run the same command again.")
        assert codes == {0} or 1 <= lines <= len(signaled), printed
