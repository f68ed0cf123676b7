"""A run's report is one self-contained HTML page that shows everything that was logged."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from neuclip_ds.errors import UserError
from neuclip_ds.reporting.report import run_names, wilson_interval, write_comparison, write_report
from neuclip_ds.reporting.retrieved import RankedImage, Retrieved, write_retrieved


def write_lines(path: Path, records: Sequence[Mapping[str, object]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("run")
    lines: list[dict[str, object]] = [
        {"step": step, "loss": 5 - 0.1 * step, "lr": 0.001, "tau": 0.07, "grad_norm": 1.0, "skipped_steps": 0}
        for step in range(1, 20)
    ]
    lines.insert(10, {"step": 10, "image_to_text_recall@1": 0.3, "chance/image_to_text_recall@1": 0.001})
    lines.append({"step": 20, "loss": "nan", "bad_samples/image": 3.0, "unknown_metric": 1.0, "retrieval_pairs": 40.0})
    lines.append({"step": 20, "image_to_text_recall@1": 0.25, "chance/image_to_text_recall@1": 0.001})
    lines.append({"step": 20, "ema/image_to_text_recall@1": 0.5, "prefix8/image_to_text_recall@1": 0.1})
    lines += [{"step": step, **{f"task/set {n}": 0.1 for n in range(9)}} for step in (10, 20)]
    events = [
        {"step": 30, "rank": 1, "kind": "data_stall", "message": "waited for <00001.tar>", "indices": [5]},
        {"step": 20, "rank": 0, "kind": "loss_spike", "message": "far above", "indices": [1, 2]},
    ]
    write_lines(folder / "metrics.jsonl", lines)
    write_lines(folder / "events.jsonl", events)
    (folder / "config.yaml").write_text("data:\n  val: 40\nobjective:\n  method: neuclip\n")
    (folder / "environment.json").write_text(json.dumps({"ranks": 2, "torch": "<2.15>"}))
    return write_report(folder).read_text()


def plots_of(page: str) -> list[dict[str, Any]]:
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    return json.loads(data)


def test_metrics_that_change_have_plots(page: str) -> None:
    """Counts, curves of nothing but zeros, and single points have no plot."""
    plots = {plot["title"]: plot for plot in plots_of(page)}
    titles = list(plots)
    assert [title for title in titles if title.startswith("task/")] == [f"task/set {n}" for n in range(9)]
    assert [title for title in titles if not title.startswith("task/")] == [
        "Image to text recall",
        "Training loss",
        "Temperature",
        "Learning rate",
        "Gradient norm",
    ]
    (recall,) = plots["Image to text recall"]["curves"]
    assert recall == {"name": "image_to_text_recall@1", "x": [10, 20], "y": [0.3, 0.25]}
    (loss,) = plots["Training loss"]["curves"]
    assert loss["x"][-1] == 20
    assert loss["y"][-1] is None, "NaN is a gap"
    assert plots["Gradient norm"]["log_scale"]
    assert not plots["Training loss"]["log_scale"]


def test_the_page_shows_last_values_environment_and_config_without_other_files(page: str) -> None:
    assert "&lt;2.15&gt;" in page, "values are escaped"
    assert "<td>unknown_metric</td><td>1</td>" in page
    assert "method: neuclip" in page
    assert not re.search(r"(src|href)=.?(http|/)", page)


def test_scores_come_first_with_chance(page: str) -> None:
    row = "<td>image_to_text_recall@1</td><td>25.00</td><td>20</td><td>30.00</td><td>10</td><td>0.10</td>"
    assert row in page, "last and best, and their steps"
    averaged = "<td>ema/image_to_text_recall@1</td><td>50.00</td><td>20</td><td>50.00</td><td>20</td><td>0.10</td>"
    assert averaged in page
    assert "on 40 pairs held out of data.train" in page
    assert page.index(row) < page.index('id="plots"')


def test_scores_have_chance_lines_and_intervals(page: str) -> None:
    plots = {plot["title"]: plot for plot in plots_of(page)}
    assert [line["y"] for line in plots["Image to text recall"]["chance"]] == [0.001]
    assert plots["Training loss"]["chance"] == []
    assert "<td>0.10</td><td>14.19 to 40.19</td>" in page, "10 of 40 pairs"
    assert re.search("prefix8/image_to_text_recall@1</td>.*<td>3.96 to 23.05</td>", page), "4 of 40 pairs"
    low, high = wilson_interval(0.0, 50)
    assert low == 0 and 0.05 < high < 0.08, "not a single point"


def test_example_retrievals_are_shown_and_damage_is_not(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [{"step": 2, "loss": 1.0}])
    (tmp_path / "config.yaml").write_text("objective:\n  method: neuclip\ndata:\n  val: ''\n")
    images = [RankedImage(index=7, score=0.5), RankedImage(index=3, score=0.25)]
    queries = [Retrieved(index=3, images=images)]
    write_retrieved(tmp_path, 12, queries, lambda index: f"<caption {index}>", lambda index: f"data:image/jpeg,{index}")
    page = write_report(tmp_path).read_text()
    assert "at step 12" in page and "&lt;caption 3&gt;" in page
    assert re.search(r'<td><img src="data:image/jpeg,7".*<td class="own"><img src="data:image/jpeg,3"', page)
    for damaged in ("{", "[]", '{"queries": [{}]}'):
        (tmp_path / "retrieved.json").write_text(damaged)
        assert "text-to-image retrieval" not in write_report(tmp_path).read_text()


def test_damaged_files_of_a_run_are_omitted_or_named(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [{"step": 2, "loss": 1.0}])
    (tmp_path / "evaluation" / "step_000000001").mkdir(parents=True)
    config = tmp_path / "config.yaml"
    for damaged in ("{", "[]", '{"tasks": {"a": {}}}'):
        for name in ("environment.json", "history.jsonl", "evaluation/step_000000001/blends.json"):
            (tmp_path / name).write_text(damaged)
        config.write_text("objective: 3\n")
        assert "Last values" in write_report(tmp_path).read_text()
        config.write_text(f"{damaged}]")
        with pytest.raises(UserError, match=r"config\.yaml"):
            write_report(tmp_path)


def test_runs_are_compared(tmp_path: Path) -> None:
    runs = [tmp_path / "first" / "demo", tmp_path / "second" / "demo", tmp_path / "other"]
    for number, run in enumerate(runs):
        run.mkdir(parents=True)
        losses = [{"step": step, "loss": step + number, "tau": 0.07} for step in (1, 2)]
        scores = [{"step": step, "task/cars": 0.1 * number + 0.01 * step} for step in (1, 2)]
        write_lines(run / "metrics.jsonl", [*losses, *(scores if number < 2 else [])])
        (run / "config.yaml").write_text(f"seed: 1\noptimizer:\n  lr: 0.{number}\n")
    write_comparison(runs, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<td>task/cars</td><td>2.00 (2.00)</td><td>12.00 (12.00)</td><td>-</td>" in page
    assert "<td>optimizer.lr</td><td>0.0</td><td>0.1</td><td>0.2</td>" in page
    assert "<td>seed</td>" not in page, "equal"
    cars, loss, *_ = plots_of(page)
    assert (cars["title"], [curve["name"] for curve in cars["curves"]]) == ("task/cars", ["first/demo", "second/demo"])
    assert (loss["title"], len(loss["curves"])) == ("loss", 3)
    with pytest.raises(UserError, match="pass each run once"):
        run_names([runs[0], runs[0]])
    assert run_names([Path("/a/seed/demo"), Path("/b/seed/demo")]) == ["a/seed/demo", "b/seed/demo"]


def test_events_are_listed_in_order_and_as_text(page: str) -> None:
    assert page.index("far above") < page.index("waited for &lt;00001.tar&gt;")


def test_the_spikes_of_a_long_run_are_shown(tmp_path: Path) -> None:
    losses = [1.0] * 5_000
    losses[2_789] = 50.0
    losses[3_876] = -3.0
    write_lines(
        tmp_path / "metrics.jsonl",
        [{"step": step, "loss": loss, "</script>": 1.0} for step, loss in enumerate(losses)],
    )
    (tmp_path / "config.yaml").write_text("objective:\n  method: neuclip\ndata:\n  val: ''\n")
    page = write_report(tmp_path).read_text()
    assert "no pairs were held out" in page
    loss_plot, _ = plots_of(page)
    (curve,) = loss_plot["curves"]
    assert len(curve["x"]) <= 1002
    assert curve["x"][0] == 0
    assert curve["x"][-1] == 4_999
    values = dict(zip(curve["x"], curve["y"], strict=True))
    assert values[2_789] == 50.0
    assert values[3_876] == -3.0


def test_a_killed_launch_ends_at_its_last_metrics(tmp_path: Path) -> None:
    start = datetime.now(timezone.utc) - timedelta(days=3)
    write_lines(tmp_path / "metrics.jsonl", [{"step": 2, "loss": 1.0}])
    last_metrics = (start + timedelta(minutes=5)).timestamp()
    os.utime(tmp_path / "metrics.jsonl", (last_metrics, last_metrics))
    launch = {"step": 0, "event": "start", "time": start.isoformat(), "command": "", "commit": "", "changes": {}}
    write_lines(tmp_path / "history.jsonl", [launch])
    (tmp_path / "config.yaml").write_text("objective: {method: neuclip}\n")
    assert "2 steps in 0:05:00." in write_report(tmp_path).read_text()


def test_a_folder_without_metrics_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"contains no metrics\.jsonl"):
        write_report(tmp_path)
