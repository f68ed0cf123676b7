"""Read evaluation sets in all supported forms: CLIP_benchmark's layout, images by class, and tables of pairs."""

import os
import sys
from pathlib import Path
from typing import Any

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from evaluation_sets import (
    Model,
    captioned_set,
    image_of,
    labeled_set,
    stored_order,
    tokenize,
    transform,
    words_of,
    write_shards,
)
from tars import unprivileged_folder, write_tar

from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.encoding import BatchEncoder
from neuclip_ds.evaluation.retrieval import caption_retrieval
from neuclip_ds.evaluation.sets import (
    EvaluationSet,
    Sample,
    is_set,
    open_captioned,
    open_labeled,
    open_set,
    open_shards,
)
from neuclip_ds.evaluation.sharded_batches import sharded_batches
from neuclip_ds.evaluation.zero_shot import zero_shot


def numbered(folder: Path, count: int, shards: int = 2) -> EvaluationSet:
    return open_shards(write_shards(folder, [{"txt": str(n).encode()} for n in range(count)], shards))


def number(sample: Sample) -> int:
    return int(sample.text("txt"))


def test_samples_are_those_that_webdataset_yields(tmp_path: Path) -> None:
    import webdataset

    folder = numbered(tmp_path, 11, 3)
    shards = [str(tmp_path / f"test/{shard}.tar") for shard in range(3)]
    expected = webdataset.WebDataset(shards, shardshuffle=False, empty_check=False)
    assert [number(sample) for sample in folder.samples()] == [int(sample["txt"]) for sample in expected]
    assert folder.kind == "classification"
    (tmp_path / "dataset_type.txt").write_text("Retrieval\n")
    assert open_shards(tmp_path).kind == "retrieval"


def test_no_shard_stays_open(tmp_path: Path) -> None:
    samples = list(numbered(tmp_path, 40, 20).samples())
    assert number(samples[3]) == 21
    open_files = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert not [path for path in open_files if path.startswith(str(tmp_path))]


def test_a_damaged_shard_is_refused(tmp_path: Path) -> None:
    folder = numbered(tmp_path, 6, 1)
    data = bytearray((tmp_path / "test/0.tar").read_bytes())
    data[1024:1200] = b"x" * 176  # the second header
    (tmp_path / "test/0.tar").write_bytes(data)
    with pytest.raises(UserError, match=r"0\.tar is damaged at byte 1024; download it again"):
        list(folder.samples())


def test_different_copies_on_different_ranks_are_refused(tmp_path: Path, run_ranks: Any) -> None:
    copies = [numbered(tmp_path / "a", 5), numbered(tmp_path / "b", 30)]
    with pytest.raises(UserError, match="the same copy"):
        run_ranks(2, lambda rank: list(sharded_batches(copies[rank.rank], number, rank, 2)))


def test_an_unreadable_shard_stops_all_ranks(tmp_path: Path, run_ranks: Any) -> None:
    folder = numbered(tmp_path, 9)
    (tmp_path / "test/1.tar").unlink()
    (tmp_path / "test/1.tar").mkdir()
    with pytest.raises(UserError, match=r"rank 0: .*1\.tar cannot be"):
        run_ranks(2, lambda rank: list(sharded_batches(folder, number, rank, 2)))


