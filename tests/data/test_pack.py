"""Check that each row of a table is packed or listed as broken, and that the output folder is complete or absent."""

import base64
import io
import json
import os
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset
from PIL import Image
from servers import files_server
from tars import jpeg

from neuclip_ds.cli.main import main
from neuclip_ds.data.build import build_manifest
from neuclip_ds.data.pack import Packed, choose_columns, pack
from neuclip_ds.data.readers import TarReader
from neuclip_ds.data.shards import resolve_shards
from neuclip_ds.data.tables import Row, captions_of, image_of, open_table, read_image, source_of
from neuclip_ds.data.uids import parse_uid
from neuclip_ds.errors import UserError

ROWS = [
    {"filepath": f"{n}.jpg", "title": text, "id": str(n)}
    for n, text in enumerate(['a, "b"\nc', "7", "", "é", "null"] * 5)
]


def write_table(folder: Path, form: str) -> str:
    """Write the rows to two files in the given format; return the folder."""
    frame = pandas.DataFrame(ROWS)
    for number, part in enumerate((frame[:13], frame[13:])):
        path = folder / f"part{number}.{form}"
        if form == "parquet":
            pq.write_table(pa.Table.from_pandas(part, preserve_index=False), path, row_group_size=4)
        elif form == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in part.to_dict("records")))
        else:
            part.to_csv(path, index=False, sep="\t" if form == "tsv" else ",")
    return str(folder)


@pytest.mark.parametrize("form", ["csv", "tsv", "jsonl", "parquet"])
def test_every_form_gives_the_same_rows(tmp_path: Path, form: str) -> None:
    named = write_table(tmp_path, form)
    table = open_table(named)
    columns = ["filepath", "title", "id"]
    assert (table.rows, table.columns) == (25, columns)
    assert [row.cells for row in table.read(columns)] == [row.cells for row in table.read(columns)] == ROWS
    assert next(table.read(["title"])).cells == {"title": ROWS[0]["title"]}
    assert [row.cells for row in open_table(f"{named}/part1.*").read(columns)] == ROWS[13:]


def test_an_error_of_a_table_names_the_file_and_the_cause(tmp_path: Path) -> None:
    good = {"jsonl": b'{"a": "x"}\n', "csv": b"a,b\n1,2\n"}
    bad = {
        "jsonl": {b'{"a": broken\n': "line 1 is not JSON", b'{"a": "x"}\n["x"]\n': "line 2 is not a JSON object"},
        "csv": {b"a,b\n1,2,3\n": "Expected 2 columns, got 3", b"": "Empty CSV file"},
        "parquet": {b"<html>" * 50: "not a parquet file"},
    }
    for form, contents in bad.items():
        for number in (0, 1):  # the first file also gives the schema
            folder = tmp_path / f"{form}{number}"
            folder.mkdir()
            for other in range(3):
                path = folder / f"{other}.{form}"
                if form == "parquet":
                    pq.write_table(pa.table({"a": ["x"]}), path)
                else:
                    path.write_bytes(good[form])
            for content, cause in contents.items():
                damaged = folder / f"{number}.{form}"
                damaged.write_bytes(content)
                with pytest.raises(UserError) as caught:
                    list(open_table(str(folder)).read(["a"]))
                assert str(damaged) in str(caught.value) and cause in str(caught.value)


def encoded(seed: int, form: str) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 9, 3), dtype=np.uint8)).save(out, form)
    return out.getvalue()


def write_csv(folder: Path) -> Path:
    """Write a CSV file with ten rows, numbered from 0; rows 4 to 8 are broken. Return the file's path."""
    images = [jpeg(0), encoded(1, "PNG"), encoded(2, "WEBP"), encoded(3, "BMP"), b"no image", jpeg(5)[:200]]
    for number, data in enumerate(images):
        (folder / f"{number}.img").write_bytes(data)
    (folder / "9.img").write_bytes(jpeg(9))
    names = [*(f"{number}.img" for number in range(6)), "absent.img", "8.img", "", str(folder / "9.img")]
    captions = [f"caption, {number}" for number in range(7)] + [" ", "nine", "last\nline"]
    frame = pandas.DataFrame(
        {"filepath": names, "title": captions, "uid": [f"{n:032x}" for n in range(10)], "n": range(10)}
    )
    frame.to_csv(folder / "pairs.csv", index=False)
    return folder / "pairs.csv"


