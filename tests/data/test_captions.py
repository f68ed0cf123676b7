"""Check the sources of captions, the random choice of a caption, and that malformed text never stops a run."""

import time
from collections import Counter
from pathlib import Path

import pytest
from tars import jpeg, manifest_of, tokenize, write_pairs

from neuclip_ds.config import DataConfig
from neuclip_ds.data.dataset import Batch, PairDataset
from neuclip_ds.data.decoders import Captions
from neuclip_ds.data.images import EvalTransform
from neuclip_ds.data.open_data import iter_captions
from neuclip_ds.data.order import hash64
from neuclip_ds.errors import UserError
from neuclip_ds.models.bpe import train_bpe

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
def test_each_source_yields_its_captions_in_order(sources, expected):
    captions = Captions(sources)
    assert captions.all_captions(MEMBERS) == expected
    assert set(captions.extensions) == {source.partition(":")[0].lower() for source in sources}


@pytest.mark.parametrize("source", ["txt", "txt:lines", "json:a"])
def test_a_byte_order_mark_is_no_part_of_a_caption(source):
    members = {"txt": "one".encode("utf-8-sig"), "json": '{"a": "one"}'.encode("utf-8-sig")}
    assert Captions([source]).all_captions(members) == ["one"]


@pytest.mark.parametrize("source", ["", "text", "json", "json:", "txt:words", "jpg", ".txt", "a/b.txt"])
def test_unknown_sources_are_refused(source):
    with pytest.raises(UserError, match=r"is not a source of captions .*: use txt, txt:lines, json:KEY"):
        Captions([source])
    with pytest.raises(UserError, match=r"data\.captions names no source"):
        Captions([])


NUMBERS = [int(hash64(7, number)[0]) for number in range(4000)]


def drawn(captions: Captions, members: dict[str, bytes]) -> Counter[str | None]:
    every_caption = captions.all_captions(members)
    counts: Counter[str | None] = Counter()
    for number in NUMBERS:
        drawn = captions.draw(members, number)
        assert drawn is None or every_caption[drawn.number] == drawn.text
        counts[drawn and drawn.text] += 1
    return counts


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        (["txt:lines", "json:a", "json:b"], dict.fromkeys(["Erste", "zweite", "one", "two", "three"], 800)),
        ({"txt:lines": 7, "syn.txt": 3}, {"made": 1200, "Erste": 1400, "zweite": 1400}),
        ({"json:absent": 5, "txt": 0.5, "syn.txt": 1.5, "alt.txt": 2}, {"Erste\r\n\n zweite": 1000, "made": 3000}),
    ],
    ids=["a list draws captions alike", "weights draw the source", "the others share what a sample lacks"],
)
def test_draws(sources: list[str] | dict[str, float], expected: dict[str, int]) -> None:
    found = drawn(Captions(sources), {**MEMBERS, "alt.txt": b" "})
    assert found == {caption: pytest.approx(count, abs=120) for caption, count in expected.items()}


def test_draws_of_samples_with_one_caption_or_none() -> None:
    captions = Captions({"json:absent": 5, "txt": 0.5, "syn.txt": 1.5, "alt.txt": 2})
    assert drawn(captions, {"txt": b"only"}) == {"only": 4000}
    assert drawn(captions, {"json": b"broken"}) == {None: 4000}
    assert all(captions.draw({"txt": b"only"}, number) == ("only", 0) for number in (0, 2**64 - 1))
    assert Captions(["txt"]).draw({}, 3) is None


def test_caption_options_are_lists_or_positive_weights() -> None:
    def captions(given: object) -> object:
        return DataConfig.model_validate({"captions": given}).captions

    assert captions("txt") == ["txt"] and captions("txt,json:a") == ["txt", "json:a"]
    assert captions('["txt", "json:a"]') == ["txt", "json:a"]
    assert captions('{"txt": 0.7, "syn.txt": 0.3}') == captions({"txt": 0.7, "syn.txt": 0.3})
    for wrong in ({"txt": 0}, {"txt": -1}, {"txt": "much"}):
        with pytest.raises(ValueError, match=r"captions"):
            captions(wrong)


SURROGATE = b'{"caption": "a \\ud800 dog \\udfff and \\ud83d\\ude00"}'
DEEP = b'{"caption": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
DIGITS = b'{"caption": "a dog", "width": ' + b"9" * 5000 + b"}"
LONG = b"word " * 210_000  # 1 MB
NUL = b"a dog" + b"\0" * 50
SOURCES = ["txt", "json:caption"]


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({"json": SURROGATE}, ["a \ufffd dog \ufffd and \U0001f600"]),
        ({}, []),
        ({"json": b'["caption"]'}, []),
        ({"json": b'{"caption": null}'}, []),
        ({"json": DEEP}, []),
        ({"json": DIGITS}, []),
        ({"json": b"1" * 5000}, []),
        ({"txt": NUL}, ["a dog"]),
        ({"txt": b"\0" * 9}, []),
        ({"txt": LONG}, [LONG.decode()[:10_000]]),
        ({"txt": b"\xed\xa0\x80 \xff", "json": b'{"caption": "cut'}, ["\ufffd\ufffd\ufffd \ufffd"]),
    ],
)
def test_captions_are_text_or_absent(members: dict[str, bytes], expected: list[str]) -> None:
    assert Captions(SOURCES).all_captions(members) == expected
    assert all(caption.encode() for caption in expected)


def shards_of(folder: Path) -> Path:
    members = [{"txt": b"a cat"}, {"json": SURROGATE}, {"json": DEEP}, {"json": DIGITS}, {"txt": NUL}, {"txt": LONG}]
    pairs = {index: {"jpg": jpeg(index), **texts} for index, texts in enumerate(members)}
    return write_pairs(folder, [10, 10], pairs)


def test_a_tokenizer_takes_every_caption_at_once(tmp_path: Path) -> None:
    manifest = manifest_of(shards_of(tmp_path))
    bpe = train_bpe(iter_captions(manifest, 100, SOURCES), 300, 12)
    began = time.process_time()
    dataset = PairDataset(manifest, EvalTransform(16), bpe, captions=SOURCES)
    batch: Batch = dataset.batch([(0, index) for index in range(10)])
    assert time.process_time() - began < 1
    assert [sample.index for sample in batch.bad] == [2, 3]
    assert {sample.reason for sample in batch.bad} == {"blank caption"}
    assert PairDataset(manifest, EvalTransform(16), tokenize, captions=SOURCES).batch([(0, 1)]).valid.tolist() == [True]
