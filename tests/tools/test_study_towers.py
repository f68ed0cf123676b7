"""The study of towers that train: its plan and estimate, the options of its runs, and a run with the trainer."""

from __future__ import annotations

import io
import math
import tarfile
from pathlib import Path
from typing import Any

import pytest
import run_study
from PIL import Image
from study import towers
from study.features import read_samples
from study.loop import Run

from neuclip_ds.data.demo import make_demo_data
from neuclip_ds.recipe import recipe_config


def test_a_plan_is_estimated_before_its_search_has_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Searches, short lists and final runs count; an arm may have its own batch size, and a stage its own grid."""
    arms = {
        "openclip": {"loss": "openclip", "grid": {"lr": [1.0, 2.0]}},
        "openclip, 32x batch": {"loss": "openclip", "batch_factor": 32},
    }
    search = {"arms": list(arms), "batch": [10], "seeds": 2, "shortlist": 1, "set": {"epochs": 2}, "grid": True}
    search["grids"] = {"openclip": {"lr": [1.0, 2.0, 3.0]}, "openclip, 32x batch": {"lr": [4.0]}}
    final = {"arms": list(arms), "batch": [10], "seeds": 3, "best_of": "search", "vary": {"epochs": [2, 8]}}
    monkeypatch.setattr(run_study, "PLAN", {"arms": arms, "stages": {"search": search, "final": final}})
    stages = {"search": tmp_path, "final": tmp_path}
    jobs = run_study.planned(stages, {})
    assert len([job for job in jobs if job.name.startswith("search/")]) == 3 + 1 + 1 + 1  # with one seed, then another
    assert len([job for job in jobs if job.name.startswith("final/")]) == 2 * 3 * 2
    assert {job.run.batch for job in jobs if "32x" in job.name} == {320}
    assert {job.run.lr for job in jobs if job.name.startswith("final/openclip, 32x batch")} == {4.0}
    # a stage's batch size includes arms with another one
    assert run_study.planned(stages, {}, run_study.Selection(batches=[10])) == jobs
    assert run_study.planned(stages, {}, run_study.Selection(batches=[320])) == []

    def record(batch: int, epochs: float, seconds: float, start_seconds: float) -> dict[str, Any]:
        run = {"loss": "openclip", "batch": batch, "seed": 1, "epochs": epochs, "lr": 1.0}
        return {"run": run, "results": {"recall": 1.0, "seconds": seconds, "start_seconds": start_seconds}}

    paces = {"pace/a/B10/seed1": record(10, 0.5, seconds=60, start_seconds=20)}
    unknown = run_study.planned(stages, paces, run_study.Selection(["openclip, 32x batch"]))
    assert "no similar run has ended" in run_study.estimate("the plan", unknown, paces, processes=2)
    assert "not counting 8 runs" in run_study.estimate("the plan", jobs, paces, processes=2)
    paces["pace/b/B320/seed1"] = record(320, 0.5, seconds=60, start_seconds=20)
    seconds = len(jobs) * 20 + 80 * sum(job.run.epochs for job in jobs)
    sentence = run_study.estimate("the plan", jobs, paces, processes=2)
    assert sentence == f"the plan: {len(jobs)} runs, about {seconds / 7200:.1f} hours"
    ended = {"search/openclip/B10/lr=1/seed1": record(10, 2, seconds=180, start_seconds=20)}
    assert len(run_study.planned(stages, ended)) == len(jobs) - 1


def test_the_plans_runs_are_valid_configs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The trainer accepts each arm's options, and its losses get the temperature's rate that the study sets."""
    monkeypatch.setattr(towers, "count_samples", lambda shards: 16_000)
    stages = dict.fromkeys((name for name, plan in run_study.PLAN["stages"].items() if plan.get("trainer")), tmp_path)
    runs: dict[tuple[str, str], Run] = {}  # one for each recipe and arm
    for job in run_study.planned(stages, {}):
        runs[job.run.recipe, job.name.split("/")[1]] = job.run
    for (_, arm), run in runs.items():
        options = towers.train_options(run, tmp_path, arm)
        config = recipe_config(str(Path(towers.__file__).with_name(f"{run.recipe}.yaml")), options)
        assert config.objective.temperature.lr == pytest.approx(run.lr * run.temperature_rate)
        assert config.max_steps == round(run.epochs * (16_000 // run.batch))
    assert runs["towers_scenes", "neuclip, constant tau"].temperature_rate == 0


def test_each_caption_of_a_photograph_is_a_sample(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    with tarfile.open(tmp_path / "source/00000.tar", "w") as tar:
        for number in range(2):
            pixels = io.BytesIO()
            Image.new("RGB", (8, 8), (number, 0, 0)).save(pixels, "JPEG")
            captions = f'{{"captions": ["first of {number}", "second of {number}"]}}'.encode()
            for extension, content in {"jpg": pixels.getvalue(), "json": captions, "txt": b"first"}.items():
                member = tarfile.TarInfo(f"{number:09d}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    towers.write_pairs(tmp_path / "source", tmp_path / "train")
    captions = [captions for _, captions in read_samples(tmp_path / "train")]
    assert captions == [["first of 0"], ["second of 0"], ["first of 1"], ["second of 1"]]
    assert towers.count_samples(tmp_path / "train") == 4


POOLED = {"npn": {"kappa": 0.25, "optimizer": "adagrad", "lr": 0.05, "prototypes": 256, "redraw_every": 112}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "options"),
    [("openclip", {}), ("neuclip_queue", {"queue": {"size": 512}}), ("neuclip", POOLED)],
)
def test_the_trainer_trains_the_towers_of_a_run(loss: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Towers learn from scratch; a queue that drives all features in one direction makes them collapse."""
    make_demo_data(tmp_path / "shards", pairs=1280, held_out=60, zero_shot=80, processes=1)
    temperature = {"temperature": {"initial": 0.05}}
    run = Run(
        loss,
        batch=16,
        seed=1,
        epochs=5,
        lr=5e-4,
        width=64,
        dropout=0.0,
        temperature_rate=0.0,
        recipe="towers_scenes",
        options=options | temperature,
    )
    results = towers.train_towers(tmp_path / "shards", "val", run, "stage/openclip, few/seed1")
    assert results["step"] == 400
    assert len(results["curve"]) == towers.POINTS
    assert results["recall"] > 2 * 100 * (1 + 5 + 10) / 3 / 60  # twice the chance
    step_seconds = 399 * results["step_seconds"]
    assert math.isclose(results["seconds"], results["start_seconds"] + step_seconds)
    assert not any((tmp_path / "runs").iterdir())
