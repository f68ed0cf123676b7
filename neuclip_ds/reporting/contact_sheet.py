"""Write pages with pictures, such as a contact sheet of pairs; thumbnails are data: URIs, so a page is one file."""

import base64
import html
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from PIL import Image

from neuclip_ds.data.decoders import DecodeError, decode_pil
from neuclip_ds.data.inspection import ExamplePair

THUMBNAIL = 160  # pixels of the longer side
_QUALITY = 80
_MAX_CHARACTERS = 300  # of a caption on a page
_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem max(1rem, 2vw) 4rem; max-width: 96rem }
table { border-collapse: collapse } td { padding: .2em 1.2em .2em 0; vertical-align: top }
#sheet { display: grid; grid-template-columns: repeat(auto-fill, minmax(12rem, 1fr)); gap: 1.2rem }
figure { margin: 0; font-size: .85rem } figcaption { overflow-wrap: anywhere }
"""


def thumbnail(image: bytes) -> str:
    """Return a small JPEG of an encoded image as a data: URI, or an empty string if the image cannot be decoded."""
    try:
        return data_uri(image, THUMBNAIL, _QUALITY)
    except DecodeError:
        return ""


def data_uri(image: bytes, side: int, quality: int) -> str:
    """Return a JPEG of an encoded image, with at most `side` pixels per side, as a data: URI.

    Raises DecodeError if the image cannot be decoded.
    """
    decoded = decode_pil(image, side).image
    assert isinstance(decoded, Image.Image)
    decoded.thumbnail((side, side))
    encoded = io.BytesIO()
    decoded.save(encoded, "JPEG", quality=quality)
    return f"data:image/jpeg;base64,{base64.b64encode(encoded.getvalue()).decode()}"


def picture(image: bytes, caption: str) -> str:
    """Return the HTML of an image with a caption, which is shortened and escaped."""
    source = thumbnail(image)
    shown = caption if len(caption) <= _MAX_CHARACTERS else f"{caption[:_MAX_CHARACTERS]}..."
    tag = f'<img src="{source}" alt="">' if source else "<em>The image cannot be decoded.</em>"
    return f"<figure>{tag}<figcaption>{html.escape(shown)}</figcaption></figure>"


def write_contact_sheet(
    path: Path, title: str, facts: Sequence[Sequence[str]], warnings: Iterable[str], examples: Iterable[ExamplePair]
) -> None:
    """Write a page with a table of properties (name and value), warnings, and pictures of pairs with their captions."""
    lines = [f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>" for name, value in facts]
    marked = [f"<p><strong>Warning:</strong> {html.escape(warning)}</p>" for warning in warnings]
    figures = [picture(pair.image, f"{pair.index}: {' | '.join(pair.captions)}") for pair in examples]
    path.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1>\n<table>{''.join(lines)}</table>\n"
        f'{"".join(marked)}\n<div id="sheet">{"".join(figures)}</div></html>\n',
        encoding="utf-8",
    )
