"""Run real DeepSpeed steps on two gloo ranks, and check that they send the bytes in docs/reference/losses.md."""

import gzip
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import pytest
from benchmarking.openclip_reference import REFERENCES
from benchmarking.run_loss import build_loss
from benchmarking.synthetic_profile import CONFIG, run_synthetic_profile
from ranks import run_ranks
from step_costs import TrainedShapes, step_calls
from test_step import MODEL

from neuclip_ds.distributed.communicator import STEP, Communicator
from neuclip_ds.engine import lean_zero1
from neuclip_ds.planning.memory import MemoryQuery
from neuclip_ds.profiling.recorder import BREAKDOWN, TRACE
from neuclip_ds.profiling.trace import read_trace
from neuclip_ds.recipe import parse, validate
from neuclip_ds.section import merge

RANKS = 2
ROWS = 8
DIM = 16
WIDTH = 6  # of the reference's features
STEPS = 2
UPDATES = 3
FLOAT = 4
DOUBLE = 8
INTEGER = 8
OTHERS = (RANKS - 1) * ROWS  # B - b
VALUE = OTHERS * FLOAT  # bytes of one number for each row of the other ranks
FEATURES = 2 * DIM * VALUE + OTHERS * INTEGER
ALL_REDUCE = 2 * (RANKS - 1) / RANKS  # bytes received by each rank, as a multiple of the tensor's size
PREDICTED: dict[str, dict[str, float]] = {  # bytes received per step and rank
    "openclip": {"features": FEATURES, "normalizer": 2 * VALUE, "scalars": ALL_REDUCE * 6 * FLOAT},
    "siglip": {"features": FEATURES, "scalars": ALL_REDUCE * 4 * FLOAT},
    "fastclip_v3": {
        "features": FEATURES,
        "normalizer": 2 * VALUE,
        "state": 2 * VALUE,
        "scalars": ALL_REDUCE * 6 * FLOAT,
    },
    "fastclip_v2": {
        "features": FEATURES,
        "normalizer": 2 * VALUE,
        "state": 2 * VALUE + ALL_REDUCE * 2 * RANKS * ROWS * FLOAT,
        "temperature": 2 * VALUE,
        "scalars": ALL_REDUCE * 6 * FLOAT,
    },
    "amorlip": {
        "features": FEATURES,
        "normalizer": 6 * VALUE,  # log w, and log Z and log C of all rows, to which every rank fits the nets
        "scalars": ALL_REDUCE * 9 * FLOAT,
    },
    "neuclip": {
        "features": FEATURES,
        "normalizer": 2 * VALUE
        + (UPDATES + 1) * ALL_REDUCE * 2 * RANKS * ROWS * DOUBLE
        + 2 * (DIM + 2) * VALUE,  # the gradient of alpha, without replicas
        "scalars": ALL_REDUCE * 6 * FLOAT,
    },
    "openclip_reference": {
        "features": 2 * DIM * VALUE,
        "feature gradients": 2 * DIM * VALUE,
        "scalars": ALL_REDUCE * 3 * FLOAT,
    },
}
QUICK = ("neuclip", "openclip_reference")
TREE: dict[str, Any] = {
    "run": {"profile_steps": STEPS},
    "model": {**merge(MODEL, {"vision": {"options": {"depth": 1}}}), "embed_dim": DIM},
    "objective": {"other_methods": {"npn": {"prototypes": 16, "inner_steps": UPDATES, "replicas": 1}}},
}


def settings_of(communicator: Communicator, name: str, stage: int, precision: str, micro: int) -> dict[str, Any]:
    return {
        "deepspeed": f"zero{stage}_{precision}",
        "data": {"batch_size": communicator.world_size * ROWS, "micro_batch": micro},
        "objective": {} if name in REFERENCES else {"method": name},
    }


