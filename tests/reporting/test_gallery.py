"""The gallery of nearest captions: what is read back, and its HTML."""

from __future__ import annotations

from pathlib import Path

from neuclip_ds.reporting.gallery import gallery, read_gallery, write_gallery

PICTURE = {
    "jpeg": "QUJD",
    "own": [["mine & yours", 0.5, True]],
    "nearest": [["<b>", 0.75, False], ["x", 0.25, False]],
}


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_gallery(tmp_path) == []
    write_gallery(tmp_path, [PICTURE])
    assert read_gallery(tmp_path) == [PICTURE]


def test_page() -> None:
    page = gallery({"model": [PICTURE]})
    assert '<li class="ahead"><span>0.750 ✗</span> &lt;b&gt;</li>' in page
    assert '<li class=""><span>0.250 </span> x</li>' in page
    assert '<li class="own"><span>0.500 ✓</span> mine &amp; yours</li></ol>' in page, "below, as it is not among them"
    assert "(✓): 1 of 1." in page
    assert '<img alt="mine &amp; yours" src="data:image/jpeg;base64,QUJD">' in page
    assert gallery({"model": []}) == ""


def test_runs_share_their_pictures() -> None:
    better = {**PICTURE, "nearest": [["mine & yours", 0.5, True]]}
    page = gallery({"one": [PICTURE], "two": [better]})
    assert page.count("<figure>") == 1
    assert page.index("<h4>one</h4>") < page.index("<h4>two</h4>")
    assert "1 of 1 (one), 0 of 1 (two)" in page
