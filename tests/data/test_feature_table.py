"""Check that batches contain the stored features of their crops and captions, and which tables are refused."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from embedded_shards import DIM, SIDE, encode_captions, encode_images, write
from ranks import run_ranks
from servers import Files, files_server, wait_for
from tars import jpeg, manifest_of, tokenize, write_tar

from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.dataset import PADDING, PairDataset
from neuclip_ds.data.decoders import CaptionSources
from neuclip_ds.data.feature_parts import FeaturePart, map_part, part_name, write_part
from neuclip_ds.data.feature_table import FeatureTable, find_table, random_crops
from neuclip_ds.data.images import DECODERS, RandomCrop
from neuclip_ds.data.loader import RankBatch
from neuclip_ds.data.manifest import Manifest, from_shards
from neuclip_ds.data.prefetch import Prefetcher, ShardRequest
from neuclip_ds.data.stored_towers import CONTENTS, IMAGE, TEXT
from neuclip_ds.data.training_data import TrainingData, open_training_data
from neuclip_ds.data.training_set import interleave_settings
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.models.source import FromConfig
from neuclip_ds.recipe import parse
from neuclip_ds.training.checks import check_data

SHARD_SIZES = [5, 7, 4]
CAPTIONS = ["txt:lines", "json:long"]
LAST_EPOCH = 3


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 16 samples with one to four captions each."""
    folder = tmp_path_factory.mktemp("data") / "shards"
    folder.mkdir()
    index = 0
    for shard, size in enumerate(SHARD_SIZES):
        members = []
        for _ in range(size):
            lines = "\n".join(f"{index} line {line}" for line in range(1 + index % 3))
            members.append((f"{index:04d}.jpg", jpeg(index)))
            members.append((f"{index:04d}.txt", lines.encode()))
            members.append((f"{index:04d}.json", json.dumps({"long": f"long {index}"} if index % 2 else {}).encode()))
            index += 1
        write_tar(folder / f"{shard:05d}.tar", members)
    return folder


@pytest.fixture(scope="module")
def manifest(shards: Path) -> Manifest:
    return manifest_of(shards)


