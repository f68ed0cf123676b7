"""Packing: every row is in a shard or listed as broken, whatever its form, and after any interruption."""

from __future__ import annotations

import io
import json
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
import webdataset
from PIL import Image
from tars import jpeg

from neuclip_ds.data import pair_packing
from neuclip_ds.data.build import build_manifest
from neuclip_ds.data.pair_packing import Packed, choose_columns, pack
from neuclip_ds.data.pair_table import open_table
from neuclip_ds.data.readers import TarReader
from neuclip_ds.data.shards import resolve_shards
from neuclip_ds.data.side_files import count_shards, list_shards
from neuclip_ds.data.uids import parse_uid
from neuclip_ds.errors import UserError


class Here(Executor):
    """Work is done where it is submitted."""

    def submit(self, work: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(work(*arguments, **options))
        return future


def image_of(seed: int, form: str) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 9, 3), dtype=np.uint8)).save(out, form)
    return out.getvalue()


def write_csv(folder: Path) -> Path:
    """Ten rows, of which those from the fifth on are broken, but the last."""
    images = [jpeg(0), image_of(1, "PNG"), image_of(2, "WEBP"), image_of(3, "BMP"), b"no image", jpeg(5)[:200]]
    for number, data in enumerate(images):
        (folder / f"{number}.img").write_bytes(data)
    names = [*(f"{number}.img" for number in range(6)), "absent.img", "0.img", "", str(folder / "0.img")]
    captions = [f"caption, {number}" for number in range(7)] + [" ", "nine", "last\nline"]
    frame = pandas.DataFrame(
        {"filepath": names, "title": captions, "uid": [f"{n:032x}" for n in range(10)], "n": range(10)}
    )
    frame.to_csv(folder / "pairs.csv", index=False)
    return folder / "pairs.csv"


def run(table: Path | str, out: Path, shard_size: int = 4, captions: tuple[str, ...] = (), **options: Any) -> Packed:
    opened = open_table(str(table))
    return pack(opened, out, choose_columns(opened, captions=captions), Here(), 1, shard_size, **options)


def samples_of(out: Path) -> list[dict[str, Any]]:
    paths = [str(path) for path in sorted(out.glob("*.tar"))]
    return list(webdataset.WebDataset(paths, shardshuffle=False, empty_check=False)) if paths else []


def test_a_csv_of_paths(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    packed = run(write_csv(tmp_path), tmp_path / "out", on_progress=lambda *counts: seen.append(counts))
    assert (packed.rows, packed.pairs, packed.shards, packed.several) == (10, 5, 2, 0)
    assert seen == [(0, 10), (4, 10), (8, 10), (10, 10)]
    assert packed.causes == {"image cannot be decoded": 2, "image cannot be read": 1, "no caption": 1, "no image": 1}
    samples = samples_of(tmp_path / "out")
    assert [sample["__key__"] for sample in samples] == [f"{n:09d}" for n in (0, 1, 2, 3, 9)]
    assert [next(name for name in ("jpg", "png", "webp") if name in sample) for sample in samples] == [
        *("jpg", "png", "webp", "png", "jpg")
    ]
    assert samples[2]["webp"] == (tmp_path / "2.img").read_bytes(), "the bytes of the file"
    assert np.array_equal(Image.open(io.BytesIO(samples[3]["png"])), Image.open(tmp_path / "3.img"))
    assert samples[4]["txt"] == b"last\nline"
    assert json.loads(samples[1]["json"]) == {"uid": f"{1:032x}", "n": "1"}
    broken = [json.loads(line) for line in (tmp_path / "out/broken.jsonl").read_text().splitlines()]
    assert [(one["row"], one["image"]) for one in broken] == [
        *((4, "4.img"), (5, "5.img"), (6, "absent.img"), (7, "0.img"), (8, ""))
    ]
    assert not (tmp_path / "out/00001.tar").exists(), "no row of it can be used"


def test_the_shards_are_data_to_train_on(tmp_path: Path) -> None:
    run(write_csv(tmp_path), tmp_path / "out")
    paths = resolve_shards(str(tmp_path / "out"))
    manifest = build_manifest(paths, processes=1)
    assert (manifest.n, manifest.n_bad) == (5, 0)
    assert TarReader(manifest).read(4).texts == {"txt": b"last\nline"}
    counted = count_shards(list(list_shards(paths).values()))
    assert [scan.shard.n for scan in counted if not isinstance(scan, UserError)] == [4, 1]


def dataset_of(count: int) -> datasets.Dataset:
    rows = {
        "image": [Image.open(io.BytesIO(jpeg(number))) for number in range(count)],
        "text": [[f"one {number}", f"two\n{number}"] for number in range(count)],
        "recaption": [f"new {number}" if number % 2 else None for number in range(count)],
        "label": [number % 3 for number in range(count)],
        "mask": [image_of(number, "PNG") for number in range(count)],
    }
    return datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())


