"""The page that follows a run: drawn when files change, with the log's end, over real HTTP."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from threading import Thread

import pytest

from neuclip_ds.errors import UserError
from neuclip_ds.reporting.live import LivePage, serve
from neuclip_ds.reporting.run_report import Page


def page_with(drawn: list[str]):
    def draw(runs: Mapping[str, Path]) -> Page:
        (run,) = runs.values()
        if not (run / "metrics.jsonl").is_file():
            raise UserError("no metrics yet")
        drawn.append((run / "metrics.jsonl").read_text())
        return Page("heading", [f"<p>drawn {len(drawn)}</p>"], [], [], [])

    return draw


def test_it_is_drawn_again_when_a_file_has_changed(tmp_path: Path) -> None:
    drawn: list[str] = []
    page = LivePage({"run": tmp_path}, page_with(drawn), seconds=0)
    assert "no metrics yet" in page.text()
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 1.0}))
    assert "drawn 1" in page.text()
    assert "drawn 1" in page.text(), "nothing has changed"
    (tmp_path / "log.txt").write_text("INFO step 3/10  loss 1.0 <ok>\n")
    text = page.text()
    assert "drawn 2" in text
    assert '<progress value="3" max="10">' in text
    assert "loss 1.0 &lt;ok&gt;" in text


def test_it_is_not_drawn_more_often_than_allowed(tmp_path: Path) -> None:
    drawn: list[str] = []
    page = LivePage({"run": tmp_path}, page_with(drawn), seconds=3600)
    (tmp_path / "metrics.jsonl").write_text("{}")
    page.text()
    (tmp_path / "log.txt").write_text("later\n")
    assert "later" not in page.text()


def test_a_browser_gets_the_page_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}")
    with serve(LivePage({"run": tmp_path}, page_with([]), 0), "127.0.0.1", 0) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        where = f"http://127.0.0.1:{server.server_address[1]}"
        with urllib.request.urlopen(where) as answer:
            assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
            assert "drawn 1" in answer.read().decode()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{where}/../config.yaml")
        with pytest.raises(UserError, match=r"choose another --port"):
            serve(LivePage({}, page_with([]), 0), "127.0.0.1", server.server_address[1])
        server.shutdown()
