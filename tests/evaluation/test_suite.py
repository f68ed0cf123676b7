"""Compare every DataComp metric with predictions on whole sets, on simulated ranks and on real ranks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from evaluation_sets import (
    Labeled,
    Model,
    class_features,
    features_of,
    labeled_set,
    npy,
    tokenize,
    transform,
    write_prompts,
    write_shards,
)

from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.encoding import BatchEncoder
from neuclip_ds.evaluation.metrics import chance_macro_f1
from neuclip_ds.evaluation.suite import measure
from neuclip_ds.evaluation.tasks import Task, load_tasks

CLASSES = 6
IMAGES = 47


def task_of(key: str) -> Task:
    (task,) = load_tasks().choose([key])
    return task


def score(communicator: Any, key: str, folder: Path, size: int = 4) -> dict[str, float | None]:
    encoder = BatchEncoder(Model(), tokenize, communicator, size, transform)
    return measure(task_of(key), folder, encoder)


def on_ranks(run_ranks: Any, key: str, folder: Path, world_size: int) -> dict[str, float | None]:
    results = run_ranks(world_size, lambda rank: score(rank, key, folder))
    assert all(result == results[0] for result in results)
    return results[0]


def metadata(count: int) -> torch.Tensor:
    """Return metadata with the groups 0, 1 and 3 in column 0, and the groups 0 to 4 in column 1."""
    rows = torch.arange(count)
    return torch.stack([torch.tensor([0, 1, 3])[rows % 3], rows % 5, rows], dim=1)


def predictions(data: Labeled) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return three (n,) tensors: the predicted class, whether it is correct, and whether one of the top five is."""
    scores = features_of(data.features) @ class_features(CLASSES).T
    is_in_top5 = (scores.topk(5).indices == data.labels[:, None]).any(1)
    guess = scores.argmax(1)
    return guess, guess == data.labels, is_in_top5


def means(hits: torch.Tensor, groups: torch.Tensor) -> dict[int, float]:
    """Return the mean of the hits in each group."""
    return {int(group): float(hits[groups == group].double().mean()) for group in groups.unique()}


@pytest.fixture(scope="module")
def labeled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Labeled]:
    """Return the folder and the contents of a labeled set with metadata."""
    folder = tmp_path_factory.mktemp("labeled")
    return folder, labeled_set(folder, IMAGES, CLASSES, metadata(IMAGES))


@dataclass(frozen=True, kw_only=True)
class Division:
    """A division of a set into groups, as the rules in datacomp.yaml name it."""

    accuracy: str
    field: str
    column: int
    worst: str
    top: int = 1


DIVISIONS = {
    "wilds/camelyon17": [Division(accuracy="acc", field="slide", column=1, worst="acc_wg")],
    "wilds/fmow": [
        Division(accuracy="acc", field="year", column=1, worst="acc_worst_year"),
        Division(accuracy="acc", field="region", column=0, worst="acc_worst_region"),
    ],
    "fairness/dollar_street": [
        Division(accuracy="acc_top5", field="income_ds", column=0, worst="acc_top5_wg", top=5),
    ],
    "fairness/geode": [Division(accuracy="acc", field="region", column=0, worst="acc_wg")],
}


@pytest.mark.parametrize("key", ["cifar10", "vtab/pets", "wilds/iwildcam", *DIVISIONS])
def test_metrics_are_those_of_the_predictions_on_the_whole_set(
    labeled: tuple[Path, Labeled], run_ranks: Any, key: str
) -> None:
    folder, data = labeled
    guess, is_right, is_in_top5 = predictions(data)
    accuracy = float(is_right.double().mean())
    recall = means(is_right, data.labels)
    assert 0.3 < accuracy < 0.98
    expected: dict[str, float] = {
        "acc1": accuracy,
        "acc5": float(is_in_top5.double().mean()),
        "mean_per_class_recall": sum(recall.values()) / len(recall),
        "chance": (5 if key == "fairness/dollar_street" else 1) / CLASSES,
    }
    if key == "wilds/iwildcam":
        f1_scores = []
        for label in data.labels.unique():
            hits = int((is_right & (guess == label)).sum())
            f1_scores.append(2 * hits / int((guess == label).sum() + (data.labels == label).sum()))
        expected["acc_avg"] = accuracy
        expected["recall-macro_all"] = expected["mean_per_class_recall"]
        expected["F1-macro_all"] = sum(f1_scores) / len(f1_scores)
        expected["chance"] = chance_macro_f1(data.labels.bincount().double())
    for division in DIVISIONS.get(key, []):
        hits_of_images = is_right if division.top == 1 else is_in_top5
        groups = data.metadata[:, division.column]
        accuracies = means(hits_of_images, groups)
        expected[f"{division.accuracy}_avg"] = float(hits_of_images.double().mean())
        expected[division.worst] = min(accuracies.values())
        for group, group_accuracy in accuracies.items():
            expected[f"{division.accuracy}_{division.field}:{group}"] = group_accuracy
            expected[f"count_{division.field}:{group}"] = int((groups == group).sum())
    expected["main_metric"] = expected[task_of(key).metric]
    metrics = on_ranks(run_ranks, key, folder, 1)
    assert metrics == pytest.approx(expected, abs=1e-12)
    assert on_ranks(run_ranks, key, folder, 3) == metrics


def _score_on_rank(communicator: Any, folder: Path) -> dict[str, float | None]:
    return score(communicator, "wilds/fmow", folder)


def test_two_connected_processes_have_the_metrics_of_one(labeled: tuple[Path, Labeled], run_ranks: Any) -> None:
    folder, _ = labeled
    first, second = ranks.run_ranks(2, _score_on_rank, folder)
    assert first == second == on_ranks(run_ranks, "wilds/fmow", folder, 1)


def test_a_set_with_four_classes_has_no_top5_accuracy(tmp_path: Path, run_ranks: Any) -> None:
    labeled_set(tmp_path, 12, 4)
    metrics = on_ranks(run_ranks, "vtab/kitti_closest_vehicle_distance", tmp_path, 2)
    assert metrics["acc5"] is None
    assert metrics["main_metric"] == metrics["acc1"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"no array", "npy member"),
        (npy(torch.tensor([1])), "npy member"),
        (npy(torch.tensor([0, -1, 2])), "contains the negative group -1"),
    ],
)
def test_a_sample_with_broken_metadata_is_named(tmp_path: Path, run_ranks: Any, data: bytes, message: str) -> None:
    write_prompts(tmp_path, 5)
    write_shards(tmp_path, [{"jpg": b"1 2", "cls": b"0", "npy": data}], 1)
    with pytest.raises(UserError, match=rf"0\.tar: sample s0000000.*{message}"):
        on_ranks(run_ranks, "wilds/fmow", tmp_path, 2)
