"""The demo data set: layout, labels, captions, near-duplicates and reproducibility."""

import json
import re
import subprocess
import sys
from collections import Counter
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from neuclip_ds.data import demo
from neuclip_ds.data.demo import CLASSES, demo_split, make_demo_data
from neuclip_ds.data.demo_scenes import (
    BACKGROUNDS,
    COLOURS,
    NUMBERS,
    PLACES,
    SHAPES,
    SIZES,
    TEMPLATES,
    describe,
    random_scene,
    render,
    single_object,
)
from neuclip_ds.errors import UserError

SMALL = {"pairs": 1500, "held_out": 40, "zero_shot": 170, "size": 32, "duplicate_share": 0.2}
TOOL = Path(__file__).parents[2] / "tools" / "make_demo_data.py"


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


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def names_one(caption: str, words: tuple[str, ...]) -> bool:
    """Whether the caption contains one of the words, in singular or plural."""
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


def test_no_two_images_are_equal(folder: Path) -> None:
    images = [sample["jpg"] for split in ("train", "val") for sample in read(folder / split)]
    assert len(set(images)) == len(images)


def test_processes_do_not_show(folder: Path, tmp_path: Path) -> None:
    make_demo_data(tmp_path / "two", processes=2, **SMALL)
    assert contents(tmp_path / "two") == contents(folder)


def test_smaller_set_begins_larger_one(folder: Path, tmp_path: Path) -> None:
    make_demo_data(tmp_path / "few", processes=1, **{**SMALL, "pairs": 30, "held_out": 5, "zero_shot": 7})
    for split in ("train", "val"):
        few, many = facts(tmp_path / "few" / split), facts(folder / split)
        assert few == many[: len(few)]


def test_seed_changes_every_pair(folder: Path, tmp_path: Path) -> None:
    make_demo_data(tmp_path / "other", processes=1, seed=1, **{**SMALL, "pairs": 200})
    other, same = read(tmp_path / "other" / "train"), read(folder / "train")
    assert all(a["jpg"] != b["jpg"] for a, b in zip(other, same, strict=False))


def test_splits_differ(folder: Path) -> None:
    train, val = facts(folder / "train"), facts(folder / "val")
    assert sum(a["objects"] == b["objects"] for a, b in zip(train, val, strict=False)) <= 1


def test_captions_tell_the_scene(folder: Path) -> None:
    named = Counter[str]()
    described = facts(folder / "train")
    for pair in described:
        caption = pair["caption"]
        for group in pair["objects"]:
            assert names_one(caption, COLOURS[group["colour"]].words), pair
            assert names_one(caption, SHAPES[group["shape"]].words), pair
        named["place"] += any(names_one(caption, PLACES[group["place"]]) for group in pair["objects"])
        named["background"] += names_one(caption, BACKGROUNDS[pair["background"]][1])
        assert not re.search(r"\ba [aeiou]|\ban [^aeiou]|  |[{}]", caption), caption
    for fact in ("place", "background"):  # sometimes omitted, more often named
        assert 0.5 < named[fact] / len(described) < 0.9


def test_captions_tell_nothing_false(folder: Path) -> None:
    for pair in facts(folder / "train"):
        caption, groups = pair["caption"], pair["objects"]
        for key, table in (("colour", COLOURS), ("shape", SHAPES)):
            for absent in set(table) - {group[key] for group in groups}:
                words = table[absent].words
                assert not names_one(spoken_objects(caption), words), (absent, pair)
        for absent in set(PLACES) - {group["place"] for group in groups}:
            assert not names_one(caption, PLACES[absent]), (absent, pair)
        for absent in set(SIZES) - {group["size"] for group in groups}:
            assert not names_one(caption, SIZES[absent][1]), (absent, pair)


def spoken_objects(caption: str) -> str:
    """Return the caption without its background, which may name a colour."""
    for _, phrases in BACKGROUNDS.values():
        for phrase in phrases:
            caption = caption.lower().replace(phrase, "")
    return caption