def run(table: Path | str, out: Path, shard_size: int = 4, captions: tuple[str, ...] = (), **options: Any) -> Packed:
    opened = open_table(str(table), "auto")
    return pack(opened, out, choose_columns(opened, captions=captions), shard_size, **options)


def samples_of(out: Path) -> list[dict[str, Any]]:
    paths = [str(path) for path in sorted(out.glob("*.tar"))]
    return list(webdataset.WebDataset(paths, shardshuffle=False))


def test_a_csv_of_paths(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    table, out = write_csv(tmp_path), tmp_path / "o%dt"  # a pattern of shard names would replace %d
    packed = run(table, out, on_progress=lambda *counts: seen.append(counts))
    assert (packed.rows, packed.pairs, packed.several) == (10, 5, 0)
    assert seen == [(10, 10)]
    assert packed.causes == {"image cannot be decoded": 2, "image cannot be read": 1, "no caption": 1, "no image": 1}
    assert sorted(path.name for path in out.iterdir()) == ["00000.tar", "00001.tar", "broken.jsonl"]
    samples = samples_of(out)
    assert [sample["__key__"] for sample in samples] == [f"{n:09d}" for n in (0, 1, 2, 3, 9)]
    assert [next(name for name in ("jpg", "png", "webp") if name in sample) for sample in samples] == [
        *("jpg", "png", "webp", "png", "jpg")
    ]
    assert samples[2]["webp"] == (tmp_path / "2.img").read_bytes(), "the bytes of the file"
    assert np.array_equal(Image.open(io.BytesIO(samples[3]["png"])), Image.open(tmp_path / "3.img"))
    assert samples[4]["txt"] == b"last\nline"
    assert json.loads(samples[1]["json"]) == {"uid": f"{1:032x}", "n": "1"}
    broken = [json.loads(line) for line in (out / "broken.jsonl").read_text().splitlines()]
    assert [(one["row"], one["image"]) for one in broken] == [
        *((4, "4.img"), (5, "5.img"), (6, "absent.img"), (7, "8.img"), (8, ""))
    ]
    manifest = build_manifest(resolve_shards(str(out)), processes=1)
    assert (manifest.sizes.tolist(), manifest.n_bad) == ([4, 1], 0)
    assert TarReader(manifest).read(4).texts == {"txt": b"last\nline"}
    run(table, tmp_path / "again")
    for path in (tmp_path / "again").iterdir():
        assert path.read_bytes() == (out / path.name).read_bytes(), "equal tables give equal files"


def test_images_in_the_table_and_several_captions(tmp_path: Path) -> None:
    """Pack a table written by Hugging Face's datasets library."""
    rows = {
        "image": [Image.open(io.BytesIO(jpeg(number))) for number in range(7)],
        "text": [[f"one {number}", f"two\n{number}"] for number in range(7)],
        "recaption": [f"new {number}" if number % 2 else None for number in range(7)],
        "label": [number % 3 for number in range(7)],
        "mask": [encoded(number, "PNG") for number in range(7)],
    }
    datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image()).to_parquet(tmp_path / "pairs.parquet")
    packed = run(tmp_path / "pairs.parquet", tmp_path / "out", 3, ("text", "syn.txt=recaption"))
    assert (packed.rows, packed.pairs, packed.several) == (7, 7, 7)
    samples = samples_of(tmp_path / "out")
    assert [sample["txt"] for sample in samples] == [f"one {n}\ntwo {n}".encode() for n in range(7)]
    assert [sample.get("syn.txt") for sample in samples] == [f"new {n}".encode() if n % 2 else None for n in range(7)]
    metadata = [json.loads(sample["json"]) for sample in samples]
    assert len({parse_uid(one.pop("uid")) for one in metadata} - {None}) == 7, "a uid by the contents"
    assert metadata == [{"label": n % 3} for n in range(7)]


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_rows_with_the_same_image_become_one_sample(tmp_path: Path, form: str) -> None:
    """The rows need not be adjacent; rows with a blank caption and all rows of a broken image are listed as broken."""
    numbers = [0, 0, 1, 2, 0, 1, 3, 3, 0]
    captions = ["a", "b\nb", "c", "d", " ", "c", "e", "f", "g"]
    for number in range(3):
        (tmp_path / f"{number}.jpg").write_bytes(jpeg(number))
    (tmp_path / "3.jpg").write_bytes(b"no image")
    paths = [f"{number}.jpg" for number in numbers]
    images = paths if form == "csv" else [(tmp_path / path).read_bytes() for path in paths]
    frame = pandas.DataFrame({"image": images, "caption": captions, "n": range(9)})
    (frame.to_csv if form == "csv" else frame.to_parquet)(tmp_path / f"rows.{form}", index=False)
    packed = run(tmp_path / f"rows.{form}", tmp_path / "out")
    assert (packed.rows, packed.pairs, packed.several) == (9, 3, 1)
    assert packed.causes == {"image cannot be decoded": 2, "no caption": 1}
    samples = {sample["__key__"]: sample for sample in samples_of(tmp_path / "out")}
    texts = {int(key): sample["txt"] for key, sample in samples.items()}
    assert texts == {3: b"d", 2: b"c", 0: b"a\nb b\ng"}
    assert samples["000000000"]["jpg"] == jpeg(0)
    assert int(json.loads(samples["000000000"]["json"])["n"]) == 0
    broken = [json.loads(line) for line in (tmp_path / "out/broken.jsonl").read_text().splitlines()]
    assert [one["row"] for one in broken] == [4, 6, 7]


