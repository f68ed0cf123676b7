"""Check zero-shot classification on synthetic sets with known answers: an image's pixels are its class scores."""

import random
from pathlib import Path

import pytest
import torch
from evaluation_sets import DIM, Model, tokenize, transform, write_prompts, write_shards
from torch import Tensor
from torch.nn import functional

from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.encoding import BatchEncoder
from neuclip_ds.evaluation.sets import EvaluationSet, open_labeled
from neuclip_ds.evaluation.zero_shot import class_embeddings, zero_shot

CLASSES = 8


def write_set(
    folder: Path,
    images: list[tuple[list[int], object]],
    shards: int = 2,
    extension: str = "jpg",
    names: list[str] | None = None,
) -> EvaluationSet:
    """Write an evaluation set; `images` are pairs of (score of each class, label)."""
    write_prompts(folder, CLASSES)
    (folder / "zeroshot_classification_templates.txt").write_text("a photo of {c}\n{in} 100% {c}\n")
    if names:
        (folder / "classnames.txt").write_text("\n".join(names))
    padding = [0] * (DIM - CLASSES)
    samples = [
        {extension: " ".join(map(str, scores + padding)).encode(), "cls": str(label).encode()}
        for scores, label in images
    ]
    return open_labeled(write_shards(folder, samples, shards))


def random_images(count: int) -> list[tuple[list[int], int]]:
    """Return images whose class scores are distinct, so that there are no ties."""
    source = random.Random(count)
    return [(source.sample(range(1, 200), CLASSES), source.randrange(CLASSES)) for _ in range(count)]


def measure(run_ranks, image_set: EvaluationSet, world_size: int = 1, batch_size: int = 4):
    models = [Model() for _ in range(world_size)]

    def work(rank):
        return zero_shot(BatchEncoder(models[rank.rank], tokenize, rank, batch_size, transform), image_set)

    results = run_ranks(world_size, work)
    assert all(result == results[0] for result in results)
    assert all(model.calls == models[0].calls for model in models)  # ZeRO-3 would hang otherwise
    assert {shape[0] for _, shape in models[0].calls} == {batch_size}
    return results[0]


@pytest.mark.parametrize("count", [1, 5, 16, 43])
def test_every_image_counts_once_at_any_number_of_ranks(tmp_path, run_ranks, count):
    images = random_images(count)
    image_set = write_set(tmp_path / "set", images, shards=3)
    better_classes = [sum(other > scores[label] for other in scores) for scores, label in images]
    expected = {
        "zero_shot_top1": sum(better < 1 for better in better_classes) / count,
        "zero_shot_top5": sum(better < 5 for better in better_classes) / count,
        "zero_shot_images": count,
    }
    for world_size, batch_size in ((1, 4), (1, 64), (2, 4), (3, 8)):
        assert measure(run_ranks, image_set, world_size, batch_size) == expected


def test_ties_count_by_expectation(tmp_path, run_ranks):
    undecided = [([7] * CLASSES, label) for label in range(CLASSES)]
    accuracies = measure(run_ranks, write_set(tmp_path / "undecided", undecided), 2)
    assert accuracies["zero_shot_top1"] == pytest.approx(1 / CLASSES, abs=1e-12)
    assert accuracies["zero_shot_top5"] == pytest.approx(5 / CLASSES, abs=1e-12)

    names = ["name 0", "name 0", "name 1"]  # ImageNet, too, has two classes with the same name
    twins = write_set(tmp_path / "twins", [([9] + [0] * 7, 1), ([0, 9] + [0] * 6, 2)], names=names)
    assert measure(run_ranks, twins)["zero_shot_top1"] == 0.75


@pytest.mark.parametrize("world_size", [1, 3])
def test_class_embedding_is_the_normalized_mean_over_templates(tmp_path, run_ranks, world_size):
    image_set = write_set(tmp_path / "set", [])
    table = functional.normalize(torch.randn(2 * CLASSES, 5, generator=torch.Generator().manual_seed(0)))
    prompts = [f"a photo of name {label}" for label in range(CLASSES)]
    prompts += [f"{{in}} 100% name {label}" for label in range(CLASSES)]

    def row_of_prompt(texts: list[str]) -> Tensor:
        return torch.tensor([[prompts.index(text)] for text in texts])

    def encode(image: Tensor | None, tokens: Tensor | None) -> tuple[None, Tensor]:
        assert image is None and tokens is not None and len(tokens) == 3
        return None, table[tokens[:, 0]]

    def work(rank) -> Tensor:
        return class_embeddings(BatchEncoder(encode, row_of_prompt, rank, 3, transform), image_set)

    expected = functional.normalize((table[:CLASSES] + table[CLASSES:]) / 2)
    for embeddings in run_ranks(world_size, work):
        torch.testing.assert_close(embeddings, expected)
        assert embeddings.dtype == torch.float32


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("classnames.txt", None, r"classnames\.txt is missing; .*nshards\.txt"),
        ("zeroshot_classification_templates.txt", None, r"is missing; .*nshards\.txt"),
        ("test/nshards.txt", None, r"nshards\.txt is missing; .*classnames\.txt"),
        ("test/1.tar", None, r"1\.tar is missing; .*nshards\.txt"),
        ("classnames.txt", "\n", r"classnames\.txt is empty"),
        ("classnames.txt", "", r"classnames\.txt is empty"),
        ("zeroshot_classification_templates.txt", "a {c}\n\n{c}\n", r"'' lacks \{c\}"),
        ("zeroshot_classification_templates.txt", "a {c}\na {}\n", r"'a \{\}' lacks \{c\}"),
        ("test/nshards.txt", "two\n", r"nshards\.txt contains 'two'"),
        ("test/nshards.txt", "0\n", r"nshards\.txt contains '0'"),
    ],
)
def test_a_missing_or_malformed_file_is_named(tmp_path, file, content, message):
    write_set(tmp_path, random_images(2))
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_text(content)
    with pytest.raises(UserError, match=message):
        open_labeled(tmp_path)


@pytest.mark.parametrize(
    ("label", "scores", "message"),
    [
        (CLASSES, [0] * CLASSES, f"has label '{CLASSES}'.* 0 to {CLASSES - 1}"),
        (-1, [0] * CLASSES, "has label '-1'"),
        ("cat", [0] * CLASSES, "has label 'cat'"),
        (0, ["broken"], "cannot be decoded"),
    ],
)
def test_an_unusable_sample_is_named_on_all_ranks(tmp_path, run_ranks, label, scores, message):
    images = [*random_images(9), (scores, label)]
    image_set = write_set(tmp_path / "set", images, shards=1)
    for world_size in (1, 2):
        with pytest.raises(UserError, match=rf"rank {9 % world_size}: .*0\.tar: sample s0000009 {message}"):
            measure(run_ranks, image_set, world_size)


def test_an_empty_set_is_refused_on_all_ranks(tmp_path, run_ranks):
    with pytest.raises(UserError, match="contains no image"):
        measure(run_ranks, write_set(tmp_path / "set", []), 2)
