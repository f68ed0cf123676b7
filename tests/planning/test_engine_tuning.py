"""Variants of a DeepSpeed config, the choice among them, their table, and the tool that runs them on two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_runs import call

from neuclip_ds.config import Config
from neuclip_ds.engine.config import FOLDER, load_engine_config, read_engine_file
from neuclip_ds.errors import UserError
from neuclip_ds.planning.engine_tuning import (
    ConfigOverride,
    Measurement,
    apply_overrides,
    best_together,
    choose,
    is_better,
    parse_override,
    reason,
    table,
    variants,
)

OVERLAP = ConfigOverride("zero_optimization.overlap_comm", True)
SMALL, LARGE = (ConfigOverride("zero_optimization.reduce_bucket_size", size) for size in (5_000_000, 500_000_000))
BF16 = ConfigOverride("communication_data_type", "bf16")
BASE = Measurement((), [[0.10, 0.11, 0.10], [0.12, 0.12, 0.13]])


def measured(*overrides: ConfigOverride, rounds: list[list[float]]) -> Measurement:
    return Measurement(overrides, rounds)


def keys_of(engine: dict[str, Any]) -> set[str]:
    return {one.key.removeprefix("zero_optimization.") for one in variants(engine)}


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.json")))
def test_each_variant_of_our_files_changes_one_value_and_loads(name: str, tmp_path: Path) -> None:
    engine = read_engine_file(name)[1]
    for one in variants(engine):
        other = apply_overrides(engine, [one])
        assert other != engine
        path = tmp_path / "variant.json"
        path.write_text(json.dumps(other))
        whole = load_engine_config(Config.model_validate({"deepspeed": str(path), "data": {"batch_size": 4}}), 2)
        section, _, key = one.key.rpartition(".")
        assert (whole[section] if section else whole)[key] == one.value


def test_only_keys_that_the_stage_reads_are_tried() -> None:
    of = {path.stem: keys_of(read_engine_file(path.stem)[1]) for path in FOLDER.glob("*.json")}
    assert of["zero0_fp32"] == set()
    assert of["zero0_bf16"] == of["zero1_bf16"] == {"communication_data_type"}
    reduction = {"overlap_comm", "reduce_bucket_size", "contiguous_gradients", "reduce_scatter"}
    assert of["zero1_fp32"] == of["zero2_fp32"] == reduction | {"use_multi_rank_bucket_allreduce"}
    assert of["zero2_bf16"] == of["zero2_fp32"] | {"communication_data_type"}
    assert {key for key in of["zero3_fp32"] if not key.startswith("stage3_")} == reduction


@pytest.mark.parametrize(("device", "reduces_in_buckets"), [("cpu", True), ("none", False)])
def test_offload_decides_which_keys_stage_1_reads_in_bf16(device: str, reduces_in_buckets: bool) -> None:
    engine = read_engine_file("zero1_bf16")[1]
    engine["zero_optimization"]["offload_optimizer"] = {"device": device}
    assert ("reduce_bucket_size" in keys_of(engine)) == reduces_in_buckets


def test_a_default_counts_as_the_bases_value() -> None:
    plain = {"zero_optimization": {"stage": 3}}
    assert ConfigOverride("zero_optimization.overlap_comm", False) in variants(plain)
    assert ConfigOverride("zero_optimization.overlap_comm", True) not in variants(plain)
    assert LARGE not in variants(plain) and SMALL in variants(plain)
    assert BF16 not in variants({"bf16": {"enabled": True}, **plain})


def test_overrides_leave_the_base_alone() -> None:
    engine = {"zero_optimization": {"stage": 2}}
    assert apply_overrides(engine, [OVERLAP, BF16]) == {
        "zero_optimization": {"stage": 2, "overlap_comm": True},
        "communication_data_type": "bf16",
    }
    assert engine == {"zero_optimization": {"stage": 2}}


def test_overrides_as_they_are_typed() -> None:
    assert parse_override("zero_optimization.overlap_comm=true") == OVERLAP
    assert parse_override("communication_data_type=bf16") == BF16
    assert str(parse_override("zero_optimization.reduce_bucket_size=5000000")) == "reduce_bucket_size=5000000"
    with pytest.raises(UserError, match="write KEY=VALUE"):
        parse_override("overlap_comm")


@pytest.mark.parametrize(
    ("rounds", "better"),
    [
        ([[0.09, 0.09, 0.2], [0.099, 0.05, 0.3]], True),  # both medians below the base's faster one
        ([[0.05, 0.05, 0.05], [0.10, 0.10, 0.10]], False),  # one start no faster
        ([[0.05, 0.05, 0.05]], False),  # a single start shows nothing
        ([[0.2, 0.2, 0.2], [0.2, 0.2, 0.2]], False),
    ],
)
def test_better_is_beyond_the_spread_of_the_starts(rounds: list[list[float]], better: bool) -> None:
    assert is_better(measured(OVERLAP, rounds=rounds), BASE) == better


def test_the_best_together_take_one_value_of_a_key_and_no_precision() -> None:
    fast, faster, slow = ([[time] * 3] * 2 for time in (0.08, 0.07, 0.2))
    found = [
        measured(SMALL, rounds=fast),
        measured(LARGE, rounds=faster),
        measured(OVERLAP, rounds=slow),
        measured(BF16, rounds=faster),
        Measurement((ConfigOverride("zero_optimization.reduce_scatter", False),), error="refused"),
    ]
    assert best_together(found, BASE) == (LARGE,)
    assert choose([found[2], found[4]], BASE) is BASE
    assert choose(found[:3], BASE) is found[1]


def test_the_ratio_is_that_of_starts_of_one_round() -> None:
    drifting = measured(OVERLAP, rounds=[[0.05], [0.06]])
    assert drifting.ratio(Measurement((), [[0.10], [0.12]])) == pytest.approx(0.5)
    assert drifting.spread == pytest.approx(0.01 / 0.055)


def test_the_table_has_a_refusal_as_a_row() -> None:
    one = measured(OVERLAP, rounds=[[0.09], [0.09]])
    one.traffic = {
        "gradient reduce": {"calls": 4.0, "bytes_sent": 2e6, "seconds": 0.3, "hidden_seconds": 0.1},
        "parameter gather": {"calls": 2.0, "bytes_sent": 1e6, "seconds": 0.1, "hidden_seconds": 0.0},
    }
    one.difference, one.drift, one.peak = 1e-5, 0.02, 3_000_000
    refused = Measurement((BF16,), error="no | such type")
    rows = table([BASE, one, refused], BASE, "Settings").rows
    assert rows[1] == [
        *("overlap_comm=true", "90.0", "0.0%", "0.825", "yes"),
        *("4", "2.00", "2", "1.00", "25%", "1e-05", "2.00%", "3"),
    ]
    assert rows[2][:2] == ['communication_data_type="bf16"', "no / such type"]
    assert len({len(row) for row in rows}) == 1


def test_the_reason_is_the_last_error() -> None:
    output = (
        "Traceback\nValueError: first\n[rank1]: some.module.ValidationError: 1 error for X\nkey\n  Input is bad\nmore\n"
    )
    assert reason(output) == "ValidationError: 1 error for X key Input is bad"
    assert reason("error: a.json is missing\n") == "error: a.json is missing"
    assert reason("Killed\n") == "killed (no error reported)"
    assert len(reason("ValueError: " + 500 * "x")) == 120


@pytest.mark.slow
def test_the_tool_on_two_ranks(tmp_path: Path) -> None:
    variants = [
        "zero_optimization.use_multi_rank_bucket_allreduce=false",
        "communication_data_type=bf16",
        "zero_optimization.overlap_comm=perhaps",
    ]
    options = ["--engine=zero2_bf16", "--recipe=miniature", "--rows=8", "--steps=3", "--rounds=1", "--out=tuning"]
    run = call("tools/tune_engine.py", *options, "--variants", *variants, "--write=mine.json", folder=tmp_path)
    assert run.returncode == 0, run.stderr
    found = json.loads((tmp_path / "tuning" / "tuning.json").read_text())
    base, owners, rounded, refused = found["alone"]
    sent = [one["traffic"]["gradient reduce"]["bytes_sent"] for one in (base, owners, rounded)]
    assert sent == [sent[0], sent[0] / 2, sent[0] / 2]
    assert owners["difference"] == 0.0 < rounded["difference"] < 1e-2
    assert base["drift"] == 0.0 < rounded["drift"] < 0.5
    assert refused["rounds"] == [] and "overlap_comm" in refused["error"]
    assert min(base["rounds"][0]) > 0 and base["peak"] > 1e8
    assert not list((tmp_path / "tuning").glob("**/*.safetensors"))
    assert json.loads((tmp_path / "mine.json").read_text()) == read_engine_file("zero2_bf16")[1]


@pytest.mark.slow
def test_the_tool_says_what_is_wrong_before_it_starts(tmp_path: Path) -> None:
    run = call("tools/tune_engine.py", "--engine=zero7_bf16", folder=tmp_path)
    assert run.returncode == 2
    assert "neither a file nor a name in ds_configs/" in run.stderr
