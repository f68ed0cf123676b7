"""The miniature study: its runs are valid, its report shows what they found, and what is done is not done again."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tars import write_pairs

from neuclip_ds.errors import UserError
from neuclip_ds.objectives import METHODS
from neuclip_ds.recipe import parse
from neuclip_ds.reproduction import report, study
from neuclip_ds.reproduction.data import prepare
from neuclip_ds.reproduction.runner import Runner, _text, read_results
from neuclip_ds.reproduction.study import ABLATIONS, ARMS, REGIMES, SEARCHED, SEARCHES, Job, Point, Regime, Study

STUDY = Study(seeds=2, anchors=100)
BEST = {(regime, name): Point(2e-3, search.values[0]) for regime in SEARCHED for name, search in study.SEARCHES.items()}
FINALS = list(study.finals(REGIMES, ARMS, BEST, STUDY))
ABLATED = list(study.finals(REGIMES[:1], ABLATIONS, BEST, STUDY))
SEARCH = [job for name in SEARCHES for job in study.search_jobs(name, SEARCHED[0], BEST[SEARCHED[0], name], STUDY)]
ALL = [*SEARCH, *FINALS, *ABLATED]


def fake(job: Job, recall: float) -> dict[str, float]:
    error = {} if job.method == "siglip" else {"normalizer_mse": 0.5}
    return {**dict.fromkeys(report.RECALLS, recall), "zero_shot_top1": 0.25, "step_ms": 10.0, **error}


def test_every_method_is_searched_and_compared() -> None:
    methods = set(METHODS) - {"gcl"}  # TuneCLIP's loss without its hinge is v1's but for a divisor
    assert set(SEARCHES) == methods | set(study.OPTIMIZERS)
    assert set(map(study.searched, study.KNOWN)) == set(SEARCHES)
    assert {job.split for job in SEARCH} == {"validation"}
    assert {job.split for job in (*FINALS, *ABLATED)} == {"test"}
    assert len({job.name for job in ALL}) == len(ALL)


def test_the_compared_arms_exist() -> None:
    compared = [names for _, *names in report.COMPARED] + [list(names) for names in report.EQUAL_TERMS]
    assert {name for names in compared for name in names} <= study.KNOWN.keys()


def test_an_arm_may_take_openclips_rate_and_start() -> None:
    arm = "neuclip, at OpenCLIP's rate and start"
    assert study.searched(arm) == "openclip"
    best = {**BEST, (SEARCHED[0], "openclip"): Point(7e-3, 0.05)}
    for job in study.finals(REGIMES[:1], [arm], best, STUDY):
        assert job.method == "neuclip"
        assert (job.options["optimizer.lr"], job.options["objective.temperature.initial"]) == (7e-3, 0.05)


# of the regimes, one is enough: they differ in numbers alone
@pytest.mark.parametrize(
    "job", [*SEARCH, *(job for job in (*FINALS[: 2 * len(ARMS)], *ABLATED) if job.seed == 1)], ids=lambda job: job.name
)
def test_every_run_is_a_valid_command(job: Job) -> None:
    config = parse(["miniature", *(f"--{key}={_text(value)}" for key, value in job.options.items())]).config
    assert config.objective.method == job.method


def test_regimes_are_read_as_they_are_written() -> None:
    assert [Regime.parse(str(regime)) for regime in REGIMES] == list(REGIMES)
    with pytest.raises(UserError, match="32 is no regime"):
        Regime.parse("32")
    assert study.nearest_search(Regime(16, 3)) == SEARCHED[0]
    assert study.nearest_search(Regime(512, 3)) == SEARCHED[1]


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
    assert max(scores, key=lambda point: scores[point]) == Point(1e-3, other)


def test_the_rate_of_an_optimizer_is_searched_separately() -> None:
    arm = "fastclip_v3, Lion"
    (point, _) = study.next_points({}, SEARCHES[arm])
    assert point.lr == 1e-4
    (job,) = study.search_jobs(arm, SEARCHED[0], point, STUDY)
    assert (job.options["optimizer.lr"], job.options["optimizer.name"]) == (1e-4, "lion")
    best = {**BEST, (SEARCHED[0], arm): Point(5e-5, 0.03)}
    for job in study.finals(REGIMES[:1], [arm], best, STUDY):
        assert (job.options["optimizer.lr"], job.options["objective.temperature.initial"]) == (5e-5, 0.03)


def test_a_search_averages_its_seeds() -> None:
    point = Point(1e-3, 0.07)
    jobs = study.search_jobs("openclip", SEARCHED[0], point, replace(STUDY, search_seeds=2))
    assert [(job.name, job.seed) for job in jobs] == [
        ("search/32x3/openclip/lr0.001_0.07", 0),
        ("search/32x3/openclip/lr0.001_0.07, seed 1", 1),
    ]
    (table,) = report._search({job.name: fake(job, 0.1 + 0.1 * job.seed) for job in jobs})
    assert table.rows == [["32x3", "openclip", "lr0.001_0.07", "15.00 ± 7.07", "2"]]


def test_report(tmp_path: Path) -> None:
    # neuclip gains 10 and 12 points over openclip
    results = {job.name: fake(job, 0.1 * job.seed + 0.01 * job.seed * (job.method == "neuclip")) for job in ALL}
    results["16x3/neuclip/seed1"] = {}  # diverged
    report.write(results, tmp_path, "A study")
    text = (tmp_path / "report.md").read_text()
    assert re.search(r"\| neuclip \| 16\.50 ± 7\.78 \| \+1\.50 ± 6\.35 \| 16\.50 .*\| 0\.50 ± 0\.00 \| 2 \|", text)
    assert re.search(r"\| neuclip \| 11\.00 ± 15\.56 \| -4\.00 ", text), "a diverged run counts as zero"
    assert re.search(r"\| siglip \| 15\.00 .*\| - \|", text)
    assert re.search(r"\| 32 \| 3 \| 16\.50 .* \| \+1\.50 ± 6\.35 \| 2 \| within noise \|", text)
    assert all(f"| {name} |" in text for name in (*ARMS, *ABLATIONS))
    page = (tmp_path / "report.html").read_text()
    for name in ("gain.png", "normalizer_error.png"):
        assert (tmp_path / name).stat().st_size > 5000
        assert f'src="{name}"' in page


def test_comparisons_on_equal_terms_are_taken_together() -> None:
    """Of seeds that all have; large batches do not count."""
    recalls = {"32x3": (0.3, 0.1), "128x12": (0.2, 0.1), "512x12": (0.9, 0.1)}
    peers = {"32x3": "openclip, tau from 0.03", "128x12": "openclip", "512x12": "openclip"}
    arms = {"32x3": "tau from 0.03", **dict.fromkeys(("128x12", "512x12"), "at OpenCLIP's rate and start")}
    results = {
        f"{regime}/{name}/seed{seed}": dict.fromkeys(report.RECALLS, recall)
        for regime, both in recalls.items()
        for name, recall in zip((f"neuclip_queue, {arms[regime]}", peers[regime]), both, strict=True)
        for seed in range(1, 4 if regime == "32x3" else 3)
    }
    table = next(table for table in report.tables(results) if "equal terms" in table.title)
    assert [row[0] for row in table.rows] == ["32", "128", "all"]
    assert [(row[3], row[4]) for row in table.rows] == [
        ("+20.00 ± 0.00", "3"),
        ("+10.00 ± 0.00", "2"),
        ("+15.00 ± 0.00", "2"),
    ]


def test_what_an_interval_shows() -> None:
    def seeds(*recalls: float) -> dict[int, dict[str, float]]:
        return {seed: dict.fromkeys(report.RECALLS, recall) for seed, recall in enumerate(recalls)}

    low = seeds(0.1, 0.2)
    assert report.verdict(report.gain(seeds(0.2, 0.3), low)) == "holds"
    assert report.verdict(report.gain(seeds(0.05, 0.15), low)) == "fails"
    assert report.verdict(report.gain(seeds(0.2, 0.2), low)) == "within noise"
    assert report.verdict(report.gain(seeds(0.2), low)) == "-", "one seed in common"
    assert report.gain({}, low) is None


def test_first_seeds_may_be_left_out() -> None:
    results = {job.name: fake(job, 0.1) for job in (*FINALS, *SEARCH)}
    left = report.after_seed(results, 1)
    assert set(left) == {job.name for job in (*FINALS, *SEARCH) if job.seed != 1}
    assert report.after_seed(results, 0) == results


def test_mean_and_deviation() -> None:
    assert str(report.summarize([1.0, 3.0])) == "2.00 ± 1.41"
    assert str(report.summarize([1.0])) == "1.00"


def test_results_are_read_and_not_made_again(tmp_path: Path) -> None:
    job = SEARCH[0]
    record = {
        "name": job.name,
        "options": {**job.options, "data.train": "train"},
        "results": {"step": 12.0, "seconds": 9.0},
    }
    (tmp_path / "results.jsonl").write_text(json.dumps(record) + "\n")
    runner = Runner(tmp_path, tmp_path / "runs", None, processes=1)
    assert runner.results("another") is None
    done: list[int] = []
    assert runner.run([job], lambda: done.append(1)) == {job.name: record["results"]}
    assert done == [1]
    assert read_results(tmp_path / "results.jsonl") == {job.name: record["results"]}
    (tmp_path / "bad.jsonl").write_text('{"name": "x"}\n')
    for name in ("bad.jsonl", "none.jsonl"):
        with pytest.raises(UserError, match=f"{name} is not the results.jsonl of a study"):
            read_results(tmp_path / name)
    other = replace(job, options={**job.options, "optimizer.lr": 5.0})
    with pytest.raises(UserError, match=r"has search/.* with another optimizer\.lr; choose another --out"):
        runner.run([other], lambda: None)


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
    prepare(tmp_path / "source", tmp_path / "limited", validation=10, test=10, pairs=1000)
    assert len(list((tmp_path / "limited/train").glob("*.tar"))) == 2
    with pytest.raises(UserError, match="at least 1000"):
        prepare(tmp_path / "source", tmp_path / "other", validation=200, test=100)


def test_a_folder_without_shards(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    with pytest.raises(UserError, match="holds no tar files"):
        prepare(tmp_path / "source", tmp_path / "out", 5, 5)
