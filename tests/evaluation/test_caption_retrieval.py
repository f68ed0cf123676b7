"""Retrieval with several captions an image, against sorted rows of the whole score matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation_sets import Model, captioned_set, features_of, pixel_features, tokenize, transform, write_shards

from neuclip_ds.errors import UserError
from neuclip_ds.evaluation import retrieval
from neuclip_ds.evaluation.caption_retrieval import caption_retrieval
from neuclip_ds.evaluation.encoding import BatchEncoder
from neuclip_ds.evaluation.folder import EvaluationFolder

CAPTIONS = [1, 5, 2, 3, 5, 4, 1, 1, 6, 5, 5, 2, 9]


def measure(run_ranks: Any, path: Path, world_size: int = 1, size: int = 4) -> dict[str, float]:
    models = [Model() for _ in range(world_size)]

    def work(rank: Any) -> dict[str, float]:
        encoder = BatchEncoder(models[rank.rank], tokenize, rank, size)
        return caption_retrieval(encoder, EvaluationFolder.read(path), transform)

    results = run_ranks(world_size, work)
    assert all(result == results[0] for result in results)
    assert all(model.calls == models[0].calls for model in models)  # ZeRO-3 would hang otherwise
    assert {shape[0] for _, shape in models[0].calls} == {size}
    return results[0]


def oracle(images: torch.Tensor, texts: torch.Tensor, image_of: torch.Tensor) -> dict[str, float]:
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
def test_equals_sorting_at_any_number_of_ranks(tmp_path: Path, run_ranks: Any, noise: float) -> None:
    wanted = oracle(*captioned_set(tmp_path, CAPTIONS, noise))
    assert 0 < wanted["mean_recall@1"] <= 1
    single = measure(run_ranks, tmp_path)
    assert single == pytest.approx(wanted, abs=1e-12)
    for world_size, size in ((1, 64), (2, 4), (3, 2), (5, 8)):
        assert measure(run_ranks, tmp_path, world_size, size) == single


def test_a_collapsed_model_is_at_chance(tmp_path: Path, run_ranks: Any) -> None:
    """All captions alike: one of an image's c among k of n at random."""
    texts = pixel_features(torch.ones(1, 24)).int().tolist()[0]
    line = " ".join(map(str, texts))
    (tmp_path / "dataset_type.txt").write_text("retrieval")
    write_shards(tmp_path, [{"jpg": line.encode(), "txt": f"{line}\n{line}".encode()}] * 20)
    found = measure(run_ranks, tmp_path, 2)
    assert found["image_retrieval_recall@5"] == pytest.approx(5 / 20)
    assert found["text_retrieval_recall@1"] == pytest.approx(2 / 40)


def test_no_whole_score_matrix(tmp_path: Path, run_ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    captioned_set(tmp_path, CAPTIONS)
    whole, blocks = retrieval.count_negatives, []

    def in_small_chunks(*arguments: Any) -> Any:
        return whole(*arguments, chunk=3)

    def noted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        blocks.append(len(b))
        return (a.double() @ b.double().T).float()

    single = measure(run_ranks, tmp_path)
    monkeypatch.setattr("neuclip_ds.evaluation.caption_retrieval.count_negatives", in_small_chunks)
    monkeypatch.setattr(retrieval, "score_matrix", noted)
    assert measure(run_ranks, tmp_path) == single
    assert max(blocks) == 3


@pytest.mark.parametrize(
    ("sample", "message"),
    [({"jpg": b"1 2", "txt": b" \n "}, "has no caption"), ({"txt": b"1 2"}, "has no image"), ({"jpg": b"1"}, "no txt")],
)
def test_incomplete_sample_is_named(tmp_path: Path, run_ranks: Any, sample: dict[str, bytes], message: str) -> None:
    write_shards(tmp_path, [{"jpg": b"1 2", "txt": b"1 2"}, sample], 1)
    with pytest.raises(UserError, match=f"sample s0000001 .*{message}|sample s0000001 {message}"):
        measure(run_ranks, tmp_path, 2)


def test_empty_set(tmp_path: Path, run_ranks: Any) -> None:
    with pytest.raises(UserError, match="has no sample"):
        measure(run_ranks, write_shards(tmp_path, []), 2)