def test_captions_count_single_groups(folder: Path) -> None:
    numbers = {1: ("a", "an", *NUMBERS[1][1:])} | {number: NUMBERS[number] for number in (2, 3, 4)}
    for pair in facts(folder / "train"):
        if len(pair["objects"]) == 1:
            assert names_one(pair["caption"], numbers[pair["objects"][0]["number"]]), pair


def test_near_duplicates(folder: Path) -> None:
    described = facts(folder / "train")
    by_key = {pair["key"]: pair for pair in described}
    repeats = [pair for pair in described if pair["near_duplicate_of"]]
    # binomial: four standard deviations
    share, chance = len(repeats) / len(described), SMALL["duplicate_share"]
    assert abs(share - chance) < 4 * (chance * (1 - chance) / len(described)) ** 0.5
    for pair in repeats:
        original = by_key[pair["near_duplicate_of"]]
        assert original["near_duplicate_of"] is None and original["key"] < pair["key"]
        assert (original["objects"], original["background"]) == (pair["objects"], pair["background"])


def test_near_duplicates_look_alike_and_have_another_template() -> None:
    specs = [demo._pair_spec(0, "train", 0.3, i) for i in range(300)]
    repeats = [spec for spec in specs if spec.original is not None]
    assert repeats
    for spec in repeats:
        assert spec.template != specs[spec.original].template

    scene, other = random_scene(Random(1)), random_scene(Random(2))
    first, again, apart = (
        np.asarray(render(s, 64, Random(seed)), dtype=float) for s, seed in ((scene, 3), (scene, 4), (other, 4))
    )
    assert not np.array_equal(first, again)
    assert abs(first - again).mean() < abs(first - apart).mean() / 2


def test_no_near_duplicates_when_none_are_wanted(tmp_path: Path) -> None:
    make_demo_data(tmp_path / "set", processes=1, **{**SMALL, "pairs": 100, "duplicate_share": 0.0})
    assert all(pair["near_duplicate_of"] is None for pair in facts(tmp_path / "set" / "train"))


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


def test_zero_shot_image_shows_the_colour_of_its_class(folder: Path) -> None:
    for sample in read(folder / "zero_shot" / "test"):
        colour, _ = CLASSES[int(sample["cls"])]
        pixels = np.asarray(Image.open(BytesIO(sample["jpg"])), dtype=int).reshape(-1, 3)
        near = abs(pixels - COLOURS[colour].rgb).max(axis=1) < 45
        assert 5 <= near.sum() < 300  # of 1024


@given(st.integers(), st.integers(0, len(TEMPLATES) - 1))
@settings(max_examples=100, deadline=None)
def test_scenes_are_consistent(seed: int, template: int) -> None:
    scene = random_scene(Random(seed))
    kinds = {(group.shape, group.colour) for group in scene.groups}
    places = {group.place for group in scene.groups}
    assert len(kinds) == len(places) == len(scene.groups) <= 3
    assert places <= {"left", "centre", "right"} or places <= {"top", "centre", "bottom"}
    assert describe(scene, template, Random(seed)) == describe(scene, template, Random(seed))


