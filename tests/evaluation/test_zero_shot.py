"""Zero-shot classification on synthetic sets whose right answers are known by construction.

An image file holds the scores that a model would give to the classes, as text; `encode` returns them and gives
every class its own axis, so that the accuracy is known.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import webdataset
from torch import Tensor
from torch.nn import functional

from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.encoding import BatchEncoder
from neuclip_ds.evaluation.zero_shot import ZeroShotSet, class_embeddings, zero_shot

CLASSES = 8


class AxisModel:
    """Class "name K" lies on axis K whatever the template; an image's features are its pixels. Counts its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def tokenize(self, prompts: list[str]) -> Tensor:
        return torch.tensor([[int(prompt.split("name ")[1].split()[0])] for prompt in prompts])

    def encode(self, image: Tensor | None, tokens: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if image is not None:
            self.calls.append(("image", len(image)))
            assert image.dtype == torch.uint8
            return functional.normalize(image[:, 0, 0, :].float()), None
        assert tokens is not None
        self.calls.append(("text", len(tokens)))
        return None, torch.eye(CLASSES)[tokens[:, 0]]


def transform(encoded: bytes) -> Tensor:
    pixels = torch.tensor([int(score) for score in encoded.split()], dtype=torch.uint8)
    return pixels.expand(3, 1, len(pixels))


def write_set(
    folder: Path,
    images: list[tuple[list[int], object]],
    shards: int = 2,
    extension: str = "jpg",
    names: list[str] | None = None,
) -> ZeroShotSet:
    """`images` are (score of each class, label) pairs."""
    (folder / "test").mkdir(parents=True)
    names = names or [f"name {k}" for k in range(CLASSES)]
    (folder / "classnames.txt").write_text("\n".join(names) + "\n")
    (folder / "zeroshot_classification_templates.txt").write_text("a photo of {c}\n{c} {in} 100% colour\n")
    (folder / "test" / "nshards.txt").write_text(f"{shards}\n")
    for shard in range(shards):
        with webdataset.TarWriter(str(folder / "test" / f"{shard}.tar")) as writer:
            for number, (scores, label) in list(enumerate(images))[shard::shards]:
                encoded = " ".join(map(str, scores)).encode()
                writer.write({"__key__": f"s{number:07d}", extension: encoded, "cls": str(label).encode()})
    return ZeroShotSet.read(folder)


def random_images(count: int) -> list[tuple[list[int], int]]:
    """Distinct scores, so without ties."""
    source = random.Random(count)
    return [(source.sample(range(1, 200), CLASSES), source.randrange(CLASSES)) for _ in range(count)]


def measure(run_ranks, image_set: ZeroShotSet, world_size: int = 1, batch_size: int = 4):
    models = [AxisModel() for _ in range(world_size)]

    def work(rank):
        model = models[rank.rank]
        return zero_shot(BatchEncoder(model.encode, model.tokenize, rank, batch_size), image_set, transform)

    results = run_ranks(world_size, work)
    assert all(result == results[0] for result in results)
    assert all(model.calls == models[0].calls for model in models)  # ZeRO-3 would hang otherwise
    assert {size for _, size in models[0].calls} == {batch_size}
    return results[0]


@pytest.mark.parametrize("count", [1, 5, 16, 43])
def test_counts_every_image_once_at_any_number_of_ranks(tmp_path, run_ranks, count):
    images = random_images(count)
    image_set = write_set(tmp_path / "set", images, shards=3)
    places = [sum(other > scores[label] for other in scores) for scores, label in images]
    expected = {
        "zero_shot_top1": sum(place < 1 for place in places) / count,
        "zero_shot_top5": sum(place < 5 for place in places) / count,
        "zero_shot_images": count,
    }
    for world_size, batch_size in ((1, 4), (1, 64), (2, 4), (3, 1), (3, 8)):
        assert measure(run_ranks, image_set, world_size, batch_size) == expected


@pytest.mark.parametrize("extension", ["jpeg", "png", "webp", "JPG"])
def test_reads_the_layouts_image_formats(tmp_path, run_ranks, extension):
    image_set = write_set(tmp_path / "set", random_images(6), extension=extension)
    assert measure(run_ranks, image_set)["zero_shot_images"] == 6


def test_ties_count_by_expectation(tmp_path, run_ranks):
    undecided = [([7] * CLASSES, label) for label in range(CLASSES)]
    found = measure(run_ranks, write_set(tmp_path / "undecided", undecided), 2)
    assert found["zero_shot_top1"] == pytest.approx(1 / CLASSES, abs=1e-12)
    assert found["zero_shot_top5"] == pytest.approx(5 / CLASSES, abs=1e-12)

    names = ["name 0", "name 0", "name 1"]  # ImageNet, too, has two classes of one name
    twins = write_set(tmp_path / "twins", [([9] + [0] * 7, 1), ([0, 9] + [0] * 6, 2)], names=names)
    assert measure(run_ranks, twins)["zero_shot_top1"] == 0.75


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_class_embedding_is_the_normalised_mean_over_templates(tmp_path, run_ranks, world_size):
    image_set = write_set(tmp_path / "set", [])
    table = functional.normalize(torch.randn(2 * CLASSES, 5, generator=torch.Generator().manual_seed(0)))
    prompts = [f"a photo of name {k}" for k in range(CLASSES)] + [
        f"name {k} {{in}} 100% colour" for k in range(CLASSES)
    ]

    def tokenize(texts: list[str]) -> Tensor:
        return torch.tensor([[prompts.index(text)] for text in texts])

    def encode(image: Tensor | None, tokens: Tensor | None) -> tuple[None, Tensor]:
        assert image is None and tokens is not None and len(tokens) == 3
        return None, table[tokens[:, 0]]

    found = run_ranks(world_size, lambda rank: class_embeddings(BatchEncoder(encode, tokenize, rank, 3), image_set))
    expected = functional.normalize((table[:CLASSES] + table[CLASSES:]) / 2)
    for embeddings in found:
        torch.testing.assert_close(embeddings, expected)
        assert embeddings.dtype == torch.float32


@pytest.mark.parametrize(
    "missing",
    ["classnames.txt", "zeroshot_classification_templates.txt", "test/nshards.txt", "test/1.tar"],
)
def test_missing_file_is_named_with_the_layout(tmp_path, missing):
    write_set(tmp_path, random_images(2))
    (tmp_path / missing).unlink()
    with pytest.raises(UserError, match=rf"{missing} is missing; .*classnames\.txt.*nshards\.txt"):
        ZeroShotSet.read(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("classnames.txt", "cat\n\ndog\n", r"classnames\.txt: line 2 is blank"),
        ("classnames.txt", "", r"classnames\.txt: line 1 is blank"),
        ("zeroshot_classification_templates.txt", "a {c}\na {}\n", r"'a \{\}' lacks \{c\}"),
        ("test/nshards.txt", "two\n", r"nshards\.txt holds 'two'"),
        ("test/nshards.txt", "0\n", r"nshards\.txt holds '0'"),
    ],
)
def test_malformed_file_is_named(tmp_path, file, content, message):
    write_set(tmp_path, random_images(2))
    (tmp_path / file).write_text(content)
    with pytest.raises(UserError, match=message):
        ZeroShotSet.read(tmp_path)