def write(folder: Path, names: list[str]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    return folder


def test_scores_of_an_image_folder_equal_those_of_the_same_images_in_shards(tmp_path: Path, run_ranks: Any) -> None:
    data = labeled_set(tmp_path / "shards", 31)
    folder = tmp_path / "folders"
    for number, (feature, label) in enumerate(zip(data.features, data.labels, strict=True)):
        image = write(folder, [f"{label}/{number}.jpg"]) / f"{label}/{number}.jpg"
        image.write_bytes(image_of(feature))
    for name in ("classnames.txt", "zeroshot_classification_templates.txt"):
        (folder / name).write_bytes((tmp_path / "shards" / name).read_bytes())

    def score(path: Path, world_size: int) -> dict[str, float]:
        image_set = open_labeled(path)
        return run_ranks(
            world_size, lambda rank: zero_shot(BatchEncoder(Model(), tokenize, rank, 4, transform), image_set)
        )[0]

    expected = score(tmp_path / "shards", 1)
    assert 0.3 < expected["zero_shot_top1"] < 1
    assert score(folder, 1) == score(folder, 2) == expected


def test_without_text_files_folders_name_the_classes(tmp_path: Path) -> None:
    names = ["wolf/1.webp", "red_fox/b/2.JPG", "red_fox/a.png", "red_fox/notes.txt", ".hidden/x.jpg", "empty/y.txt"]
    image_set = open_labeled(write(tmp_path, names))
    assert image_set.class_names == ("red fox", "wolf")
    assert image_set.prompt(0) == "a photo of a red fox."
    labels = [(sample.text("cls"), Path(sample.name).name) for sample in image_set.samples()]
    assert labels == [("0", "a.png"), ("0", "2.JPG"), ("1", "1.webp")]


def classes_of_images(path: Path) -> dict[str, str]:
    """Return the class name of each image, by the image's path in the set."""
    image_set = open_labeled(path)
    names = {}
    for sample in image_set.samples():
        names[str(Path(sample.name).relative_to(path))] = image_set.class_names[int(sample.text("cls"))]
    return names


def folders_of_images(path: Path, names: list[str]) -> None:
    write(path, [f"{name}/a.png" for name in names])


def test_folders_of_imagenet_have_its_names_and_templates(tmp_path: Path) -> None:
    metadata = pytest.importorskip("open_clip.zero_shot_metadata")
    folders_of_images(tmp_path, ["n01440764", "n15075141", "n02123045"])
    image_set = open_labeled(tmp_path)
    assert image_set.class_names == ("tench", "tabby cat", "toilet paper")
    assert image_set.templates == tuple(make("{c}") for make in metadata.OPENAI_IMAGENET_TEMPLATES)
    (tmp_path / "classnames.txt").write_text("fish\ncat\npaper\n")
    image_set = open_labeled(tmp_path)
    assert (image_set.class_names, image_set.templates) == (("fish", "cat", "paper"), ("a photo of a {c}.",))


def test_other_wordnet_ids_are_refused_and_other_names_are_not(tmp_path: Path) -> None:
    pytest.importorskip("open_clip")
    folders_of_images(tmp_path / "ids", ["n01440764", "n00000001"])
    with pytest.raises(UserError, match="n00000001"):
        open_labeled(tmp_path / "ids")
    folders_of_images(tmp_path / "names", ["n01440764", "cat"])
    assert open_labeled(tmp_path / "names").class_names == ("cat", "n01440764")


def test_imagenet_without_open_clip_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "open_clip.zero_shot_metadata", None)
    folders_of_images(tmp_path, ["n01440764", "n15075141"])
    with pytest.raises(UserError, match="open_clip_torch"):
        open_labeled(tmp_path)


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("first", [0, 1])
def test_folders_of_numbers_are_sorted_by_number(tmp_path: Path, width: int, first: int) -> None:
    """ImageNetV2's folders, for example, are 0 to 999 without leading zeros."""
    folders = [f"{number:0{width}d}" for number in range(first, first + 12)]
    write(tmp_path, [f"{name}/a.jpg" for name in folders])
    (tmp_path / "classnames.txt").write_text("".join(f"class {number}\n" for number in range(12)))
    expected = {f"{name}/a.jpg": f"class {number}" for number, name in enumerate(folders)}
    assert classes_of_images(tmp_path) == expected


def test_numbers_in_names_that_sort_as_text_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, [f"class_{number}/a.jpg" for number in (1, 2, 10)])
    (tmp_path / "classnames.txt").write_text("one\ntwo\nten\n")
    assert classes_of_images(tmp_path)["class_10/a.jpg"] == "two"
    assert "class of class_10 is 'two'" in caplog.text
    caplog.clear()
    (tmp_path / "class_10").rename(tmp_path / "class_3")
    assert classes_of_images(tmp_path)["class_3/a.jpg"] == "ten"
    assert not caplog.text


@pytest.mark.parametrize(
    "extra", ["__MACOSX/._a.jpg", "lost+found/x", ".cache/a.jpg", "notes/readme.md", "masks/deep/x.npy"]
)
@pytest.mark.parametrize("named", [False, True])
def test_other_folders_are_no_classes(tmp_path: Path, extra: str, named: bool) -> None:
    write(tmp_path, ["cat/1.jpg", "cat/._1.jpg", "dog/deep/2.jpg", "fox/3.png", extra])
    if named:
        (tmp_path / "classnames.txt").write_text("cat\ndog\nfox\n")
    assert is_set(tmp_path)
    assert open_labeled(tmp_path).class_names == ("cat", "dog", "fox")
    assert classes_of_images(tmp_path) == {"cat/1.jpg": "cat", "dog/deep/2.jpg": "dog", "fox/3.png": "fox"}


def test_a_class_without_images_counts_if_it_has_a_name(tmp_path: Path) -> None:
    write(tmp_path, ["a/1.jpg", "b/notes.txt", "c/2.jpg"])
    (tmp_path / "classnames.txt").write_text("cat\ndog\nfox\n")
    assert classes_of_images(tmp_path) == {"a/1.jpg": "cat", "c/2.jpg": "fox"}


