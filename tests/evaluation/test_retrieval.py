"""Retrieval against a brute-force oracle, with ties, padding, broken features and several ranks."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from neuclip_ds.data.dataset import Batch
from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.retrieval import encode_pairs, retrieval


class Pairs(NamedTuple):
    """Pairs whose `image` and `tokens` already are the features that `identity` returns."""

    image: Tensor
    tokens: Tensor
    valid: Tensor


def identity(image: Tensor | None, tokens: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return image, tokens


def batches_of(pairs: Pairs, rank: int, world_size: int, batch_size: int) -> list[Batch]:
    """Rank r's rows r::K in batches, padded to equal numbers with invalid rows."""
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
        lambda rank: retrieval(
            encode_pairs(identity, batches_of(pairs, rank.rank, world_size, batch_size)), rank, **options
        ),
    )
    assert all(result == results[0] for result in results)
    return results[0]


def oracle(pairs: Pairs, ks: tuple[int, ...]) -> dict[str, float]:
    """Recall by sorting every row, the places of a tied group shared evenly."""
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
    # small integers multiply exactly, so ties are real ones
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
    # odd widths reach the edge code of matmul kernels, where float32 sums alone would not tie
    image, text = functional.normalize(torch.randn(2, 61, generator=torch.Generator().manual_seed(n)))
    pairs = Pairs(image.repeat(n, 1), text.repeat(n, 1), torch.ones(n, dtype=torch.bool))
    found = measure(run_ranks, pairs, world_size, batch_size=16, chunk=13)
    for k in (1, 5, 10):
        assert found[f"image_to_text_recall@{k}"] == pytest.approx(min(k / n, 1), abs=1e-12)
        assert found[f"text_to_image_recall@{k}"] == pytest.approx(min(k / n, 1), abs=1e-12)


def test_perfect_and_reversed_models(run_ranks):
    features = torch.eye(12)
    valid = torch.ones(12, dtype=torch.bool)
    perfect = measure(run_ranks, Pairs(features, features, valid), 2)
    assert {perfect[key] for key in perfect if "recall" in key} == {1.0}
    worst = measure(run_ranks, Pairs(features, -features, valid), 2, ks=(1, 11, 12))
    assert worst["image_to_text_recall@1"] == worst["image_to_text_recall@11"] == 0
    assert worst["image_to_text_recall@12"] == 1


def test_invalid_rows_are_no_candidates(run_ranks):
    # row 1 is a copy of row 0 and would tie with it, if it counted
    image = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    valid = torch.tensor([True, False, True])
    found = measure(run_ranks, Pairs(image, image, valid), 2, batch_size=1)
    assert found["image_to_text_recall@1"] == 1
    assert found["retrieval_pairs"] == 2


def test_directions_differ(run_ranks):
    image = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    text = torch.tensor([[1.0, 0.0], [0.8, 0.6]])  # text 1 finds image 0 first, image 1 still finds text 1
    found = measure(run_ranks, Pairs(image, text, torch.ones(2, dtype=torch.bool)), ks=(1,))
    assert found["image_to_text_recall@1"] == 1
    assert found["text_to_image_recall@1"] == 0.5


def test_diverged_model_scores_nothing(run_ranks):
    features = torch.full((20, 4), math.nan)
    found = measure(run_ranks, Pairs(features, features, torch.ones(20, dtype=torch.bool)))
    assert {found[key] for key in found if "recall" in key} == {0.0}


def test_no_batch_is_a_user_error(run_ranks):
    with pytest.raises(UserError, match=r"data\.val"):
        run_ranks(1, lambda rank: retrieval(encode_pairs(identity, []), rank))


def test_keeps_no_graph(run_ranks):
    weight = torch.ones(4, requires_grad=True)
    seen = []

    def encode(image: Tensor | None, tokens: Tensor | None) -> tuple[Tensor, Tensor]:
        assert image is not None and tokens is not None
        seen.append((image * weight).requires_grad)
        return image * weight, tokens

    pairs = random_pairs(6, d=4)
    run_ranks(1, lambda rank: retrieval(encode_pairs(encode, batches_of(pairs, 0, 1, 3)), rank))
    assert seen == [False, False]