class Killed(Exception):
    pass


def test_the_folder_is_complete_or_absent(tmp_path: Path) -> None:
    def killed(done: int, total: int) -> None:
        raise Killed

    table = write_csv(tmp_path)
    with pytest.raises(Killed):
        run(table, tmp_path / "out", on_progress=killed)
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]
    assert run(table, tmp_path / "out").pairs == 5
    with pytest.raises(UserError, match="is not an empty folder"):
        run(table, tmp_path / "out")
    opened = open_table(str(table))
    with pytest.raises(UserError, match=r"No row of .* can be used \(the first row: .*image cannot be read"):
        pack(opened, tmp_path / "none", choose_columns(opened, image="uid"))
    assert not (tmp_path / "none").exists()


def read(cell: object, folder: Path) -> bytes:
    """Read the image of a cell in a table in `folder`."""
    source = source_of(Row(folder, {"image": cell}), "image")
    assert source is not None
    return read_image(source)


def test_images_and_captions_of_cells(tmp_path: Path) -> None:
    assert image_of(" a.jpg") == image_of({"bytes": None, "path": "a.jpg"}) == "a.jpg"
    assert image_of({"bytes": b"bytes", "path": "a.jpg"}) == b"bytes"
    assert image_of({"bytes": None, "path": None}) == image_of(" ") == image_of(3) is None
    (tmp_path / "a.jpg").write_bytes(b"here")
    for cell in ("a.jpg", str(tmp_path / "a.jpg"), f"file://{tmp_path}/a.jpg", b"here"):
        assert read(cell, tmp_path) == b"here"
    for cell in ("b.jpg", f"file://{tmp_path}/b.jpg", "nowhere://b.jpg"):
        with pytest.raises(OSError):
            read(cell, tmp_path)
    assert captions_of(" one\ntwo ") == ["one\ntwo"]
    assert captions_of(["one\ntwo", " ", None, "three"]) == ["one two", "three"]
    assert captions_of(7) == captions_of([7]) == ["7"]
    assert captions_of(None) == captions_of("  ") == captions_of(True) == captions_of(float("nan")) == []


