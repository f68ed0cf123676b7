"""The nearest captions of an evaluation set and of held-out pairs: which they are, and their order."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation_sets import Model, captioned_set, features_of, tokenize, transform, words_of, write_shards
from PIL import Image
from tars import jpeg
from torch.nn import functional

from neuclip_ds.evaluation.encoding import BatchEncoder
from neuclip_ds.evaluation.folder import EvaluationFolder
from neuclip_ds.evaluation.nearest_captions import (
    CaptionedImage,
    NearestTexts,
    ScoredCaption,
    nearest_captions,
    nearest_pairs,
    read_pairs,
    records,
)
from neuclip_ds.evaluation.retrieval import EncodedPairs

CAPTIONS = [2, 3, 1, 5, 2, 4]


def test_nearest_of_all_captions(tmp_path: Path, run_ranks: Any) -> None:
    images, texts, image_of = captioned_set(tmp_path, CAPTIONS, noise=2.0)
    scores = features_of(images) @ features_of(texts).T

    def work(rank: Any) -> list[CaptionedImage]:
        encoder = BatchEncoder(Model(), tokenize, rank, 2)  # captions come in several batches
        return nearest_captions(encoder, EvaluationFolder.read(tmp_path), transform, images=4, k=3)

    (shown,) = run_ranks(1, work)
    stored = [0, 2, 4, 1]  # the first four of the two shards
    assert len(shown) == 4
    by_best = {one.own[0].text: one for one in shown}
    for number in stored:
        own = torch.where(image_of == number)[0]
        best = own[scores[number, own].argmax()]
        one = by_best[words_of(texts[best])]
        order = scores[number].topk(3).indices.tolist()
        assert [near.text for near in one.nearest] == [words_of(texts[column]) for column in order]
        assert [near.own for near in one.nearest] == [int(image_of[column]) == number for column in order]
        assert len(one.own) == CAPTIONS[number]
        ahead = int((scores[number] > scores[number, best]).sum())
        assert one.closer_negatives == min(ahead, 3)
    assert [one.closer_negatives for one in shown] == sorted((s.closer_negatives for s in shown), reverse=True)


def test_records_are_json_with_a_thumbnail() -> None:
    one = CaptionedImage(jpeg(1), [ScoredCaption("mine", 0.5, True)], [ScoredCaption("other", 0.75, False)])
    (record,) = json.loads(json.dumps(records([one])))
    assert record["own"] == [["mine", 0.5, True]]
    assert record["nearest"] == [["other", 0.75, False]]
    assert max(Image.open(io.BytesIO(base64.b64decode(record["jpeg"]))).size) <= 192


@pytest.mark.parametrize("world_size", [1, 2])
def test_nearest_pairs_of_all_ranks(run_ranks: Any, world_size: int) -> None:
    features = functional.normalize(torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(0)), dim=2)
    valid = torch.arange(12) != 1
    scores = (features[0] @ features[1].T)[:, valid]
    samples = torch.arange(12)[valid]

    def work(rank: Any) -> list[NearestTexts]:
        rows = torch.arange(12).chunk(world_size)[rank.rank]
        pairs = EncodedPairs(features[0][rows], features[1][rows], rows, valid[rows])
        return nearest_pairs(pairs, rank, images=3, k=4)

    found, *others = run_ranks(world_size, work)
    assert all(other == [] for other in others)
    assert [one.sample for one in found] == [0, 2, 3], "the first valid ones"
    for one in found:
        wanted = scores[one.sample].topk(4)
        assert [sample for sample, _ in one.nearest] == samples[wanted.indices].tolist()
        assert [value for _, value in one.nearest] == pytest.approx(wanted.values.tolist(), abs=1e-6)
        assert one.similarity == pytest.approx(float(features[0][one.sample] @ features[1][one.sample]), abs=1e-6)


def test_pairs_that_cannot_be_read_are_left_out() -> None:
    stored = {0: (b"image 0", "text 0"), 1: None, 2: (b"image 2", "text 2")}
    found = [NearestTexts(0, 0.5, [(1, 0.9), (0, 0.5), (2, 0.1)]), NearestTexts(1, 0.2, [(0, 0.3)])]
    (one,) = read_pairs(found, lambda samples: [stored[sample] for sample in samples])
    assert one.encoded == b"image 0"
    assert one.nearest == [ScoredCaption("text 0", 0.5, True), ScoredCaption("text 2", 0.1, False)]


def test_fewer_captions_than_requested(tmp_path: Path, run_ranks: Any) -> None:
    write_shards(tmp_path, [{"jpg": b"1 2 3", "txt": b"1 2 3"}], 1)

    def work(rank: Any) -> list[CaptionedImage]:
        encoder = BatchEncoder(Model(), tokenize, rank, 2)
        return nearest_captions(encoder, EvaluationFolder.read(tmp_path), transform, images=50)

    ((one,),) = run_ranks(1, work)
    assert len(one.nearest) == 1
    assert one.nearest[0].own