def test_a_class_may_have_no_name(tmp_path: Path) -> None:
    """CLEVR Distance, in CLIP_benchmark and DataComp, has a blank line in its classnames.txt."""
    labeled_set(tmp_path, 12, classes=3)
    (tmp_path / "classnames.txt").write_text("very nearby\n\ndistant\n")
    image_set = open_labeled(tmp_path)
    assert image_set.class_names == ("very nearby", "", "distant")
    assert image_set.prompt(2) == "a photo of "


@pytest.mark.parametrize("name", ["classnames.txt", "zeroshot_classification_templates.txt", "test/nshards.txt"])
def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path, name: str) -> None:
    labeled_set(tmp_path, 12)
    expected = open_labeled(tmp_path)
    text = (tmp_path / name).read_text()
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    image_set = open_labeled(tmp_path)
    assert (image_set.class_names, image_set.templates) == (expected.class_names, expected.templates)
    for encoding in ("latin-1", "utf-16"):
        (tmp_path / name).write_text(f"{text}ä\n", encoding=encoding)
        with pytest.raises(UserError, match=rf"{Path(name).name} is not UTF-8 text"):
            open_labeled(tmp_path)


def test_a_byte_order_mark_is_no_part_of_a_kind_or_caption(tmp_path: Path) -> None:
    captioned_set(tmp_path, [1, 1])
    (tmp_path / "dataset_type.txt").write_text("retrieval\n", encoding="utf-8-sig")
    assert open_captioned(tmp_path).kind == "retrieval"
    write_shards(tmp_path, [{"txt": "one\n".encode("utf-8-sig")}], 1)
    assert [sample.text("txt") for sample in open_captioned(tmp_path).samples()] == ["one"]


def test_names_of_folders_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    for name in (b"k\xe4fer", b"maus"):
        folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
        folder.mkdir()
        (folder / "1.jpg").write_bytes(b"")
    with pytest.raises(UserError, match="not UTF-8 text"):
        open_labeled(tmp_path)


def test_a_set_that_cannot_be_listed_is_an_error() -> None:
    with unprivileged_folder() as folder:
        write(folder, ["a/1.jpg", "b/2.jpg", "c/3.jpg"])
        (folder / "b").chmod(0)
        try:
            with pytest.raises(UserError, match=r"cannot be read .*Permission denied"):
                is_set(folder)
        finally:
            (folder / "b").chmod(0o700)


def change_caption(folder: Path) -> None:
    """Rewrite a tar with one other letter, as large as before."""
    path = folder / "test/0.tar"
    path.write_bytes(path.read_bytes().replace(b"128", b"129", 1))


