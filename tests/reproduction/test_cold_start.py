"""The cold-start study: its runs are valid, share what they should, and its page shows what they found."""

from __future__ import annotations

from pathlib import Path

import pytest

from neuclip_ds.recipe import parse
from neuclip_ds.reproduction import cold_start, cold_start_report
from neuclip_ds.reproduction.cold_start import VARIANTS, Plan
from neuclip_ds.reproduction.report import RECALLS
from neuclip_ds.reproduction.runner import _text

PLAN = Plan("train/{00000}.tar", "train/{00001}.tar", 64, 2, 3, 8, Path("models"), Path("runs"))
BEST = dict.fromkeys(VARIANTS, 3e-4)
FINALS = cold_start.finals(PLAN, BEST, seeds=2)
RECOVERIES = [cold_start.recovery(PLAN, name, 1) for name in cold_start.RECOVERIES]
ALL = [cold_start.pretraining(PLAN, 1), *RECOVERIES, *cold_start.search(PLAN), *FINALS]


@pytest.mark.parametrize("job", [job for job in ALL if job.seed < 2], ids=lambda job: job.name)
def test_every_run_is_a_valid_command(job: cold_start.Job) -> None:
    config = parse(["miniature", *(f"--{key}={_text(value)}" for key, value in job.options.items())]).config
    assert config.data.batch_size == 64
    if config.recovery.reuse is not None:
        assert str(config.recovery.reuse) in {f"runs/{recovery.name}" for recovery in RECOVERIES} | {
            f"runs/recover/full/seed{job.seed}"
        }


def test_runs_differ_in_what_they_are_named_for() -> None:
    assert len({job.name for job in ALL}) == len(ALL)
    options = {job.name: job.options for job in FINALS if job.seed == 1}
    whole, moments = options["tune/TuneCLIP/seed1"], options["tune/HGCL, moments recovered/seed1"]
    assert {key for key in whole.keys() | moments.keys() if whole.get(key) != moments.get(key)} == {"recovery.transfer"}
    warm = options["tune/HGCL, warm-up of one epoch/seed1"]
    assert warm["optimizer.warmup_steps"] == PLAN.epoch_steps
    assert {job.train for job in ALL[1:]} == {PLAN.tuning}


def test_report(tmp_path: Path) -> None:
    def point(step: int, recall: float) -> tuple[int, dict[str, float]]:
        return step, {**dict.fromkeys(RECALLS, recall), "zero_shot_top1": recall / 2, "step": step}

    curves = {
        name: [[point(0, 0.5), point(5, 0.3), point(9, 0.6 + 0.1 * seed)] for seed in (0, 1)] for name in VARIANTS
    }
    searched = {"TuneCLIP": dict.fromkeys(cold_start.LEARNING_RATES, 61.234)}
    recovered = {job.name: {"seconds": 10.0, "normalizer_mse": 0.25} for job in RECOVERIES}
    tables = [
        cold_start_report.recoveries(recovered),
        cold_start_report.differences([{"log_u_rms": 0.1}, {"log_u_rms": 0.3}]),
    ]
    cold_start_report.write(curves, searched, tables, tmp_path, "A study")
    text = (tmp_path / "tuneclip.md").read_text()
    assert "| TuneCLIP | 50.00 ± 0.00 | 30.00 ± 0.00 | 65.00 ± 7.07 | 15.00 ± 7.07 |" in text
    assert "| TuneCLIP | 61.23 | 61.23 | 61.23 |" in text
    assert "| cached | 10.00 | 0.25 |" in text
    assert "| log_u_rms | 0.200 ± 0.141 |" in text
    assert (tmp_path / "tuneclip.png").stat().st_size > 5000
    assert 'src="tuneclip.png"' in (tmp_path / "tuneclip.html").read_text()
