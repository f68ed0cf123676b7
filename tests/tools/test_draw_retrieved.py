"""The picture has the images that a run ranked first, and a frame around a caption's own image."""

import base64
import io
import json
import sys
from pathlib import Path

import draw_retrieved
import pytest
from PIL import Image

GREEN = (27, 158, 119)


def picture(color: str) -> str:
    """Return an image of one color as a data: URI."""
    file = io.BytesIO()
    Image.new("RGB", (32, 32), color).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def test_images_and_the_frame_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"index": 1, "score": 0.9, "picture": picture("red")}
    own = {"index": 0, "score": 0.8, "picture": picture("blue")}
    lost = {"index": 2, "score": 0.7, "picture": ""}  # could not be stored
    query = {"caption": "a long caption " * 8, "index": 0, "images": [first, own, lost]}
    content = {"step": 1, "queries": [query, query]}
    (tmp_path / "retrieved.json").write_text(json.dumps(content), encoding="utf-8")
    out = tmp_path / "out.png"
    monkeypatch.setattr(sys, "argv", ["draw_retrieved.py", str(tmp_path), str(out), "--queries=1"])
    draw_retrieved.main()
    colors = {color for _, color in Image.open(out).convert("RGB").getcolors(1 << 16)}
    assert {(255, 0, 0), (0, 0, 255), (211, 211, 211), GREEN} <= colors


def test_a_run_without_retrievals_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["draw_retrieved.py", str(tmp_path), str(tmp_path / "out.png")])
    with pytest.raises(SystemExit) as ended:
        draw_retrieved.main()
    assert ended.value.code == 2
    assert not (tmp_path / "out.png").exists()
