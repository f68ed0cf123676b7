"""Which captions a model finds nearest to some images, its own and strangers': candidates for false negatives.

A stranger's caption that lies nearer than the image's own may well describe it; as a negative it pushes away what
belongs together (TuneCLIP, Table 21 shows such captions with their similarities).
"""

from __future__ import annotations

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
from neuclip_ds.evaluation import Communicator
from neuclip_ds.evaluation.batches import BatchEncoder
from neuclip_ds.evaluation.caption_retrieval import captions_of
from neuclip_ds.evaluation.folder import EvaluationFolder
from neuclip_ds.evaluation.retrieval import score_matrix
from neuclip_ds.evaluation.sharded_batches import decode, rounds

_THUMBNAIL = 192  # pixels


class Neighbour(NamedTuple):
    """A caption beside an image."""

    caption: str
    similarity: float
    own: bool


class Shown(NamedTuple):
    """An image and what lies near it.

    Attributes:
        encoded: the image's file.
        own: its own captions, the nearest first.
        nearest: the nearest of all captions.
    """

    encoded: bytes
    own: list[Neighbour]
    nearest: list[Neighbour]

    @property
    def strangers_ahead(self) -> int:
        """How many of the nearest captions are others' and lie nearer than its own best."""
        return sum(not near.own and near.similarity > self.own[0].similarity for near in self.nearest)


@torch.no_grad()
def nearest_captions(
    encoder: BatchEncoder,
    folder: EvaluationFolder,
    transform: Callable[[bytes], Tensor],
    communicator: Communicator,
    images: int,
    k: int = 5,
) -> list[Shown]:
    """The first images of a captioned set, those with the most strangers ahead first; for one rank.

    Captions are streamed; k of them are kept an image, beside its own.

    Raises:
        UserError: the set has no sample, or one without image or caption.
    """
    samples = list(islice(folder.samples(), images))
    if not samples:
        raise UserError(f"{folder.path} has no sample; download the set again.")
    features = encoder.images([decode(sample, transform) for sample in samples])
    nearest: list[list[Neighbour]] = [[] for _ in samples]
    own: list[list[Neighbour]] = [[] for _ in samples]
    seen = 0
    for part in rounds(folder, captions_of, communicator, encoder.size):
        lines = [(seen + row, line) for row, found in enumerate(part.rows) for line in found]
        scores = score_matrix(features, encoder.texts([line for _, line in lines]))
        best, places = scores.topk(min(k, len(lines)), dim=1)
        for image, (values, columns) in enumerate(zip(best.tolist(), places.tolist(), strict=True)):
            found = [
                Neighbour(lines[column][1], value, lines[column][0] == image)
                for value, column in zip(values, columns, strict=True)
            ]
            nearest[image] = _sorted(nearest[image] + found)[:k]
        for column, (owner, line) in enumerate(lines):
            if owner < len(samples):
                own[owner].append(Neighbour(line, float(scores[owner, column]), True))
        seen += part.used
    shown = [
        Shown(sample.image(), _sorted(captions), near)
        for sample, captions, near in zip(samples, own, nearest, strict=True)
    ]
    return sorted(shown, key=lambda one: one.strangers_ahead, reverse=True)


def caption_page(title: str, shown: list[Shown]) -> str:
    """A page of HTML that needs no other file."""
    ahead = sum(one.strangers_ahead > 0 for one in shown)
    rows = "\n".join(_row(one) for one in shown)
    return f"""<!doctype html>
<meta charset="utf-8">
<title>{html.escape(title)}</title>
<style>
body {{ font: 15px/1.4 sans-serif; margin: 2em auto; max-width: 70em }}
td {{ vertical-align: top; padding: 0.5em 1em; border-top: 1px solid #ccc }}
.own {{ color: #06632b }} .ahead {{ color: #a01010 }} .number {{ font-variant-numeric: tabular-nums }}
</style>
<h1>{html.escape(title)}</h1>
<p>Of {len(shown)} images, {ahead} have a stranger's caption nearer than their own (red): a mistake of the model, or a
caption that fits and that training counts as a negative. Numbers are cosine similarities.</p>
<table>
<tr><th></th><th>own captions</th><th>nearest of all captions</th></tr>
{rows}
</table>
"""


def _sorted(neighbours: list[Neighbour]) -> list[Neighbour]:
    return sorted(neighbours, key=lambda near: near.similarity, reverse=True)


def _row(shown: Shown) -> str:
    own, nearest = (
        "<br>".join(_line(near, shown.own[0].similarity) for near in part) for part in (shown.own, shown.nearest)
    )
    return f'<tr><td><img src="{_thumbnail(shown.encoded)}"></td><td>{own}</td><td>{nearest}</td></tr>'


def _line(near: Neighbour, own_best: float) -> str:
    kind = "own" if near.own else "ahead" if near.similarity > own_best else "other"
    return f'<span class="{kind}"><span class="number">{near.similarity:.3f}</span> {html.escape(near.caption)}</span>'


def _thumbnail(encoded: bytes) -> str:
    image = Image.open(io.BytesIO(encoded)).convert("RGB")
    image.thumbnail((_THUMBNAIL, _THUMBNAIL))
    image.save(out := io.BytesIO(), "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode()}"
