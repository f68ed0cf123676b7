"""The scores of blends are read as they were written, and shown in a table and a plot."""

import re
from pathlib import Path

from neuclip_ds.reporting.blends import Blends, BlendScores, ScoredTask, blends_plot

TASKS = {
    "own/val": ScoredTask(name="<val>", metric="mean_recall@1"),
    "cars": ScoredTask(name="Cars", metric="acc1"),
    "pets": ScoredTask(name="Pets", metric="acc1"),
}


def blends_of(*scores: tuple[float, float | None, float | None]) -> Blends:
    """Return blends with these scores of the target and of the two other tasks."""
    blends = []
    for number, (target, cars, pets) in enumerate(scores):
        scores_by_key = {"own/val": target, "cars": cars, "pets": pets}
        blends.append(BlendScores.of(number / 4, "own/val", scores_by_key))
    return Blends(start="clip", result="step", target="own/val", tasks=TASKS, blends=blends)


def test_scores_are_written_and_listed(tmp_path: Path) -> None:
    blends = blends_of((0.1, 0.5, 0.7), (0.3, 0.4, None))
    blends.write(tmp_path)
    assert Blends.read(tmp_path) == blends
    assert blends.markdown().splitlines() == [
        "| blend | 0 | 0.25 |",
        "|---|---|---|",
        "| target: <val>, mean_recall@1 | 10.00 | 30.00 |",
        "| mean of the 2 others | 60.00 | 40.00 |",
        "| Cars, acc1 | 50.00 | 40.00 |",
        "| Pets, acc1 | 70.00 | - |",
    ]


def test_the_plot_has_a_point_for_each_blend_and_grid_lines_inside_it() -> None:
    plot = blends_plot(blends_of((0.1, 0.5, 0.7), (0.3, 0.45, 0.7), (0.31, 0.2, 0.3)))
    assert "<val>" not in plot and "&lt;val&gt;, mean_recall@1" in plot
    points = [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', plot)]
    assert len(points) == 3
    assert points[0][0] > points[1][0] > points[2][0], "the mean of the others falls"
    assert points[0][1] > points[1][1] > points[2][1], "the target rises, and y grows downwards"
    assert len(re.findall("<line", plot)) >= 6
    constant = blends_plot(blends_of((0.1, 0.5, 0.7), (0.1, 0.5, 0.7)))
    assert constant.count("<circle") == 2 and "nan" not in constant


def test_without_other_tasks_there_is_no_plot() -> None:
    assert blends_plot(blends_of((0.1, None, None), (0.3, None, None))) == ""
