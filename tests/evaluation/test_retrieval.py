"""Compare retrieval of pairs and captions with brute-force oracles, with ties, padding and several ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation_sets import Model, captioned_set, features_of, pixel_features, tokenize, transform, write_shards
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from neuclip_ds.data.dataset import Batch
from neuclip_ds.errors import UserError
from neuclip_ds.evaluation import retrieval as retrieval_module
from neuclip_ds.evaluation.encoding import BatchEncoder, encode_batch
from neuclip_ds.evaluation.retrieval import caption_retrieval, example_retrievals, retrieval
from neuclip_ds.evaluation.sets import open_shards


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Pairs whose `image` and `tokens` are already the features, which `identity` returns unchanged."""

    image: Tensor
    tokens: Tensor
    valid: Tensor


def identity(image: Tensor | None, tokens: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return image, tokens


def batches_of(pairs: Pairs, rank: int, world_size: int, batch_size: int) -> list[Batch]:
    """Return rows rank::world_size in batches, padded with invalid rows to the same number of full batches per rank."""
    n, d = pairs.image.shape
    global_batch_size = world_size * batch_size
    batches = max(1, math.ceil(n / global_batch_size))
    missing = batches * global_batch_size - n
    padding = torch.full((missing, d), math.nan)
    image = torch.cat([pairs.image, padding])
    text = torch.cat([pairs.tokens, padding])
    valid = torch.cat([pairs.valid, torch.zeros(missing, dtype=torch.bool)])
    index = torch.arange(n + missing)
    result = []
    for batch in range(batches):
        start = batch * global_batch_size
        rows = slice(start + rank, start + global_batch_size, world_size)
        result.append(Batch(image=image[rows], tokens=text[rows], index=index[rows], valid=valid[rows]))
    return result


def measure(run_ranks, pairs: Pairs, world_size: int = 1, batch_size: int = 4, **options) -> dict[str, float]:
    results = run_ranks(
        world_size,
        lambda rank: retrieval(identity, batches_of(pairs, rank.rank, world_size, batch_size), rank, **options),
    )
    assert all(result == results[0] for result in results)
    return results[0]


def oracle(pairs: Pairs, ks: tuple[int, ...]) -> dict[str, float]:
    """Compute recall by sorting the scores of every row; ties are resolved in expectation."""
    image = pairs.image[pairs.valid]
    text = pairs.tokens[pairs.valid]
    result: dict[str, float] = {"retrieval_pairs": len(image)}
    for name, scores in (("image_to_text", image @ text.T), ("text_to_image", text @ image.T)):
        hits = dict.fromkeys(ks, 0.0)
        for query, row in enumerate(scores.tolist()):
            descending = sorted(row, reverse=True)
            ranks = [rank for rank, score in enumerate(descending) if score == row[query]]
            for k in ks:
                hits[k] += sum(rank < k for rank in ranks) / len(ranks)
        for k in ks:
            result[f"{name}_recall@{k}"] = hits[k] / len(image)
    return result


def random_pairs(n: int, d: int = 16, noise: float = 1.0) -> Pairs:
    generator = torch.Generator().manual_seed(n)
    image = torch.randn(n, d, generator=generator)
    text = image + noise * torch.randn(n, d, generator=generator)
    valid = torch.rand(n, generator=generator) < 0.9
    return Pairs(image=functional.normalize(image), tokens=functional.normalize(text), valid=valid)


@settings(deadline=None, max_examples=30)
@given(
    rows=st.lists(
        st.tuples(st.lists(st.integers(-1, 1), min_size=6, max_size=6), st.booleans()), min_size=1, max_size=12
    ),
    world_size=st.integers(1, 3),
    batch_size=st.integers(1, 4),
    chunk=st.integers(1, 5),
)
def test_recall_equals_that_of_sorted_scores_with_many_ties(run_ranks, rows, world_size, batch_size, chunk):
    # products of small integers are exact, so equal scores are true ties
    values = torch.tensor([row for row, _ in rows], dtype=torch.float32)
    valid = torch.tensor([is_valid for _, is_valid in rows])
    pairs = Pairs(image=values[:, :3], tokens=values[:, 3:], valid=valid)
    if not pairs.valid.any():
        with pytest.raises(UserError, match=r"no readable pair.*data\.val"):
            measure(run_ranks, pairs, world_size, batch_size)
        return
    recalls = measure(run_ranks, pairs, world_size, batch_size, ks=(1, 2, 5), chunk=chunk)
    assert recalls == pytest.approx(oracle(pairs, (1, 2, 5)), abs=1e-12)


def test_one_two_and_three_ranks_agree_bit_for_bit(run_ranks):
    pairs = random_pairs(101)
    single = measure(run_ranks, pairs, 1, batch_size=101)
    assert 0.05 < single["image_to_text_recall@1"] < 0.95
    assert single == pytest.approx(oracle(pairs, (1, 5, 10)), abs=1e-12)
    for world_size in (2, 3):
        assert measure(run_ranks, pairs, world_size, batch_size=8, chunk=7) == single


def test_the_recall_of_prefixes_is_that_of_cut_features(run_ranks: Any) -> None:
    pairs = random_pairs(50)
    recalls = measure(run_ranks, pairs, world_size=2, prefixes=[4, 7])
    for length in (4, 7):
        cut = Pairs(image=pairs.image[:, :length], tokens=pairs.tokens[:, :length], valid=pairs.valid)
        normalized = Pairs(
            image=functional.normalize(cut.image), tokens=functional.normalize(cut.tokens), valid=pairs.valid
        )
        for name, value in oracle(normalized, (1, 5, 10)).items():
            if name != "retrieval_pairs":
                assert recalls[f"prefix{length}/{name}"] == pytest.approx(value)
    without = measure(run_ranks, pairs, world_size=2)
    assert {name: value for name, value in recalls.items() if not name.startswith("prefix")} == without


@pytest.mark.parametrize(("n", "world_size"), [(1, 2), (37, 1), (130, 2)])
def test_a_collapsed_model_scores_chance(run_ranks, n, world_size):
    # odd widths reach the edge code of matmul kernels, where plain float32 sums would not be equal
    image, text = functional.normalize(torch.randn(2, 61, generator=torch.Generator().manual_seed(n)))
    pairs = Pairs(image=image.repeat(n, 1), tokens=text.repeat(n, 1), valid=torch.ones(n, dtype=torch.bool))
    recalls = measure(run_ranks, pairs, world_size, batch_size=16, chunk=13)
    for k in (1, 5, 10):
        assert recalls[f"image_to_text_recall@{k}"] == pytest.approx(min(k / n, 1), abs=1e-12)
        assert recalls[f"text_to_image_recall@{k}"] == pytest.approx(min(k / n, 1), abs=1e-12)


def test_a_model_that_has_diverged_recalls_nothing(run_ranks):
    features = torch.full((20, 4), math.nan)
    pairs = Pairs(image=features, tokens=features, valid=torch.ones(20, dtype=torch.bool))
    recalls = measure(run_ranks, pairs, 2, batch_size=2)
    assert recalls.pop("retrieval_pairs") == 20
    assert set(recalls.values()) == {0.0}


CAPTIONS = [1, 5, 2, 3, 5, 4, 1, 1, 6, 5, 5, 2, 9]


def measure_captions(
    run_ranks: Any,
    path: Path,
    world_size: int = 1,
    size: int = 4,
    chunk: int = 1024,
    prefixes: Sequence[int] = (),
) -> dict[str, float]:
    models = [Model() for _ in range(world_size)]

    def work(rank: Any) -> dict[str, float]:
        encoder = BatchEncoder(models[rank.rank], tokenize, rank, size, transform, prefixes=prefixes)
        metrics = caption_retrieval(encoder, open_shards(path), chunk=chunk)
        assert rank.purposes <= {"evaluation"}, "all traffic is counted as that of the evaluation"
        return metrics

    results = run_ranks(world_size, work)
    assert all(result == results[0] for result in results)
    assert all(model.calls == models[0].calls for model in models)  # ZeRO-3 would hang otherwise
    assert {shape[0] for _, shape in models[0].calls} == {size}
    return results[0]


def caption_oracle(images: Tensor, texts: Tensor, image_of: Tensor) -> dict[str, float]:
    """Compute recall by sorting the scores of every image and every caption."""
    scores = features_of(images).double() @ features_of(texts).double().T
    metrics = {}
    for k in (1, 5, 10):
        image_hits = 0
        for image, row in enumerate(scores):
            image_hits += bool((image_of[row.topk(k).indices] == image).any())
        text_hits = 0
        for text, column in enumerate(scores.T):
            text_hits += int(image_of[text]) in column.topk(k).indices.tolist()
        metrics[f"text_retrieval_recall@{k}"] = image_hits / len(images)
        metrics[f"image_retrieval_recall@{k}"] = text_hits / len(texts)
    metrics["chance"] = 1 / len(images)
    metrics["mean_recall@1"] = (metrics["text_retrieval_recall@1"] + metrics["image_retrieval_recall@1"]) / 2
    return metrics


@pytest.mark.parametrize("noise", [0.5, 3.0])
def test_caption_recall_equals_that_of_sorted_scores_at_any_number_of_ranks(
    tmp_path: Path, run_ranks: Any, noise: float
) -> None:
    images, texts, image_of_text = captioned_set(tmp_path, CAPTIONS, noise)
    expected = caption_oracle(images, texts, image_of_text)
    assert 0 < expected["mean_recall@1"] <= 1
    single = measure_captions(run_ranks, tmp_path)
    assert single == pytest.approx(expected, abs=1e-12)
    for world_size, size in ((1, 64), (2, 4), (5, 8)):
        assert measure_captions(run_ranks, tmp_path, world_size, size) == single
    with_prefix = measure_captions(run_ranks, tmp_path, 2, prefixes=[6])
    assert {name: with_prefix[name] for name in single} == single
    assert 0 < with_prefix["prefix6/mean_recall@1"] < single["mean_recall@1"] + 0.5


def test_captions_of_a_collapsed_model_are_at_chance(tmp_path: Path, run_ranks: Any) -> None:
    """With identical features, recall@k is the probability that k items chosen at random include a match."""
    pixels = pixel_features(torch.ones(1, 24)).int().tolist()[0]
    line = " ".join(map(str, pixels))
    (tmp_path / "dataset_type.txt").write_text("retrieval")
    write_shards(tmp_path, [{"jpg": line.encode(), "txt": f"{line}\n{line}".encode()}] * 20)
    metrics = measure_captions(run_ranks, tmp_path, 2)
    assert metrics["image_retrieval_recall@5"] == pytest.approx(5 / 20)
    assert metrics["text_retrieval_recall@1"] == pytest.approx(2 / 40)


def test_at_most_a_chunk_of_candidates_is_compared_at_once(
    tmp_path: Path, run_ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    captioned_set(tmp_path, CAPTIONS)
    expected = measure_captions(run_ranks, tmp_path)
    candidate_counts = []
    score_matrix = retrieval_module.score_matrix

    def counting_score_matrix(queries: Tensor, candidates: Tensor) -> Tensor:
        candidate_counts.append(len(candidates))
        return score_matrix(queries, candidates)

    monkeypatch.setattr(retrieval_module, "score_matrix", counting_score_matrix)
    assert measure_captions(run_ranks, tmp_path, chunk=3) == expected
    assert max(candidate_counts) == 3


@pytest.mark.parametrize(
    ("sample", "message"),
    [({"jpg": b"1 2", "txt": b" \n "}, "has no caption"), ({"txt": b"1 2"}, "has no image"), ({"jpg": b"1"}, "no txt")],
)
def test_an_incomplete_sample_is_named_on_all_ranks(
    tmp_path: Path, run_ranks: Any, sample: dict[str, bytes], message: str
) -> None:
    write_shards(tmp_path, [{"jpg": b"1 2", "txt": b"1 2"}, sample], 1)
    with pytest.raises(UserError, match=f"sample s0000001 .*{message}|sample s0000001 {message}"):
        measure_captions(run_ranks, tmp_path, 2)


def test_a_set_without_samples_is_an_error(tmp_path: Path, run_ranks: Any) -> None:
    with pytest.raises(UserError, match=r"data\.val"):
        run_ranks(1, lambda rank: retrieval(identity, [], rank))
    with pytest.raises(UserError, match="contains no sample"):
        measure_captions(run_ranks, write_shards(tmp_path, []), 2)


@pytest.mark.parametrize("world_size", [1, 3])
def test_examples_are_the_first_images_of_all_ranks(run_ranks: Any, world_size: int) -> None:
    """Some ranks have fewer valid pairs than images are shown, and one may have none."""
    generator = torch.Generator().manual_seed(0)
    image, text = functional.normalize(torch.randn(2, 8, 5, generator=generator), dim=-1)
    valid = torch.tensor([True, True, False, True, True, False, True, True])
    pairs = Pairs(image=image, tokens=text, valid=valid)

    def examples(rank: Any) -> list[tuple[int, list[int]]]:
        batches = batches_of(pairs, rank.rank, world_size, batch_size=4)
        encoded = [encode_batch(identity, batch) for batch in batches]
        retrieved = example_retrievals(encoded, rank, queries=3, images=4)
        assert all(ranked.score <= 1.001 for query in retrieved for ranked in query.images)
        return [(query.index, [ranked.index for ranked in query.images]) for query in retrieved]

    results = run_ranks(world_size, examples)
    assert all(result == results[0] for result in results)
    indices = valid.nonzero().flatten()
    assert [query for query, _ in results[0]] == [0, 3, 6]
    for query, ranked in results[0]:
        order = (text[query] @ image[indices].T).argsort(descending=True)
        assert ranked == indices[order][:4].tolist()
