"""The report of a run: one file with everything that was logged, which a browser shows."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from neuclip_ds.errors import UserError
from neuclip_ds.reporting.figures import PANELS, collect, draw
from neuclip_ds.reporting.page import Table
from neuclip_ds.reporting.run_report import write_comparison, write_report

CONFIG = "objective:\n  method: {method}\noptimizer:\n  lr: {lr}\n"


def a_run(folder: Path, method: str = "neuclip", lr: float = 0.001) -> Path:
    folder.mkdir(parents=True)
    lines = [
        {"step": step, "loss": 5 - 0.1 * step, "lr": lr, "tau": 0.07, "grad_norm": 1.0, "data_wait_share": 0.1}
        for step in range(1, 20)
    ]
    lines.append({"step": 20, "loss": "nan", "image_to_text_recall@1": 0.25, "bad_samples/image": 3.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text(CONFIG.format(method=method, lr=lr))
    (folder / "environment.json").write_text(json.dumps({"ranks": 2, "torch": "<2.15>"}))
    return folder


def test_everything_is_in_one_file(tmp_path: Path) -> None:
    run = a_run(tmp_path / "one")
    page = write_report(run, {"u of samples": {"image": [1.0, 2.0], "text": [0.5]}}).read_text()
    images = re.findall(r'<img alt="([^"]*)" src="data:image/png;base64,([^"]*)"', page)
    titles = [title for title, _ in images]
    assert titles == [
        "loss",
        "temperature",
        "learning rate",
        "gradient norms",
        "held-out retrieval, recall",
        "share of time waiting for data",
        "bad samples",
        "u of samples",
    ]
    assert all(base64.b64decode(data).startswith(b"\x89PNG") for _, data in images)
    assert len(list((run / "plots").glob("*.png"))) == len(images)
    assert "&lt;2.15&gt;" in page, "values are escaped"
    assert "<td>image_to_text_recall@1</td><td>0.25</td>" in page
    assert not re.search(r"(src|href)=.?(http|/)", page), "no other file is loaded"


def test_comparison(tmp_path: Path) -> None:
    runs = {"slow": a_run(tmp_path / "slow", lr=0.001), "fast": a_run(tmp_path / "fast", lr=0.01)}
    page = write_comparison(runs, tmp_path / "both").read_text()
    assert "<td>optimizer.lr</td><td>0.001</td><td>0.01</td>" in page
    assert "objective.method" not in page, "equal options are omitted"


def test_a_panel_without_its_metrics_is_omitted() -> None:
    series = collect([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}])
    assert series == {"loss": ([1, 2], [2.0, 1.0])}
    drawn = [panel.title for panel in PANELS if draw(panel, {"run": series}) is not None]
    assert drawn == ["loss"]


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no metrics\.jsonl"):
        write_report(tmp_path)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Debian's chromium")
def test_a_browser_shows_it(tmp_path: Path) -> None:
    page = write_report(a_run(tmp_path / "one"))
    shot = tmp_path / "shot.png"
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
    where = [f"--user-data-dir={tmp_path}/profile", f"--screenshot={shot}", "--window-size=1200,1600"]
    subprocess.run(["chromium", *quiet, *where, page.as_uri()], check=True, capture_output=True, timeout=120)
    colours = Image.open(shot).convert("RGB").getcolors(1 << 24)
    assert colours is not None
    assert len(colours) > 50, "curves and text, not a blank page"


def test_events_are_listed_in_order_and_as_text(tmp_path: Path) -> None:
    run = a_run(tmp_path / "one")
    assert "Events" not in write_report(run).read_text()
    events = [
        {"step": 30, "rank": 1, "kind": "data_stall", "words": "waited for <00001.tar>", "indices": [5]},
        {"step": 20, "rank": 0, "kind": "loss_spike", "words": "far above", "indices": [1, 2]},
    ]
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    page = write_report(run).read_text()
    assert "<h2>Events</h2>" in page
    assert page.index("far above") < page.index("waited for &lt;00001.tar&gt;")


def test_further_tables_are_in_it(tmp_path: Path) -> None:
    table = Table("average in percent: a paper", ["theirs", "ours"], [["25.08", "25.10"]])
    page = write_report(a_run(tmp_path / "one"), tables=[table]).read_text()
    assert "<h2>average in percent: a paper</h2>" in page
    assert "<td>25.08</td><td>25.10</td>" in page
