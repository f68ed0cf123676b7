"""Check which samples get features, and that files do not depend on the number of ranks or on interruptions."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from embedded_shards import DIM, SIDE, encode, uid, write, write_samples
from ranks import run_ranks
from small_runs import contents
from tars import jpeg, tokenize, write_pairs

from neuclip_ds.data.build import build_manifest
from neuclip_ds.data.images import EvalTransform
from neuclip_ds.data.manifest import Manifest, from_shards
from neuclip_ds.data.uids import parse_uid
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.embedding.select import feature_tables
from neuclip_ds.errors import UserError

USABLE = [n for n in range(21) if n not in (6, 13)]


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return write_samples(tmp_path / "shards")


def test_features_of_every_usable_sample(tmp_path: Path, manifest: Manifest) -> None:
    assert write(tmp_path / "out", manifest)[:4] == (4, 19, 2, [])
    files = feature_tables(tmp_path / "out")
    assert [path.stem[-8:] for path in files] == [f"{number:08d}" for number in range(4)]
    table = pa.concat_tables(pq.read_table(path) for path in files)
    assert table.column("index").to_pylist() == USABLE
    assert table.column("key").to_pylist() == [f"k{n:04d}" for n in USABLE]
    uids = dict(zip(USABLE, table.column("uid").to_pylist(), strict=True))
    assert all(found == uid(n) for n, found in uids.items() if n % 2 == 0)
    assert len({parse_uid(found) for found in uids.values()} - {None}) == len(USABLE), "others have that of their place"
    image, text = (np.array(table.column(kind).to_pylist()) for kind in ("image", "text"))
    pixels = torch.stack([EvalTransform(SIDE)(jpeg(n)) for n in USABLE])
    captions = tokenize([f"caption {n} {'x' * (n % 5)}".strip() for n in USABLE])
    expected = encode(pixels, captions)
    assert np.allclose(image, expected[0], atol=1e-6) and np.allclose(text, expected[1], atol=1e-6)
    assert np.allclose(table.column("similarity"), (image * text).sum(axis=1), atol=1e-6)


def _write(communicator: Communicator, out: Path, manifest: Manifest) -> tuple[int, int, int, list[str]]:
    return write(out, manifest, communicator, workers=communicator.rank)[:4]


def test_two_ranks_write_the_same_files(tmp_path: Path, manifest: Manifest) -> None:
    write(tmp_path / "one", manifest)
    summaries = run_ranks(2, _write, tmp_path / "two", manifest)
    assert summaries == [(4, 19, 2, [])] * 2
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def test_it_resumes_with_the_same_files(tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "whole", manifest)
    written, replace = [], Path.replace

    def killed(self: Path, target: Path) -> Path:
        written.append(target)
        if len(written) == 4:
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", manifest)
    assert 0 < write(tmp_path / "out", manifest).shards < 4
    assert write(tmp_path / "out", manifest).shards == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_another_model_or_other_data_are_refused_and_grown_data_are_not(tmp_path: Path, manifest: Manifest) -> None:
    first = Manifest(manifest.shards[:2])
    assert write(tmp_path / "out", first, dtype="float16").shards == 2
    assert write(tmp_path / "out", manifest, dtype="float16").shards == 2, "the new ones"
    rows = pq.read_table(feature_tables(tmp_path / "out")[1])
    assert (rows.column("image").type, len(rows)) == (pa.list_(pa.float16(), DIM), 6)
    with pytest.raises(UserError, match=r"features with dtype=float16, not float32: choose another --out"):
        write(tmp_path / "out", manifest)
    other = build_manifest([str(path) for path in write_pairs(tmp_path / "other", [9] * 4).iterdir()], processes=1)
    with pytest.raises(UserError, match="features with data="):
        write(tmp_path / "out", other, dtype="float16")
    (tmp_path / "out" / "embedding.json").write_text("{")
    with pytest.raises(UserError, match=r"embedding.json cannot be read"):
        write(tmp_path / "out", manifest)


def test_a_shard_that_cannot_be_read_has_no_part(tmp_path: Path, manifest: Manifest) -> None:
    missing = Path(manifest.shards[1].path)
    data = missing.read_bytes()
    missing.unlink()
    summary = write(tmp_path / "out", manifest)
    assert summary.shards == 3
    assert len(summary.unreadable) == 1 and str(missing) in summary.unreadable[0]
    missing.write_bytes(data)
    assert write(tmp_path / "out", manifest).shards == 1


def test_shards_without_a_usable_sample(tmp_path: Path) -> None:
    broken = {n: {"jpg": b"no image", "txt": b"caption"} for n in range(2)}
    folder = write_pairs(tmp_path / "broken", [2, 0], broken)
    shards = build_manifest([str(folder / f"{n:05d}.tar") for n in range(2)], processes=1).shards
    assert write(tmp_path / "none", from_shards(shards))[:3] == (1, 0, 2)
    (table,) = feature_tables(tmp_path / "none")
    assert len(pq.read_table(table)) == 0
