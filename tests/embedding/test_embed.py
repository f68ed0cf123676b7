"""Check which samples get features, and that files do not depend on the number of ranks or on interruptions."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from embedded_shards import DIM, IDENTITY, SIDE, encode_captions, encode_images, uid, write, write_samples
from ranks import run_ranks
from small_runs import contents
from tars import jpeg, tokenize, write_pairs

from neuclip_ds.data.build import build_manifest
from neuclip_ds.data.feature_parts import FeaturePart, map_part
from neuclip_ds.data.images import EvalTransform
from neuclip_ds.data.manifest import Manifest, from_shards
from neuclip_ds.data.uids import parse_uid
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.embedding.embed import EncodedShard, Parts, Summary, encode_by_length
from neuclip_ds.embedding.reader import Block, BlockSamples
from neuclip_ds.embedding.select import feature_tables
from neuclip_ds.errors import UserError
from neuclip_ds.models.pretrained.text_encoder import PADDING

USABLE = [index for index in range(21) if index not in (6, 13)]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return write_samples(tmp_path_factory.mktemp("data") / "shards")


@pytest.fixture(scope="module")
def features(manifest: Manifest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of features that one rank writes without interruption."""
    out = tmp_path_factory.mktemp("features")
    check_complete(write(out, manifest))
    return out


def read_parts(folder: Path) -> list[FeaturePart]:
    parts = []
    for path in sorted(folder.glob("part-*.safetensors")):
        with path.open("rb", buffering=0) as file:
            parts.append(map_part(file))
    return parts


def check_complete(summary: Summary) -> None:
    """Check that all samples were written at once, except for the two unusable ones."""
    assert summary.shards == 4
    assert summary.samples == len(USABLE)
    assert summary.bad == 2
    assert summary.unreadable == []


def test_every_usable_sample_has_its_features_key_and_uid(features: Path) -> None:
    files = feature_tables(features)
    assert [path.stem[-8:] for path in files] == [f"{shard:08d}" for shard in range(4)]
    table = pa.concat_tables(pq.read_table(path) for path in files)
    assert table.column("index").to_pylist() == USABLE
    assert table.column("key").to_pylist() == [f"k{index:04d}" for index in USABLE]

    uids = table.column("uid").to_pylist()
    assert all(written == uid(index) for index, written in zip(USABLE, uids, strict=True) if index % 2 == 0)
    assert len({parse_uid(text) for text in uids} - {None}) == len(USABLE), "a sample without a uid gets a new one"

    parts = read_parts(features)
    assert np.concatenate([part.index for part in parts]).tolist() == USABLE
    image = np.concatenate([part.image[:, 0] for part in parts])
    text = np.concatenate([part.text for part in parts])
    pixels = torch.stack([EvalTransform(SIDE)(jpeg(index)) for index in USABLE])
    captions = tokenize([f"caption {index} {'x' * (index % 5)}".strip() for index in USABLE])
    assert np.allclose(image, encode_images(pixels), atol=1e-6)
    assert np.allclose(text, encode_captions(captions), atol=1e-6)
    assert np.allclose(table.column("similarity"), (image * text).sum(axis=1), atol=1e-6)


def _write_on_rank(communicator: Communicator, out: Path, manifest: Manifest) -> Summary:
    return write(out, manifest, communicator, workers=communicator.rank)


def test_two_ranks_write_the_same_files_as_one(tmp_path: Path, manifest: Manifest, features: Path) -> None:
    for summary in run_ranks(2, _write_on_rank, tmp_path / "two", manifest):
        check_complete(summary)
    assert contents(tmp_path / "two") == contents(features)


def test_an_interrupted_job_resumes_and_writes_the_same_files(
    tmp_path: Path, manifest: Manifest, features: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced = []
    replace = Path.replace

    def interrupted(self: Path, target: Path) -> Path:
        replaced.append(target)
        if len(replaced) == 7:
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, manifest)
    assert 0 < write(tmp_path, manifest).shards < 4
    assert write(tmp_path, manifest).shards == 0
    assert contents(tmp_path) == contents(features)


@pytest.mark.parametrize("suffix", ["safetensors", "parquet"])
def test_a_part_that_lost_a_file_is_written_again(
    tmp_path: Path, manifest: Manifest, features: Path, suffix: str
) -> None:
    write(tmp_path, manifest)
    (tmp_path / f"part-00000001.{suffix}").unlink()
    assert write(tmp_path, manifest).shards == 1
    assert contents(tmp_path) == contents(features)


