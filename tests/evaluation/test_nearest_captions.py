"""The page of nearest captions: which captions, their order, and its text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from evaluation_sets import Model, captioned_set, features_of, tokenize, transform, words_of, write_shards
from tars import jpeg

from neuclip_ds.evaluation.encoding import BatchEncoder
from neuclip_ds.evaluation.folder import EvaluationFolder
from neuclip_ds.evaluation.nearest_captions import CaptionedImage, ScoredCaption, caption_page, nearest_captions

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


def test_page() -> None:
    one = CaptionedImage(
        jpeg(1),
        [ScoredCaption("mine & yours", 0.5, True)],
        [ScoredCaption("<b>", 0.75, False), ScoredCaption("x", 0.25, False)],
    )
    page = caption_page("model", [one])
    assert '<span class="ahead"><span class="number">0.750</span> &lt;b&gt;</span>' in page
    assert '<span class="other"><span class="number">0.250</span> x</span>' in page
    assert "mine &amp; yours" in page
    assert "Of 1 images, 1 have" in page
    assert page.count("data:image/jpeg;base64,") == 1


def test_fewer_captions_than_requested(tmp_path: Path, run_ranks: Any) -> None:
    write_shards(tmp_path, [{"jpg": b"1 2 3", "txt": b"1 2 3"}], 1)

    def work(rank: Any) -> list[CaptionedImage]:
        encoder = BatchEncoder(Model(), tokenize, rank, 2)
        return nearest_captions(encoder, EvaluationFolder.read(tmp_path), transform, images=50)

    ((one,),) = run_ranks(1, work)
    assert len(one.nearest) == 1
    assert one.nearest[0].own
