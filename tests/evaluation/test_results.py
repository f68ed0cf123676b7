"""Scores on disk: DataComp's layout, continuing after a crash, averages that never hide a missing task."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.results import FILE, Results, averages
from neuclip_ds.evaluation.suite import Metrics
from neuclip_ds.evaluation.summary import compare_with_published, summary_text, summary_tree
from neuclip_ds.evaluation.tasks import load_tasks

TASKS = load_tasks()
MODEL = {"model": "a", "precision": "float32"}


def scores(leave_out: tuple[str, ...] = ()) -> dict[str, Metrics]:
    """Task number i has the score i / 100."""
    numbered = enumerate(TASKS.tasks)
    return {task.key: {"main_metric": number / 100} for number, task in numbered if task.name not in leave_out}


def test_lines_are_those_of_datacomp(tmp_path: Path) -> None:
    results = Results(tmp_path / "new", MODEL)
    task = TASKS.choose(["vtab/pcam"])[0]
    results.add(task, {"acc1": 0.5, "acc5": None, "mean_per_class_recall": 0.25, "main_metric": 0.5})
    line = (tmp_path / "new" / FILE).read_text()
    assert line.endswith("}\n")
    assert json.loads(line) == {
        "key": "vtab/pcam",
        "dataset": "PatchCamelyon",
        "metrics": {"acc1": 0.5, "acc5": None, "mean_per_class_recall": 0.25, "main_metric": 0.5},
    }


def test_continues_after_complete_lines(tmp_path: Path) -> None:
    for number in (0, 1):
        Results(tmp_path, MODEL).add(TASKS.tasks[number], {"main_metric": number / 10})
    with (tmp_path / FILE).open("a") as file:
        file.write('{"key": "cut off when the proc')
    again = Results(tmp_path, MODEL)
    assert list(again.metrics) == [TASKS.tasks[0].key, TASKS.tasks[1].key]
    again.add(TASKS.tasks[2], {"main_metric": 0.2})
    assert len(Results(tmp_path, MODEL).metrics) == 3


def test_scores_of_two_models_are_not_mixed(tmp_path: Path) -> None:
    Results(tmp_path, MODEL).add(TASKS.tasks[0], {"main_metric": 0.1})
    with pytest.raises(UserError, match="scores of another model or precision"):
        Results(tmp_path, {**MODEL, "precision": "bfloat16"})


def test_broken_lines_are_named(tmp_path: Path) -> None:
    Results(tmp_path, MODEL)
    (tmp_path / FILE).write_text("what\n")
    with pytest.raises(UserError, match=r"eval_results\.jsonl is not a file of scores"):
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
    tree = json.loads(json.dumps(summary_tree(TASKS, scores(leave_out=("MSCOCO",)))))
    assert tree["retrieval"]["value"] is None
    assert tree["retrieval"]["missing"] == ["MSCOCO"]


def test_table_with_published_scores() -> None:
    lines = summary_text(TASKS, scores(), "dfn14m").splitlines()[-5:]
    assert lines[0] == "datacomp in percent, dfn14m: NeuCLIP (ICLR 2026), Table 1:"
    assert lines[2] == "| openclip | fastclip | siglip | amorlip | neuclip | this model |"
    assert lines[4] == "| 37.78 | 38.45 | 37.23 | 37.53 | 39.16 | 18.50 |"


def test_every_source_of_a_setting_has_its_table() -> None:
    found = compare_with_published("vitb32", {"datacomp": 0.5, "retrieval": None})
    assert [table.title.split(" in percent")[0] for table in found] == [
        "datacomp",
        "imagenet_and_variants",
        "retrieval",
    ]
    assert found[0].header == ["checkpoint", "this model"]
    assert [table.scores for table in found] == [["52.45", "50.00"], ["50.64", "-"], ["54.56", "-"]]
