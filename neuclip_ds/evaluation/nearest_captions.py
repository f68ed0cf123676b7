"""Captions that a model finds nearest to some images, the image's own and others': candidates for false negatives.

Another image's caption that is nearer than the image's own may well describe it; as a negative it pushes a matching
pair apart (TuneCLIP, Table 21 shows such captions with their similarities).
"""

import base64
import io
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from neuclip_ds.data.dataset import PADDING
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.caption_retrieval import read_captions
from neuclip_ds.evaluation.encoding import BatchEncoder
from neuclip_ds.evaluation.folder import EvaluationSet
from neuclip_ds.evaluation.retrieval import EncodedPairs, inner_products, score_matrix
from neuclip_ds.evaluation.sharded_batches import decode, sharded_batches

_THUMBNAIL = 192  # pixels


class ScoredCaption(NamedTuple):
    """A caption with its similarity to an image."""

    text: str
    similarity: float
    own: bool  # whether it is one of the image's own captions


class NearestTexts(NamedTuple):
    """A pair's image with the texts nearest to it, by their samples' indices."""

    sample: int
    similarity: float  # to its own text
    nearest: list[tuple[int, float]]  # samples with their similarities


class CaptionedImage(NamedTuple):
    """An image with its own captions and the nearest of all captions."""

    encoded: bytes  # the image's file
    own: list[ScoredCaption]  # the nearest first
    nearest: list[ScoredCaption]

    @property
    def closer_negatives(self) -> int:
        """How many of the nearest captions are other images' and nearer than its own best."""
        return sum(not near.own and near.similarity > self.own[0].similarity for near in self.nearest)


@torch.no_grad()
def nearest_captions(
    encoder: BatchEncoder,
    folder: EvaluationSet,
    transform: Callable[[bytes], Tensor],
    images: int,
    k: int = 5,
) -> list[CaptionedImage]:
    """Return the first images of a captioned set, those with the most closer negatives first; for one rank.

    Captions are streamed; for each image its own and the k nearest are kept.

    Raises:
        UserError: the set has no sample, or one without image or caption.
    """
    samples = list(islice(folder.samples(), images))
    if not samples:
        raise UserError(f"{folder.path} has no sample; download the set again.")
    features = encoder.encode_images([decode(sample, transform) for sample in samples])
    nearest: list[list[ScoredCaption]] = [[] for _ in samples]
    own: list[list[ScoredCaption]] = [[] for _ in samples]
    seen = 0
    for batch in sharded_batches(folder, read_captions, encoder.communicator, encoder.size):
        lines = [(seen + row, line) for row, captions in enumerate(batch.rows) for line in captions]
        scores = score_matrix(features, encoder.encode_texts([line for _, line in lines]))
        _keep_nearest(nearest, scores, lines, k)
        for column, (image, line) in enumerate(lines):
            if image < len(samples):
                own[image].append(ScoredCaption(line, float(scores[image, column]), True))
        seen += batch.n_valid
    found = [
        CaptionedImage(sample.image(), _sorted(captions), near)
        for sample, captions, near in zip(samples, own, nearest, strict=True)
    ]
    return sorted(found, key=lambda one: one.closer_negatives, reverse=True)


@torch.no_grad()
def nearest_pairs(pairs: EncodedPairs, communicator: Communicator, images: int, k: int) -> list[NearestTexts]:
    """Return the texts of all ranks' pairs that are nearest to the first images of rank 0; empty on other ranks."""
    index = torch.where(pairs.valid, pairs.sample, PADDING).to(pairs.text.device, non_blocking=True)
    texts, samples = (communicator.all_gather(x, "evaluation") for x in (pairs.text, index))
    if communicator.rank > 0:
        return []
    rows = pairs.valid.nonzero().squeeze(1)[:images].to(pairs.image.device)
    own = inner_products(pairs.image[rows], pairs.text[rows])
    scores = score_matrix(pairs.image[rows], texts).masked_fill(samples == PADDING, -torch.inf)
    best, places = scores.topk(min(k, int((samples != PADDING).sum())), dim=1)
    columns = (index[rows], own, samples[places], best)
    return [
        NearestTexts(sample, similarity, list(zip(near, similarities, strict=True)))
        for sample, similarity, near, similarities in zip(*(x.tolist() for x in columns), strict=True)
    ]


def read_pairs(
    found: Sequence[NearestTexts], read: Callable[[list[int]], list[tuple[bytes, str] | None]]
) -> list[CaptionedImage]:
    """Return images and captions of what `nearest_pairs` found, as `read` gives them by sample."""
    samples = sorted({sample for one in found for sample in (one.sample, *(near for near, _ in one.nearest))})
    stored = {sample: pair for sample, pair in zip(samples, read(samples), strict=True) if pair is not None}
    return [
        CaptionedImage(
            stored[one.sample][0],
            [ScoredCaption(stored[one.sample][1], one.similarity, True)],
            [
                ScoredCaption(stored[near][1], value, near == one.sample)
                for near, value in one.nearest
                if near in stored
            ],
        )
        for one in found
        if one.sample in stored
    ]


def records(images: Sequence[CaptionedImage]) -> list[dict[str, Any]]:
    """Return images with their captions as JSON: a JPEG thumbnail in base64, and [text, similarity, own] captions."""
    return [{"jpeg": _thumbnail(one.encoded), "own": one.own, "nearest": one.nearest} for one in images]


def _keep_nearest(nearest: list[list[ScoredCaption]], scores: Tensor, lines: list[tuple[int, str]], k: int) -> None:
    """Merge a batch of captions, each with the number of its image, into the k nearest of every image."""
    best, places = scores.topk(min(k, len(lines)), dim=1)
    for image, (values, columns) in enumerate(zip(best.tolist(), places.tolist(), strict=True)):
        found = [
            ScoredCaption(lines[column][1], value, lines[column][0] == image)
            for value, column in zip(values, columns, strict=True)
        ]
        nearest[image] = _sorted(nearest[image] + found)[:k]


def _sorted(captions: list[ScoredCaption]) -> list[ScoredCaption]:
    return sorted(captions, key=lambda near: near.similarity, reverse=True)


def _thumbnail(encoded: bytes) -> str:
    image = Image.open(io.BytesIO(encoded)).convert("RGB")
    image.thumbnail((_THUMBNAIL, _THUMBNAIL))
    image.save(out := io.BytesIO(), "JPEG", quality=85)
    return base64.b64encode(out.getvalue()).decode()
