"""Check the layout, labels, captions, near-duplicates and reproducibility of the demo dataset."""

import json
import os
import re
from collections import Counter
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import webdataset
from PIL import Image
from small_runs import contents

from neuclip_ds.cli.main import main
from neuclip_ds.data import demo
from neuclip_ds.data.demo import (
    BACKGROUNDS,
    CLASSES,
    COLORS,
    NUMBERS,
    PLACES,
    SHAPES,
    SIZES,
    demo_split,
    make_demo_data,
    plan_pair,
    render,
    single_object,
)
from neuclip_ds.errors import UserError

SMALL = {"pairs": 1050, "held_out": 40, "zero_shot": 170, "size": 32}
FEW: dict[str, Any] = {"pairs": 2, "held_out": 2, "zero_shot": 2, "processes": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "set"
    make_demo_data(folder, processes=1, **SMALL)
    return folder


def read(folder: Path) -> list[dict[str, Any]]:
    urls = [str(path) for path in sorted(folder.glob("*.tar"))]
    return list(webdataset.WebDataset(urls, shardshuffle=False))


def facts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(sample["json"]) for sample in read(folder)]


def names_one(caption: str, words: tuple[str, ...]) -> bool:
    """Return whether the caption contains one of the words, in the singular or plural."""
    return any(re.search(rf"(?<![\w-]){re.escape(word)}(s|es)?(?![\w-])", caption.lower()) for word in words)


def test_pairs_in_img2dataset_layout(folder: Path) -> None:
    assert sorted(path.name for path in (folder / "train").iterdir()) == ["00000.tar", "00001.tar"]
    samples = read(folder / "train")
    assert len(samples) == SMALL["pairs"]
    assert [samples[i]["__key__"] for i in (0, 999, 1000)] == ["000000000", "000000999", "000010000"]
    assert len({sample["__key__"] for sample in samples}) == len(samples)
    for sample in samples[::100]:
        described = json.loads(sample["json"])
        assert described["key"] == sample["__key__"]
        assert described["caption"] == sample["txt"].decode()
        image = Image.open(BytesIO(sample["jpg"]))
        assert image.format == "JPEG" and image.mode == "RGB"
        assert image.size == (described["width"], described["height"]) == (32, 32)


def test_other_images_everywhere_and_a_smaller_set_begins_a_larger_one(folder: Path, tmp_path: Path) -> None:
    images = [sample["jpg"] for split in ("train", "val") for sample in read(folder / split)]
    assert len(set(images)) == len(images)
    make_demo_data(tmp_path / "few", processes=1, **{**SMALL, "pairs": 30, "held_out": 5, "zero_shot": 7})
    for split in ("train", "val"):
        few, many = facts(tmp_path / "few" / split), facts(folder / split)
        assert few == many[: len(few)]
    make_demo_data(tmp_path / "other", processes=1, seed=1, **{**SMALL, "pairs": 50})
    assert not {sample["jpg"] for sample in read(tmp_path / "other" / "train")} & set(images)


def test_captions_tell_the_scene_and_nothing_false(folder: Path) -> None:
    named = Counter[str]()
    numbers = {**NUMBERS, 1: ("a", "an", *NUMBERS[1][1:])}
    described = facts(folder / "train")
    for pair in described:
        caption, groups = pair["caption"], pair["objects"]
        for key, table in (("color", COLORS), ("shape", SHAPES)):
            shown = {group[key] for group in groups}
            for name, (_, words) in table.items():
                assert names_one(spoken_objects(caption), words) == (name in shown), (name, pair)
        for key, table in (("place", PLACES), ("size", {size: words for size, (_, words) in SIZES.items()})):
            for absent in set(table) - {group[key] for group in groups}:
                assert not names_one(caption, table[absent]), (absent, pair)
        if len(groups) == 1:
            assert names_one(caption, numbers[groups[0]["number"]]), pair
        named["place"] += any(names_one(caption, PLACES[group["place"]]) for group in groups)
        named["background"] += names_one(caption, BACKGROUNDS[pair["background"]][1])
        assert not re.search(r"\ba [aeiou]|\ban [^aeiou]|  |[{}]", caption), caption
    for fact in ("place", "background"):  # most captions name it, but not all
        assert 0.5 < named[fact] / len(described) < 0.9


def spoken_objects(caption: str) -> str:
    """Return the caption in lower case without the background, which may name a color."""
    for _, phrases in BACKGROUNDS.values():
        for phrase in phrases:
            caption = caption.lower().replace(phrase, "")
    return caption