@pytest.mark.parametrize(
    ("place", "middle"), [("left", (0, 1)), ("right", (2, 1)), ("top", (1, 0)), ("bottom", (1, 2))]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_objects_are_where_the_scene_says(shape: str, place: str, middle: tuple[int, int]) -> None:
    for seed in range(10):
        scene = single_object(Random(seed), shape, "black")
        scene = scene._replace(groups=(scene.groups[0]._replace(place=place),), background="white")
        dark = np.asarray(render(scene, 90, Random(seed)).convert("L")) < 100
        rows, columns = dark.nonzero()
        assert (int(columns.mean() // 30), int(rows.mean() // 30)) == middle
        assert all(marks.min() > 0 and marks.max() < 89 for marks in (rows, columns))  # whole


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    make_demo_data(
        tmp_path / "set",
        pairs=3,
        held_out=2,
        zero_shot=1,
        processes=1,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == sorted(seen) and len(seen) == 3 and seen[-1] == (6, 6)


def test_used_folder_is_refused_and_empty_one_taken(tmp_path: Path) -> None:
    few = {"pairs": 2, "held_out": 2, "zero_shot": 2, "processes": 1}
    folder = tmp_path / "set"
    folder.mkdir()
    make_demo_data(folder, **few)
    before = contents(folder)
    with pytest.raises(UserError, match="exists already"):
        make_demo_data(folder, seed=1, **few)
    assert contents(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["set"]  # nothing aside is left


def test_failure_leaves_nothing(tmp_path: Path) -> None:
    def fail(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_demo_data(tmp_path / "set", pairs=2, held_out=2, zero_shot=2, processes=1, on_progress=fail)
    assert list(tmp_path.iterdir()) == []


def test_unwritable_place_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        make_demo_data(tmp_path / "file" / "set", pairs=2, held_out=2, zero_shot=2, processes=1)


@pytest.mark.parametrize(
    "numbers",
    [
        {"pairs": 0},
        {"held_out": -1},
        {"zero_shot": 0},
        {"size": 8},
        {"duplicate_share": 1.0},
        {"duplicate_share": float("nan")},
        {"processes": 0},
    ],
)
def test_senseless_numbers_are_user_errors(numbers: dict[str, Any], tmp_path: Path) -> None:
    (name,) = numbers
    with pytest.raises(UserError, match=f"^{name}="):
        make_demo_data(tmp_path / "set", **numbers)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_default(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replace the default set by a small one; yield the folders that are rendered."""
    rendered = []

    def small(folder: Path) -> None:
        rendered.append(folder)
        make_demo_data(folder, pairs=2, held_out=2, zero_shot=2, processes=1)

    monkeypatch.setattr(demo, "make_demo_data", small)
    return rendered


def test_demo_split_renders_once(small_default: list[Path], tmp_path: Path) -> None:
    folders = [demo_split(f"demo:{split}", tmp_path / "cache") for split in ("train", "val", "zero_shot")]
    assert len(small_default) == 1
    assert [folder.name for folder in folders] == ["train", "val", "zero_shot"]
    assert len({folder.parent for folder in folders}) == 1 and all(folder.is_dir() for folder in folders)


@pytest.mark.parametrize("source", ["demo:test", "demo", "demo:", "train", "other:train", "demo:train:x"])
def test_unknown_split_names_the_three(source: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="demo:train, demo:val, demo:zero_shot"):
        demo_split(source, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_loser_of_the_race_uses_the_winners_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    winner = demo.make_demo_data
    few = {"pairs": 2, "held_out": 2, "zero_shot": 2, "processes": 1}

    def slow(folder: Path) -> None:
        """Let another process finish first while this one is rendering."""

        def overtake(done: int, total: int) -> None:
            if done == total:
                winner(folder, seed=5, **few)

        winner(folder, on_progress=overtake, **few)

    monkeypatch.setattr(demo, "make_demo_data", slow)
    folder = demo_split("demo:train", tmp_path)
    expected = tmp_path / "expected"
    winner(expected, seed=5, **few)
    assert contents(folder) == contents(expected / "train")
    assert not list(tmp_path.glob("*.partial"))


def test_tool(tmp_path: Path) -> None:
    arguments = ["--pairs=3", "--held-out=2", "--zero-shot=2", "--processes=1", "--duplicate-share=0.5"]
    command = [sys.executable, str(TOOL), str(tmp_path / "set"), *arguments]
    environment = {"PYTHONPATH": str(TOOL.parents[1]), "PATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Wrote 7 images" in done.stdout.replace("\n", " ")
    again = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert again.returncode == 2
    assert "exists already" in again.stderr and "Traceback" not in again.stderr