CHANGES = {
    "a class name": lambda folder: (folder / "classnames.txt").write_text("name 1\nname 0\nname 2\n"),
    "a template": lambda folder: (folder / "zeroshot_classification_templates.txt").write_text("art of {c}"),
    "a file is removed": lambda folder: (folder / "zeroshot_classification_templates.txt").unlink(),
    "a kind": lambda folder: (folder / "dataset_type.txt").write_text("retrieval"),
    "a caption": change_caption,
    "an image": lambda folder: (folder / "b/2.jpg").write_bytes(b"y"),
    "a name": lambda folder: (folder / "b/2.jpg").rename(folder / "b/3.jpg"),
    "an image of a table": lambda folder: (folder / "pairs/images/1.jpg").write_bytes(b"y"),
    "a table": lambda folder: (folder / "pairs/pairs.csv").write_text("path,text\nimages/1.jpg,two\n"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_fingerprint_changes_with_each_file(tmp_path: Path, change: str) -> None:
    if "table" in change:
        write(tmp_path / "pairs", ["images/1.jpg"])
        (tmp_path / "pairs/pairs.csv").write_text("path,text\nimages/1.jpg,one\n")
        path = tmp_path / "pairs/pairs.csv"
    else:
        path = tmp_path
        if change in ("an image", "a name"):
            write(tmp_path, ["a/1.jpg", "b/2.jpg"])
        else:
            labeled_set(tmp_path, 12, classes=3)
    before = open_set(path).fingerprint()
    assert open_set(path).fingerprint() == before
    for file in tmp_path.rglob("*"):
        os.utime(file, ns=(0, 0))
    stale = open_set(path).fingerprint()
    CHANGES[change](tmp_path)
    assert open_set(path).fingerprint() not in (before, stale)


@pytest.mark.parametrize("problem", ["joined", "not adjacent", "repeated"])
def test_shards_that_lose_members_are_refused_with_the_cause(tmp_path: Path, problem: str) -> None:
    folder = numbered(tmp_path, 3, 1)
    path = tmp_path / "test/0.tar"
    names = {
        "joined": ["a.txt"],
        "not adjacent": ["a.cls", "b.cls", "a.txt", "b.txt"],
        "repeated": ["a.txt", "a.txt"],
    }
    tar = write_tar(path, [(name, b"0") for name in names[problem]]).read_bytes()
    message = "are not adjacent: 2; .* another member: 0" if problem == "not adjacent" else "adjacent: 0; .* member: 1"
    if problem == "joined":
        path.write_bytes(tar + write_tar(tmp_path / "b.tar", [("b.txt", b"1")]).read_bytes())
        message = "several tars may have been joined"
    with pytest.raises(UserError, match=message):
        list(folder.samples())


def test_a_folder_without_two_folders_of_images_is_not_an_image_folder(tmp_path: Path) -> None:
    assert not is_set(write(tmp_path / "one", ["images/1.jpg"])), "these may be the images of a table next to them"
    assert not is_set(write(tmp_path / "none", ["a/1.tar", "b/2.txt"]))
    with pytest.raises(UserError, match=r"nshards\.txt is missing; a zero-shot set is"):
        open_labeled(tmp_path / "none")


def test_names_and_templates_that_do_not_fit_an_image_folder_are_errors(tmp_path: Path) -> None:
    folder = write(tmp_path, ["a/1.jpg", "b/2.jpg"])
    (folder / "classnames.txt").write_text("a\nb\nc\n")
    with pytest.raises(UserError, match="contains 3 names for 2 folders of images"):
        open_labeled(folder)
    (folder / "classnames.txt").write_text("cat\ndog\n")
    (folder / "zeroshot_classification_templates.txt").write_text("a photo\n")
    with pytest.raises(UserError, match=r"the template 'a photo' lacks \{c\}"):
        open_labeled(folder)


def write_tables(folder: Path) -> list[Path]:
    """Write shards with several captions per image, and the same pairs as a table of paths and a table of images."""
    images, captions, image_of_text = captioned_set(folder / "shards", [2, 1, 3, 1, 2, 1, 1], noise=2)
    titles = list(map(words_of, captions))
    for number, image in enumerate(images):
        (folder / f"{number}.png").write_bytes(image_of(image))
    paths = [f"{image}.png" for image in image_of_text.tolist()]
    pandas.DataFrame({"filepath": paths, "title": titles}).to_csv(folder / "pairs.csv", index=False)

    image_cells = []
    caption_cells: list[list[str]] = []
    for number in stored_order(len(images)):
        image_cells.append({"bytes": image_of(images[number]), "path": None})
        caption_cells.append([titles[text] for text in torch.where(image_of_text == number)[0].tolist()])
    pq.write_table(pa.table({"image": image_cells, "caption": caption_cells}), folder / "pairs.parquet")
    return [folder / "shards", folder / "pairs.csv", folder / "pairs.parquet"]


def test_scores_of_a_table_equal_those_of_the_same_pairs_in_shards(tmp_path: Path, run_ranks: Any) -> None:
    def score(path: Path, world_size: int) -> dict[str, float]:
        captioned = open_captioned(path)
        return run_ranks(
            world_size, lambda rank: caption_retrieval(BatchEncoder(Model(), tokenize, rank, 2, transform), captioned)
        )[0]

    shards, table_of_paths, table_of_images = write_tables(tmp_path)
    expected = score(shards, 1)
    assert 0 < expected["mean_recall@1"] < 1
    for table in (table_of_paths, table_of_images):
        assert score(table, 1) == expected
        assert score(table, 2) == expected


def test_all_rows_of_an_image_are_its_captions(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('file_name,text\nx.jpg,one\ny.jpg,two\nx.jpg,"three\nlines"\n')
    samples = list(open_set(tmp_path / "a.csv").samples())
    assert [sample.text("txt") for sample in samples] == ["one\nthree lines", "two"]
    with pytest.raises(UserError, match=r"a\.csv: x\.jpg cannot be read"):
        samples[0].image()


def test_tables_without_the_columns_or_an_image_and_other_sets_are_errors(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("where,what\n1,2\n")
    with pytest.raises(
        UserError,
        match=r"a\.csv has no image column .*; its columns are where, what: rename the column with",
    ):
        open_set(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_text("image,caption\nx.jpg,one\n ,two\n")
    with pytest.raises(UserError, match=r"b\.csv: row 2 \(not counting a header\) has no image in the column image"):
        list(open_set(tmp_path / "b.csv").samples())
    (tmp_path / "a" / "x").mkdir(parents=True)
    for name in ("x/1.jpg", "y/2.jpg"):
        (tmp_path / "a" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "a" / name).write_bytes(b"")
    with pytest.raises(UserError, match="a classification set, not a retrieval set"):
        open_captioned(tmp_path / "a")
    with pytest.raises(UserError, match="does not exist; pass an evaluation set"):
        open_captioned(tmp_path / "nothing")