def test_unusable_tables_and_columns_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("path,Caption,other\n1,2,3\n")
    table = open_table(str(tmp_path / "a.csv"))
    assert choose_columns(table).captions == {"txt": "Caption"}, "in whatever case"
    with pytest.raises(
        UserError, match=r"no image column with a recognized name \(picture\); its columns are path, Caption, other"
    ):
        table.find_column(["picture"], "image", "name it")
    with pytest.raises(UserError, match=r"has no column words; name one of its columns \(path, Caption, other\)"):
        choose_columns(table, captions=["words"])
    assert choose_columns(table, captions=["Caption", "SYN.txt=other"]).captions == {
        "txt": "Caption",
        "syn.txt": "other",
    }
    refused_captions = (
        ["Caption", "other"],
        ["json=Caption"],
        ["syn=Caption"],
        ["_syn.txt=Caption"],
        ["syn.txt=Caption", "SYN.txt=other"],
    )
    for captions in refused_captions:
        with pytest.raises(UserError, match="with a different member"):
            choose_columns(table, captions=captions)
    (tmp_path / "b.parquet").write_bytes(b"no parquet")
    (tmp_path / "c.csv").write_text("image,caption\na.jpg,a dog,and a cat\n")
    refused = {
        "": r"includes files of several formats \(\.csv, \.parquet\)",
        "nothing": "contains no table",
        "b.parquet": "cannot be read",
        "c.csv": r"cannot be read .*or write the table as \.jsonl or \.parquet",
    }
    for source, words in refused.items():
        with pytest.raises(UserError, match=words) as error:
            open_table(str(tmp_path / source), "off")
        assert "--quotes=off" not in str(error.value)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pairs.csv").write_text("path,caption\n" + "".join(f"{n}.jpg,caption {n}\n" for n in range(25)))
    for number in range(24):
        (tmp_path / f"{number}.jpg").write_bytes(jpeg(number))
    out = tmp_path / "out"
    command = ["pack", str(tmp_path / "pairs.csv"), str(out)]
    main([*command, "--shard_size=8"])
    printed = capsys.readouterr().out
    assert f"{out}: packed 24 of 25 rows into 24 samples in 3 shards." in printed
    assert f"1 row could not be used (image cannot be read: 1); {out}/broken.jsonl has the details." in printed
    assert len(list(out.glob("*.tar"))) == 3
    with pytest.raises(SystemExit):
        main([*command, "--shard-size=0"])
    assert "must be at least 1" in capsys.readouterr().err


def write_images(folder: Path, count: int, first: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / f"{number}.jpg").write_bytes(jpeg(first + number))


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_paths_start_from_the_folder_of_their_own_file(tmp_path: Path, form: str) -> None:
    for first, name in ((0, "cats"), (10, "dogs")):
        write_images(tmp_path / "set" / name, 3, first)
        frame = pandas.DataFrame(
            {"file_name": [f"{n}.jpg" for n in range(3)], "text": [f"{name} {n}" for n in range(3)]}
        )
        path = tmp_path / "set" / name / f"metadata.{form}"
        if form == "csv":
            frame.to_csv(path, index=False)
        elif form == "jsonl":
            frame.to_json(path, orient="records", lines=True)
        else:
            frame.to_parquet(path, index=False)
    for source, out in ((tmp_path / "set", tmp_path / "a"), (tmp_path / "set" / "*" / f"*.{form}", tmp_path / "b")):
        assert run(source, out).pairs == 6
        pairs = [(sample["txt"].decode(), sample["jpg"]) for sample in samples_of(out)]
        assert pairs == [(f"cats {n}", jpeg(n)) for n in range(3)] + [(f"dogs {n}", jpeg(10 + n)) for n in range(3)]


