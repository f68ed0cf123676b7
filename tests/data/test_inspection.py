"""Check the counts, the examples and the warnings of `neuclip-ds inspect`, and the warnings at the start of a run."""

import logging
from pathlib import Path

import numpy as np
import pytest
from tars import jpeg, manifest_of, write_pairs

from neuclip_ds.cli.main import main
from neuclip_ds.data.inspection import caption_lengths, inspect_pairs, pair_warnings, size_warnings
from neuclip_ds.data.training_data import open_training_data
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.models.bpe import train_bpe
from neuclip_ds.models.source import FromConfig
from neuclip_ds.recipe import parse

LONG = "one two three four five six seven eight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of 30 pairs: a broken, a repeated and a wide image, a missing caption, and 29 equal captions."""
    replace = {index: {"jpg": jpeg(index), "txt": b"the same words " * 20} for index in range(30)}
    replace[3]["jpg"] = b"not an image"
    del replace[4]["txt"]
    replace[5]["jpg"] = jpeg(0)
    replace[6]["jpg"] = jpeg(6, width=90, height=50)
    return write_pairs(tmp_path_factory.mktemp("pairs") / "shards", [15, 15], replace)


def test_pairs_are_counted_and_shown(folder: Path) -> None:
    inspection = inspect_pairs(manifest_of(folder), limit=100, examples=4)
    assert inspection.read == inspection.total == 30
    assert dict(inspection.unusable) == {"image cannot be decoded": 1, "no caption": 1}
    assert inspection.repeated_images == 1
    assert len(inspection.sides) == len(inspection.captions) == 28
    assert inspection.sides.max(axis=0).tolist() == [90, 50]
    assert len(inspection.examples) == 4
    assert all(pair.image.startswith(b"\xff\xd8") and pair.captions for pair in inspection.examples)
    assert inspect_pairs(manifest_of(folder), limit=10, examples=4).read == 10


@pytest.mark.parametrize("context", [3, 10, 11, 77])
def test_truncated_captions_are_found_with_any_context(context: int) -> None:
    tokenize = train_bpe([LONG] * 3, 400, context)
    lengths = caption_lengths([LONG, "one", "one two"], tokenize, context)
    words = len(LONG.split())
    needed = np.array([words + 2, 3, 4])  # one token per word, and BOS and EOS
    assert lengths.truncated.tolist() == [bool(number > context) and number > 3 for number in needed]
    assert lengths.tokens.argmax() == 0 and lengths.tokens.max() <= context


def test_warnings_name_the_worst_and_spare_good_data() -> None:
    tokenize = train_bpe([LONG], 400, 5)
    good = [f"word {number}" for number in range(30)]
    fits = caption_lengths(["one"] * 30, tokenize, 5)
    cut = caption_lengths([LONG] * 30, tokenize, 5)
    assert pair_warnings(good, fits, 3, 30) == []
    (truncated,) = pair_warnings(good, cut)
    assert "100%" in truncated and "model.text.context_length" in truncated
    captions, images = pair_warnings(["alike"] * 30, fits, 29, 30)
    assert "1 of 30 captions" in captions and "'alike'" in captions and "1 of 30 images" in images
    assert pair_warnings(["alike"] * 5, fits) == [], "too few to judge"
    assert size_warnings(100, 100) == []
    assert "2,048 exceeds the 1,000" in size_warnings(2048, 1000)[0]


def test_a_run_warns_before_its_first_step(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = [f"--data.train={folder}", "--data.batch_size=64", "--data.workers=0", "--model.text.context_length=8"]
    config = parse(["demo", *options]).config
    with caplog.at_level(logging.WARNING):
        open_training_data(config, FromConfig(config.model), Communicator(), tmp_path)
    assert "data.batch_size=64 exceeds the 30 training pairs" in caplog.text
    assert "captions are cut off after 8 tokens" in caplog.text
    assert "captions are distinct" in caplog.text


def test_the_command_prints_what_it_finds_and_writes_pictures(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["inspect", str(folder), "--examples=5", "--model.text.context-length=8"])
    printed = capsys.readouterr().out
    assert "image cannot be decoded (1)" in printed
    assert "of captions are cut off after 8 tokens" in printed
    assert printed.count("warning") == 3
    page = (tmp_path / "inspect.html").read_text()
    assert page.count("data:image/jpeg;base64,") == 5
    assert "the same words" in page
