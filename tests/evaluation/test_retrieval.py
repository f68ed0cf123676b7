"""Compare retrieval of pairs and captions with brute-force oracles, with ties, padding and several ranks."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from evaluation_sets import Model, captioned_set, features_of, pixel_features, tokenize, transform, write_shards
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from neuclip_ds.data.dataset import Batch
from neuclip_ds.errors import UserError
from neuclip_ds.evaluation import retrieval as module
from neuclip_ds.evaluation.encoding import BatchEncoder
from neuclip_ds.evaluation.retrieval import caption_retrieval, retrieval
from neuclip_ds.evaluation.sets import open_shards

DIRECTIONS = ("image_to_text", "text_to_image")


class Pairs(NamedTuple):
    """Pairs whose `image` and `tokens` are already the features, which `identity` returns unchanged."""

    image: Tensor
    tokens: Tensor
    valid: Tensor


def identity(image: Tensor | None, tokens: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return image, tokens


def batches_of(pairs: Pairs, rank: int, world_size: int, batch_size: int) -> list[Batch]:
    """Return rows rank::world_size in batches, padded with invalid rows to the same number of full batches per rank."""
    n, d = pairs.image.shape
    batches = max(1, math.ceil(n / (world_size * batch_size)))
    missing = batches * world_size * batch_size - n
    padding = torch.full((missing, d), math.nan)
    padded = Pairs(
        torch.cat([pairs.image, padding]),
        torch.cat([pairs.tokens, padding]),
        torch.cat([pairs.valid, torch.zeros(missing, dtype=torch.bool)]),
    )
    columns = (padded.image, padded.tokens, torch.arange(n + missing), padded.valid)
    own = [column[rank::world_size].split(batch_size) for column in columns]
    return [Batch(*parts) for parts in zip(*own, strict=True)]


def measure(run_ranks, pairs: Pairs, world_size: int = 1, batch_size: int = 4, **options) -> dict[str, float]:
    results = run_ranks(
        world_size,
        lambda rank: retrieval(identity, batches_of(pairs, rank.rank, world_size, batch_size), rank, **options),
    )
    assert all(result == results[0] for result in results)
    return results[0]


def oracle(pairs: Pairs, ks: tuple[int, ...]) -> dict[str, float]:
    """Compute recall by sorting the scores of every row; ties are resolved in expectation."""
    image, text = pairs.image[pairs.valid], pairs.tokens[pairs.valid]
    result: dict[str, float] = {"retrieval_pairs": len(image)}
    for name, scores in (("image_to_text", image @ text.T), ("text_to_image", text @ image.T)):
        for k in ks:
            hits = 0.0
            for i, row in enumerate(scores.tolist()):
                places = [place for place, score in enumerate(sorted(row, reverse=True)) if score == row[i]]
                hits += sum(place < k for place in places) / len(places)
            result[f"{name}_recall@{k}"] = hits / len(image)
    return result


def random_pairs(n: int, d: int = 16, noise: float = 1.0) -> Pairs:
    generator = torch.Generator().manual_seed(n)
    image = torch.randn(n, d, generator=generator)
    text = image + noise * torch.randn(n, d, generator=generator)
    valid = torch.rand(n, generator=generator) < 0.9
    return Pairs(functional.normalize(image), functional.normalize(text), valid)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(
        st.tuples(st.lists(st.integers(-1, 1), min_size=6, max_size=6), st.booleans()), min_size=1, max_size=12
    ),
    world_size=st.integers(1, 3),
    batch_size=st.integers(1, 4),
    chunk=st.integers(1, 5),
)
def test_equals_the_oracle_with_many_ties(run_ranks, rows, world_size, batch_size, chunk):
    # products of small integers are exact, so equal scores are true ties
    values = torch.tensor([row for row, _ in rows], dtype=torch.float32)
    pairs = Pairs(values[:, :3], values[:, 3:], torch.tensor([valid for _, valid in rows]))
    if not pairs.valid.any():
        with pytest.raises(UserError, match=r"no readable pair.*data\.val"):
            measure(run_ranks, pairs, world_size, batch_size)
        return
    found = measure(run_ranks, pairs, world_size, batch_size, ks=(1, 2, 5), chunk=chunk)
    assert found == pytest.approx(oracle(pairs, (1, 2, 5)), abs=1e-12)


def test_one_two_and_three_ranks_agree_bit_for_bit(run_ranks):
    pairs = random_pairs(101)
    single = measure(run_ranks, pairs, 1, batch_size=101)
    assert 0.05 < single["image_to_text_recall@1"] < 0.95
    assert single == pytest.approx(oracle(pairs, (1, 5, 10)), abs=1e-12)
    for world_size in (2, 3):
        assert measure(run_ranks, pairs, world_size, batch_size=8, chunk=7) == single


@pytest.mark.parametrize("n", [1, 37, 130])
@pytest.mark.parametrize("world_size", [1, 2])
def test_collapsed_model_scores_chance(run_ranks, n, world_size):
    # odd widths reach the edge code of matmul kernels, where plain float32 sums would not be equal
    image, text = functional.normalize(torch.randn(2, 61, generator=torch.Generator().manual_seed(n)))
    pairs = Pairs(image.repeat(n, 1), text.repeat(n, 1), torch.ones(n, dtype=torch.bool))
    found = measure(run_ranks, pairs, world_size, batch_size=16, chunk=13)
    for k in (1, 5, 10):
        assert found[f"image_to_text_recall@{k}"] == pytest.approx(min(k / n, 1), abs=1e-12)
        assert found[f"text_to_image_recall@{k}"] == pytest.approx(min(k / n, 1), abs=1e-12)


def test_a_model_that_has_diverged_recalls_nothing(run_ranks):
    features = torch.full((20, 4), math.nan)
    found = measure(run_ranks, Pairs(features, features, torch.ones(20, dtype=torch.bool)), 2, batch_size=2)
    assert {found[f"{name}_recall@{k}"] for name in DIRECTIONS for k in (1, 10)} == {0.0}


CAPTIONS = [1, 5, 2, 3, 5, 4, 1, 1, 6, 5, 5, 2, 9]


def measure_captions(run_ranks: Any, path: Path, world_size: int = 1, size: int = 4) -> dict[str, float]:
    models = [Model() for _ in range(world_size)]

    def work(rank: Any) -> dict[str, float]:
        encoder = BatchEncoder(models[rank.rank], tokenize, rank, size, transform)
        found = caption_retrieval(encoder, open_shards(path))
        assert rank.purposes <= {"evaluation"}, "whose bytes are counted"
        return found

    results = run_ranks(world_size, work)
    assert all(result == results[0] for result in results)
    assert all(model.calls == models[0].calls for model in models)  # ZeRO-3 would hang otherwise
    assert {shape[0] for _, shape in models[0].calls} == {size}
    return results[0]


def caption_oracle(images: Tensor, texts: Tensor, image_of: Tensor) -> dict[str, float]:
    scores = features_of(images).double() @ features_of(texts).double().T
    found = {}
    for k in (1, 5, 10):
        texts_of = [set(torch.where(image_of == number)[0].tolist()) for number in range(len(images))]
        hits = [bool(set(row.topk(k).indices.tolist()) & own) for row, own in zip(scores, texts_of, strict=True)]
        found[f"text_retrieval_recall@{k}"] = sum(hits) / len(hits)
        hits = [int(number) in row.topk(k).indices.tolist() for row, number in zip(scores.T, image_of, strict=True)]
        found[f"image_retrieval_recall@{k}"] = sum(hits) / len(hits)
    found["chance"] = 1 / len(images)
    found["mean_recall@1"] = (found["text_retrieval_recall@1"] + found["image_retrieval_recall@1"]) / 2
    return found


@pytest.mark.parametrize("noise", [0.5, 3.0])
def test_captions_equal_sorting_at_any_number_of_ranks(tmp_path: Path, run_ranks: Any, noise: float) -> None:
    wanted = caption_oracle(*captioned_set(tmp_path, CAPTIONS, noise))
    assert 0 < wanted["mean_recall@1"] <= 1
    single = measure_captions(run_ranks, tmp_path)
    assert single == pytest.approx(wanted, abs=1e-12)
    for world_size, size in ((1, 64), (2, 4), (3, 2), (5, 8)):
        assert measure_captions(run_ranks, tmp_path, world_size, size) == single


def test_captions_of_a_collapsed_model_are_at_chance(tmp_path: Path, run_ranks: Any) -> None:
    """With identical features, recall@k is the probability that k items chosen at random include a match."""
    texts = pixel_features(torch.ones(1, 24)).int().tolist()[0]
    line = " ".join(map(str, texts))
    (tmp_path / "dataset_type.txt").write_text("retrieval")
    write_shards(tmp_path, [{"jpg": line.encode(), "txt": f"{line}\n{line}".encode()}] * 20)
    found = measure_captions(run_ranks, tmp_path, 2)
    assert found["image_retrieval_recall@5"] == pytest.approx(5 / 20)
    assert found["text_retrieval_recall@1"] == pytest.approx(2 / 40)


def test_no_whole_score_matrix(tmp_path: Path, run_ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    captioned_set(tmp_path, CAPTIONS)
    whole, blocks = module.count_negatives, []

    def in_small_chunks(*arguments: Any) -> Any:
        return whole(*arguments[:-1], chunk=3)

    def noted(a: Tensor, b: Tensor) -> Tensor:
        blocks.append(len(b))
        return (a.double() @ b.double().T).float()

    single = measure_captions(run_ranks, tmp_path)
    monkeypatch.setattr("neuclip_ds.evaluation.retrieval.count_negatives", in_small_chunks)
    monkeypatch.setattr(module, "score_matrix", noted)
    assert measure_captions(run_ranks, tmp_path) == single
    assert max(blocks) == 3


@pytest.mark.parametrize(
    ("sample", "message"),
    [({"jpg": b"1 2", "txt": b" \n "}, "has no caption"), ({"txt": b"1 2"}, "has no image"), ({"jpg": b"1"}, "no txt")],
)
def test_incomplete_sample_is_named(tmp_path: Path, run_ranks: Any, sample: dict[str, bytes], message: str) -> None:
    write_shards(tmp_path, [{"jpg": b"1 2", "txt": b"1 2"}, sample], 1)
    with pytest.raises(UserError, match=f"sample s0000001 .*{message}|sample s0000001 {message}"):
        measure_captions(run_ranks, tmp_path, 2)


def test_no_data(tmp_path: Path, run_ranks: Any) -> None:
    with pytest.raises(UserError, match=r"data\.val"):
        run_ranks(1, lambda rank: retrieval(identity, [], rank))
    with pytest.raises(UserError, match="has no sample"):
        measure_captions(run_ranks, write_shards(tmp_path, []), 2)