def test_the_same_image_under_two_paths_is_one_sample(tmp_path: Path) -> None:
    write_images(tmp_path / "images", 1)
    (tmp_path / "pairs.csv").write_text(f"path,text\nimages/0.jpg,one\n{tmp_path}/images/0.jpg,two\n")
    assert run(tmp_path / "pairs.csv", tmp_path / "out").pairs == 1
    assert samples_of(tmp_path / "out")[0]["txt"] == b"one\ntwo"


def test_hidden_copies_of_a_table_are_not_packed(tmp_path: Path) -> None:
    write_images(tmp_path / "set", 2)
    old = "".join(f"{tmp_path}/set/{n}.jpg,wrong {n}\n" for n in range(2))
    for name in (".ipynb_checkpoints/pairs-checkpoint.csv", "__MACOSX/pairs.csv", ".trash.csv"):
        path = tmp_path / "set" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("path,caption\n" + old)
    (tmp_path / "set" / "._pairs.csv").write_bytes(b"\0\5\x16\7")
    (tmp_path / "set" / "pairs.csv").write_text("path,caption\n" + old.replace("wrong", "right"))
    assert run(tmp_path / "set", tmp_path / "out").rows == 2
    assert [sample["txt"] for sample in samples_of(tmp_path / "out")] == [b"right 0", b"right 1"]


STRAY_QUOTES = {
    "at the end": ["a dog", 'a "big" dog', '"a cat', "a bird", 'a 5" pipe', "last"],
    "never closed": ['"a dog', "a cat", "a bird"],
    "closed at the end of a line": ['"a dog', "a cat", 'a screen of 12"', "a bird"],
}


@pytest.mark.parametrize("case", STRAY_QUOTES)
@pytest.mark.parametrize("layout", ["image, caption", "caption, image", "image, caption, id"])
def test_a_stray_quote_does_not_swallow_rows(tmp_path: Path, case: str, layout: str) -> None:
    captions = STRAY_QUOTES[case]
    write_images(tmp_path, len(captions))
    names = layout.split(", ")
    rows = [{"image": f"{n}.jpg", "caption": text, "id": str(n)} for n, text in enumerate(captions)]
    lines = ["\t".join(row[name] for name in names) for row in rows]
    (tmp_path / "pairs.tsv").write_text("\n".join(["\t".join(names), *lines]) + "\n")
    with pytest.raises(UserError, match=r"pairs\.tsv.* --quotes=off"):
        run(tmp_path / "pairs.tsv", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=r"pairs\.tsv") as without_option:
        list(open_table(str(tmp_path / "pairs.tsv")).read(names))
    assert "--quotes" not in str(without_option.value)
    opened = open_table(str(tmp_path / "pairs.tsv"), "off")
    assert pack(opened, tmp_path / "out", choose_columns(opened)).pairs == len(captions)
    assert [sample["txt"].decode() for sample in samples_of(tmp_path / "out")] == captions


def test_captions_with_line_breaks_and_delimiters_are_kept(tmp_path: Path) -> None:
    captions = ["a dog, red\na cat, blue", 'a "quoted" word,\nand, more', "plain"]
    write_images(tmp_path, 3)
    frame = pandas.DataFrame({"image": [f"{n}.jpg" for n in range(3)], "caption": captions})
    frame.to_csv(tmp_path / "pairs.csv", index=False)
    run(tmp_path / "pairs.csv", tmp_path / "out")
    assert [sample["txt"].decode() for sample in samples_of(tmp_path / "out")] == captions
    tabbed = [text.replace(",", "\t") for text in captions]
    pandas.DataFrame({"image": frame.image, "caption": tabbed}).to_csv(tmp_path / "pairs.tsv", index=False, sep="\t")
    opened = open_table(str(tmp_path / "pairs.tsv"), "on")
    assert pack(opened, tmp_path / "tabs", choose_columns(opened)).pairs == 3


