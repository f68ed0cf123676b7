"""Features by sample: which rows, the same files at any number of ranks and after any end, and what is left out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from embedded_shards import DIM, SIDE, encode, uid, write
from ranks import run_ranks
from tars import jpeg, tokenize, write_pairs

from neuclip_ds.data.build import build_manifest
from neuclip_ds.data.manifest import Manifest, extend
from neuclip_ds.data.transforms import EvalTransform
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.embedding.parts import Parts
from neuclip_ds.errors import UserError

USABLE = [n for n in range(21) if n not in (6, 13)]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("file_format", ["parquet", "npy"])
def test_features_of_every_usable_sample(tmp_path: Path, manifest: Manifest, file_format: str) -> None:
    summary = write(tmp_path / "out", manifest, file_format=file_format)
    assert summary[:4] == (4, 19, 2, [])
    parts = Parts(tmp_path / "out")
    assert parts.numbers == [0, 1, 2, 3] and sum(map(parts.rows, parts.numbers)) == 19
    tables = [parts.table(number).to_pylist() for number in parts.numbers]
    rows = [row for table in tables for row in table]
    assert [row["index"] for row in rows] == USABLE
    assert [row["key"] for row in rows] == [f"k{n:04d}" for n in USABLE]
    assert [row["uid"] for row in rows] == [uid(n) if n != 20 else None for n in USABLE]
    image = np.concatenate([parts.features(number, "image") for number in parts.numbers])
    text = np.concatenate([parts.features(number, "text") for number in parts.numbers])
    pixels = torch.stack([EvalTransform(SIDE)(jpeg(n)) for n in USABLE])
    captions = tokenize([f"caption {n} {'x' * (n % 5)}".strip() for n in USABLE])
    expected = encode(pixels, captions)
    assert np.allclose(image, expected[0], atol=1e-6) and np.allclose(text, expected[1], atol=1e-6)
    assert np.allclose([row["similarity"] for row in rows], (image * text).sum(axis=1), atol=1e-6)


def _write(communicator: Communicator, out: Path, manifest: Manifest) -> tuple[int, int, int, list[str]]:
    return write(out, manifest, communicator, workers=communicator.rank)[:4]


def test_two_ranks_write_the_same_files(tmp_path: Path, manifest: Manifest) -> None:
    write(tmp_path / "one", manifest)
    summaries = run_ranks(2, _write, tmp_path / "two", manifest)
    assert summaries == [(4, 19, 2, [])] * 2
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


@pytest.mark.parametrize("file_format", ["parquet", "npy"])
def test_it_resumes_with_the_same_files(
    tmp_path: Path, manifest: Manifest, file_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "whole", manifest, file_format=file_format)
    written, replace = [], Path.replace

    def killed(self: Path, target: Path) -> Path:
        written.append(target)
        if len(written) == 6:  # amid a part
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", killed)
    for _ in range(3):
        try:
            write(tmp_path / "out", manifest, file_format=file_format)
        except KeyboardInterrupt:
            continue
    summary = write(tmp_path / "out", manifest, file_format=file_format)
    assert summary.shards == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_one_kind_needs_no_other(tmp_path: Path, manifest: Manifest) -> None:
    assert write(tmp_path / "image", manifest, kinds=["image"]).samples == 20, "one without a caption is encoded"
    assert write(tmp_path / "text", manifest, kinds=["text"]).samples == 20, "one with a broken image, too"
    assert pq.read_schema(tmp_path / "text" / "part-00000000.parquet").names == ["index", "key", "uid", "text"]


def test_features_are_rounded_to_float16(tmp_path: Path, manifest: Manifest) -> None:
    write(tmp_path / "half", manifest, dtype="float16")
    write(tmp_path / "full", manifest)
    half, full = (Parts(tmp_path / name).features(1, "image") for name in ("half", "full"))
    assert half.dtype == np.float16 and half.shape == (6, DIM)
    assert np.array_equal(half, full.astype(np.float16))


def test_another_model_or_other_data_are_refused_and_grown_data_are_not(tmp_path: Path, manifest: Manifest) -> None:
    first = Manifest(manifest.shards[:2])
    assert write(tmp_path / "out", first).shards == 2
    assert write(tmp_path / "out", manifest).shards == 2, "the new ones"
    with pytest.raises(UserError, match=r"features with dtype=float32, not float16: choose another --out"):
        write(tmp_path / "out", manifest, dtype="float16")
    other = build_manifest([str(path) for path in write_pairs(tmp_path / "other", [9] * 4).iterdir()], processes=1)
    with pytest.raises(UserError, match="features with data="):
        write(tmp_path / "out", other)


def test_a_shard_that_cannot_be_read_has_no_part(tmp_path: Path, manifest: Manifest) -> None:
    missing = Path(manifest.shards[1].path)
    data = missing.read_bytes()
    missing.unlink()
    summary = write(tmp_path / "out", manifest)
    assert summary.shards == 3
    assert len(summary.unreadable) == 1 and str(missing) in summary.unreadable[0]
    missing.write_bytes(data)
    assert write(tmp_path / "out", manifest).shards == 1


def test_removed_shards_and_those_without_a_usable_sample(tmp_path: Path, manifest: Manifest) -> None:
    removed = Manifest([shard._replace(removed=number == 0) for number, shard in enumerate(manifest.shards)])
    assert write(tmp_path / "removed", removed).shards == 3
    broken = {n: {"jpg": b"no image", "txt": b"caption"} for n in range(2)}
    folder = write_pairs(tmp_path / "broken", [2], broken)
    shards = build_manifest([str(folder / "00000.tar")], processes=1).shards
    assert write(tmp_path / "none", extend(None, shards))[1:3] == (0, 2)
    assert Parts(tmp_path / "none").features(0, "text").shape == (0, DIM)
