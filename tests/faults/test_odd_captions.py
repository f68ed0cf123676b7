"""Captions and JSON that nobody checked: text for the tokenizer or a bad sample, never the end of a run."""

import time
from pathlib import Path

import pytest
from tars import jpeg, manifest_of, tokenize, write_pairs

from neuclip_ds.data.dataset import Batch, PairDataset
from neuclip_ds.data.decoders import Captions
from neuclip_ds.data.images import EvalTransform
from neuclip_ds.data.uids import uid_of
from neuclip_ds.models.bpe import train_bpe
from neuclip_ds.training.data import iter_captions

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
    assert Captions(SOURCES).of(members) == expected
    assert all(caption.encode() for caption in expected)


@pytest.mark.parametrize(
    "data",
    [DEEP, DIGITS, SURROGATE, b'{"uid": "-' + b"0" * 30 + b'1"}', b"\xff\xfe{", b""],
    ids=["deep", "digits", "surrogate", "negative", "UTF-16", "empty"],
)
def test_json_without_a_usable_uid_has_none(data: bytes) -> None:
    assert uid_of(data, "uid") is None


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
