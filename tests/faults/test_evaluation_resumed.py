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
from neuclip_ds.distributed.environment import read_environment
from neuclip_ds.evaluation.evaluator import Evaluator
from neuclip_ds.recipe import parse
from neuclip_ds.reporting.metrics import read_metrics
from neuclip_ds.training import trainer
from neuclip_ds.training.run_lock import LOCK

METRIC, BEST = "image_to_text_recall@1", "run/checkpoints"
EVERY = ("--run.evaluate_every=2", "--run.checkpoint_every=2", "--run.log_every=1", f"--run.best_metric={METRIC}")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    write_pairs(folder / "val", [9, 17])
    return str(write_pairs(folder / "shards", [13, 13]))


def _die_in(place: Any, name: str, number: int, options: list[str]) -> None:
    """Train, and kill this process when it calls the method `name` for the `number`-th time."""
    original, calls = getattr(place, name), 0

    def killed(*arguments: Any, **further: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **further)

    setattr(place, name, killed)
    trainer.train(parse(options).config, read_environment(), open_evaluation=Evaluator)


def kill_in(runs: Path, data: str, place: Any, name: str, number: int) -> None:
    options = [*training(runs, data, 6), *EVERY, f"--data.val={Path(data).parent / 'val'}"]
    process = fork(_die_in, place, name, number, options, variables=environment())
    process.join()
    assert process.exitcode == -signal.SIGKILL


def run(runs: Path, data: str, ranks: int = 1) -> str:
    done = train(runs, data, 6, *EVERY, f"--data.val={Path(data).parent / 'val'}", ranks=ranks)
    return done.stderr


def evaluations(runs: Path) -> dict[int, float]:
    records = [record for record in read_metrics(runs / "run" / "metrics.jsonl") if METRIC in record]
    assert len({record["step"] for record in records}) == len(records), "none is done twice"
    return {int(record["step"]): record[METRIC] for record in records}


@pytest.fixture(scope="module")
def whole(shards: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("whole")
    run(runs, shards)
    return runs


MOMENTS: dict[str, tuple[Any, str, int]] = {  # a method, and the call to kill; evaluations are at steps 0, 2, 4, 6
    "between checkpoint and evaluation": (Evaluator, "__call__", 2),
    "before the best is kept": (Checkpoints, "keep_best", 1),
    "before the last evaluation": (Evaluator, "__call__", 4),
}
SLOW = [("before the best is kept", 1), ("before the last evaluation", 2)]


@pytest.mark.parametrize(
    ("moment", "ranks"),
    [("between checkpoint and evaluation", 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_no_evaluation_is_lost(moment: str, ranks: int, whole: Path, shards: str, tmp_path: Path) -> None:
    kill_in(tmp_path, shards, *MOMENTS[moment])
    assert evaluations(tmp_path).keys() < evaluations(whole).keys() or moment.endswith("kept")
    run(tmp_path, shards, ranks)
    assert evaluations(tmp_path) == evaluations(whole)
    assert ranks > 1 or read_best(tmp_path / BEST) == read_best(whole / BEST) is not None


def test_a_finished_run_does_nothing_more(whole: Path, shards: str) -> None:
    def state() -> dict[str, tuple[int, bytes]]:
        files = [path for path in sorted(whole.rglob("*")) if path.is_file() and path.name != LOCK]
        return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    before = state()
    assert "is complete after 6 steps" in run(whole, shards)
    assert state() == before


@pytest.mark.slow
def test_bad_samples_of_all_starts_count(tmp_path: Path) -> None:
    bad = {index: {"jpg": b"none", "txt": b"a caption"} for index in (3, 11, 17, 25)}
    data = str(write_pairs(tmp_path / "shards", [16, 16], replace=bad))
    options = ("--run.log_every=1", "--data.max_bad_fraction=0.006")  # 6 of the first 1000 samples
    train(tmp_path, data, 4, *options)
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step_*")
    kept = read_meta(checkpoint)["data"]["hooks"]["WriteRecords"]
    assert (kept["seen"], sum(kept["causes"].values())) == (32, 4)
    done = train(tmp_path, data, 8, *options, code=2)
    assert "7 of " in done.stderr or "8 of " in done.stderr
    assert "data.max_bad_fraction=0.006" in done.stderr
