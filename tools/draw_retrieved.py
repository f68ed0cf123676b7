"""Draw the example retrievals of a run's report as a picture: captions, and the images that the model ranks first.

A green frame marks the caption's own image. Use runs whose images you may publish, such as those of the demo.

Example:
  python tools/draw_retrieved.py runs/demo docs/figures/retrieved.png
"""

import argparse
import base64
import io
import json
import textwrap
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from neuclip_ds.cli.program import exit_on_mistake
from neuclip_ds.errors import UserError
from neuclip_ds.reporting.retrieved import FILE

_TILE = 96  # pixels
_GAP = 12
_CAPTION_WIDTH = 330
_CAPTION_LETTERS = 40  # per line
_LINE_HEIGHT = 20
_FRAME = 4
_GREEN = "#1b9e77"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run that has been evaluated on image-text pairs")
    parser.add_argument("picture", type=Path, help="PNG file to write")
    parser.add_argument("--queries", type=int, default=6, help="maximum number of captions to draw (default: 6)")
    options = parser.parse_args()
    with exit_on_mistake():
        queries = read_queries(options.run)[: options.queries]
        picture = drawn(queries)
        # a palette keeps the file small; the other methods merge rare colors
        palette_picture = picture.quantize(method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        palette_picture.save(options.picture, optimize=True)
        print(f"{options.picture}: {len(queries)} captions, {options.picture.stat().st_size / 1000:.0f} kB")


def read_queries(run: Path) -> list[dict[str, Any]]:
    """Return the captions and the images that the model ranked first, as stored in a run's `retrieved.json`.

    Raises:
        UserError: the run has no example retrievals.
    """
    path = run / FILE
    if not path.is_file():
        raise UserError(f"{path} does not exist: pass a run that was evaluated on image-text pairs (data.val).")
    queries: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["queries"]
    return queries


def drawn(queries: list[dict[str, Any]]) -> Image.Image:
    """Return a picture with a row for each caption: the caption, and the images, the best one first."""
    columns = max(len(query["images"]) for query in queries)
    row_height = _TILE + _GAP
    size = (_CAPTION_WIDTH + columns * (_TILE + _GAP) + _GAP, len(queries) * row_height + _GAP)
    canvas = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(canvas)
    font = ImageFont.load_default(15)
    for row, query in enumerate(queries):
        top = _GAP + row * row_height
        lines = textwrap.wrap(str(query["caption"]), _CAPTION_LETTERS)
        text_top = top + (_TILE - len(lines) * _LINE_HEIGHT) // 2
        for number, line in enumerate(lines):
            draw.text((_GAP, text_top + number * _LINE_HEIGHT), line, "black", font)
        for column, image in enumerate(query["images"]):
            left = _CAPTION_WIDTH + column * (_TILE + _GAP)
            if image["index"] == query["index"]:
                frame = (left - _FRAME, top - _FRAME, left + _TILE + _FRAME - 1, top + _TILE + _FRAME - 1)
                draw.rectangle(frame, fill=_GREEN)
            canvas.paste(tile(str(image["picture"])), (left, top))
    return canvas


def tile(picture: str) -> Image.Image:
    """Return the image of a data: URI, resized to a tile, or a gray tile if the image could not be stored."""
    _, _, encoded = picture.partition("base64,")
    if not encoded:
        return Image.new("RGB", (_TILE, _TILE), "lightgray")
    image = Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGB")
    return image.resize((_TILE, _TILE), Image.Resampling.LANCZOS)


if __name__ == "__main__":
    main()
