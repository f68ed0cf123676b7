"""A run's report has the papers' tables of its setting."""

from __future__ import annotations

import json
from pathlib import Path

from build import objective

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.training.report import report_run


def test_scores_stand_below_the_published_ones(tmp_path: Path) -> None:
    run = tmp_path / "cc3m_amorlip"
    run.mkdir()
    scores = {"average/datacomp": 0.2345, "task/imagenet1k": 0.2, "loss": 1.0}
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": step, **scores}) + "\n" for step in (1, 2)))
    (run / "config.yaml").write_text("objective:\n  method: amorlip\n")
    report_run(run, objective("amorlip", Communicator(), 4))
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "<h2>cc3m in percent: NeuCLIP (ICLR 2026), Tables 1 and 6 to 10<button" in page
    assert "<h2>cc3m_amorlip in percent: AmorLIP, Table 3<button" in page
    assert "24.74 ± 0.35" in page
    assert "23.45" in page
    assert "20.00" in page  # ImageNet 1k, a task
