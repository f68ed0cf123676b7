"""Example retrievals of a run's last evaluation (retrieved.json): captions, and the images that the model ranks first.

    {"step": 100, "queries": [{"caption": "...", "index": 5,
                               "images": [{"index": 7, "score": 0.31, "picture": "data:image/jpeg;base64,..."}]}]}

`index` is a sample's index in the manifest of the held-out pairs; the image with the caption's index is the right one.
"""

import html
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from neuclip_ds.files import atomic_write, best_effort

FILE = "retrieved.json"


@dataclass(frozen=True, kw_only=True)
class RankedImage:
    """An image that a model ranks among the first for a caption."""

    index: int
    score: float  # cosine similarity


@dataclass(frozen=True, kw_only=True)
class Retrieved:
    """The images that a model ranks first for the caption of a sample, the best one first."""

    index: int
    images: Sequence[RankedImage]


def write_retrieved(
    folder: Path,
    step: int,
    queries: Sequence[Retrieved],
    caption_of: Callable[[int], str],
    picture_of: Callable[[int], str],
) -> None:
    """Write FOLDER/retrieved.json, or log why it cannot be written.

    For the index of a sample, `caption_of` returns its caption, and `picture_of` returns its image as a data: URI. Both
    return "" if the sample cannot be read.
    """
    entries = []
    for query in queries:
        images = [{**asdict(image), "picture": picture_of(image.index)} for image in query.images]
        entries.append({"caption": caption_of(query.index), "index": query.index, "images": images})
    with best_effort(folder / FILE), atomic_write(folder / FILE) as path:
        path.write_text(json.dumps({"step": step, "queries": entries}), encoding="utf-8")


def retrieved_lines(folder: Path) -> Iterator[str]:
    """Yield the HTML of the example retrievals of a run, if there are any and the file is intact."""
    try:
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))
        rows = [_row(query) for query in content["queries"]]
        step = int(content["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    if rows:
        yield f"<h2>Examples of text-to-image retrieval at step {step:,}</h2>"
        yield "<p>The images that the model ranks first for each caption; the caption's own image is marked.</p>"
        yield f'<div class="table"><table class="retrieved">{"".join(rows)}</table></div>'


def _row(query: dict) -> str:
    cells = [f"<td>{html.escape(str(query['caption']))}</td>"]
    for image in query["images"]:
        is_own = image["index"] == query["index"]
        marked = ' class="own"' if is_own else ""
        score = f"{float(image['score']):.2f}"
        name = f"sample {int(image['index'])}" + (", the caption's own image" if is_own else "")
        source = html.escape(str(image["picture"]))
        cells.append(f'<td{marked}><img src="{source}" alt="{name}" title="{name}"><br>{score}</td>')
    return f"<tr>{''.join(cells)}</tr>"