@pytest.fixture(scope="module")
def features(manifest: Manifest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the features of two random crops and of all captions."""
    out = tmp_path_factory.mktemp("features") / "out"
    write(out, manifest, crops=2, crop_scale=0.5, seed=7, captions=CAPTIONS, all_captions=True)
    return out


def read_part(folder: Path, shard: int) -> FeaturePart:
    with (folder / part_name(shard)).open("rb", buffering=0) as file:
        return map_part(file)


def open_table(folder: Path | str, manifest: Manifest, cache: ShardCache | None = None) -> FeatureTable:
    return FeatureTable(find_table(str(folder)), manifest, CAPTIONS, cache)


def open_training(
    shards: Path,
    features: Path,
    staged: Path,
    communicator: Communicator,
    *,
    workers: int = 0,
    meta: dict[str, Any] | None = None,
) -> TrainingData:
    """Open the training data with the stored features, and with the tokenizer of the tests."""
    arguments = [
        "cc12m_openclip",
        f"--data.train={shards}",
        f"--data.captions={json.dumps(CAPTIONS)}",
        "--data.batch_size=4",
        "--data.val=",
        "--data.crop_scale=0.5",
        "--data.shard_streams=1",
        f"--data.workers={workers}",
        "--run.seed=7",
        "--model.text.tokenizer=null",
        f"--model.vision.image_size={SIDE}",
    ]
    config = parse(arguments).config
    staged.mkdir(exist_ok=True)
    folders = {"teacher": str(features)}
    source = FromConfig(config.model)
    data = open_training_data(config, source, communicator, staged, meta=meta, features=folders)
    return replace(data, tokenizer=tokenize)


def pixels_and_tokens(batch: RankBatch) -> tuple[torch.Tensor, torch.Tensor]:
    (piece,) = batch.pieces(slice(0, len(batch)))
    return piece


def _check_batches(communicator: Communicator, shards: Path, features: Path, staged: Path) -> None:
    """Compare the stored features in a rank's batches, over several epochs, with features of the batches' inputs."""
    data = open_training(shards, features, staged, communicator, workers=communicator.rank)
    steps = data.order.steps_per_epoch * LAST_EPOCH
    for begin in (0, steps - 3):  # from the start, and after a resume
        for batch in data.batches(communicator, begin, steps - begin):
            pixels, tokens = pixels_and_tokens(batch)
            stored = batch.stored["teacher"]
            assert batch.valid.all()
            torch.testing.assert_close(stored.text, encode_captions(tokens))
            torch.testing.assert_close(stored.image, encode_images(pixels))


def test_batches_contain_the_features_of_their_crops_and_captions(tmp_path: Path, shards: Path, features: Path) -> None:
    run_ranks(2, _check_batches, shards, features, tmp_path)


@pytest.mark.parametrize("sources", [CAPTIONS, {"txt:lines": 0.3, "json:long": 0.7}], ids=["", "weights"])
@pytest.mark.parametrize("names", [[IMAGE, TEXT], [IMAGE], [TEXT]], ids=["both", "image", "text"])
def test_stored_outputs_of_trunks_replace_the_inputs_of_the_same_samples(
    manifest: Manifest, features: Path, tmp_path: Path, sources: CaptionSources, names: list[str]
) -> None:
    """If both trunks' outputs are stored, shards are not read, unless the draw of captions has weights."""
    tables = {}
    for name in names:
        tables[name] = FeatureTable(find_table(str(features)), manifest, CAPTIONS, only=CONTENTS[name])
    crop = RandomCrop(SIDE, 0.5, DECODERS["simplejpeg"])
    plain = PairDataset(manifest, crop, tokenize, 7, sources, random_crops=2)
    items = [(epoch, index) for epoch in range(LAST_EPOCH) for index in (*range(0, 16, 2), PADDING)]
    expected = plain.batch(items)
    if len(names) == 2 and isinstance(sources, list):
        manifest = from_shards([replace(shard, path=str(tmp_path / "none.tar")) for shard in manifest.shards])
    batch = PairDataset(manifest, crop, tokenize, 7, sources, tables=tables, random_crops=2).batch(items)
    assert torch.equal(batch.valid, expected.valid)
    image = encode_images(expected.image) if IMAGE in names else expected.image
    text = encode_captions(expected.tokens) if TEXT in names else expected.tokens
    torch.testing.assert_close(batch.image[batch.valid], image[batch.valid])
    torch.testing.assert_close(batch.tokens[batch.valid], text[batch.valid])
    assert not batch.image[~batch.valid].any()
    assert batch.stored == {}


def test_a_part_that_does_not_fit_on_the_disk_is_an_os_error(tmp_path: Path) -> None:
    part = FeaturePart(job="", shard=0, samples=10_000, index=np.arange(10_000))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_part(tmp_path, part)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == [], "nothing is left of the part"


def edited(features: Path, folder: Path, shard: int, edit: Callable[[FeaturePart], FeaturePart]) -> Path:
    """Return a copy of the features in which a part was edited."""
    copy = folder / "edited"
    shutil.copytree(features, copy)
    part = edit(read_part(features, shard))
    (copy / part_name(shard)).unlink()
    write_part(copy, part)
    return copy


def without_first_row(part: FeaturePart) -> FeaturePart:
    assert part.image is not None and part.text is not None
    assert part.text_start is not None and part.first_caption is not None
    start = int(part.text_start[1])
    return replace(
        part,
        index=part.index[1:],
        image=part.image[1:],
        text=part.text[start:],
        text_start=part.text_start[1:] - start,
        first_caption=part.first_caption[1:],
    )


def with_nan_in_first_row(part: FeaturePart) -> FeaturePart:
    assert part.image is not None
    image = part.image.copy()
    image[0, :, 3] = np.nan
    return replace(part, image=image)


@pytest.mark.parametrize(
    ("edit", "cause"),
    [
        (without_first_row, "no stored features: neuclip-ds embed omitted the sample"),
        (with_nan_in_first_row, "stored features are not finite"),
    ],
)
def test_a_sample_without_usable_features_is_omitted(
    tmp_path: Path, shards: Path, features: Path, edit: Callable[[FeaturePart], FeaturePart], cause: str
) -> None:
    copy = edited(features, tmp_path, 1, edit)
    data = open_training(shards, copy, tmp_path, Communicator())
    bad = []
    for batch in data.batches(Communicator(), 0, data.order.steps_per_epoch):
        pixels, _ = pixels_and_tokens(batch)
        stored = batch.stored["teacher"]
        assert stored.image is not None and stored.text is not None
        is_omitted = batch.index == SHARD_SIZES[0]
        assert batch.valid.equal(~is_omitted & (batch.index >= 0))
        for values in (pixels.flatten(1), stored.image, stored.text):
            assert not values[is_omitted].any()
            assert values[batch.valid].any(dim=1).all()
        bad += batch.bad
    (sample,) = bad
    assert sample.index == SHARD_SIZES[0]
    assert cause in sample.reason and str(copy) in sample.reason


def test_rows_of_a_remote_folder_equal_those_of_a_local_one(tmp_path: Path, manifest: Manifest, features: Path) -> None:
    store = fsspec.filesystem("memory")
    for path in features.iterdir():
        store.pipe_file(f"/features/{path.name}", path.read_bytes())
    with pytest.raises(UserError, match=r"are remote: pass a cache"):
        open_table("memory://features", manifest)
    remote = open_table("memory://features/", manifest, ShardCache(tmp_path, 10**6, backoff=0.01))
    index = torch.tensor([15, 0, 5, 11, 4])
    crop = torch.tensor([1, 0, 1, 1, 0])
    for rows in ({}, {"crop": crop}):
        ours, problems = remote.rows(index, **rows)
        expected, _ = open_table(features, manifest).rows(index, **rows)
        assert not problems
        assert torch.equal(ours.image, expected.image)
        assert torch.equal(ours.text, expected.text)

    changed = open_table("memory://features", manifest, ShardCache(tmp_path / "new", 10**6, backoff=0.01))
    store.pipe_file(f"/features/{part_name(1)}", b"other content")
    with pytest.raises(UserError, match=r"has changed"):
        changed.rows(torch.tensor([5]))


def served(http: Files, features: Path) -> str:
    """Serve the folder's files over HTTP, without a listing that names their sizes; return its URL."""
    for path in features.iterdir():
        http.files[f"features/{path.name}"] = path.read_bytes()
    return http.url("features")


def test_a_web_servers_folder_needs_no_listing(tmp_path: Path, manifest: Manifest, features: Path) -> None:
    index = torch.tensor([15, 0, 5, 11, 4])
    expected, _ = open_table(features, manifest).rows(index)
    with files_server() as http:
        url = served(http, features)
        ours, problems = open_table(url, manifest, ShardCache(tmp_path, 10**6, backoff=0.01)).rows(index)
        assert not problems
        assert torch.equal(ours.image, expected.image) and torch.equal(ours.text, expected.text)
        embedding = json.loads(http.files["features/embedding.json"])
        del embedding["part_bytes"]
        http.files["features/embedding.json"] = json.dumps(embedding).encode()
        with pytest.raises(UserError, match=r"does not list the sizes of the files.*let neuclip-ds embed finish"):
            find_table(url)


def test_remote_features_are_prefetched_and_replaced_files_are_fetched_again(
    tmp_path: Path, manifest: Manifest, features: Path
) -> None:
    """The shards are local, so that only the features are fetched."""
    cache = ShardCache(tmp_path / "cache", 10**6, timeout=5, backoff=0.01)
    index = torch.tensor([0, 5, 12])
    parts = [part_name(shard) for shard in range(3)]
    with files_server() as http:
        url = served(http, features)
        table = open_table(url, manifest, cache)
        requests = [ShardRequest(0, 2, shard) for shard in range(3)]
        with Prefetcher(cache, lambda: iter(requests), manifest.shards, begin=0, end=3, ahead=3, tables=[table]):
            wait_for(lambda: all(cache.touch(f"{url}/{name}", len(http.files[f"features/{name}"])) for name in parts))
        table.rows(index)
        assert [http.gets[f"features/{name}"] for name in parts] == [1, 1, 1]

        # another job's files of the same size at the same address: the cached copies are of no use to a new run
        other = tmp_path / "other"
        write(other, manifest, crops=2, crop_scale=0.5, seed=8, captions=CAPTIONS, all_captions=True)
        served(http, other)
        assert [len(http.files[f"features/{name}"]) for name in parts] == table.cached_bytes.tolist()
        ours, problems = open_table(url, manifest, cache).rows(index)
        assert not problems
        assert torch.equal(ours.image, open_table(other, manifest).rows(index)[0].image)
        # a run that began with the first files ends when it reads the others
        begun = FeatureTable({**find_table(str(features)), "folder": url}, manifest, CAPTIONS, cache)
        with pytest.raises(UserError, match="has changed or is damaged: it was not written by the job"):
            begun.rows(index)


def edit_embedding(folder: Path, features: Path, **changes: Any) -> Path:
    """Return a copy of the features with `changes` to the fields of embedding.json; None removes a field."""
    shutil.copytree(features, folder)
    path = folder / "embedding.json"
    embedding = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in embedding.items() if value is not None}))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 3}, "format of another version"),
        ({"crops": None, "output": None}, "lacks crops and lacks output: restore it"),
        ({"dtype": "int8"}, "lists the unknown dtype int8"),
        ({"shards": "three"}, "cannot be read"),
        (
            {"model": "another"},
            "not written by the job that embedding.json describes .embedding.json may have been edited",
        ),
    ],
)
def test_an_edited_description_is_refused(
    tmp_path: Path, manifest: Manifest, features: Path, changes: dict[str, Any], message: str
) -> None:
    folder = edit_embedding(tmp_path / "edited", features, **changes)
    with pytest.raises(UserError, match=message):
        open_table(folder, manifest).rows(torch.tensor([0]))


