"""A run's report is one self-contained HTML page that shows everything that was logged."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from neuclip_ds.errors import UserError
from neuclip_ds.reporting.report import write_report


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
    lines.append({"step": 20, "ema/image_to_text_recall@1": 0.5})
    lines += [{"step": step, **{f"task/set {n}": 0.1 for n in range(9)}} for step in (10, 20)]
    events = [
        {"step": 30, "rank": 1, "kind": "data_stall", "message": "waited for <00001.tar>", "indices": [5]},
        {"step": 20, "rank": 0, "kind": "loss_spike", "message": "far above", "indices": [1, 2]},
    ]
    for name, records in (("metrics", lines), ("events", events)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "config.yaml").write_text("data:\n  val: 40\nobjective:\n  method: neuclip\n")
    (folder / "environment.json").write_text(json.dumps({"ranks": 2, "torch": "<2.15>"}))
    return write_report(folder).read_text()


def plots_of(page: str) -> list[dict[str, Any]]:
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    return json.loads(data)


def test_everything_is_in_one_file(page: str) -> None:
    plots = {plot["title"]: plot for plot in plots_of(page)}
    titles = list(plots)
    assert [title for title in titles if title.startswith("task/")] == [f"task/set {n}" for n in range(9)]
    assert [title for title in titles if not title.startswith("task/")] == [
        "Image to text recall",
        "Training loss",
        "Temperature",
        "Learning rate",
        "Gradient norm",
    ], "counts, curves of nothing but zeros, and single points have no plot"
    (recall,) = plots["Image to text recall"]["curves"]
    assert recall == {"name": "image_to_text_recall@1", "x": [10, 20], "y": [0.3, 0.25]}
    (loss,) = plots["Training loss"]["curves"]
    assert loss["x"][-1] == 20 and loss["y"][-1] is None, "what is no number is a gap"
    assert plots["Gradient norm"]["log_scale"] and not plots["Training loss"]["log_scale"]
    assert "&lt;2.15&gt;" in page, "values are escaped"
    assert "<td>unknown_metric</td><td>1</td>" in page
    assert "method: neuclip" in page
    assert not re.search(r"(src|href)=.?(http|/)", page), "no other file is loaded"


def test_scores_come_first_with_chance(page: str) -> None:
    row = "<td>image_to_text_recall@1</td><td>25.00</td><td>20</td><td>30.00</td><td>10</td><td>0.10</td>"
    assert row in page, "last and best, and their steps"
    averaged = "<td>ema/image_to_text_recall@1</td><td>50.00</td><td>20</td><td>50.00</td><td>20</td><td>0.10</td>"
    assert averaged in page
    assert "on 40 pairs held out of data.train" in page
    assert page.index(row) < page.index('id="plots"')


def test_events_are_listed_in_order_and_as_text(page: str) -> None:
    assert page.index("far above") < page.index("waited for &lt;00001.tar&gt;")


def test_the_spikes_of_a_long_run_are_shown(tmp_path: Path) -> None:
    losses = [1.0] * 12_345
    losses[6_789], losses[9_876] = 50.0, -3.0
    records = [json.dumps({"step": step, "loss": loss, "</script>": 1.0}) for step, loss in enumerate(losses)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(records) + "\n")
    (tmp_path / "config.yaml").write_text("objective:\n  method: neuclip\ndata:\n  val: ''\n")
    (loss, _) = plots_of(page := write_report(tmp_path).read_text())
    assert "no pairs were held out" in page
    (curve,) = loss["curves"]
    assert len(curve["x"]) <= 1002 and (curve["x"][0], curve["x"][-1]) == (0, 12_344)
    assert dict(zip(curve["x"], curve["y"], strict=True)).items() >= {6_789: 50.0, 9_876: -3.0}.items()


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no metrics\.jsonl"):
        write_report(tmp_path)
