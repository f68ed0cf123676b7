"""Check scores on disk: DataComp's layout, resuming after a crash, and averages that name missing tasks."""

import json
from pathlib import Path

import pytest

from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.results import FILE, Results, averages, summary_text
from neuclip_ds.evaluation.suite import Metrics
from neuclip_ds.evaluation.tasks import Task, load_tasks

TASKS = load_tasks()
MODEL = {"model": "a", "precision": "float32"}


def scores(leave_out: tuple[str, ...] = ()) -> dict[str, Metrics]:
    """Return metrics in which task number i has the score i / 100."""
    numbered = enumerate(TASKS.tasks)
    return {task.key: {"main_metric": number / 100} for number, task in numbered if task.name not in leave_out}


def test_lines_are_those_of_datacomp_and_tell_own_sets_apart(tmp_path: Path) -> None:
    results, metrics = Results(tmp_path / "new", MODEL), {"acc1": 0.5, "acc5": None, "main_metric": 0.5}
    results.add(TASKS.choose(["vtab/pcam"])[0], metrics)
    line = (tmp_path / "new" / FILE).read_text()
    assert line.endswith("}\n")
    assert json.loads(line) == {"key": "vtab/pcam", "dataset": "PatchCamelyon", "metrics": metrics}
    for number, data in enumerate(("/a/pets: 1", "/b/pets: 2")):
        results.add(Task.own("pets", "classification"), {"main_metric": number / 10}, data)
    again = Results(tmp_path / "new", MODEL)
    assert (again.metrics, again.data) == (results.metrics, results.data)
    assert again.data["own/pets"] == "/b/pets: 2" and again.metrics["own/pets"]["main_metric"] == 0.1


def test_continues_after_complete_lines(tmp_path: Path) -> None:
    for number in (0, 1):
        Results(tmp_path, MODEL).add(TASKS.tasks[number], {"main_metric": number / 10})
    with (tmp_path / FILE).open("a") as file:
        file.write('{"key": "cut off when the proc')
    again = Results(tmp_path, MODEL)
    assert list(again.metrics) == [TASKS.tasks[0].key, TASKS.tasks[1].key]
    again.add(TASKS.tasks[2], {"main_metric": 0.2})
    assert len(Results(tmp_path, MODEL).metrics) == 3


def test_files_that_are_refused(tmp_path: Path) -> None:
    Results(tmp_path, MODEL).add(TASKS.tasks[0], {"main_metric": 0.1})
    with pytest.raises(UserError, match="scores of another model or precision"):
        Results(tmp_path, {**MODEL, "precision": "bfloat16"})
    (tmp_path / FILE).write_text("what\n")
    with pytest.raises(UserError, match=r"eval_results\.jsonl .*--out"):
        Results(tmp_path, MODEL)


def test_averages_of_everything() -> None:
    found = averages(TASKS, scores())
    assert found["datacomp"].value == pytest.approx(sum(range(38)) / 38 / 100)
    place = {task.name: number for number, task in enumerate(TASKS.tasks)}
    assert found["retrieval"].value == pytest.approx((place["Flickr"] + place["MSCOCO"]) / 200)
    assert all(not average.missing for average in found.values())


def test_a_missing_task_is_named_and_leaves_no_average() -> None:
    found = averages(TASKS, scores(leave_out=("MSCOCO", "ObjectNet")))
    assert found["datacomp"].value is None
    assert found["datacomp"].missing == ("ObjectNet", "MSCOCO")
    assert found["retrieval"].value is None
    assert found["retrieval"].partial == pytest.approx([t.name for t in TASKS.tasks].index("Flickr") / 100)
    assert found["vtab"].value is not None
    text = summary_text(TASKS, scores(leave_out=("MSCOCO", "ObjectNet")))
    assert "Missing from datacomp: ObjectNet, MSCOCO." in text
    assert "none: 36 of 38 tasks scored, mean of these" in text
    assert "average" not in summary_text(TASKS, {}), "of which nothing was scored"