def grown(shards: Path, folder: Path) -> Manifest:
    """Return the dataset with another shard at the end."""
    copy = folder / "grown"
    shutil.copytree(shards, copy)
    write_tar(copy / "00003.tar", [("a.jpg", jpeg(99)), ("a.txt", b"a")])
    return manifest_of(copy)


def test_tables_that_do_not_fit_the_data_are_refused(
    tmp_path: Path, shards: Path, manifest: Manifest, features: Path
) -> None:
    with pytest.raises(UserError, match=r"cannot be read .*pass the --out folder"):
        open_table(tmp_path, manifest)
    reordered = from_shards([manifest.shards[number] for number in (1, 0, 2)])
    for other in (reordered, Manifest(manifest.shards[:2])):
        with pytest.raises(UserError, match=r"computed for other data or for the shards in a different order"):
            open_table(features, other)
    with pytest.raises(UserError, match=r"set data.captions to the sources of the features"):
        FeatureTable(find_table(str(features)), manifest, CAPTIONS[::-1])
    with pytest.raises(UserError, match=r"lacks the features of 1 of 4 shards \(00003.tar\): run neuclip-ds embed"):
        open_table(features, grown(shards, tmp_path))

    old = tmp_path / "old"
    old.mkdir()
    (old / "embedding.json").write_text('{"shards": 3}')
    with pytest.raises(UserError, match=r"format of another version"):
        open_table(old, manifest)