def test_another_model_or_other_data_are_refused_and_grown_data_are_not(tmp_path: Path, manifest: Manifest) -> None:
    out = tmp_path / "out"
    first_shards = Manifest(manifest.shards[:2])
    assert write(out, first_shards, dtype="float16").shards == 2
    assert write(out, manifest, dtype="float16").shards == 2, "only the new shards are written"
    part = read_parts(out)[1]
    assert part.image.dtype == np.float16
    assert part.image.shape == (6, 1, DIM)
    with pytest.raises(
        UserError, match=r"features of a job with dtype=float16, but this job uses dtype=float32: choose another --out"
    ):
        write(out, manifest)
    other_shards = [str(path) for path in write_pairs(tmp_path / "other", [9] * 4).iterdir()]
    with pytest.raises(UserError, match="contains features of other data"):
        write(out, build_manifest(other_shards, processes=1), dtype="float16")
    (out / "embedding.json").write_text("{")
    with pytest.raises(UserError, match=r"embedding.json cannot be read"):
        write(out, manifest)


def test_a_shard_that_cannot_be_read_has_no_part_until_it_can(tmp_path: Path) -> None:
    manifest = write_samples(tmp_path / "shards")
    shard = Path(manifest.shards[1].path)
    data = shard.read_bytes()
    shard.unlink()
    summary = write(tmp_path / "out", manifest)
    assert summary.shards == 3
    (problem,) = summary.unreadable
    assert str(shard) in problem
    shard.write_bytes(data)
    assert write(tmp_path / "out", manifest).shards == 1


def test_a_member_that_is_too_large_costs_its_sample_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuclip_ds.data.readers._MAX_READ", 20_000)
    large = bytes(30_000)
    replaced = {1: {"jpg": large, "txt": b"large"}, 2: {"jpg": jpeg(2), "txt": b"large uid", "json": large}}
    shards = write_pairs(tmp_path / "shards", [4], replace=replaced)
    summary = write(tmp_path / "out", build_manifest([str(shards / "00000.tar")], processes=1))
    assert (summary.samples, summary.bad, summary.unreadable) == (3, 1, [])
    (part,) = read_parts(tmp_path / "out")
    assert part.index.tolist() == [0, 2, 3]
    (table,) = feature_tables(tmp_path / "out")
    assert pq.read_table(table)["uid"].to_pylist()[1] is None


def test_single_encoders_need_only_their_part_of_a_sample(tmp_path: Path, manifest: Manifest) -> None:
    """Sample 6 has a broken image, and sample 13 has no caption."""
    images = tmp_path / "images"
    texts = tmp_path / "texts"
    assert write(images, manifest, text_width=None, output="trunk").samples == 20
    assert write(texts, manifest, image_width=None, output="trunk").samples == 20
    assert all(part.text is None for part in read_parts(images))
    assert all(part.image is None for part in read_parts(texts))
    assert 13 in read_parts(images)[2].index
    assert 6 in read_parts(texts)[1].index
    assert pq.read_table(feature_tables(images)[0]).column_names == ["index", "key", "uid"]


def test_captions_of_similar_length_are_encoded_together() -> None:
    lengths = [3, 9, 1, 9, 2, 4, 3]
    tokens = torch.full((len(lengths), 12), PADDING)
    for row, length in enumerate(lengths):
        tokens[row, :length] = row
    shapes = []

    def encode(ids: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(ids.shape))
        return ids[:, :1].float()

    features = encode_by_length(encode, tokens, batch_size=3)
    assert features.flatten().tolist() == list(range(7))
    assert shapes == [(3, 3), (3, 9), (1, 9)]


def test_features_that_do_not_fit_the_dtype_are_reported(tmp_path: Path, manifest: Manifest) -> None:
    too_large = Parts(tmp_path, {**IDENTITY, "dtype": "float16", "text_width": None})
    block = BlockSamples(block=Block(0, 0, 5), index=torch.arange(1), keys=["a"], uids=[None])
    for value, message in ((1e5, "exceed the range of float16: set --dtype float32"), (torch.nan, "are not finite")):
        encoded = EncodedShard(shard=0, blocks=[block], image=torch.full((1, 1, DIM), value), text=None)
        with pytest.raises(UserError, match=message):
            too_large.write(encoded, manifest)


def test_a_shard_without_a_usable_sample_has_an_empty_part(tmp_path: Path) -> None:
    broken = {index: {"jpg": b"no image", "txt": b"caption"} for index in range(2)}
    folder = write_pairs(tmp_path / "broken", [2, 0], broken)
    shards = build_manifest([str(folder / f"{shard:05d}.tar") for shard in range(2)], processes=1).shards
    summary = write(tmp_path / "out", from_shards(shards))
    assert summary.shards == 1
    assert summary.samples == 0
    assert summary.bad == 2
    (table,) = feature_tables(tmp_path / "out")
    assert len(pq.read_table(table)) == 0
    (part,) = read_parts(tmp_path / "out")
    assert part.image.shape == (0, 1, DIM)
    assert part.text.shape == (0, DIM)
