"""Check DataComp's tasks, their metrics and averages, and how tasks are found on disk."""

from collections import Counter
from pathlib import Path

import pytest
from evaluation_sets import write_shards

from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.tasks import load_tasks

TASKS = load_tasks()


def test_the_38_tasks_and_their_groups() -> None:
    assert len(TASKS.tasks) == 38
    for of in ("key", "name", "folder", "source"):
        assert len({getattr(task, of) for task in TASKS.tasks}) == 38
    sizes = {name: len(TASKS.in_average(name)) for name in TASKS.averages}
    assert sizes == {
        "imagenet_and_variants": 7,
        "retrieval": 2,
        "datacomp": 38,
        "imagenet_shifts": 6,
        "vtab": 13,
        "retrieval_and_winogavil": 3,
    }
    assert all(set(task.averages) <= set(TASKS.averages) for task in TASKS.tasks)


def test_scores() -> None:
    metrics = {task.name: task.metric for task in TASKS.tasks}
    assert Counter(metrics.values())["acc1"] == 27
    by_class = [name for name, metric in metrics.items() if metric == "mean_per_class_recall"]
    assert by_class == ["Caltech-101", "FGVC Aircraft", "Oxford Flowers-102", "Oxford-IIIT Pet"]
    assert metrics["iWildCam"] == "F1-macro_all"
    assert metrics["FMoW"] == "acc_worst_region"
    assert metrics["Dollar Street"] == "acc_top5_wg"
    assert metrics["GeoDE"] == "acc_wg"
    assert metrics["WinoGAViL"] == "jaccard_score_10-12"
    assert metrics["Flickr"] == metrics["MSCOCO"] == "mean_recall@1"


def test_choice_by_name_key_or_pattern() -> None:
    assert [task.name for task in TASKS.choose(["flickr", "IMAGENETV2"])] == ["ImageNet v2", "Flickr"]
    assert len(TASKS.choose(["wds_vtab-*"])) == 12
    assert len(TASKS.choose([])) == 38
    with pytest.raises(UserError, match="Unknown task cifar11; the tasks are vtab/caltech101, cifar10"):
        TASKS.choose(["cifar10", "cifar11"])


def test_folder_by_either_name(tmp_path: Path) -> None:
    (task,) = TASKS.choose(["vtab/pcam"])
    short, full = tmp_path / "wds_vtab-pcam", tmp_path / "wds_vtab-pcam_test"
    assert task.find([short, full]) is None
    short.mkdir()
    assert task.find([short, full]) == short
    full.mkdir()
    assert task.find([short, full]) == full


def write_own_sets(root: Path) -> Path:
    """Write images of pets by class, pairs, and shards of two kinds, next to a DataComp set and unrelated files."""
    for name in ("pets/cat/a.jpg", "pets/dog/more/b.png", "pets/dog/c.PNG", "images/a.jpg", "wds_cifar10/x"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")
    (root / "pairs.csv").write_text("filepath,title\nimages/a.jpg,words\n")
    (root / "notes.md").write_text("words")
    for name in ("birds", "coco"):
        write_shards(root / name, [{"txt": b"0"}])
    (root / "coco" / "dataset_type.txt").write_text("retrieval")
    return root


def found_in(*places: Path, names: tuple[str, ...] = ()) -> list[tuple[str, str, str]]:
    return [(task.key, task.metric, place.name) for task, place in TASKS.on_disk(places, names)]


def test_own_sets_in_a_folder_next_to_datacomps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root, recall = write_own_sets(tmp_path), "mean_recall@1"
    pets = ("own/pets", "acc1", "pets")
    assert found_in(root) == [
        ("cifar10", "acc1", "wds_cifar10"),
        ("own/birds", "acc1", "birds"),
        ("own/coco", recall, "coco"),
        ("own/pairs", recall, "pairs.csv"),
        pets,
    ]
    assert "skipped: Caltech-101" in caplog.text
    caplog.clear()
    assert found_in(root / "pets", root / "pairs.csv") == [pets, ("own/pairs", recall, "pairs.csv")]
    assert not caplog.text, "who names own sets alone does not miss DataComp's"
    assert found_in(root, names=("pets", "own/b*")) == [("own/birds", "acc1", "birds"), pets]


def test_mistakes_with_own_sets(tmp_path: Path) -> None:
    root = write_own_sets(tmp_path / "a")
    with pytest.raises(UserError, match=r"Unknown task pts; the tasks are .*own/pets"):
        found_in(root, names=("pts",))
    with pytest.raises(UserError, match="2 evaluation sets are called pets"):
        found_in(root / "pets", write_own_sets(tmp_path / "b") / "pets")
    with pytest.raises(UserError, match="is not a folder; name the one"):
        found_in(root / "notes.md")
    with pytest.raises(UserError, match=r"a table \(\.csv, \.tsv"):
        found_in(root / "images")
    (root / "coco" / "dataset_type.txt").write_text("multilabel")
    with pytest.raises(UserError, match="is a multilabel set, which has no score here"):
        found_in(root)


def test_own_sets_are_in_no_average() -> None:
    scored = {"own/pets": {"acc1": 1.0}, "own/coco": {"mean_recall@1": 1.0}, "cifar10": {"acc1": 0.0}}
    tasks = TASKS.with_scored(scored)
    assert [(task.name, task.kind) for task in tasks.tasks[38:]] == [("pets", "classification"), ("coco", "retrieval")]
    assert [len(tasks.in_average(name)) for name in TASKS.averages] == [
        len(TASKS.in_average(name)) for name in TASKS.averages
    ]
