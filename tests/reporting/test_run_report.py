"""The report of a run: one file with everything that was logged, which a browser shows."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image, ImageColor

from neuclip_ds.errors import UserError
from neuclip_ds.reporting.colours import COLOURS
from neuclip_ds.reporting.figures import draw_histogram, svg
from neuclip_ds.reporting.page import Table
from neuclip_ds.reporting.run_report import Plot, comparison_page, run_page

CONFIG = "objective:\n  method: {method}\noptimizer:\n  lr: {lr}\n"


def a_run(folder: Path, method: str = "neuclip", lr: float = 0.001, recall: float = 0.25) -> Path:
    folder.mkdir(parents=True)
    lines = [
        {"step": step, "loss": 5 - 0.1 * step, "lr": lr, "tau": 0.07, "grad_norm": 1.0, "data_wait_share": 0.1}
        for step in range(1, 20)
    ]
    lines.insert(10, {"step": 10, "image_to_text_recall@1": 0.3, "chance/image_to_text_recall@1": 0.001})
    lines.append({"step": 20, "loss": "nan", "bad_samples/image": 3.0, "unknown_metric": 1.0})
    lines.append({"step": 20, "image_to_text_recall@1": recall, "chance/image_to_text_recall@1": 0.001})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text(CONFIG.format(method=method, lr=lr))
    (folder / "environment.json").write_text(json.dumps({"ranks": 2, "torch": "<2.15>"}))
    return folder


def test_everything_is_in_one_file(tmp_path: Path) -> None:
    run = a_run(tmp_path / "one")
    histogram = Plot(draw_histogram("u of samples", "log u", {"image": [1.0, 2.0], "text": [0.5]}), "What u is.")
    page = run_page(run, distributions=[histogram]).write(run).read_text()
    assert re.findall(r'<svg role="img" aria-label="([^"]*)"', page) == [
        "Image to text recall",
        "Training loss",
        "Temperature",
        "Learning rate",
        "Gradient norm",
        "Waiting for data",
        "Bad samples",
        "unknown_metric",
        "u of samples",
    ]
    assert sorted(path.read_bytes()[:4] for path in (run / "plots").iterdir()) == [b"\x89PNG"] * 9
    assert "What u is." in page
    assert "&lt;2.15&gt;" in page, "values are escaped"
    assert "<td>image_to_text_recall@1</td><td>Image to text recall</td><td>0.25</td>" in page
    assert not re.search(r"(src|href)=.?(http|/)", page), "no other file is loaded"


def test_scores_come_first_with_chance(tmp_path: Path) -> None:
    page = run_page(a_run(tmp_path / "one")).html()
    tile = "Image to text recall@1<b>25.00 %</b><dl><dt>chance</dt><dd>0.10</dd></dl>"
    assert page.index(tile) < page.index("<svg")
    row = "<td>Image to text recall@1</td><td>25.00</td><td>20</td><td>30.00</td><td>10</td><td>0.10</td>"
    assert row in page, "last and best, and their steps"


def test_comparison(tmp_path: Path) -> None:
    runs = {"slow": a_run(tmp_path / "slow", lr=0.001), "fast": a_run(tmp_path / "fast", lr=0.01, recall=0.5)}
    page = comparison_page(runs).write(tmp_path / "both").read_text()
    assert "<td>optimizer.lr</td><td>0.001</td><td>0.01</td>" in page
    assert "<td>objective.method</td>" not in page, "equal options are omitted"
    assert "<td>Image to text recall@1</td><td>25.00</td><td class=best>50.00</td><td>0.10</td>" in page
    assert page.count(">slow</text>") == page.count("<svg"), "each plot has the legend of the runs"


def test_a_run_has_its_colour_in_every_plot(tmp_path: Path) -> None:
    """Also where another run lacks the metric."""
    runs = {"slow": a_run(tmp_path / "slow"), "fast": a_run(tmp_path / "fast")}
    (runs["slow"] / "metrics.jsonl").write_text('{"step": 1, "lr": 0.1}\n')
    plots = {plot.figure.get_label(): svg(plot.figure) for plot in comparison_page(runs).plots}
    assert "var(--curve-0)" not in plots["Training loss"]
    assert "var(--curve-1)" in plots["Training loss"]
    assert "var(--curve-0)" in plots["Learning rate"]


def test_many_curves_have_a_plot_each_on_demand(tmp_path: Path) -> None:
    run = a_run(tmp_path / "one")
    tasks = {f"task/set {number}": 0.1 for number in range(9)}
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, **tasks}) + "\n")
    page = run_page(run)
    assert page.plots == []
    assert len(page.folded) == 9
    assert "<summary>9 more plots</summary>" in page.html()


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no metrics\.jsonl"):
        run_page(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Debian's chromium")
@pytest.mark.parametrize(("theme", "scheme"), [("dark", 0), ("light", 1)])
def test_a_browser_shows_it_in_its_theme(tmp_path: Path, theme: str, scheme: int) -> None:
    page = run_page(a_run(tmp_path / "one")).write(tmp_path / "one")
    shot = tmp_path / "shot.png"
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
    how = [f"--blink-settings=preferredColorScheme={scheme}", "--window-size=1200,1600"]
    where = [f"--user-data-dir={tmp_path}/profile", f"--screenshot={shot}"]
    subprocess.run(["chromium", *quiet, *how, *where, page.as_uri()], check=True, capture_output=True, timeout=120)
    picture = Image.open(shot).convert("RGB")
    colours = picture.getcolors(1 << 24)
    assert colours is not None
    assert len(colours) > 50, "curves and text, not a blank page"
    curve = ImageColor.getrgb(COLOURS["curve-0"][theme == "dark"])
    assert curve in {colour for _, colour in colours}
    assert (max(picture.getpixel((2, 2))) < 64) == (theme == "dark")  # type: ignore[arg-type]


def test_events_are_listed_in_order_and_as_text(tmp_path: Path) -> None:
    run = a_run(tmp_path / "one")
    assert "Events" not in run_page(run).html()
    events = [
        {"step": 30, "rank": 1, "kind": "data_stall", "words": "waited for <00001.tar>", "indices": [5]},
        {"step": 20, "rank": 0, "kind": "loss_spike", "words": "far above", "indices": [1, 2]},
    ]
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    page = run_page(run).html()
    assert "<h2>Events<button" in page
    assert page.index("far above") < page.index("waited for &lt;00001.tar&gt;")


def test_further_tables_are_in_it(tmp_path: Path) -> None:
    table = Table("average in percent: a paper", ["theirs", "ours"], [["25.08", "25.10"]])
    page = run_page(a_run(tmp_path / "one"), tables=[table]).html()
    assert "<h2>average in percent: a paper<button" in page
    assert "<td>25.08</td><td>25.10</td>" in page
