"""What a person sees of a run: progress and scores in log.txt, no cliff at an epoch's rest, and the page."""

from __future__ import annotations

import json
import re
from pathlib import Path

from small_runs import train
from tars import write_pairs


def test_log_metrics_and_page(tmp_path: Path) -> None:
    write_pairs(tmp_path / "val", [9, 17])
    shards = write_pairs(tmp_path / "shards", [13, 13])  # batches of 8, 8, 8 and 2
    options = [f"--data.val={tmp_path / 'val'}", "--run.evaluate_every=2", "--run.report=true", "--run.log_every=1"]
    done = train(tmp_path, str(shards), 4, *options)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"

    log = (run / "log.txt").read_text()
    assert log.count("image_to_text_recall@1: ") == 2, "in the middle and at the end"
    scores = re.findall(r"INFO step (\d)/4  text_to_image_recall@10: [\d.]+ \(chance ([\d.]+)\)", log)
    assert scores == [("2", "0.385"), ("4", "0.385")]

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line for line in lines if "lr" in line}
    assert ["loss" in steps[step] for step in (1, 2, 3, 4)] == [True, True, True, False]
    last = re.search(r"step 4/4  loss ([-\d.]+)", log)
    assert last is not None
    assert float(last[1]) == round(steps[3]["loss"], 4), "that of the newest full batch"

    pictures = json.loads((run / "nearest_captions.json").read_text())
    assert len(pictures) == 12
    assert all(len(picture["nearest"]) == 5 for picture in pictures)
    assert [picture["own"][0][0] for picture in pictures] == [f"caption {number}" for number in range(12)]
    for picture in pictures:
        assert all(own == (text == picture["own"][0][0]) for text, _, own in picture["nearest"])
    page = (run / "report.html").read_text()
    assert "Image to text recall@1<b>" in page
    assert page.count("data:image/jpeg;base64,") == 12
