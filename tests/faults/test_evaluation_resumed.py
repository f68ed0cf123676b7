"""A resumed run repeats an interrupted evaluation and keeps its count of bad samples; a finished run does nothing."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from forks import fork
from small_runs import environment, train, training
from tars import write_pairs

from neuclip_ds.checkpoint.checkpoints import Checkpoints, read_best
from neuclip_ds.checkpoint.integrity import read_meta
from neuclip_ds.distributed.environment import RankEnvironment
from neuclip_ds.evaluation.evaluator import Evaluator
from neuclip_ds.recipe import parse
from neuclip_ds.reporting.metrics import read_metrics
from neuclip_ds.training import trainer
from neuclip_ds.training.run_lock import LOCK

STEPS = 4
METRIC = "image_to_text_recall@1"
EVALUATED_STEPS = [0, 2, 4]
CHECKPOINTS = "run/checkpoints"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of training shards, which is next to the folder of validation shards."""
    folder = tmp_path_factory.mktemp("data")
    write_pairs(folder / "val", [9, 17])
    return str(write_pairs(folder / "shards", [13, 13]))


def evaluating(data: str) -> list[str]:
    """Return the options of a run that saves a checkpoint and evaluates every two steps."""
    return [
        "--run.evaluate_every=2",
        "--run.checkpoint_every=2",
        "--run.log_every=1",
        f"--run.best_metric={METRIC}",
        f"--data.val={Path(data).parent / 'val'}",
    ]


def train_here(runs: Path, data: str) -> None:
    """Train the run, or resume it, in this process."""
    config = parse([*training(runs, data, STEPS), *evaluating(data)]).config
    trainer.train(config, RankEnvironment(0, 0, 1))


def _train_until_killed(runs: Path, data: str, owner: type, method: str, fatal_call: int) -> None:
    """Train, and kill this process when it calls a method for the `fatal_call`-th time."""
    original = getattr(owner, method)
    calls = 0

    def kill_or_call(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fatal_call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)

    setattr(owner, method, kill_or_call)
    train_here(runs, data)


def evaluations(runs: Path) -> dict[int, float]:
    """Return the recall by step, after checking that no evaluation was recorded twice."""
    records = [record for record in read_metrics(runs / "run" / "metrics.jsonl") if METRIC in record]
    recalls = {int(record["step"]): record[METRIC] for record in records}
    assert len(recalls) == len(records)
    return recalls


@pytest.fixture(scope="module")
def uninterrupted(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("uninterrupted")
    train_here(runs, data)
    return runs


@pytest.mark.parametrize(
    ("owner", "method", "fatal_call", "evaluated_steps", "ranks"),
    [
        pytest.param(Evaluator, "__call__", 2, [0], 1, id="between checkpoint and evaluation"),
        pytest.param(Checkpoints, "keep_best", 1, [0, 2], 1, id="before the best is kept", marks=pytest.mark.slow),
        pytest.param(Evaluator, "__call__", 3, [0, 2], 2, id="before the last evaluation", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_that_resumes_has_every_evaluation_once(
    owner: type,
    method: str,
    fatal_call: int,
    evaluated_steps: list[int],
    ranks: int,
    uninterrupted: Path,
    data: str,
    tmp_path: Path,
) -> None:
    process = fork(_train_until_killed, tmp_path, data, owner, method, fatal_call, variables=environment())
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert list(evaluations(tmp_path)) == evaluated_steps
    if ranks == 1:
        train_here(tmp_path, data)
    else:
        train(tmp_path, data, STEPS, *evaluating(data), ranks=ranks)
    assert list(evaluations(uninterrupted)) == EVALUATED_STEPS
    assert evaluations(tmp_path) == evaluations(uninterrupted)
    if ranks == 1:
        best = read_best(tmp_path / CHECKPOINTS)
        assert best is not None
        assert best == read_best(uninterrupted / CHECKPOINTS)


def test_a_finished_run_that_starts_again_changes_no_file(
    uninterrupted: Path, data: str, caplog: pytest.LogCaptureFixture
) -> None:
    def files() -> dict[str, tuple[int, bytes]]:
        paths = [path for path in sorted(uninterrupted.rglob("*")) if path.is_file() and path.name != LOCK]
        return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}

    before = files()
    train_here(uninterrupted, data)
    assert f"is complete after {STEPS} steps" in caplog.text
    assert files() == before


@pytest.mark.slow
def test_a_resumed_run_counts_the_bad_samples_of_all_its_starts(tmp_path: Path) -> None:
    bad = {index: {"jpg": b"none", "txt": b"a caption"} for index in (3, 11, 17, 25)}
    data = str(write_pairs(tmp_path / "shards", [16, 16], replace=bad))
    options = ("--run.log_every=1", "--data.max_bad_fraction=0.006")  # 6 of the first 1000 samples
    train(tmp_path, data, 4, *options)
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step_*")
    counts = read_meta(checkpoint)["data"]["hooks"]["WriteRecords"]
    assert (counts["seen"], sum(counts["causes"].values())) == (32, 4)
    resumed = train(tmp_path, data, 8, *options, code=2)
    assert "7 of " in resumed.stderr or "8 of " in resumed.stderr
    assert "data.max_bad_fraction=0.006" in resumed.stderr