def test_columns_and_captions_of_json_lines_do_not_depend_on_the_first_rows(tmp_path: Path) -> None:
    """pyarrow takes columns and types from the first MB, and reads texts that look like dates as dates."""
    records: list[dict[str, Any]] = [{"image": "a.jpg", "caption": None, "note": "x" * 100}] * 20_000
    records += [{"image": "b.jpg", "caption": "2020-01-01", "uid": "1"}, {"image": "c.jpg", "caption": 7}]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    table = open_table(str(path))
    assert (table.rows, table.columns) == (20_002, ["image", "caption", "note", "uid"])
    *_, date, number = table.read(["caption", "uid"])
    assert (captions_of(date.cells["caption"]), date.cells["uid"]) == (["2020-01-01"], "1")
    assert (captions_of(number.cells["caption"]), number.cells["uid"]) == (["7"], None)


@pytest.mark.parametrize("form", ["csv", "tsv", "jsonl"])
def test_a_row_may_contain_a_large_image(tmp_path: Path, form: str) -> None:
    large = jpeg(0) + bytes(3_000_000)
    image = base64.b64encode(large).decode()
    path = tmp_path / f"pairs.{form}"
    delimiter = "," if form == "csv" else "\t"
    lines = [f"image{delimiter}caption", *([f"{image}{delimiter}large"] * 2)]
    if form == "jsonl":
        lines = [json.dumps({"image": image, "caption": "large"})] * 2
    path.write_text("\n".join(lines) + "\n")
    rows = list(open_table(str(path)).read(["image", "caption"]))
    assert [row.cells["caption"] for row in rows] == ["large"] * 2
    assert image_of(rows[1].cells["image"]) == large


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_images_in_base64_are_decoded(tmp_path: Path, form: str) -> None:
    data = encoded(0, form)
    text = base64.b64encode(data).decode()
    cells = [text, f"data:image/{form.lower()};base64,{text}", base64.encodebytes(data).decode()]
    assert [image_of(cell) for cell in cells] == [data] * 3
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps({"image": c, "caption": "x"}) + "\n" for c in cells))
    assert run(tmp_path / "pairs.jsonl", tmp_path / "out").pairs == 1, "the same image three times"


def test_reports_are_short_even_if_a_cell_is_not(tmp_path: Path) -> None:
    write_images(tmp_path, 1)
    cells = ["0.jpg", "data:image/jpeg;base64," + "!" * 50_000, "x" * 50_000]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps({"image": c, "caption": "x"}) + "\n" for c in cells))
    assert run(tmp_path / "pairs.jsonl", tmp_path / "out").causes == {"image cannot be read": 2}
    assert (tmp_path / "out/broken.jsonl").stat().st_size < 2000


def test_secrets_of_urls_are_in_no_report(tmp_path: Path) -> None:
    with files_server() as server:
        query = "X-Amz-Signature=SECRET123"
        server.files[f"0.jpg?{query}"] = jpeg(0)
        rows = [f"{server.url(name)}?{query},text\n" for name in ("0.jpg", "1.jpg")]
        (tmp_path / "pairs.csv").write_text("url,text\n" + "".join(rows))
        opened = open_table(str(tmp_path / "pairs.csv"))
        assert pack(opened, tmp_path / "out", choose_columns(opened, "url")).causes == {"image cannot be read": 1}
    report = (tmp_path / "out/broken.jsonl").read_text()
    assert "1.jpg" in report and "SECRET123" not in report


