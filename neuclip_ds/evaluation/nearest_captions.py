"""Captions that a model finds nearest to some images, the image's own and others': candidates for false negatives.

Another image's caption that is nearer than the image's own may well describe it; as a negative it pushes a matching
pair apart (TuneCLIP, Table 21 shows such captions with their similarities).
"""

import base64
import html
import io
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.caption_retrieval import read_captions
from neuclip_ds.evaluation.encoding import BatchEncoder
from neuclip_ds.evaluation.folder import EvaluationSet
from neuclip_ds.evaluation.retrieval import score_matrix
from neuclip_ds.evaluation.sharded_batches import decode, sharded_batches

_THUMBNAIL = 192  # pixels


class ScoredCaption(NamedTuple):
    """A caption with its similarity to an image."""

    text: str
    similarity: float
    own: bool  # whether it is one of the image's own captions


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


def _keep_nearest(nearest: list[list[ScoredCaption]], scores: Tensor, lines: list[tuple[int, str]], k: int) -> None:
    """Merge a batch of captions, each with the number of its image, into the k nearest of every image."""
    best, places = scores.topk(min(k, len(lines)), dim=1)
    for image, (values, columns) in enumerate(zip(best.tolist(), places.tolist(), strict=True)):
        found = [
            ScoredCaption(lines[column][1], value, lines[column][0] == image)
            for value, column in zip(values, columns, strict=True)
        ]
        nearest[image] = _sorted(nearest[image] + found)[:k]


def caption_page(title: str, images: list[CaptionedImage]) -> str:
    """Return a self-contained HTML page."""
    ahead = sum(one.closer_negatives > 0 for one in images)
    rows = "\n".join(_row(one) for one in images)
    return f"""<!doctype html>
<meta charset="utf-8">
<title>{html.escape(title)}</title>
<style>
body {{ font: 15px/1.4 sans-serif; margin: 2em auto; max-width: 70em }}
td {{ vertical-align: top; padding: 0.5em 1em; border-top: 1px solid #ccc }}
.own {{ color: #06632b }} .ahead {{ color: #a01010 }} .number {{ font-variant-numeric: tabular-nums }}
</style>
<h1>{html.escape(title)}</h1>
<p>Of {len(images)} images, {ahead} have another image's caption nearer than their own (red): either the model is wrong,
or the caption fits and training counts it as a negative. Numbers are cosine similarities.</p>
<table>
<tr><th></th><th>own captions</th><th>nearest of all captions</th></tr>
{rows}
</table>
"""


def _sorted(captions: list[ScoredCaption]) -> list[ScoredCaption]:
    return sorted(captions, key=lambda near: near.similarity, reverse=True)


def _row(image: CaptionedImage) -> str:
    own, nearest = (
        "<br>".join(_line(near, image.own[0].similarity) for near in part) for part in (image.own, image.nearest)
    )
    return f'<tr><td><img src="{_thumbnail(image.encoded)}"></td><td>{own}</td><td>{nearest}</td></tr>'


def _line(near: ScoredCaption, own_best: float) -> str:
    kind = "own" if near.own else "ahead" if near.similarity > own_best else "other"
    return f'<span class="{kind}"><span class="number">{near.similarity:.3f}</span> {html.escape(near.text)}</span>'


def _thumbnail(encoded: bytes) -> str:
    image = Image.open(io.BytesIO(encoded)).convert("RGB")
    image.thumbnail((_THUMBNAIL, _THUMBNAIL))
    image.save(out := io.BytesIO(), "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode()}"
