"""The cold-start study: its runs are valid, share what they should, and its search ends inside its grid."""

from __future__ import annotations

from pathlib import Path

import pytest

from neuclip_ds.recipe import parse
from neuclip_ds.reproduction import cold_start
from neuclip_ds.reproduction.cold_start import RATES, RECOVERIES, VARIANTS, Plan
from neuclip_ds.reproduction.runner import _text

PLAN = Plan(
    pretraining="train/{00000}.tar",
    tuning="tuning",
    noisy="mismatched",
    batch=64,
    pretraining_epochs=2,
    temperature=0.01,
    epochs=3,
    epoch_steps=8,
    captions=["json:captions", "txt"],
    models=Path("models"),
    runs=Path("runs"),
    checkpoints=4,
)
FINALS = {name: cold_start.final(PLAN, name, 3e-4, 1) for name in VARIANTS}
RECOVERED = {name: cold_start.recovery(PLAN, name, 1) for name in RECOVERIES}
SEARCHES = [cold_start.searching(PLAN, name, 1e-3) for name, variant in VARIANTS.items() if variant.searched is None]
ALL = [cold_start.pretraining(PLAN, 1), *RECOVERED.values(), *SEARCHES, *FINALS.values()]


@pytest.mark.parametrize("job", ALL, ids=lambda job: job.name)
def test_every_run_is_a_valid_command(job: cold_start.Job) -> None:
    config = parse(["miniature", *(f"--{key}={_text(value)}" for key, value in job.options.items())]).config
    assert config.data.batch_size == (128 if job is RECOVERED[cold_start.LARGER] else 64)
    if config.recovery.reuse is not None:
        reused = RECOVERED[str(config.recovery.reuse).split("/")[2]]
        assert str(config.recovery.reuse).rsplit("/", 1)[0] == f"runs/{reused.name}".rsplit("/", 1)[0]
        assert reused.train == job.train, "u belongs to its pairs"
        optimizers = {one.options.get("optimizer.name") for one in (reused, job)}
        assert len(optimizers) == 1, "moments belong to their optimizer"


def test_pretraining_keeps_the_temperature() -> None:
    constant = {"objective.temperature.initial": 0.01, "objective.temperature.lr": 0.0}
    assert constant.items() <= cold_start.pretraining(PLAN, 1).options.items()
    learned = cold_start.pretraining(PLAN._replace(temperature=None), 1).options
    assert not constant.keys() & learned.keys()


def test_seeds_share_checkpoints_in_turn() -> None:
    one, other = (cold_start.final(PLAN._replace(checkpoints=2), "TuneCLIP", 1e-4, seed).options for seed in (1, 3))
    assert one == other
    assert one["model.pretrained"] == Path("models/seed1")
    assert one["recovery.reuse"] == Path("runs/recover/full/seed1")


def changes(one: str, other: str) -> set[str]:
    ours, theirs = FINALS[one].options, FINALS[other].options
    changed = {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
    return changed - {"run.evaluate_every"}  # of variants with a curve


def test_runs_differ_in_what_they_are_named_for() -> None:
    assert len({job.name for job in ALL}) == len(ALL)
    assert changes("TuneCLIP", "HGCL, moments recovered") == {"recovery.transfer"}
    assert changes("TuneCLIP", "GCL, moments and u recovered") == {"objective.method"}
    assert changes("TuneCLIP", "TuneCLIP, margin 0.2") == {"objective.hinge.margin"}
    assert changes("TuneCLIP", "TuneCLIP, momentum SGD") == {"optimizer.name", "recovery.reuse"}
    assert FINALS["HGCL, warm-up of one epoch"].options["optimizer.warmup_steps"] == PLAN.epoch_steps
    assert {job.train for job in ALL[1:]} == {PLAN.tuning, PLAN.noisy}


def test_variants_take_rates_of_variants_that_search() -> None:
    taken = {variant.searched for variant in VARIANTS.values()} - {None}
    assert all(VARIANTS[name].searched is None for name in taken)


@pytest.mark.parametrize("best", [3e-5, 3e-4, 3e-2])
def test_search_goes_on_until_the_best_rate_is_inside(best: float) -> None:
    found: dict[float, float] = {}
    while rates := cold_start.rates_to_try(found, (1e-4, 3e-4, 1e-3)):
        found |= {rate: -abs(RATES.index(rate) - RATES.index(best)) for rate in rates}
    assert max(found, key=lambda rate: found[rate]) == best
    assert min(found) < best < max(found)


def test_search_ends_where_the_rates_end() -> None:
    assert cold_start.rates_to_try({RATES[-2]: 0.0, RATES[-1]: 1.0}, ()) == []