def test_rows_lost_in_an_outage_can_be_packed_later(tmp_path: Path) -> None:
    """The storage fails once for one image and always for another one, which two rows share."""
    with files_server() as server:
        server.files = {f"{n}.jpg": jpeg(n) for n in range(4)}
        server.faults = {"1.jpg": [503], "2.jpg": [503] * 3}
        names = ["0.jpg", "1.jpg", "2.jpg", "3.jpg", "2.jpg"]
        rows = [f"{server.url(name)},caption {n},{n}\n" for n, name in enumerate(names)]
        (tmp_path / "pairs.csv").write_text("image,caption,id\n" + "".join(rows))
        packed = run(tmp_path / "pairs.csv", tmp_path / "out", pauses=[0.0, 0.0])
        assert (packed.pairs, packed.lost, packed.causes) == (3, 2, {"storage failed": 2})
        assert (tmp_path / "out/retry.jsonl").stat().st_mode & 0o777 == 0o600
        assert run(tmp_path / "out/retry.jsonl", tmp_path / "later").pairs == 1
        (sample,) = samples_of(tmp_path / "later")
        assert (sample["txt"], sample["jpg"]) == (b"caption 2\ncaption 4", jpeg(2))
        assert json.loads(sample["json"])["id"] == "2"


def test_rows_are_not_waited_for_while_their_host_fails(tmp_path: Path) -> None:
    rows = 200
    with files_server() as server:
        server.refuses = 503
        (tmp_path / "pairs.csv").write_text("image,text\n" + "".join(f"{server.url(str(n))},x\n" for n in range(rows)))
        with pytest.raises(UserError, match=r"No row of .* can be used .*storage failed"):
            run(tmp_path / "pairs.csv", tmp_path / "out", pauses=[0.05, 0.05])
        assert rows <= server.refused < 1.5 * rows, "one attempt for each row but the first ones"


def test_the_command_names_all_members_that_contain_captions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "0.jpg").write_bytes(jpeg(0))
    (tmp_path / "pairs.csv").write_text("image,a,b\n0.jpg,a dog,a cat\n0.jpg,a dog,a bird\n")
    captions = ["--captions", "txt=a", "syn.txt=b"]
    main(["pack", str(tmp_path / "pairs.csv"), str(tmp_path / "out"), *captions])
    expected = "1 sample has several captions: train with --data.captions=txt,syn.txt:lines."
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize("several", ["rows", "list"])
def test_captions_are_lines_in_members_with_several_captions(tmp_path: Path, several: str) -> None:
    """Image 0 has one caption of two lines; image 1 has two captions in `txt`, and one in `b.txt`."""
    for number in range(2):
        (tmp_path / f"{number}.jpg").write_bytes(jpeg(number))
    records: list[dict[str, Any]] = [{"image": "0.jpg", "a": "first\nline", "b": "first\nline"}]
    if several == "rows":
        records += [{"image": "1.jpg", "a": "dog", "b": "cat"}, {"image": "1.jpg", "a": "pup", "b": "cat"}]
    else:
        records.append({"image": "1.jpg", "a": ["dog", "pup"], "b": ["cat"]})
    records.append({"image": "", "a": "none", "b": ["one", "two"]})
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    packed = run(tmp_path / "pairs.jsonl", tmp_path / "out", captions=("a", "b.txt=b"))
    assert (packed.several, packed.members_of_lines) == (1, {"txt"})
    texts = [(sample["txt"], sample["b.txt"]) for sample in samples_of(tmp_path / "out")]
    assert texts == [(b"first line", b"first\nline"), (b"dog\npup", b"cat")]


def test_the_command_fails_if_the_storage_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with files_server() as server:
        server.files = {f"{n}.jpg": jpeg(n) for n in range(3)}
        server.faults = {"2.jpg": [503] * 6}
        (tmp_path / "pairs.csv").write_text("image,text\n" + "".join(f"{server.url(f'{n}.jpg')},x\n" for n in range(3)))
        with pytest.raises(SystemExit) as ended:
            main(["pack", str(tmp_path / "pairs.csv"), str(tmp_path / "out")])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert "2 of 3 rows into 2 samples" in printed.out
    assert f"pack {tmp_path}/out/retry.jsonl to another folder" in printed.err


