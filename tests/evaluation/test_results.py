"""Check scores on disk: DataComp's layout, resuming after a crash, and averages that name missing tasks."""

import json
from pathlib import Path

import pytest

from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.results import FILE, Results, averages, summary_text
from neuclip_ds.evaluation.suite import Metrics
from neuclip_ds.evaluation.tasks import Task, load_tasks

TASKS = load_tasks()
MODEL = {"model": "a", "precision": "float32", "weights": "5eed"}


def scores(omitted: tuple[str, ...] = ()) -> dict[str, Metrics]:
    """Return metrics in which task number i has the score i / 100."""
    metrics: dict[str, Metrics] = {}
    for number, task in enumerate(TASKS.tasks):
        if task.name not in omitted:
            metrics[task.key] = {"main_metric": number / 100}
    return metrics


def test_a_folder_that_cannot_be_written_names_the_fix(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot be written .*, or choose another --out\.$"):
        Results(tmp_path / "file/scores", MODEL)
    results = Results(tmp_path / "scores", MODEL)
    (tmp_path / "scores" / FILE).mkdir()
    with pytest.raises(UserError, match=r"cannot be written .*, or choose another --out\.$"):
        results.add(TASKS.tasks[0], {"main_metric": 0.5})


def test_lines_are_those_of_datacomp_and_name_the_data_of_user_sets(tmp_path: Path) -> None:
    results = Results(tmp_path / "new", MODEL)
    metrics = {"acc1": 0.5, "acc5": None, "main_metric": 0.5}
    results.add(TASKS.choose(["vtab/pcam"])[0], metrics)
    line = (tmp_path / "new" / FILE).read_text()
    assert line.endswith("}\n")
    assert json.loads(line) == {"key": "vtab/pcam", "dataset": "PatchCamelyon", "metrics": metrics}
    for number, data in enumerate(("/a/pets: 1", "/b/pets: 2")):
        results.add(Task.own("pets", "classification"), {"main_metric": number / 10}, data)
    again = Results(tmp_path / "new", MODEL)
    assert again.metrics == results.metrics
    assert again.data == results.data
    assert again.data["own/pets"] == "/b/pets: 2"
    assert again.metrics["own/pets"]["main_metric"] == 0.1


def test_scores_are_added_after_the_complete_lines_of_an_earlier_start(tmp_path: Path) -> None:
    for number in (0, 1):
        Results(tmp_path, MODEL).add(TASKS.tasks[number], {"main_metric": number / 10})
    with (tmp_path / FILE).open("a") as file:
        file.write('{"key": "cut off when the proc')
    again = Results(tmp_path, MODEL)
    assert list(again.metrics) == [TASKS.tasks[0].key, TASKS.tasks[1].key]
    again.add(TASKS.tasks[2], {"main_metric": 0.2})
    assert len(Results(tmp_path, MODEL).metrics) == 3


def test_scores_of_another_model_and_damaged_files_are_refused(tmp_path: Path) -> None:
    Results(tmp_path, MODEL).add(TASKS.tasks[0], {"main_metric": 0.1})
    model_path = tmp_path / "model.json"
    written = model_path.read_text()
    model_path.write_text(written[:5])
    with pytest.raises(UserError, match=r"model\.json cannot be read .*choose another --out"):
        Results(tmp_path, MODEL)
    model_path.write_text(written)
    for changed in ({"precision": "bfloat16"}, {"weights": "0ther"}, {"model": "b"}):
        with pytest.raises(UserError, match="scores of another model, of other weights or in another precision"):
            Results(tmp_path, {**MODEL, **changed})
    (tmp_path / FILE).write_text("what\n")
    with pytest.raises(UserError, match=r"eval_results\.jsonl .*--out"):
        Results(tmp_path, MODEL)


def test_scores_of_earlier_versions_without_a_hash_of_the_weights_stay_valid(tmp_path: Path) -> None:
    Results(tmp_path, MODEL).add(TASKS.tasks[0], {"main_metric": 0.1})
    for name in ("a", "/absolute/path/of/a"):
        (tmp_path / "model.json").write_text(json.dumps({"model": name, "precision": "float32"}))
        assert Results(tmp_path, MODEL, other_name="/absolute/path/of/a").metrics
    with pytest.raises(UserError, match="of other weights"):  # the hash is known from now on
        Results(tmp_path, {**MODEL, "weights": "0ther"})


def test_averages_are_means_over_their_tasks() -> None:
    numbers = {task.name: number for number, task in enumerate(TASKS.tasks)}
    means = averages(TASKS, scores())
    assert means["datacomp"].value == pytest.approx(sum(range(38)) / 38 / 100)
    assert means["retrieval"].value == pytest.approx((numbers["Flickr"] + numbers["MSCOCO"]) / 200)
    assert all(not average.missing for average in means.values())


def test_a_missing_task_is_named_and_leaves_no_average() -> None:
    incomplete = scores(omitted=("MSCOCO", "ObjectNet"))
    means = averages(TASKS, incomplete)
    assert means["datacomp"].value is None
    assert means["datacomp"].missing == ("ObjectNet", "MSCOCO")
    assert means["retrieval"].value is None
    numbers = {task.name: number for number, task in enumerate(TASKS.tasks)}
    assert means["retrieval"].partial == pytest.approx(numbers["Flickr"] / 100)
    assert means["vtab"].value is not None
    text = summary_text(TASKS, incomplete)
    assert "Missing from datacomp: ObjectNet, MSCOCO." in text
    assert "none: scores exist for only 36 of 38 tasks; their mean is" in text
    assert "average" not in summary_text(TASKS, {}), "averages without a scored task are omitted"
