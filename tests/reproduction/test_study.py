"""The miniature study: its runs are valid, its report shows what they found, and what is done is not done again."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tars import write_pairs

from neuclip_ds.errors import UserError
from neuclip_ds.objectives import METHODS
from neuclip_ds.recipe import parse
from neuclip_ds.reproduction import report, study
from neuclip_ds.reproduction.data import prepare
from neuclip_ds.reproduction.runner import Runner, _text
from neuclip_ds.reproduction.study import Budget, Job

BUDGET = Budget(batch=64, epochs=2, seeds=2, anchors=100)
SEARCHED = study.search(BUDGET)
BEST = {job.method: job.options for job in SEARCHED}
ALL = [*SEARCHED, *study.finals(BEST, BUDGET), *study.sweeps(BEST, BUDGET)]


def fake(job: Job, recall: float) -> dict[str, float]:
    error = {} if job.method == "siglip" else {"normalizer_mse": 0.5}
    return {**dict.fromkeys(report.RECALLS, recall), "zero_shot_top1": 0.25, "step_ms": 10.0, **error}


def test_every_method_has_the_same_search() -> None:
    assert set(study.SEARCHES) == set(METHODS) - {"gcl"}, "TuneCLIP's loss without its hinge is v1's but for a divisor"
    assert all(sum(job.method == name for job in SEARCHED) == 4 for name in study.SEARCHES)
    assert {job.split for job in SEARCHED} == {"validation"}
    assert {job.split for job in ALL if not job.name.startswith("search")} == {"test"}
    assert len({job.name for job in ALL}) == len(ALL)


@pytest.mark.parametrize("job", [job for job in ALL if job.seed < 2], ids=lambda job: job.name)
def test_every_run_is_a_valid_command(job: Job) -> None:
    config = parse(["miniature", *(f"--{key}={_text(value)}" for key, value in job.options.items())]).config
    assert config.objective.method == job.method


def test_report(tmp_path: Path) -> None:
    results = {job.name: fake(job, 0.1 * job.seed) for job in ALL}
    results["final/openclip/seed1"] = {}  # diverged
    report.write(results, tmp_path, "A study")
    text = (tmp_path / "report.md").read_text()
    assert re.search(r"\| neuclip \| 15\.00 ± 7\.07 \| 15\.00 ± 7\.07 .*\| 0\.50 ± 0\.00 \|", text)
    assert re.search(r"\| openclip \| 10\.00 ± 14\.14 ", text), "a diverged run counts as zero"
    assert re.search(r"\| siglip \| 15\.00 .*\| - \|", text)
    assert all(f"| {name} |" in text for name in study.ABLATIONS)
    page = (tmp_path / "report.html").read_text()
    for name in ("quality.png", "normalizer_error.png"):
        assert (tmp_path / name).stat().st_size > 5000
        assert f'src="{name}"' in page


def test_mean_and_deviation() -> None:
    assert str(report.summarize([1.0, 3.0])) == "2.00 ± 1.41"
    assert str(report.summarize([1.0])) == "1.00"


def test_results_are_read_and_not_made_again(tmp_path: Path) -> None:
    job = SEARCHED[0]
    folder = tmp_path / job.name
    folder.mkdir(parents=True)
    runner = Runner(tmp_path, tmp_path, None, processes=1)
    assert runner.results(job.name) is None
    lines = [{"step": 10, "samples_per_second": 640.0}, {"step": 12, "retrieval_pairs": 5.0}]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert runner.results(job.name) is None, "it has not ended"
    (folder / "job.json").write_text(json.dumps({**job.options, "seconds": 9.0}))
    assert runner.curve(job.name) == [(12, lines[1])]
    done: list[int] = []
    found = runner.run([job], lambda: done.append(1))
    assert found == {job.name: {"step": 12.0, "retrieval_pairs": 5.0, "step_ms": 100.0, "seconds": 9.0}}
    assert done == [1]


def test_splits_are_disjoint(tmp_path: Path) -> None:
    write_pairs(tmp_path / "source", [1160])
    prepare(tmp_path / "source", tmp_path / "out", validation=50, test=100)
    import webdataset

    def captions(name: str) -> list[bytes]:
        shards = sorted(str(path) for path in (tmp_path / "out" / name).glob("*.tar"))
        return [sample["txt"] for sample in webdataset.WebDataset(shards, shardshuffle=False)]

    train, validation, test = captions("train"), captions("validation"), captions("test")
    assert (len(train), len(validation), len(test)) == (1010, 50, 100)
    assert len({*train, *validation, *test}) == 1160
    assert captions("train_tenth") == train[:101]
    with pytest.raises(UserError, match="at least 1000"):
        prepare(tmp_path / "source", tmp_path / "other", validation=200, test=100)


def test_a_folder_without_shards(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    with pytest.raises(UserError, match="holds no tar files"):
        prepare(tmp_path / "source", tmp_path / "out", 5, 5)