def test_a_folder_of_images_and_texts(tmp_path: Path) -> None:
    """Files of equal names in different subfolders are different pairs; each file without a partner is reported."""
    source = tmp_path / "mine"
    captions = {"a/dog.jpg": "a dog\n", "b/dog.JPEG": "another dog", "b/cat.png": "7", "alone.jpg": None}
    for number, (name, caption) in enumerate(captions.items()):
        image = source / name
        image.parent.mkdir(parents=True, exist_ok=True)
        image.write_bytes(jpeg(number))
        if caption is not None:
            image.with_suffix(".txt").write_text(caption)
    (source / "b" / "lonely.txt").write_text("no image")
    (source / "._hidden.jpg").write_bytes(b"")
    table = open_table(str(source))
    packed = pack(table, tmp_path / "out", choose_columns(table))
    assert (packed.rows, packed.pairs, dict(packed.causes)) == (5, 3, {"no caption": 1, "no image": 1})
    manifest = build_manifest(resolve_shards(str(tmp_path / "out")))
    reader = TarReader(manifest)
    assert {reader.read(index).texts["txt"] for index in range(3)} == {b"a dog", b"another dog", b"7"}
    (source / "b" / "cat.txt").write_bytes("caf\xe9".encode("utf-16"))
    with pytest.raises(UserError, match=r"cat\.txt is not UTF-8 text"):
        open_table(str(source))
    (source / "pairs.csv").write_text("image,caption\na/dog.jpg,from the table\n")
    assert open_table(str(source)).rows == 1, "a table comes first"


def test_names_of_images_need_not_be_utf_8(tmp_path: Path) -> None:
    folder = tmp_path / "pairs"
    folder.mkdir()
    name = os.fsdecode(b"caf\xe9.jpg")
    (folder / name).write_bytes(jpeg(0))
    (folder / name).with_suffix(".txt").write_text("a cafe")
    (folder / os.fsdecode(b"\xe9.jpg")).write_bytes(jpeg(1))
    assert run(folder, tmp_path / "out").pairs == 1
    (sample,) = samples_of(tmp_path / "out")
    assert (sample["jpg"], sample["txt"]) == (jpeg(0), b"a cafe")
    broken = json.loads((tmp_path / "out/broken.jsonl").read_text())
    assert (broken["image"], broken["reason"]) == (os.fsdecode(b"\xe9.jpg"), "no caption")


@pytest.mark.parametrize("delimiter", ["\t", ";", ","])
def test_the_delimiter_of_a_csv_is_found(tmp_path: Path, delimiter: str) -> None:
    """open_clip's tables end in .csv and are separated by tabs."""
    lines = [["filepath", "title"], ["0.jpg", "a dog, running; fast" if delimiter == "\t" else "a dog"]]
    path = tmp_path / "pairs.csv"
    path.write_text("".join(delimiter.join(cells) + "\n" for cells in lines))
    table = open_table(str(path))
    assert choose_columns(table).image == "filepath"
    (row,) = table.read(["filepath", "title"])
    assert list(row.cells.values()) == lines[1]


@pytest.mark.parametrize("name", ["pairs.parquet", "folder", "tables"])
def test_pairs_that_are_not_in_shards_are_refused_with_the_command_that_packs_them(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "dog.jpg").write_bytes(jpeg(0))
    (tmp_path / "tables").mkdir()
    for path in (tmp_path / "pairs.parquet", tmp_path / "tables" / "pairs.csv"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match=rf"neuclip-ds pack {tmp_path}/{name} OUT"):
        resolve_shards(str(tmp_path / name))
    with pytest.raises(UserError, match="contains 1 image, but neither"):
        open_table(str(tmp_path / "folder"))


def test_an_image_that_is_a_pipe_is_an_error(tmp_path: Path) -> None:
    """Reading it would wait for a writer forever."""
    os.mkfifo(tmp_path / "0.jpg")
    with pytest.raises(OSError, match="not a file"):
        read_image(str(tmp_path / "0.jpg"))
