"""Checkpoints that are written while training continues: equal to those in the foreground, and safe to be killed in."""

import os
import random
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import fork
from ranks import run_ranks
from small_checkpoints import DATA, FACTS, PlainEngine, fresh, keeper, trained
from small_runs import TRAIN, lines_in, newest_checkpoint, start, tensors, train, training, wait_for

from neuclip_ds.checkpoint import checkpoints as module
from neuclip_ds.checkpoint.integrity import verify
from neuclip_ds.distributed.communicator import Communicator

EVERY = ("--run.checkpoint_every=1", "--run.log_every=1", "--run.background_saves=true", "--run.keep_checkpoints=3")


def _slowly(write: Any) -> Any:
    def slow(*arguments: Any) -> Any:
        time.sleep(0.3)
        return write(*arguments)

    return slow


def test_it_holds_the_state_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "write_files", _slowly(module.write_files))
    checkpoints, engine = keeper(tmp_path, background=True), PlainEngine(1.0)
    path = checkpoints.save(1, engine, trained(), FACTS, DATA)
    with torch.no_grad():
        engine.module.weight += 1.0  # as the next steps do
    assert not checkpoints.publish() and not path.exists()
    time.sleep(0.1)
    assert checkpoints.saving
    checkpoints.save(2, engine, trained(), FACTS, DATA)
    assert path.is_dir(), "a second one waits for the first"
    assert checkpoints.finish() and not checkpoints.finish()
    read = PlainEngine()
    for step, value in ((1, 1.0), (2, 2.0)):
        checkpoints.load(path.with_name(f"step_{step:09d}"), read, fresh())
        assert read.value == value


def _publish(communicator: Communicator, folder: Path) -> list[bool]:
    """Whether each of two calls has published it; rank 1 takes longer to write."""
    if communicator.rank == 1:
        module.write_files = _slowly(module.write_files)
    checkpoints = keeper(folder, communicator=communicator, background=True)
    checkpoints.save(1, PlainEngine(1.0), fresh(communicator), FACTS, DATA)
    first = checkpoints.publish()
    time.sleep(1.0)
    return [first, checkpoints.publish()]


def test_it_is_published_when_all_ranks_are_done(tmp_path: Path) -> None:
    assert run_ranks(2, _publish, tmp_path) == [[False, True]] * 2
    verify(tmp_path / "checkpoints" / "step_000000001")


def _killed_while_saving(folder: str, delay: float) -> None:
    checkpoints = keeper(Path(folder), background=True)
    checkpoints.save(1, PlainEngine(1.0), trained(), FACTS, DATA)
    checkpoints.finish()
    checkpoints.save(2, PlainEngine(2.0), trained(), FACTS, DATA)
    time.sleep(delay)
    checkpoints.publish()
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_at_any_moment(tmp_path: Path) -> None:
    rng = random.Random(5)
    for number in range(10):
        folder = tmp_path / str(number)
        folder.mkdir()
        process = fork(_killed_while_saving, str(folder), rng.uniform(0, 0.02), variables=dict(os.environ))
        process.join()
        assert process.exitcode == -signal.SIGKILL
        newest = keeper(folder).newest()
        assert newest is not None and newest.name in ("step_000000001", "step_000000002")


def _reached(metrics: Path, steps: int) -> bool:
    return lines_in(metrics) >= steps


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_run_is_bit_equal(ranks: int, shards: Path, tmp_path: Path) -> None:
    """In the foreground, in the background, and killed twice at a random moment and resumed."""
    for name, options in (("front", EVERY[:2]), ("back", EVERY)):
        assert train(tmp_path / name, shards, 12, *options, ranks=ranks).returncode == 0
    rng, metrics = random.Random(ranks), tmp_path / "killed" / "run" / "metrics.jsonl"
    for _ in range(2):
        programs = start(TRAIN, *training(tmp_path / "killed", shards, 12), *EVERY, ranks=ranks)
        wait_for(partial(_reached, metrics, rng.randrange(1, 10)), programs)
        for program in programs:
            program.kill()
    assert train(tmp_path / "killed", shards, 12, *EVERY, ranks=ranks).returncode == 0
    newest = [newest_checkpoint(tmp_path / name) for name in ("front", "back", "killed")]
    assert {path.name for path in newest} == {"step_000000012"}
    assert tensors(newest[0]) == tensors(newest[1]) == tensors(newest[2])
