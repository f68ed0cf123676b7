"""Check DataComp's tasks, their metrics and averages, and how tasks are found on disk."""

from collections import Counter
from pathlib import Path

import pytest
from evaluation_sets import write_shards

from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.tasks import load_tasks

TASKS = load_tasks()


def test_there_are_38_distinct_tasks_in_datacomps_averages() -> None:
    assert len(TASKS.tasks) == 38
    for field in ("key", "name", "folder", "source"):
        assert len({getattr(task, field) for task in TASKS.tasks}) == 38
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


def test_main_metrics_are_datacomps() -> None:
    metrics = {task.name: task.metric for task in TASKS.tasks}
    assert Counter(metrics.values())["acc1"] == 27
    scored_by_class = [name for name, metric in metrics.items() if metric == "mean_per_class_recall"]
    assert scored_by_class == ["Caltech-101", "FGVC Aircraft", "Oxford Flowers-102", "Oxford-IIIT Pet"]
    assert metrics["iWildCam"] == "F1-macro_all"
    assert metrics["FMoW"] == "acc_worst_region"
    assert metrics["Dollar Street"] == "acc_top5_wg"
    assert metrics["GeoDE"] == "acc_wg"
    assert metrics["WinoGAViL"] == "jaccard_score_10-12"
    assert metrics["Flickr"] == metrics["MSCOCO"] == "mean_recall@1"


def test_tasks_are_chosen_by_name_key_folder_or_pattern() -> None:
    assert [task.name for task in TASKS.choose(["flickr", "IMAGENETV2"])] == ["ImageNet v2", "Flickr"]
    assert len(TASKS.choose(["wds_vtab-*"])) == 12
    assert len(TASKS.choose([])) == 38
    with pytest.raises(UserError, match="Unknown task cifar11; the tasks are vtab/caltech101, cifar10"):
        TASKS.choose(["cifar10", "cifar11"])


def test_a_folder_is_found_with_or_without_the_suffix_test(tmp_path: Path) -> None:
    (task,) = TASKS.choose(["vtab/pcam"])
    short = tmp_path / "wds_vtab-pcam"
    full = tmp_path / "wds_vtab-pcam_test"
    assert task.find([short, full]) is None
    short.mkdir()
    assert task.find([short, full]) == short
    full.mkdir()
    assert task.find([short, full]) == full


def write_user_sets(root: Path) -> Path:
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


def tasks_in(*paths: Path, names: tuple[str, ...] = ()) -> list[tuple[str, str, str]]:
    """Return the key, the main metric and the file name of each task on disk."""
    return [(task.key, task.metric, path.name) for task, path in TASKS.on_disk(paths, names)]


def test_user_sets_are_found_next_to_datacomps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = write_user_sets(tmp_path)
    birds = ("own/birds", "acc1", "birds")
    coco = ("own/coco", "mean_recall@1", "coco")
    pairs = ("own/pairs", "mean_recall@1", "pairs.csv")
    pets = ("own/pets", "acc1", "pets")
    assert tasks_in(root) == [("cifar10", "acc1", "wds_cifar10"), birds, coco, pairs, pets]
    assert ": Caltech-101" in caplog.text
    assert tasks_in(root, names=("pets", "own/b*")) == [birds, pets]
    caplog.clear()
    assert tasks_in(root / "pets", root / "pairs.csv") == [pets, pairs]
    assert not caplog.text, "without any of DataComp's sets, none is reported as missing"


def test_unknown_repeated_and_unusable_sets_are_errors(tmp_path: Path) -> None:
    root = write_user_sets(tmp_path / "a")
    with pytest.raises(UserError, match=r"Unknown task pts; the tasks are .*own/pets"):
        tasks_in(root, names=("pts",))
    with pytest.raises(UserError, match="2 evaluation sets are called pets; pass them as NAME=PATH"):
        tasks_in(root / "pets", write_user_sets(tmp_path / "b") / "pets")
    with pytest.raises(UserError, match="is neither a folder nor an evaluation set"):
        tasks_in(root / "notes.md")
    with pytest.raises(UserError, match=r"a table \(\.csv, \.tsv"):
        tasks_in(root / "images")
    (root / "shards" / "deep").mkdir(parents=True)
    (root / "shards" / "deep" / "0.tar").touch()
    with pytest.raises(UserError, match=r"shards contains no evaluation set: .* the folder that contains the tars"):
        tasks_in(root / "pets", root / "shards")
    (root / "coco" / "dataset_type.txt").write_text("multilabel")
    with pytest.raises(UserError, match="is a multilabel set, which neuclip_ds cannot score"):
        tasks_in(root)


def test_sets_of_one_name_can_be_told_apart(tmp_path: Path) -> None:
    first = write_user_sets(tmp_path / "a")
    second = write_user_sets(tmp_path / "b")
    paths = [first / "pets", second / "pets", second / "birds"]
    names = {second / "pets": "cats", second / "birds": "mine"}
    on_disk = TASKS.on_disk(paths, (), names)
    assert [(task.name, path) for task, path in on_disk] == [("pets", paths[0]), ("cats", paths[1]), ("mine", paths[2])]
    with pytest.raises(UserError, match=r"names a single evaluation set, but .* is not one; omit all="):
        TASKS.on_disk([first], (), {first: "all"})


def test_user_sets_are_in_no_average() -> None:
    scored = {"own/pets": {"acc1": 1.0}, "own/coco": {"mean_recall@1": 1.0}, "cifar10": {"acc1": 0.0}}
    tasks = TASKS.with_scored(scored)
    assert [(task.name, task.kind) for task in tasks.tasks[38:]] == [("pets", "classification"), ("coco", "retrieval")]
    for name in TASKS.averages:
        assert tasks.in_average(name) == TASKS.in_average(name)