def test_a_data_set_of_the_library_with_several_captions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    dataset_of(7).save_to_disk(tmp_path / "saved")
    dataset_of(7).to_parquet(tmp_path / "rows.parquet")
    sources = (tmp_path / "saved", tmp_path / "rows.parquet", f"hf:{tmp_path / 'rows_as_hub'}")
    (tmp_path / "rows_as_hub").mkdir()
    (tmp_path / "rows_as_hub" / "train.parquet").write_bytes((tmp_path / "rows.parquet").read_bytes())
    for number, source in enumerate(sources):
        packed = run(source, tmp_path / f"out{number}", 3, ("text", "syn.txt=recaption"))
        assert (packed.rows, packed.pairs, packed.shards, packed.several) == (7, 7, 3, 7)
        assert run(source, tmp_path / f"out{number}", 3, ("text", "syn.txt=recaption")) == packed, "the same one again"
    samples, *others = (samples_of(tmp_path / f"out{number}") for number in range(3))
    assert [sample["txt"] for sample in samples] == [f"one {n}\ntwo {n}".encode() for n in range(7)]
    assert [sample.get("syn.txt") for sample in samples] == [f"new {n}".encode() if n % 2 else None for n in range(7)]
    metadata = [json.loads(sample["json"]) for sample in samples]
    assert len({parse_uid(one.pop("uid")) for one in metadata} - {None}) == 7, "a uid by the contents"
    assert metadata == [{"label": n % 3} for n in range(7)]
    members = [
        [{name: sample[name] for name in sample if name[0] != "_"} for sample in found] for found in (samples, *others)
    ]
    assert members[0] == members[1] == members[2]


class Killed(Exception):
    pass


def test_an_interrupted_one_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = write_csv(tmp_path)
    run(table, tmp_path / "whole", 2)
    write, written = pair_packing._write_shard, []

    def failing(job: Any, rows: Any) -> int:
        written.append(job.number)
        if written[-1] == 3 and written.count(3) == 1:
            raise Killed
        return write(job, rows)

    monkeypatch.setattr(pair_packing, "_write_shard", failing)
    with pytest.raises(Killed):
        run(table, tmp_path / "out", 2)
    (tmp_path / "out" / "00001_stats.json").unlink()  # as if killed between the shard and its counts
    seen: list[int] = []
    packed = run(table, tmp_path / "out", 2, on_progress=lambda done, total: seen.append(done))
    assert written == [0, 1, 2, 3, 1, 3, 4]
    assert seen == [4, 6, 8, 10]
    assert packed.pairs == 5
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "out").iterdir())
    assert all((tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes() for name in names)
    assert run(table, tmp_path / "out", 2) == packed, "nothing is left to do"
    assert written[-1] == 4 and len(written) == 7


def test_mistakes(tmp_path: Path) -> None:
    table = write_csv(tmp_path)
    run(table, tmp_path / "out")
    with pytest.raises(UserError, match="holds shards of another table, or with other options"):
        run(table, tmp_path / "out", 5)
    with pytest.raises(UserError, match="is not an empty folder"):
        run(table, tmp_path)
    opened = open_table(str(table))
    with pytest.raises(UserError, match="has no column words; its columns are filepath, title, uid, n"):
        choose_columns(opened, captions=["words"])
    for captions in (["title", "uid"], ["json=title"], ["syn=title"]):
        with pytest.raises(UserError, match="each needs a separate member"):
            choose_columns(opened, captions=captions)
    with pytest.raises(UserError, match=r"No row of .* can be used \(most often: image cannot be read"):
        opened = open_table(str(table))
        pack(opened, tmp_path / "none", choose_columns(opened, image="uid"), Here(), 1)
    table.write_text(table.read_text() + "0.img,more,,10\n")
    with pytest.raises(UserError, match="another table"):
        run(table, tmp_path / "out")