def test_near_duplicates(folder: Path) -> None:
    described = facts(folder / "train")
    by_key = {pair["key"]: pair for pair in described}
    repeats = [pair for pair in described if pair["near_duplicate_of"]]
    assert 0.03 < len(repeats) / len(described) < 0.07
    for pair in repeats:
        original = by_key[pair["near_duplicate_of"]]
        assert original["near_duplicate_of"] is None and original["key"] < pair["key"]
        assert (original["objects"], original["background"]) == (pair["objects"], pair["background"])
    plans = [plan_pair(0, "train", index) for index in range(300)]
    repeated_plans = [plan for plan in plans if plan.original is not None]
    assert all(plan.template != plans[plan.original].template for plan in repeated_plans)


def test_zero_shot_layout_and_labels(folder: Path) -> None:
    root = folder / "zero_shot"
    names = (root / "classnames.txt").read_text().splitlines()
    templates = (root / "zeroshot_classification_templates.txt").read_text().splitlines()
    assert len(names) == len(set(names)) == len(CLASSES) == 80 and "red circle" in names
    assert all(template.count("{c}") == 1 for template in templates)
    assert (root / "test" / "nshards.txt").read_text().strip() == "1"
    samples = read(root / "test")
    assert [sample["__key__"] for sample in samples[:2]] == ["s0000000", "s0000001"]
    labels = Counter(int(sample["cls"].decode()) for sample in samples)
    assert set(labels) == set(range(len(CLASSES))) and sum(labels.values()) == SMALL["zero_shot"]
    assert max(labels.values()) - min(labels.values()) <= 1


@pytest.mark.parametrize(
    ("place", "middle"), [("left", (0, 1)), ("right", (2, 1)), ("top", (1, 0)), ("bottom", (1, 2))]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_objects_are_where_the_scene_says(shape: str, place: str, middle: tuple[int, int]) -> None:
    for seed in range(10):
        scene = single_object(Random(seed), "black", shape)
        scene = replace(scene, groups=(replace(scene.groups[0], place=place),), background="white")
        dark = np.asarray(render(scene, 90, Random(seed)).convert("L")) < 100
        rows, columns = dark.nonzero()
        assert (int(columns.mean() // 30), int(rows.mean() // 30)) == middle
        assert all(marks.min() > 0 and marks.max() < 89 for marks in (rows, columns))  # no object is cut off


def test_mistakes_change_nothing(tmp_path: Path) -> None:
    """Invalid options create nothing; an existing empty folder is filled, and a non-empty folder is left unchanged."""
    folder = tmp_path / "set"
    for name, number in (("pairs", 0), ("held_out", -1), ("size", 8), ("processes", 0)):
        with pytest.raises(UserError, match=f"^{name}="):
            make_demo_data(folder, **{name: number})
    for source in ("demo:test", "demo", "demo:", "train", "other:train", "demo:train:x"):
        with pytest.raises(UserError, match="demo:train, demo:val, demo:zero_shot"):
            demo_split(source, tmp_path)
    assert list(tmp_path.iterdir()) == []
    folder.mkdir()
    make_demo_data(folder, **FEW)
    before = contents(folder)
    with pytest.raises(UserError, match="exists already"):
        make_demo_data(folder, seed=1, **FEW)
    assert contents(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["set"]  # no temporary folder is left


def test_a_demo_split_needs_a_cache_that_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(UserError, match=r"cache cannot be written .*, or run the command in another folder\.$"):
        demo_split("demo:train", tmp_path / "cache")


def test_demo_split_renders_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = []

    def small(folder: Path, **options: Any) -> None:
        rendered.append(folder)
        make_demo_data(folder, **FEW, **options)

    monkeypatch.setattr(demo, "make_demo_data", small)
    folders = [demo_split(f"demo:{split}", tmp_path / "cache") for split in ("train", "val", "zero_shot")]
    assert rendered == [tmp_path / "cache" / "demo"]
    assert folders == [rendered[0] / split for split in ("train", "val", "zero_shot")]
    assert all(folder.is_dir() for folder in folders)


def test_loser_of_the_race_uses_the_winners_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(folder: Path, **_: Any) -> None:
        """Simulate a second process that finishes just before this call does."""

        def overtake(done: int, total: int) -> None:
            if done == total:
                make_demo_data(folder, seed=5, **FEW)

        make_demo_data(folder, on_progress=overtake, **FEW)

    monkeypatch.setattr(demo, "make_demo_data", slow)
    folder = demo_split("demo:train", tmp_path)
    make_demo_data(tmp_path / "expected", seed=5, **FEW)
    assert contents(folder) == contents(tmp_path / "expected" / "train")
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])  # slow: both import torch
def test_the_command_renders_the_same_in_several_processes(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: processes)
    main(["make-demo-data", str(tmp_path / "set"), "--pairs=2", "--held-out=2", "--zero-shot=2"])
    assert "Wrote 6 images" in capsys.readouterr().out
    make_demo_data(tmp_path / "one", **FEW)
    assert contents(tmp_path / "set") == contents(tmp_path / "one")
