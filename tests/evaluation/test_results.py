"""Scores on disk: DataComp's layout, continuing after a crash, averages that never hide a missing task."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.results import FILE, Results, averages
from neuclip_ds.evaluation.suite import Metrics
from neuclip_ds.evaluation.summary import compare_with_published, summary_text, summary_tree
from neuclip_ds.evaluation.tasks import Task, load_tasks

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


def test_lines_of_own_sets_tell_which_set_it_was(tmp_path: Path) -> None:
    task, results = Task.own("pets", "classification"), Results(tmp_path, MODEL)
    for number, data in enumerate(("/a/pets: 1", "/b/pets: 2")):
        results.add(task, {"main_metric": number / 10}, data)
    again = Results(tmp_path, MODEL)
    assert (again.metrics, again.data) == (results.metrics, results.data)
    assert again.data == {"own/pets": "/b/pets: 2"} and again.metrics["own/pets"]["main_metric"] == 0.1


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
    assert "average" not in summary_text(TASKS, {}), "of which nothing was scored"
    tree = json.loads(json.dumps(summary_tree(TASKS, scores(leave_out=("MSCOCO",)))))
    assert tree["retrieval"]["value"] is None
    assert tree["retrieval"]["missing"] == ["MSCOCO"]


def test_table_with_published_scores() -> None:
    lines = summary_text(TASKS, scores(), "dfn14m").splitlines()[-10:]
    assert lines[0] == "dfn14m in percent: NeuCLIP (ICLR 2026), Tables 1 and 6 to 10:"
    assert lines[2] == "|  | datacomp | imagenet_and_variants | retrieval |"
    assert lines[8] == "| neuclip | 39.16 ± 0.20 | 33.79 ± 0.07 | 26.60 ± 0.28 |"
    assert lines[9].startswith("| this model | 18.50 | ")


def test_every_source_of_a_setting_has_its_table() -> None:
    """An ablation's tables come only with the runs of its method; a task's scores are found by its name."""
    key = "retrieval/mscoco_2014_5k_test_image_text_retrieval"
    metrics = scores() | {key: {"main_metric": 0.5, "image_retrieval_recall@1": 0.4, "text_retrieval_recall@1": 0.6}}
    plain = compare_with_published("vitb16", {"datacomp": 0.5, "retrieval": None})
    assert [len(table.rows) for table in plain] == [5, 5, 5]
    assert plain[0].rows[0] == ["checkpoint", "56.26", "57.67", "57.46"]
    assert plain[0].rows[-1] == ["this model", "50.00", "-", "-"]
    text = summary_text(TASKS, metrics, "vitb16_tuneclip")
    assert "vitb16_tuneclip in percent: TuneCLIP, Table 2:" in text
    assert "| lr 1e-4 | 69.66 | 48.98 |" in text
    assert re.search(r"\| this model \| \d+\.00 \| 50\.00 \|", text)
    assert " | 40.00 | 60.00 | - | - |" in text  # MSCOCO and Flickr by direction
