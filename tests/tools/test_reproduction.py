"""The comparison of methods: its runs are valid, its tables show what they found, and no run is done twice."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from reproduction import study
from reproduction.data import prepare
from reproduction.report import RECALLS, difference, report
from reproduction.runner import Runner, as_text, read_results
from reproduction.study import ARMS, SEARCHED, Job, Point, Regime, Study
from small_runs import SMALL, demo_shards
from tars import write_pairs

from neuclip_ds.errors import UserError
from neuclip_ds.objectives import METHODS
from neuclip_ds.recipe import parse

STUDY = Study(seeds=2, anchors=100)
SEARCHES = {name: arm.search for name, arm in ARMS.items() if arm.search is not None}
BEST = {(regime, name): Point(2e-3, search.values[0]) for regime in SEARCHED for name, search in SEARCHES.items()}
FINALS = list(study.finals([Regime(32, 3)], ARMS, BEST, STUDY))
SEARCH = [job for name in SEARCHES for job in study.search_jobs(name, SEARCHED[0], BEST[SEARCHED[0], name], STUDY)]


def fake(recall: float) -> dict[str, float]:
    return {**dict.fromkeys(RECALLS, recall), "zero_shot_top1": 0.25, "step_ms": 10.0}


def test_every_method_is_compared_by_valid_commands() -> None:
    assert {arm.method for arm in ARMS.values()} == set(METHODS) - {"gcl"}  # fastclip_v1 but for a divisor
    assert {arm.like for arm in ARMS.values()} <= SEARCHES.keys()
    assert len({job.name for job in (*SEARCH, *FINALS)}) == len(SEARCH) + len(FINALS)
    for job in (*SEARCH, *FINALS[: len(ARMS)]):
        config = parse(["miniature", *(f"--{key}={as_text(value)}" for key, value in job.options.items())]).config
        assert config.objective.method == job.options["objective.method"]
    with pytest.raises(UserError, match="Unknown arm siglipp; did you mean siglip"):
        study.chosen(["siglipp"])
    assert [str(Regime.parse(text)) for text in ("32x3", "32x30/10")] == ["32x3", "32x30/10"]
    with pytest.raises(UserError, match="32 is not a regime"):
        Regime.parse("32")


def test_a_search_ends_inside_its_rates() -> None:
    """The best rate has a worse one on both sides, and both values of the option were tried there."""
    search = SEARCHES["openclip"]
    first, other = search.values
    recall = {1e-3: 20.0, 5e-4: 10.0, 2e-3: 15.0, 4e-3: 5.0}
    scores: dict[Point, float] = {}
    asked = []
    while points := study.next_points(scores, search):
        asked.append(points)
        scores |= {point: recall[point.lr] + (point.value == other) for point in points}
    assert asked == [
        [Point(2e-3, first), Point(4e-3, first)],
        [Point(1e-3, first)],
        [Point(5e-4, first)],
        [Point(1e-3, other)],
    ]


def test_tables() -> None:
    """Differences are taken over the seeds that both have, and a diverged run counts as zero.

    Half-widths are t's of 0.975: 4.303 for gains of 2, 1 and 0, which deviate by 1.
    """
    assert str(difference([3.0, 5.0, 4.0], [1.0, 4.0, 4.0])) == "+1.00 ± 2.48"
    results = {f"32x3/openclip/seed{seed}": fake(0.1 * seed) for seed in (1, 2, 3)}
    results |= {f"32x3/neuclip, no rho/seed{seed}": fake(0.11 * seed) for seed in (1, 2)}
    results |= {"16x3/openclip/seed1": fake(0.2), "16x3/neuclip/seed1": {}}
    results |= {f"search/32x3/openclip/lr0.001_0.07{more}": fake(x) for more, x in (("", 0.1), (", seed 1", 0.2))}
    text = report(results)
    assert "| neuclip, no rho | 16.50 ± 7.78 | +1.50 ± 6.35 | 16.50 ± 7.78 |" in text
    assert "| neuclip | 0.00 | -20.00 | - | - | - | - | - | 1 |" in text
    assert "| 32x3 | openclip | lr0.001_0.07 | 15.00 ± 7.07 | 2 |" in text
    assert text.index("## B = 16, 3 epochs") < text.index("## B = 32, 3 epochs") < text.index("## Search")


def test_results_are_read_and_not_made_again(tmp_path: Path) -> None:
    job = SEARCH[0]
    results = {"step": 12.0, "seconds": 9.0}
    record = {"name": job.name, "options": {**job.options, "data.train": "train"}, "results": results}
    (tmp_path / "results.jsonl").write_text(json.dumps(record) + "\n")
    runner = Runner(tmp_path, tmp_path / "runs", None, processes=1)
    done: list[int] = []
    assert runner.run([job], lambda: done.append(1)) == {job.name: results} and done == [1]
    assert read_results(tmp_path / "results.jsonl") == {job.name: results}
    (tmp_path / "bad.jsonl").write_text('{"name": "x"}\n')
    for name in ("bad.jsonl", "none.jsonl"):
        with pytest.raises(UserError, match=f"{name} is not the results.jsonl of a study"):
            read_results(tmp_path / name)
    other = replace(job, options={**job.options, "optimizer.lr": 5.0})
    with pytest.raises(UserError, match=r"has search/.* with another optimizer\.lr; choose another --out"):
        runner.run([other], lambda: None)


@pytest.mark.slow
def test_a_diverged_run_has_no_results(tmp_path: Path) -> None:
    demo_shards(tmp_path / "data", 40)
    runner = Runner(tmp_path / "data", tmp_path / "runs", None, processes=1)
    own = {"objective.method": "openclip", "data.batch_size": 8, "data.workers": 0, "max_steps": 30}
    own |= {"run.max_skipped_steps": 3, "optimizer.warmup_steps": 1}
    options = {**dict(option.removeprefix("--").split("=", 1) for option in SMALL), **own}
    job = Job("diverges", 0, "val", {**options, "optimizer.lr": 1e30})
    assert runner.run([job], lambda: None) == {"diverges": {}}
    with pytest.raises(UserError, match=r"The run fails failed with exit code 2; see .*/runs/fails/output.txt\."):
        runner.run([Job("fails", 0, "val", {**options, "optimizer.lr": -1})], lambda: None)


def test_splits_are_disjoint(tmp_path: Path) -> None:
    import webdataset

    write_pairs(tmp_path / "source", [1160])
    prepare(tmp_path / "source", tmp_path / "out", validation=50, test=100)

    def captions(name: str) -> list[bytes]:
        shards = sorted(str(path) for path in (tmp_path / "out" / name).glob("*.tar"))
        return [sample["txt"] for sample in webdataset.WebDataset(shards, shardshuffle=False)]

    train, validation, test = captions("train"), captions("validation"), captions("test")
    assert (len(train), len(validation), len(test)) == (1010, 50, 100)
    assert len({*train, *validation, *test}) == 1160
    assert captions("train_tenth") == train[:101]
    with pytest.raises(UserError, match="at least 1000"):
        prepare(tmp_path / "source", tmp_path / "other", validation=200, test=100)
    with pytest.raises(UserError, match="holds no tar files"):
        prepare(tmp_path / "nothing", tmp_path / "third", 5, 5)
