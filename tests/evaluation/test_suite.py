"""Compare every DataComp metric with predictions on whole sets, on simulated ranks and on real ranks."""

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


def task(key: str) -> Task:
    (found,) = load_tasks().choose([key])
    return found


def score(communicator: Any, key: str, folder: Path, size: int = 4) -> dict[str, float | None]:
    encoder = BatchEncoder(Model(), tokenize, communicator, size, transform)
    return measure(task(key), folder, encoder)


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
    five = (scores.topk(5).indices == data.labels[:, None]).any(1)
    guess = scores.argmax(1)
    return guess, guess == data.labels, five


def means(right: torch.Tensor, groups: torch.Tensor) -> dict[int, float]:
    return {int(group): float(right[groups == group].double().mean()) for group in groups.unique()}


@pytest.mark.parametrize("key", ["cifar10", "vtab/pets", "wilds/iwildcam", "wilds/camelyon17", "wilds/fmow",
                                 "fairness/dollar_street", "fairness/geode"])  # fmt: skip
def test_metrics_of_labeled_sets(tmp_path: Path, run_ranks: Any, key: str) -> None:
    data = labeled_set(tmp_path, 47, CLASSES, metadata(47))
    guess, right, five = predictions(data)
    column0, column1 = data.metadata[:, 0], data.metadata[:, 1]
    accuracy, recall = float(right.double().mean()), means(right, data.labels)
    assert 0.3 < accuracy < 0.98
    wanted: dict[str, float] = {
        "acc1": accuracy,
        "acc5": float(five.double().mean()),
        "mean_per_class_recall": sum(recall.values()) / len(recall),
        "chance": (5 if key == "fairness/dollar_street" else 1) / CLASSES,
    }
    if key == "wilds/iwildcam":
        both = [(2 * int((right & (guess == c)).sum()) / int((guess == c).sum() + (data.labels == c).sum()))
                for c in data.labels.unique()]  # fmt: skip
        wanted |= {"acc_avg": accuracy, "recall-macro_all": wanted["mean_per_class_recall"]}
        wanted |= {"F1-macro_all": sum(both) / len(both), "chance": chance_macro_f1(data.labels.bincount().double())}
    divisions = {
        "wilds/camelyon17": [("acc", "slide", right, column1, "acc_wg")],
        "wilds/fmow": [
            ("acc", "year", right, column1, "acc_worst_year"),
            ("acc", "region", right, column0, "acc_worst_region"),
        ],
        "fairness/dollar_street": [("acc_top5", "income_ds", five, column0, "acc_top5_wg")],
        "fairness/geode": [("acc", "region", right, column0, "acc_wg")],
    }
    for name, field, hit, groups, worst in divisions.get(key, []):
        by_group = means(hit, groups)
        wanted |= {f"{name}_avg": float(hit.double().mean()), worst: min(by_group.values())}
        wanted |= {f"{name}_{field}:{group}": value for group, value in by_group.items()}
        wanted |= {f"count_{field}:{group}": int((groups == group).sum()) for group in by_group}
    wanted["main_metric"] = wanted[task(key).metric]
    found = on_ranks(run_ranks, key, tmp_path, 1)
    assert found == pytest.approx(wanted, abs=1e-12)
    for world_size in (2, 3):
        assert on_ranks(run_ranks, key, tmp_path, world_size) == found


def _on_real_ranks(communicator: Any, folder: Path) -> dict[str, float | None]:
    return score(communicator, "wilds/fmow", folder)


def test_two_real_ranks_equal_one(tmp_path: Path, run_ranks: Any) -> None:
    labeled_set(tmp_path, 31, CLASSES, metadata(31))
    both = ranks.run_ranks(2, _on_real_ranks, tmp_path)
    assert both[0] == both[1] == on_ranks(run_ranks, "wilds/fmow", tmp_path, 1)


def test_few_classes_have_no_top5(tmp_path: Path, run_ranks: Any) -> None:
    labeled_set(tmp_path, 12, 4)
    found = on_ranks(run_ranks, "vtab/kitti_closest_vehicle_distance", tmp_path, 2)
    assert found["acc5"] is None
    assert found["main_metric"] == found["acc1"]


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"no array", "npy member"), (npy(torch.tensor([1])), "npy member"),
     (npy(torch.tensor([0, -1, 2])), "has the group -1")],
)  # fmt: skip
def test_broken_metadata_is_named(tmp_path: Path, run_ranks: Any, data: bytes, message: str) -> None:
    write_prompts(tmp_path, 5)
    write_shards(tmp_path, [{"jpg": b"1 2", "cls": b"0", "npy": data}], 1)
    with pytest.raises(UserError, match=rf"0\.tar: sample s0000000.*{message}"):
        on_ranks(run_ranks, "wilds/fmow", tmp_path, 2)
