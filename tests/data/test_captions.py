"""Sources of captions: whole texts, lines, keys of the JSON."""

from __future__ import annotations

import pytest

from neuclip_ds.data.captions import Captions
from neuclip_ds.errors import UserError

MEMBERS = {"txt": b"Erste\r\n\n zweite \n", "json": b'{"a": "one", "b": ["two", " ", 3, "three"], "c": 4}'}


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        (["txt"], ["Erste\r\n\n zweite"]),
        (["txt:lines"], ["Erste", "zweite"]),
        (["json:a"], ["one"]),
        (["json:b"], ["two", "three"]),
        (["json:c"], []),
        (["json:absent"], []),
        (["json:a", "txt:lines", "json:b"], ["one", "Erste", "zweite", "two", "three"]),
    ],
)
def test_sources(sources, expected):
    captions = Captions(sources)
    assert captions.of(MEMBERS) == expected
    assert set(captions.extensions) == {source.partition(":")[0] for source in sources}


def test_absent_and_broken_members_have_no_captions():
    captions = Captions(["txt", "json:a"])
    assert captions.of({}) == []
    assert captions.of({"json": b'{"a": "cut', "txt": b"\xff ok"}) == ["\ufffd ok"]
    assert captions.of({"json": b'["a"]'}) == []
    assert captions.of({"json": b'{"a": null}'}) == []


@pytest.mark.parametrize("source", ["", "text", "json", "json:", "txt:words", "jpg"])
def test_unknown_sources_are_refused(source):
    with pytest.raises(UserError, match="a source is txt, txt:lines or json:KEY"):
        Captions([source])


def test_no_source_is_refused():
    with pytest.raises(UserError, match=r"data\.captions is empty"):
        Captions([])
