"""Tables as Markdown, and with plots beside them as a page."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Table(NamedTuple):
    title: str
    header: list[str]
    rows: list[list[str]]


def write_page(found: Sequence[Table], plots: Sequence[str], path: Path, heading: str) -> None:
    """PATH.md with the tables, PATH.html with the plots too, which lie beside it."""
    text = "\n\n".join(_markdown(table) for table in found)
    path.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    body = "".join(_html(table) for table in found) + "".join(f'<p><img src="{name}"></p>' for name in plots)
    style = "body{font:15px sans-serif;margin:2em;max-width:70em}td,th{padding:.2em .8em;text-align:left}"
    page = f"<!doctype html><meta charset=utf-8><style>{style}</style><h1>{html.escape(heading)}</h1>{body}"
    path.with_suffix(".html").write_text(page, encoding="utf-8")


def _markdown(table: Table) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in [table.header, ["---"] * len(table.header), *table.rows]]
    return f"## {table.title}\n\n" + "\n".join(lines)


def _html(table: Table) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in table.header)
    rows = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in table.rows)
    return (
        f"<h2>{html.escape(table.title)}</h2><table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"
    )
