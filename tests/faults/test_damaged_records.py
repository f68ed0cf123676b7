"""A run resumes although any file next to its checkpoints is torn, garbled or edited."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from small_checkpoints import DATA, FACTS, PlainEngine, keeper, trained
from small_runs import newest_checkpoint, tensors, train

from neuclip_ds.checkpoint.checkpoints import Best, read_best
from neuclip_ds.checkpoint.integrity import sealed
from neuclip_ds.reporting.metrics import read_metrics

OPTIONS = [
    "--data.val=10",
    "--run.best_metric=image_to_text_recall@1",
    "--run.evaluate_every=2",
    "--run.checkpoint_every=1",
    "--run.keep_checkpoints=2",
    "--run.log_every=1",
]


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: 2 * len(content) // 3])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": cut,
    "empty": lambda path: path.write_bytes(b""),
    "garbled": lambda path: path.write_bytes(b"\xff\xfe[1,\n" * 3),
    "edited": lambda path: path.write_text('{"step": null, "index": "a", "indices": 3}\n{"step": 1, "loss": [1]}\n'),
    "lost": lambda path: path.unlink(),
}
BOTH_KINDS = [
    "cut",
    pytest.param("edited"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("empty", "garbled")),
]


@pytest.fixture(scope="module")
def stopped(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that has trained 4 of 6 steps."""
    runs = tmp_path_factory.mktemp("stopped")
    train(runs, shards, 4, *OPTIONS)
    for name in ("events.jsonl", "bad_samples.jsonl"):
        (runs / "run" / name).write_text(
            '{"step": 1, "rank": 0, "kind": "k", "message": "m", "indices": [], "index": 1}\n'
        )
    return runs


@pytest.mark.parametrize("damage", BOTH_KINDS)
def test_a_run_resumes_although_all_files_next_to_its_checkpoints_are_damaged(
    damage: str, stopped: Path, shards: Path, tmp_path: Path
) -> None:
    shutil.copytree(stopped, tmp_path / "runs")
    run = tmp_path / "runs" / "run"
    files = [path for path in run.rglob("*") if path.is_file() and not path.is_relative_to(run / "checkpoints")]
    assert len(files) > 8
    for path in [*files, run / "checkpoints" / "best.json"]:
        DAMAGES[damage](path)
    done = train(tmp_path / "runs", shards, 6, *OPTIONS)
    assert ", 4 of 6 steps done" in done.stderr
    assert "Traceback" not in done.stderr
    assert newest_checkpoint(tmp_path / "runs").name == "step_000000006"
    assert [record["step"] for record in read_metrics(run / "metrics.jsonl")][-1] == 6


@pytest.mark.parametrize("damage", ["cut", "lost"])
def test_the_best_evaluation_is_known_from_the_metrics(
    damage: str, stopped: Path, shards: Path, tmp_path: Path
) -> None:
    shutil.copytree(stopped, tmp_path / "runs")
    checkpoints = tmp_path / "runs" / "run" / "checkpoints"
    metrics = tmp_path / "runs" / "run" / "metrics.jsonl"
    name = "image_to_text_recall@1"
    metrics.write_text(metrics.read_text() + f'{{"step": 2, "{name}": 2.0}}\n')
    shutil.copytree(checkpoints / "step_000000004", checkpoints / "step_000000002", dirs_exist_ok=True)
    DAMAGES[damage](checkpoints / "best.json")
    train(tmp_path / "runs", shards, 6, *OPTIONS)
    assert read_best(checkpoints) == Best(2, name, 2.0)
    assert (checkpoints / "step_000000002").exists(), "the best one is kept"
    assert tensors(checkpoints / "step_000000006")


def test_a_run_continues_if_the_best_evaluation_cannot_be_recorded(stopped: Path, shards: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(stopped, runs)
    (runs / "run" / "metrics.jsonl").unlink()  # no earlier evaluation is known
    best = runs / "run" / "checkpoints" / "best.json"
    best.unlink()
    (best / "not empty").mkdir(parents=True)
    train(runs, shards, 6, *OPTIONS)
    assert newest_checkpoint(runs).name == "step_000000006"
    events = [json.loads(line) for line in (runs / "run" / "events.jsonl").read_text().splitlines()]
    assert events[-1]["kind"] == "save_failed"
    assert "step 6 is not recorded as the best" in events[-1]["message"]


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", sealed({"step": 1}), sealed({"step": "1", "metric": "recall", "value": 1.0})]
)
def test_saves_go_on_and_keep_all_checkpoints_while_the_best_one_is_unknown(content: str, tmp_path: Path) -> None:
    checkpoints = keeper(tmp_path, keep=1)
    checkpoints.save(1, PlainEngine(1.0), trained(), FACTS, DATA)
    checkpoints.keep_best(Best(1, "recall", 0.5))
    (tmp_path / "checkpoints" / "best.json").write_text(content)
    for step in (2, 3, 4):
        checkpoints.save(step, PlainEngine(1.0), trained(), FACTS, DATA)
    assert checkpoints.best() is None
    assert len(list((tmp_path / "checkpoints").glob("step_*"))) == 4
    checkpoints.keep_best(Best(2, "recall", 0.5))
    checkpoints.save(5, PlainEngine(1.0), trained(), FACTS, DATA)
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*"))
    assert names == ["step_000000002", "step_000000005"]


def test_a_file_where_a_partial_checkpoint_would_be_does_not_stop_a_save(tmp_path: Path) -> None:
    checkpoints = keeper(tmp_path, keep=1)
    checkpoints.save(1, PlainEngine(1.0), trained(), FACTS, DATA)
    for name in ("step_000000002", "deleted-step_000000001", "x"):
        (tmp_path / "checkpoints" / f".partial-{name}").touch()
    checkpoints.save(2, PlainEngine(1.0), trained(), FACTS, DATA)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000000002"]
