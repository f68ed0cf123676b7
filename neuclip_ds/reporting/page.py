"""Pages of tables and plots, as Markdown and HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:86em;color:#222}"
    "td,th{padding:.15em .9em .15em 0;text-align:left;vertical-align:top;font-variant-numeric:tabular-nums}"
    "img{max-width:100%}.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(26em,1fr));gap:1em}"
    "pre{background:#f5f5f5;padding:1em;overflow:auto}"
)


class Table(NamedTuple):
    """Table with a title."""

    title: str
    header: list[str]
    rows: list[list[str]]


def write_page(tables: Sequence[Table], plots: Sequence[str], path: Path, heading: str) -> None:
    """Write PATH.md with the tables and PATH.html with tables and plots, the names of images in the same folder."""
    text = "\n\n".join(_markdown(table) for table in tables)
    path.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    images = (f'<p><img src="{name}"></p>' for name in plots)
    write_html(path.with_suffix(".html"), heading, [*map(section, tables), *images])


def write_html(path: Path, heading: str, sections: Sequence[str]) -> Path:
    """Write an HTML page, which loads no other file than those that its sections name."""
    title = html.escape(heading)
    page = f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>"
    path.write_text(page + "".join(sections), encoding="utf-8")
    return path


def section(table: Table) -> str:
    """Return a table as HTML below its title, with its cells escaped."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in table.header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f"<h2>{html.escape(table.title)}</h2><table><tr>{head}</tr>{body}</table>"


def _markdown(table: Table) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in [table.header, ["---"] * len(table.header), *table.rows]]
    return f"## {table.title}\n\n" + "\n".join(lines)