def test_shards_of_the_same_size_with_other_samples_are_refused(tmp_path: Path) -> None:
    """Tars are padded, so the size often stays the same if samples are shuffled."""

    def shards_of(indices: Sequence[int]) -> Manifest:
        (tmp_path / "shards").mkdir(exist_ok=True)
        members: list[tuple[str, bytes]] = []
        for index in indices:
            members += [(f"{index}.jpg", jpeg(0)), (f"{index}.txt", f"caption {index}".encode())]
        write_tar(tmp_path / "shards/0.tar", members)
        return manifest_of(tmp_path / "shards")

    manifest = shards_of(range(5))
    write(tmp_path / "features", manifest)
    table = find_table(str(tmp_path / "features"))
    shuffled = shards_of([4, 0, 1, 3, 2])
    assert shuffled.content_hash == manifest.content_hash
    with pytest.raises(UserError, match=r"same names and sizes, but with other samples.*embed .* with a new --out"):
        FeatureTable(table, shuffled, ["txt"])
    with pytest.raises(UserError, match=r"same names and sizes, but with other samples.*choose another --out"):
        write(tmp_path / "features", shuffled)
    record = {"hash": manifest.content_hash, "layout": manifest.layout_of_first(1)}
    check_data(record, manifest, "The checkpoint", "give the run another name")
    with pytest.raises(UserError, match=r"checkpoint was written with shards of the same names .* or give the run"):
        check_data(record, shuffled, "The checkpoint", "give the run another name")

    # a manifest from side files and features or checkpoints of an earlier version do not know the layout
    FeatureTable(table, Manifest([replace(shuffled.shards[0], layout=None)]), ["txt"])
    del table["embedding"]["layout"]
    FeatureTable(table, shuffled, ["txt"])
    del record["layout"]
    check_data(record, shuffled, "The checkpoint", "give the run another name")


def test_the_recorded_layout_is_that_of_the_parts(tmp_path: Path, manifest: Manifest) -> None:
    """A manifest from side files does not know how the samples lie in the shards, so it cannot record or replace it."""

    def layout() -> str | None:
        return json.loads((folder / "embedding.json").read_text())["layout"]

    without = Manifest([replace(shard, layout=None) for shard in manifest.shards])
    folder = tmp_path / "known"
    write(folder, manifest)
    known = layout()
    assert known is not None
    write(folder, without)
    assert layout() == known

    folder = tmp_path / "unknown"
    write(folder, without)
    write(folder, manifest)
    assert layout() is None, "other samples may have been encoded"


