"""Tables of pairs: every form gives the same rows, from any row on; columns and cells are found."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import datasets
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from neuclip_ds.data.pair_table import CAPTION_COLUMNS, ImageCell, Rows, captions_of, find_column, open_table
from neuclip_ds.errors import UserError

ROWS = [
    {"filepath": f"{n}.jpg", "title": text, "id": str(n)}
    for n, text in enumerate(['a, "b"\nc', "7", "", "é", "null"] * 5)
]


def write(folder: Path, form: str) -> str:
    """Write the rows, in two files where that is possible; return what names them."""
    frame = pandas.DataFrame(ROWS)
    if form == "datasets":
        datasets.Dataset.from_list(ROWS).save_to_disk(folder / "saved")
        return str(folder / "saved")
    if form == "splits":
        found = datasets.DatasetDict(
            {"val": datasets.Dataset.from_list(ROWS[:3]), "train": datasets.Dataset.from_list(ROWS)}
        )
        found.save_to_disk(folder / "saved")
        return str(folder / "saved")
    for number, part in enumerate((frame[:13], frame[13:])):
        path = folder / f"part{number}.{form}"
        if form == "parquet":
            pq.write_table(pa.Table.from_pandas(part, preserve_index=False), path, row_group_size=4)
        elif form == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in part.to_dict("records")))
        else:
            part.to_csv(path, index=False, sep="\t" if form == "tsv" else ",")
    return str(folder)


@pytest.mark.parametrize("form", ["csv", "tsv", "jsonl", "parquet", "datasets", "splits"])
def test_every_form_gives_the_same_rows(tmp_path: Path, form: str) -> None:
    table = open_table(write(tmp_path, form), "train" if form == "splits" else None)
    assert (table.rows, table.columns) == (25, ["filepath", "title", "id"])
    for begin in (0, 3, 10, 14, 24):
        parts = [pickle.loads(pickle.dumps(part)) for part in table.slices(10, begin)]
        assert [row for part in parts for row in rows_of(part)] == ROWS[begin:]
        assert all(len(part) == 10 for part in parts[:-1])
    assert rows_of(next(table.slices(2, 1, ["title"]))) == [{"title": "7"}, {"title": ""}]


def rows_of(part: Rows) -> list[dict[str, Any]]:
    found = [row for batch in part.batches() for row in batch.to_pylist()]
    assert len(found) == len(part)
    return found


def test_what_a_glob_names_and_what_changes(tmp_path: Path) -> None:
    source = f"{write(tmp_path, 'csv')}/part*.csv"
    table = open_table(source)
    assert (table.rows, table.folder, open_table(source).identity) == (25, tmp_path, table.identity)
    with (tmp_path / "part1.csv").open("a") as file:
        file.write("x.jpg,more,25\n")
    assert open_table(source).identity != table.identity


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a.jpg", "a.jpg"),
        (b"bytes", b"bytes"),
        ({"bytes": b"bytes", "path": "a.jpg"}, b"bytes"),
        ({"bytes": None, "path": "a.jpg"}, "a.jpg"),
        ({"bytes": None, "path": None}, None),
        (" ", None),
        (None, None),
        (3, None),
    ],
)
def test_images_of_cells(value: Any, expected: bytes | str | None) -> None:
    cell = ImageCell.of(value, Path("folder"))
    assert (cell and cell.source) == expected


def test_images_are_read_from_the_tables_folder_from_anywhere_and_by_url(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"here")
    for name in ("a.jpg", str(tmp_path / "a.jpg"), f"file://{tmp_path}/a.jpg"):
        assert ImageCell(name, tmp_path).read() == b"here"
    for name in ("b.jpg", f"file://{tmp_path}/b.jpg", "nowhere://b.jpg"):
        with pytest.raises(OSError):
            ImageCell(name, tmp_path).read()


def test_captions_of_cells() -> None:
    assert captions_of(" one\ntwo ") == ["one\ntwo"]
    assert captions_of(["one\ntwo", " ", None, "three"]) == ["one two", "three"]
    assert captions_of(None) == captions_of("  ") == captions_of(7) == []


def test_mistakes(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("IMG,Caption\n1,2\n")
    table = open_table(str(tmp_path / "a.csv"))
    assert find_column(table, CAPTION_COLUMNS, "captions", "") == "Caption"
    with pytest.raises(
        UserError, match=r"no column of images with a usual name \(picture\), but IMG, Caption: name it"
    ):
        find_column(table, ["picture"], "images", "name it")
    with pytest.raises(UserError, match="names no table"):
        open_table(str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="has no splits"):
        open_table(str(tmp_path / "a.csv"), "train")
    (tmp_path / "b.parquet").write_bytes(b"no parquet")
    with pytest.raises(UserError, match=r"files of \.csv, \.parquet"):
        open_table(str(tmp_path))
    with pytest.raises(UserError, match="cannot be read"):
        open_table(str(tmp_path / "b.parquet"))
    for name, column in (("x", "a"), ("y", "b")):
        pq.write_table(pa.table({column: [1]}), tmp_path / f"{name}.parquet")
    with pytest.raises(UserError, match=r"y\.parquet has other columns than .*x\.parquet"):
        open_table(f"{tmp_path}/[xy].parquet")
    with pytest.raises(UserError, match=r"cannot be opened .* check the name"):
        open_table(f"hf:{tmp_path}/absent")
    write(tmp_path, "splits")
    with pytest.raises(UserError, match="has the splits val, train; choose one with --split"):
        open_table(str(tmp_path / "saved"))
