"""Check the scores of WinoGAViL, which chooses images for a cue, on sets with known associations."""

from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation_sets import Model, features_of, tokenize, transform, winogavil_set, write_shards

from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.encoding import BatchEncoder
from neuclip_ds.evaluation.metrics import chance_jaccard
from neuclip_ds.evaluation.sets import open_shards
from neuclip_ds.evaluation.winogavil import prompt, winogavil

SIZES = [5, 6, 5, 12, 10, 6, 12, 10, 5, 6, 10]


def measure(run_ranks: Any, path: Path, world_size: int = 1, size: int = 16) -> dict[str, float | None]:
    def work(rank: Any) -> dict[str, float | None]:
        return winogavil(BatchEncoder(Model(), tokenize, rank, size, transform), open_shards(path))

    results = run_ranks(world_size, work)
    assert all(result == results[0] for result in results)
    return results[0]


def test_scores_are_mean_jaccard_indices_by_number_of_candidates(tmp_path: Path, run_ranks: Any) -> None:
    scores: dict[int, list[float]] = {}
    chances = []
    for cue, images, is_associated in winogavil_set(tmp_path, SIZES):
        associated = set(torch.where(is_associated)[0].tolist())
        similarities = features_of(images) @ features_of(cue)
        nearest = set(similarities.topk(len(associated)).indices.tolist())
        jaccard = len(nearest & associated) / len(nearest | associated)
        scores.setdefault(len(images), []).append(jaccard)
        if len(images) >= 10:
            chances.append(chance_jaccard(len(images), len(associated)))

    def mean(*sizes: int) -> float:
        scores_of_sizes: list[float] = []
        for size in sizes:
            scores_of_sizes += scores[size]
        return sum(scores_of_sizes) / len(scores_of_sizes)

    metrics = measure(run_ranks, tmp_path)
    assert metrics == pytest.approx(
        {
            "avg_jaccard_score": mean(5, 6, 10, 12),
            "jaccard_score_5": mean(5),
            "jaccard_score_6": mean(6),
            "jaccard_score_10": mean(10),
            "jaccard_score_12": mean(12),
            "jaccard_score_5-6": mean(5, 6),
            "jaccard_score_10-12": mean(10, 12),
            "chance": sum(chances) / len(chances),
        },
        abs=1e-12,
    )
    assert measure(run_ranks, tmp_path, 3, 8) == pytest.approx(metrics, abs=1e-12)


def test_the_prompts_article_fits_the_cue() -> None:
    assert prompt("Pogonophile") == "A pogonophile"
    assert prompt("Owl") == "An owl"


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"json": b"{}", "0.jpg": b"1"}, "must contain the keys cue, candidates and associations"),
        (
            {"json": b'{"cue": "1", "candidates": ["a"], "associations": ["b"]}', "0.jpg": b"1"},
            "none of its candidates",
        ),
        (
            {"json": b'{"cue": "1", "candidates": ["a"], "associations": ["a"]}', "1.jpg": b"1"},
            r"no image; add a member with one of the extensions 0\.jpg",
        ),
    ],
)
def test_a_broken_instance_is_named(tmp_path: Path, run_ranks: Any, members: dict[str, bytes], message: str) -> None:
    with pytest.raises(UserError, match=rf"sample s0000000.*{message}"):
        measure(run_ranks, write_shards(tmp_path, [members], 1), 2)