def test_a_table_that_changes_during_training_ends_the_run(tmp_path: Path, manifest: Manifest, features: Path) -> None:
    other_job = tmp_path / "other"
    write(other_job, manifest, crops=2, crop_scale=0.5, seed=8, captions=CAPTIONS, all_captions=True)
    copy = tmp_path / "copy"
    shutil.copytree(features, copy)
    table = open_table(copy, manifest)
    shutil.copy(other_job / part_name(0), copy)
    shutil.copy(copy / part_name(2), copy / part_name(1))
    (copy / part_name(2)).write_bytes((copy / part_name(2)).read_bytes()[:-100])
    with pytest.raises(UserError, match=r"has changed or is damaged: it was not written by the job"):
        table.rows(torch.tensor([0]))
    with pytest.raises(UserError, match=r"has changed or is damaged: it is \d+ bytes long"):
        table.rows(torch.tensor([SHARD_SIZES[0]]))
    with pytest.raises(UserError, match=r"has changed or is damaged: it is \d+ bytes long"):
        table.rows(torch.tensor([15]))


def test_a_file_that_is_overwritten_while_it_is_mapped_ends_the_run(
    tmp_path: Path, manifest: Manifest, features: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(features, copy)
    table = open_table(copy, manifest)
    table.rows(torch.tensor([0]))
    part = copy / part_name(0)
    part.write_bytes(part.read_bytes()[:-8] + bytes(8))
    with pytest.raises(UserError, match="has changed since it was opened"):
        table.rows(torch.tensor([0]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image": np.zeros((7, 2, DIM + 1), np.float32)}, "its image features are float32 .*not float32"),
        ({"image": np.zeros((7, 2, DIM), np.float16)}, "its image features are float16"),
        ({"image": None}, "its image features are missing"),
        ({"index": np.arange(7)}, "its samples have the indices 0 to 6, but those of the shard have the indices 5 to"),
        ({"index": np.array([5, 6, 8, 7, 9, 10, 11])}, "not in ascending order"),
        ({"first_caption": None}, "does not list which captions"),
        ({"samples": 8}, "belongs to shard 1 with 8 samples, not to shard 1 with 7"),
    ],
)
def test_a_part_of_the_wrong_shape_or_order_is_refused(
    tmp_path: Path, manifest: Manifest, features: Path, changes: dict[str, Any], message: str
) -> None:
    copy = edited(features, tmp_path, 1, lambda part: replace(part, **changes))
    with pytest.raises(UserError, match=message):
        open_table(copy, manifest).rows(torch.tensor([SHARD_SIZES[0]]))


def test_tables_of_one_caption_need_samples_of_one_caption(tmp_path: Path, manifest: Manifest) -> None:
    write(tmp_path, manifest, captions=CAPTIONS, image_width=None)
    table = open_table(tmp_path, manifest)
    index = torch.arange(16)
    stored, _ = table.rows(index)
    assert stored.image is None
    drawn = torch.cat([torch.tensor(read_part(tmp_path, shard).first_caption) for shard in range(3)])
    assert torch.equal(table.rows(index, caption=drawn)[0].text, stored.text)
    with pytest.raises(UserError, match="run neuclip-ds embed with --all-captions"):
        table.rows(index, caption=(drawn + 1) % 2)


def test_a_run_resumes_only_with_the_same_features(
    tmp_path: Path, shards: Path, manifest: Manifest, features: Path
) -> None:
    data = open_training(shards, features, tmp_path / "new", Communicator())
    meta = {"data": data.record(), "facts": interleave_settings(data.order.interleave)}
    same = open_training(shards, features, tmp_path / "same", Communicator(), meta=meta)
    assert same.record() == data.record()
    other = tmp_path / "other"
    write(other, manifest, crops=2, crop_scale=0.5, seed=7, captions=CAPTIONS, all_captions=True, model="another")
    with pytest.raises(UserError, match="no longer contains the features with which the run started"):
        open_training(shards, other, tmp_path / "changed", Communicator(), meta=meta)


def test_crops_must_be_those_of_training(tmp_path: Path, manifest: Manifest, features: Path) -> None:
    table = open_table(features, manifest)
    write(tmp_path, manifest, captions=CAPTIONS, text_width=None)
    fixed = open_table(tmp_path, manifest)
    assert random_crops({"a": fixed}, 0.9, 0) == 0
    assert random_crops({"a": fixed, "b": table}, 0.5, 7) == 2
    for crop_scale, seed in ((0.9, 7), (0.5, 0)):
        with pytest.raises(UserError, match="set both options to the values of the stored crops"):
            random_crops({"a": table}, crop_scale, seed)
