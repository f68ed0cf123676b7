"""Test searches and classification with features that were computed, or that `neuclip-ds embed` stored."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from embedded_shards import ENCODERS, SIDE, encode_captions, encode_images, members, write, write_samples
from tars import jpeg, tokenize, write_pairs

from neuclip_ds.data.build import build_manifest
from neuclip_ds.data.decoders import DecodeError
from neuclip_ds.data.feature_table import find_table
from neuclip_ds.data.images import EvalTransform
from neuclip_ds.data.loader import LoaderOptions
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.embedding.collection import Collection, FolderImages, ShardImages
from neuclip_ds.embedding.nearest import (
    CollectionFeatures,
    Features,
    Match,
    SearchableModel,
    encode_collection,
    read_features,
)
from neuclip_ds.errors import UserError
from neuclip_ds.models.pretrained.base import Preprocessing

MEAN = (0.5, 0.5, 0.5)
DUAL = replace(ENCODERS, preprocessing=Preprocessing(size=SIDE, mean=MEAN, std=MEAN))
WITHOUT_CAPTION = 13  # of `write_samples`
BROKEN = 6


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return write_samples(tmp_path_factory.mktemp("data") / "shards")


def encoded(collection: Collection, workers: int = 0, batch_size: int = 4) -> CollectionFeatures:
    reports: list[tuple[int, int]] = []
    options = LoaderOptions(workers=workers)
    features = encode_collection(collection, DUAL, options, batch_size, lambda *counts: reports.append(counts))
    total = len(collection)
    assert reports == sorted(reports) and reports[-1] == (total, total)
    return features


def stored(folder: Path, manifest: Manifest, model: str = "m", **changes: object) -> CollectionFeatures:
    write(folder, manifest, **{"ema": False, **changes})
    return read_features(find_table(str(folder)), model, manifest)


def write_folder(folder: Path, numbers: Sequence[int]) -> Path:
    """Write the images of `write_samples` with these numbers to files, every second one with a caption."""
    (folder / "more").mkdir(parents=True)
    for position, number in enumerate(numbers):
        path = folder / ("more" if position % 3 == 2 else "") / f"{number:04d}.jpg"
        path.write_bytes(jpeg(number))
        if position % 2 == 0:
            path.with_suffix(".txt").write_bytes(members(number)["txt"])
    return folder


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_nearest_rows_are_those_with_the_largest_cosine_similarity(dtype: str) -> None:
    pytest.importorskip("usearch", reason="neuclip-ds explore needs usearch")
    generator = torch.Generator().manual_seed(0)
    values = torch.nn.functional.normalize(torch.randn(300, 24, generator=generator), dim=1).numpy().astype(dtype)
    features = Features(index=np.arange(300) * 7, values=values)
    query = torch.nn.functional.normalize(torch.randn(24, generator=generator), dim=0)
    similarities = values.astype(np.float64) @ query.double().numpy()
    expected = np.argsort(-similarities)

    matches = features.nearest(query, 10)
    assert [match.index for match in matches] == [7 * row for row in expected[:10]]
    assert np.allclose([match.similarity for match in matches], similarities[expected[:10]], atol=1e-3)
    assert len(features.nearest(query, 301)) == 300
    assert Features(index=np.arange(0), values=np.empty((0, 24), dtype)).nearest(query, 3) == []


@pytest.mark.parametrize("workers", [0, 1])
def test_unusable_images_and_missing_captions_are_omitted(
    manifest: Manifest, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    features = encoded(ShardImages(manifest, ["txt"]), workers)
    usable = [index for index in range(21) if index != BROKEN]
    with_caption = [index for index in usable if index != WITHOUT_CAPTION]
    assert features.images.index.tolist() == usable
    assert features.captions.index.tolist() == with_caption
    pixels = torch.stack([EvalTransform(SIDE)(jpeg(index)) for index in usable])
    captions = [members(index)["txt"].decode().strip() for index in with_caption]
    assert np.allclose(features.images.values, encode_images(pixels), atol=1e-6)
    assert np.allclose(features.captions.values, encode_captions(tokenize(captions)), atol=1e-6)
    assert "omitted 1 of 21 images" in caplog.text


def test_stored_features_equal_computed_ones(manifest: Manifest, tmp_path: Path) -> None:
    computed = encoded(ShardImages(manifest, ["txt"]))
    read = stored(tmp_path, manifest)
    assert read.images.index.tolist() == [index for index in range(21) if index not in (BROKEN, WITHOUT_CAPTION)]
    is_stored = np.isin(computed.images.index, read.images.index)
    assert np.allclose(read.images.values, computed.images.values[is_stored], atol=1e-6)
    assert np.array_equal(read.captions.index, computed.captions.index)
    assert np.allclose(read.captions.values, computed.captions.values, atol=1e-6)


def test_the_caption_that_is_shown_is_the_one_that_embed_encodes(tmp_path: Path) -> None:
    lines = b"caption one\ncaption two\ncaption three"
    pairs = {index: {"jpg": jpeg(index), "txt": lines} for index in range(8)}
    folder = write_pairs(tmp_path / "shards", [8], replace=pairs)
    manifest = build_manifest([str(folder / "00000.tar")], processes=1)
    for all_captions, seed in ((False, 0), (False, 1), (True, 0)):
        folder = tmp_path / f"{all_captions}_{seed}"
        read = stored(folder, manifest, captions=["txt:lines"], all_captions=all_captions, seed=seed)
        collection = ShardImages(manifest, ["txt:lines"], takes_first=all_captions, seed=seed)
        captions = [collection.read(index).caption or "" for index in range(8)]
        assert np.allclose(read.captions.values, encode_captions(tokenize(captions)), atol=1e-6)
        assert len(set(captions)) == (1 if all_captions else 3)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("another", {}, "computed with m, not with another"),
        ("m", {"ema": True}, "computed with the moving average of m"),
        ("m", {"output": "trunk"}, "without --output=trunk"),
        ("m", {"crops": 2, "crop_scale": 0.5}, "without --crops"),
    ],
)
def test_features_of_another_model_or_kind_are_refused(
    manifest: Manifest, tmp_path: Path, model: str, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        stored(tmp_path, manifest, model, **changes)


def test_features_of_other_data_are_refused(manifest: Manifest, tmp_path: Path) -> None:
    stored(tmp_path / "features", manifest)
    other = write_samples(tmp_path / "more")
    fewer = Manifest(other.shards[:2])
    with pytest.raises(UserError, match="computed for other data"):
        read_features(find_table(str(tmp_path / "features")), "m", fewer)


def test_files_of_a_folder_are_images_with_captions_in_text_files(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "pictures", [3, 4, 5])
    (folder / "notes.md").write_text("no image")
    collection = FolderImages(folder, ["txt"])
    assert [collection.name(index) for index in range(len(collection))] == ["0003.jpg", "0004.jpg", "more/0005.jpg"]
    assert [collection.read(index).caption for index in range(3)] == ["caption 3 xxx", None, "caption 5"]
    features = encoded(collection)
    assert features.images.index.tolist() == [0, 1, 2]
    assert features.captions.index.tolist() == [0, 2]
    with pytest.raises(UserError, match="contains neither tar shards nor images"):
        FolderImages(tmp_path / "pictures" / "none", ["txt"])


def test_a_folder_without_a_usable_image_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    with pytest.raises(UserError, match="None of the 1 images can be used"):
        encoded(FolderImages(tmp_path, ["txt"]))


def test_queries_are_encoded_as_the_collection_is(manifest: Manifest) -> None:
    pytest.importorskip("usearch", reason="neuclip-ds explore needs usearch")
    collection = ShardImages(manifest, ["txt"])
    model = SearchableModel("m", DUAL, 0.5, encoded(collection))
    best: list[Match] = model.features.images.nearest(model.encode_image(jpeg(9)), 3)
    assert best[0].index == 9 and best[0].similarity == pytest.approx(1, abs=1e-5)
    caption = collection.read(9).caption
    assert caption is not None
    best = model.features.captions.nearest(model.encode_text(caption), 1)
    assert best[0].similarity == pytest.approx(1, abs=1e-5)
    with pytest.raises(DecodeError):
        model.encode_image(b"no image")


def test_classes_are_scored_by_their_prompts(manifest: Manifest) -> None:
    model = SearchableModel("m", DUAL, 0.5, encoded(ShardImages(manifest, ["txt"])))
    names = ["cat", "dog", "heron"]
    scores = model.classify(jpeg(2), names, "a {c}!")
    feature = encode_images(EvalTransform(SIDE)(jpeg(2)).unsqueeze(0))[0]
    expected = {name: float(encode_captions(tokenize([f"a {name}!"]))[0] @ feature) for name in names}
    assert {score.name: score.similarity for score in scores} == pytest.approx(expected, abs=1e-5)
    weights = {name: math.exp(similarity / 0.5) for name, similarity in expected.items()}
    probabilities = {name: weight / sum(weights.values()) for name, weight in weights.items()}
    assert {score.name: score.probability for score in scores} == pytest.approx(probabilities, abs=1e-5)
    similarities = [score.similarity for score in scores]
    assert similarities == sorted(similarities, reverse=True)