@pytest.mark.parametrize("label", [CLASSES, -1, "cat", ""])
@pytest.mark.parametrize("world_size", [1, 2])
def test_label_without_a_class_names_the_sample(tmp_path, run_ranks, label, world_size):
    images = random_images(9)
    images[6] = (images[6][0], label)
    image_set = write_set(tmp_path / "set", images)
    with pytest.raises(UserError, match=rf"0\.tar: sample s0000006 has label '{label}'.* 0 to {CLASSES - 1}"):
        measure(run_ranks, image_set, world_size)


@pytest.mark.parametrize(("sample", "message"), [({"cls": b"0"}, "no image"), ({"jpg": b"1 2 3"}, "no cls member")])
def test_incomplete_sample_is_named(tmp_path, run_ranks, sample, message):
    image_set = write_set(tmp_path / "set", random_images(1), shards=1)
    with webdataset.TarWriter(str(image_set.folder.shards[0])) as writer:
        writer.write({"__key__": "odd", **sample})
    with pytest.raises(UserError, match=f"sample odd has {message}"):
        measure(run_ranks, image_set, 2)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_undecodable_image_is_named_on_all_ranks(tmp_path, run_ranks, world_size):
    images = random_images(3)
    image_set = write_set(tmp_path / "set", [*images, (["broken"], 0)], shards=1)
    with pytest.raises(UserError, match=f"rank {3 % world_size}: .*sample s0000003 cannot be decoded"):
        measure(run_ranks, image_set, world_size)


def test_empty_set_is_refused_on_all_ranks(tmp_path, run_ranks):
    with pytest.raises(UserError, match="has no image"):
        measure(run_ranks, write_set(tmp_path / "set", []), 2)
