"""Gallery of images with the captions nearest to them: nearest_captions.json of a run, and its part of a page."""

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from neuclip_ds.data.atomic_write import atomic_write
from neuclip_ds.data.disk import best_effort

FILE = "nearest_captions.json"
_OF_SEVERAL = 3  # captions of a picture for each run that is compared
Picture = Mapping[str, Any]  # jpeg in base64; own and nearest, lists of [text, cosine similarity, whether its own]


def write_gallery(run: Path, pictures: Sequence[Picture]) -> None:
    """Replace the gallery of a run."""
    with best_effort(run / FILE), atomic_write(run / FILE) as path:
        path.write_text(json.dumps(pictures), encoding="utf-8")


def read_gallery(run: Path) -> list[Picture]:
    """Return the gallery of a run, empty if there is none."""
    path = run / FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []


def gallery(runs: Mapping[str, Sequence[Picture]]) -> str:
    """Return the pictures as HTML, each with the captions that every run finds nearest to it; empty without pictures.

    Runs of the same held-out data have the same pictures, which are told by their thumbnails.
    """
    shown: dict[str, dict[str, Picture]] = {}
    for run, pictures in runs.items():
        for picture in pictures:
            shown.setdefault(picture["jpeg"], {})[run] = picture
    if not shown:
        return ""
    ahead = ", ".join(f"{_is_ahead(pictures)} of {len(pictures)}{_of(run, runs)}" for run, pictures in runs.items())
    note = (
        f"Images with another image's caption (✗) nearer than their own (✓): {ahead}. There the model is wrong, or the "
        "caption fits and training counts it as a negative. Numbers are cosine similarities."
    )
    figures = "".join(_figure(jpeg, found, len(runs) > 1) for jpeg, found in shown.items())
    return f'<h2>Nearest captions</h2><p>{html.escape(note)}</p><div class="gallery">{figures}</div>'


def _is_ahead(pictures: Sequence[Picture]) -> int:
    return sum(any(not own and near > one["own"][0][1] for _, near, own in one["nearest"]) for one in pictures)


def _of(run: str, runs: Mapping[str, object]) -> str:
    return f" ({run})" if len(runs) > 1 else ""


def _figure(jpeg: str, found: Mapping[str, Picture], named: bool) -> str:
    own = html.escape(next(iter(found.values()))["own"][0][0])
    lists = "".join(
        f"<h4>{html.escape(run)}</h4>{_list(one, _OF_SEVERAL)}" if named else _list(one) for run, one in found.items()
    )
    image = f'<img alt="{own}" src="data:image/jpeg;base64,{jpeg}">'
    return f"<figure>{image}<figcaption><p>{own}</p>{lists}</figcaption></figure>"


def _list(picture: Picture, length: int | None = None) -> str:
    """Return the nearest captions, and the picture's own below them if it is not one of them."""
    nearest = picture["nearest"][:length]
    shown = [text for text, _, own in nearest if own]
    lines = [*nearest, *(own for own in picture["own"] if own[0] not in shown)]
    best = picture["own"][0][1]
    return "<ol>" + "".join(_line(text, near, own, best) for text, near, own in lines) + "</ol>"


def _line(text: str, similarity: float, own: bool, best: float) -> str:
    kind, mark = ("own", "✓") if own else ("ahead", "✗") if similarity > best else ("", "")
    return f'<li class="{kind}"><span>{similarity:.3f} {mark}</span> {html.escape(text)}</li>'
