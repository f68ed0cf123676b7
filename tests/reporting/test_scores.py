"""Scores in tiles, tables and lines, with chance and the papers' values."""

from __future__ import annotations

from neuclip_ds.reporting.scores import Reference, headline, score_lines, score_table, scores_among

SERIES = {
    "loss": ([1, 2], [2.0, 1.0]),
    "task/a": ([2], [0.5]),
    "average/datacomp": ([1, 2], [0.3, 0.2]),
    "chance/average/datacomp": ([1, 2], [0.08, 0.08]),
}
PAPERS = Reference(
    {"average/datacomp": "Average: datacomp"}, {"average/datacomp": {"theirs": "25.08 ± 0.39"}}, ["Paper"]
)


def test_scores_are_ordered_and_nothing_else_is_one():
    assert scores_among(["task/a", "retrieval_pairs", "zero_shot_images", "loss", "average/b"]) == [
        "average/b",
        "task/a",
    ]


def test_a_tile_has_chance_and_the_papers():
    tiles = headline({"run": SERIES}, PAPERS)
    wanted = "<b>20.00 %</b><dl><dt>chance</dt><dd>8.00</dd><dt>theirs</dt><dd>25.08 ± 0.39</dd></dl>"
    assert f"Average: datacomp{wanted}" in tiles
    assert "task/a" not in tiles
    assert headline({"run": {"loss": SERIES["loss"]}}, PAPERS) == ""


def test_a_table_of_one_run_has_its_best():
    table = score_table({"run": SERIES}, PAPERS)
    assert table is not None
    assert table.title == "Scores, % (papers: Paper)"
    assert table.header == ["score", "last", "at step", "best", "at step", "chance", "theirs"]
    assert table.rows[0] == ["Average: datacomp", "20.00", "2", "30.00", "1", "8.00", "25.08 ± 0.39"]
    assert table.rows[1] == ["a", "50.00", "2", "50.00", "2", "-", "-"]


def test_in_a_comparison_the_best_stands_out():
    table = score_table({"one": SERIES, "two": {"task/a": ([9], [0.75])}}, PAPERS)
    assert table is not None
    assert table.rows == [
        ["Average: datacomp", "20.00", "-", "8.00", "25.08 ± 0.39"],
        ["a", "50.00", "75.00", "-", "-"],
    ]
    assert table.best == {(0, 1), (1, 2)}


def test_lines_of_the_log_have_chance():
    results = {"zero_shot_top1": 0.1955, "chance/zero_shot_top1": 0.0125, "ema/zero_shot_top1": 0.2}
    results["normalizer_mse"] = 0.5
    assert list(score_lines(results)) == [
        "zero_shot_top1: 0.1955 (chance 0.0125)",
        "ema/zero_shot_top1: 0.2 (chance 0.0125)",
        "normalizer_mse: 0.5",
    ]


def test_averaged_weights_have_rows_of_their_own():
    series = {**SERIES, "ema/average/datacomp": ([2], [0.25])}
    table = score_table({"run": series}, PAPERS)
    assert table is not None
    assert table.rows[1] == ["Average: datacomp, EMA", "25.00", "2", "25.00", "2", "8.00", "25.08 ± 0.39"]
    assert "EMA" not in headline({"run": series}, PAPERS)
    assert "<b>25.00 %</b>" in headline({"run": {"ema/average/datacomp": ([2], [0.25])}}, PAPERS)
