"""Sources of captions: whole texts, lines, keys of the JSON."""

from collections import Counter

import pytest

from neuclip_ds.config import DataConfig
from neuclip_ds.data.decoders import Captions
from neuclip_ds.data.order import hash64
from neuclip_ds.errors import UserError

MEMBERS = {
    "txt": b"Erste\r\n\n zweite \n",
    "json": b'{"a": "one", "b": ["two", " ", 3, "three"], "c": 4}',
    "syn.txt": b"made",
    "blip.json": b'{"k": "up"}',
}


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
        (["Syn.txt", "blip.json:k"], ["made", "up"]),
    ],
)
def test_sources(sources, expected):
    captions = Captions(sources)
    assert captions.of(MEMBERS) == expected
    assert set(captions.extensions) == {source.partition(":")[0].lower() for source in sources}


@pytest.mark.parametrize("source", ["", "text", "json", "json:", "txt:words", "jpg", ".txt", "a/b.txt"])
def test_unknown_sources_are_refused(source):
    with pytest.raises(UserError, match="a source is txt, txt:lines or json:KEY"):
        Captions([source])


def test_no_source_is_refused():
    with pytest.raises(UserError, match=r"data\.captions is empty"):
        Captions([])


NUMBERS = [int(hash64(7, number)[0]) for number in range(4000)]


def drawn(captions: Captions, members: dict[str, bytes]) -> Counter[str | None]:
    return Counter(captions.draw(members, number) for number in NUMBERS)


def test_a_list_draws_every_caption_alike() -> None:
    found = drawn(Captions(["txt:lines", "json:a", "json:b"]), MEMBERS)
    assert set(found) == {"Erste", "zweite", "one", "two", "three"}
    assert all(abs(count - 800) < 100 for count in found.values())


def test_weights_draw_the_source_first() -> None:
    found = drawn(Captions({"txt:lines": 7, "syn.txt": 3}), MEMBERS)
    assert abs(found["made"] - 1200) < 120
    assert abs(found["Erste"] - 1400) < 120 and abs(found["zweite"] - 1400) < 120


def test_a_source_that_a_sample_lacks_leaves_its_share_to_the_others() -> None:
    captions = Captions({"json:absent": 5, "txt": 0.5, "syn.txt": 1.5, "alt.txt": 2})
    found = drawn(captions, {**MEMBERS, "alt.txt": b" "})
    assert set(found) == {"Erste\r\n\n zweite", "made"}
    assert abs(found["made"] - 3000) < 120
    assert drawn(captions, {"txt": b"only"}) == {"only": 4000}
    assert drawn(captions, {"json": b"broken"}) == {None: 4000}
    assert Captions(["txt"]).draw({}, 3) is None


@pytest.mark.parametrize("number", [0, 2**64 - 1])
def test_the_ends_of_the_draw(number: int) -> None:
    assert Captions({"alt.txt": 1, "txt": 0.3, "json:absent": 2}).draw({"txt": b"only"}, number) == "only"


def test_options_and_mistakes() -> None:
    def captions(given: object) -> object:
        return DataConfig.model_validate({"captions": given}).captions

    assert captions("txt") == ["txt"] and captions("txt,json:a") == ["txt", "json:a"]
    assert captions('["txt", "json:a"]') == ["txt", "json:a"]
    assert captions('{"txt": 0.7, "syn.txt": 0.3}') == captions({"txt": 0.7, "syn.txt": 0.3})
    for wrong in ({"txt": 0}, {"txt": -1}, {"txt": "much"}):
        with pytest.raises(ValueError, match=r"captions"):
            captions(wrong)
