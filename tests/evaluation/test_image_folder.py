"""Folders of images by class score as the same images in CLIP_benchmark's layout do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from evaluation_sets import Model, image_of, labelled_set, tokenize, transform

from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.encoding import BatchEncoder
from neuclip_ds.evaluation.image_folder import ImageFolder, is_image_folder
from neuclip_ds.evaluation.zero_shot import ZeroShotSet, zero_shot


def write(folder: Path, names: list[str]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    return folder


def test_scores_equal_those_of_the_same_images_in_shards(tmp_path: Path, run_ranks: Any) -> None:
    data = labelled_set(tmp_path / "shards", 31)
    folder = tmp_path / "folders"
    for number, (feature, label) in enumerate(zip(data.features, data.labels, strict=True)):
        image = write(folder, [f"{label}/{number}.jpg"]) / f"{label}/{number}.jpg"
        image.write_bytes(image_of(feature))
    for name in ("classnames.txt", "zeroshot_classification_templates.txt"):
        (folder / name).write_bytes((tmp_path / "shards" / name).read_bytes())

    def score(path: Path, world_size: int) -> dict[str, float]:
        image_set = ZeroShotSet.read(path)
        return run_ranks(
            world_size, lambda rank: zero_shot(BatchEncoder(Model(), tokenize, rank, 4), image_set, transform)
        )[0]

    expected = score(tmp_path / "shards", 1)
    assert 0.3 < expected["zero_shot_top1"] < 1
    assert score(folder, 1) == score(folder, 2) == expected


def test_names_and_prompts_without_files(tmp_path: Path) -> None:
    names = ["wolf/1.webp", "red_fox/b/2.JPG", "red_fox/a.png", "red_fox/notes.txt", ".hidden/x.jpg", "empty/y.txt"]
    image_set = ZeroShotSet.read(write(tmp_path, names))
    assert image_set.class_names == ("empty", "red fox", "wolf")
    assert image_set.prompt(1) == "a photo of a red fox."
    labels = [(sample.text("cls"), Path(sample.name).name) for sample in image_set.folder.samples()]
    assert labels == [("1", "a.png"), ("1", "2.JPG"), ("2", "1.webp")]


def test_copies_that_differ_are_told_apart(tmp_path: Path) -> None:
    one, other = (write(tmp_path / name, ["a/1.jpg", f"b/{name}.jpg"]) for name in ("x", "y"))
    assert ImageFolder.read(one).contents != ImageFolder.read(other).contents


def test_what_is_no_such_folder(tmp_path: Path) -> None:
    assert not is_image_folder(write(tmp_path / "one", ["images/1.jpg"])), "a class alone, or images next to a table"
    assert not is_image_folder(write(tmp_path / "none", ["a/1.tar", "b/2.txt"]))
    with pytest.raises(UserError, match=r"nshards\.txt is missing; a zero-shot set is"):
        ZeroShotSet.read(tmp_path / "none")


def test_mistakes(tmp_path: Path) -> None:
    folder = write(tmp_path, ["a/1.jpg", "b/2.jpg"])
    (folder / "classnames.txt").write_text("a\nb\nc\n")
    with pytest.raises(UserError, match="has 3 names for 2 folders of classes"):
        ZeroShotSet.read(folder)
    (folder / "classnames.txt").write_text("cat\ndog\n")
    (folder / "zeroshot_classification_templates.txt").write_text("a photo\n")
    with pytest.raises(UserError, match=r"the template 'a photo' lacks \{c\}"):
        ZeroShotSet.read(folder)