def profiles(
    communicator: Communicator,
    folder: Path,
    combinations: list[tuple[str, int]],
    precision: str = "fp32",
    micro: int = ROWS,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    for name, stage in combinations:
        settings = settings_of(communicator, name, stage, precision, micro)
        config = validate(merge(merge(TREE, settings), options))
        build = REFERENCES.get(name, build_loss)
        run_synthetic_profile(config, communicator, folder / f"{name}{stage}", name, 2, build)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profiles")
    run_ranks(RANKS, profiles, folder, [(name, 1) for name in QUICK])
    return folder


def breakdown_of(folder: Path, name: str, stage: int = 1) -> dict[str, Any]:
    return json.loads((folder / f"{name}{stage}" / BREAKDOWN).read_text())


@pytest.mark.parametrize("name", QUICK)
def test_collectives_and_bytes_are_those_predicted(folder: Path, name: str) -> None:
    check_collectives(folder, name, 1)
    check_complete(folder, name, 1)
    check_bytes(folder, name)


@pytest.mark.slow
def test_bytes_of_the_other_methods(tmp_path: Path) -> None:
    others = [name for name in PREDICTED if name not in QUICK]
    run_ranks(RANKS, profiles, tmp_path, [(name, 1) for name in others])
    for name in others:
        check_bytes(tmp_path, name)
        check_collectives(tmp_path, name, 1)


def check_bytes(folder: Path, name: str) -> None:
    breakdown = breakdown_of(folder, name)
    weights = breakdown["parameters"] * FLOAT
    engine = {
        "gradient reduce": ALL_REDUCE * weights,
        "parameter gather": (RANKS - 1) / RANKS * weights,
        "norm and overflow": breakdown["purposes"]["norm and overflow"]["bytes_sent"],
    }
    received = {purpose: record["bytes_sent"] for purpose, record in breakdown["purposes"].items()}
    assert received == {**PREDICTED[name], **engine}


def check_collectives(folder: Path, name: str, stage: int, stored_width: int | None = None) -> None:
    """Check that the purposes, operations, sizes and counts of all collectives match tools/step_costs.py."""
    breakdown = breakdown_of(folder, name, stage)
    config = parse([str(folder / f"{name}{stage}" / CONFIG)]).config
    shapes = TrainedShapes.of(MemoryQuery(config, 1).build(), config.optimizer)
    build = REFERENCES.get(name, build_loss)
    predicted: Counter[tuple[str, str, int]] = Counter()
    for call in step_calls(config, shapes, DIM, breakdown["world_size"], build, stored_width):
        predicted[call.purpose, call.op, call.size] += call.times
    profiled = {(one["purpose"], one["op"], one["size"]): one["calls"] for one in breakdown["collectives"]}
    assert profiled == predicted


def check_complete(folder: Path, name: str, stage: int) -> None:
    """Check that the counted calls are all c10d operators in the trace and all collectives that gloo executed."""
    breakdown = breakdown_of(folder, name, stage)
    path = folder / f"{name}{stage}" / TRACE
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    windows = [event for event in events if event["name"] == STEP]
    launched = 0
    executed = 0
    for event in events:
        time = event.get("ts", 0)
        if any(window["ts"] <= time <= window["ts"] + window["dur"] for window in windows):
            launched += event["name"].startswith("c10d::")
            executed += event["name"].startswith("gloo:")
    assert len(windows) == breakdown["steps"] == STEPS
    for records in (breakdown["purposes"].values(), breakdown["collectives"]):
        assert sum(record["calls"] for record in records) * STEPS == launched == executed
    for step in read_trace(path):
        assert all(len(collective.intervals) == 1 for collective in step.collectives)
    assert not [purpose for purpose in breakdown["purposes"] if " in " in purpose or "outside" in purpose]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "micro", "precision"),
    [(2, ROWS, "fp32"), (2, ROWS // 2, "bf16"), (3, ROWS, "bf16")],
)
def test_collectives_of_every_stage(tmp_path: Path, precision: str, ranks: int, micro: int) -> None:
    stages = [("neuclip", stage) for stage in range(4)]
    run_ranks(ranks, profiles, tmp_path, stages, precision, micro)
    for name, stage in stages:
        check_collectives(tmp_path, name, stage)
        check_complete(tmp_path, name, stage)


PARTS = {
    "model": {"vision": {"trainable": 0}, "text": {"trainable": "frozen"}},
    "optimizer": {"layer_decay": 0.5},
}
WHOLE = {"optimizer": {"layer_decay": 0.5, "text_lr": 1e-3}}


@pytest.mark.slow
@pytest.mark.parametrize(("options", "precision"), [(PARTS, "fp32"), (WHOLE, "bf16")])
def test_frozen_parts_send_nothing_and_groups_are_counted(
    tmp_path: Path, precision: str, options: dict[str, Any]
) -> None:
    stages = [("openclip", stage) for stage in range(4)]
    run_ranks(RANKS, profiles, tmp_path, stages, precision, ROWS // 2, options)
    for name, stage in stages:
        check_collectives(tmp_path, name, stage)
        if options is PARTS:  # the final norm and the projection of the image tower, in each of two micro-batches
            reduced = breakdown_of(tmp_path, name, stage)["purposes"]["gradient reduce"]
            assert reduced["bytes_sent"] <= 2 * ALL_REDUCE * FLOAT * (2 * 32 + 32 * DIM)


REFERENCE = {"objective": {"reference_model": "not read", "temperature": {"initial": 0.05}}}
LEAN = {"optimizer": {"lean_zero1": True}}
SMALL_BUCKET = 3_000  # elements, fewer than a group of matrices has and more than a group of vectors


def profile_stored_and_lean(communicator: Communicator, folder: Path) -> None:
    """Profile a step with a reference whose width is given, and lean steps with small and with large buckets."""
    config = validate(merge(TREE, merge(REFERENCE, settings_of(communicator, "fastclip_v1", 1, "fp32", ROWS // 2))))
    run_synthetic_profile(config, communicator, folder / "reference1", "reference", 2, stored_width=WIDTH)
    profiles(communicator, folder / "large", [("openclip", 1)], "bf16", ROWS // 2, LEAN)
    with patch.object(lean_zero1, "BUCKET_ELEMENTS", SMALL_BUCKET):
        profiles(communicator, folder / "small", [("openclip", 1)], "bf16", ROWS // 2, LEAN)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_stored_features_and_lean_steps_send_what_is_predicted(tmp_path: Path, ranks: int) -> None:
    run_ranks(ranks, profile_stored_and_lean, tmp_path)
    check_collectives(tmp_path, "reference", 1, WIDTH)
    check_complete(tmp_path, "reference", 1)
    sent = breakdown_of(tmp_path, "reference")["purposes"]["stored_features"]["bytes_sent"]
    assert sent == 2 * WIDTH * (ranks - 1) * ROWS * FLOAT
    check_collectives(tmp_path / "large", "openclip", 1)
    check_complete(tmp_path / "large", "openclip", 1)
    with patch.object(lean_zero1, "BUCKET_ELEMENTS", SMALL_BUCKET):
        check_collectives(tmp_path / "small", "openclip", 1)
    check_complete(tmp_path / "small", "openclip", 1)
    ops = {one["op"] for one in breakdown_of(tmp_path / "small", "openclip")["collectives"]}
    assert {"reduce", "reduce_scatter", "all_gather"} <= ops


def test_times_add_up_and_the_report_has_them(folder: Path) -> None:
    breakdown = breakdown_of(folder, "neuclip")
    seconds = {name: statistic["mean"] for name, statistic in breakdown["seconds"].items()}
    assert seconds["total"] == pytest.approx(
        seconds["computation"] + seconds["pure_communication"] + seconds["others"], rel=1e-6
    )
    assert 0 < sum(statistic["mean"] for statistic in breakdown["phases"].values()) < seconds["total"]
    assert set(breakdown["phases"]) == {"forward", "objective", "normalizer", "backward", "optimizer"}
    assert len(breakdown["ranks"]) == RANKS
    text = (folder / "neuclip1" / "report.md").read_text()
    assert "| neuclip | 1 | 2 | norm and overflow |" in text and "pure communication" in text
