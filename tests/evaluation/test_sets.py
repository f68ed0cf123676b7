"""Read evaluation sets in all supported forms: CLIP_benchmark's layout, images by class, and tables of pairs."""

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
    assert image_set.class_names == ("empty", "red fox", "wolf")
    assert image_set.prompt(1) == "a photo of a red fox."
    labels = [(sample.text("cls"), Path(sample.name).name) for sample in image_set.samples()]
    assert labels == [("1", "a.png"), ("1", "2.JPG"), ("2", "1.webp")]


def test_a_folder_without_two_folders_of_images_is_not_an_image_folder(tmp_path: Path) -> None:
    assert not is_set(write(tmp_path / "one", ["images/1.jpg"])), "these may be the images of a table next to them"
    assert not is_set(write(tmp_path / "none", ["a/1.tar", "b/2.txt"]))
    with pytest.raises(UserError, match=r"nshards\.txt is missing; a zero-shot set is"):
        open_labeled(tmp_path / "none")


def test_names_and_templates_that_do_not_fit_an_image_folder_are_errors(tmp_path: Path) -> None:
    folder = write(tmp_path, ["a/1.jpg", "b/2.jpg"])
    (folder / "classnames.txt").write_text("a\nb\nc\n")
    with pytest.raises(UserError, match="has 3 names for 2 folders of classes"):
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
    with pytest.raises(UserError, match=r"a\.csv has no column of images .*, but where, what: rename one of them"):
        open_set(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_text("image,caption\nx.jpg,one\n ,two\n")
    with pytest.raises(UserError, match=r"b\.csv: row 1 has no image in the column image"):
        list(open_set(tmp_path / "b.csv").samples())
    (tmp_path / "a" / "x").mkdir(parents=True)
    for name in ("x/1.jpg", "y/2.jpg"):
        (tmp_path / "a" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "a" / name).write_bytes(b"")
    with pytest.raises(UserError, match="a classification set, not a retrieval set"):
        open_captioned(tmp_path / "a")
    with pytest.raises(UserError, match="does not exist; name an evaluation set"):
        open_captioned(tmp_path / "nothing")
