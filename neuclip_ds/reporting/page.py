"""Pages of tables and plots, as Markdown and HTML."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from neuclip_ds.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


def write_page(tables: Sequence[Table], figures: Mapping[str, Figure], path: Path, heading: str) -> str:
    """Write PATH.md with the tables, PATH.html with tables and figures, and the figures by file name next to them.

    Returns:
        The text of PATH.md.
    """
    text = markdown(tables)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    for name, figure in figures.items():
        figure.savefig(path.parent / name, dpi=120)
    images = (f'<p><img src="{name}"></p>' for name in figures)
    write_html(path.with_suffix(".html"), heading, [*map(section, tables), *images])
    return text


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


def markdown(tables: Sequence[Table]) -> str:
    """Return tables as Markdown, each below its title."""
    return "\n\n".join(f"## {table.title}\n\n{_lines(table)}" for table in tables) + "\n"


def replace_tables(path: Path, tables: Sequence[Table]) -> None:
    """Put tables into a Markdown page, each in place of the one that follows the line `<!-- TITLE -->`.

    Raises:
        UserError: the page has no such line for any of them.
    """
    text = old = path.read_text(encoding="utf-8")
    for table in tables:
        before, mark, after = text.partition(f"<!-- {table.title} -->\n\n")
        if mark:
            rest = dropwhile(lambda line: line.startswith("|"), after.splitlines())
            text = "\n".join([before + mark + _lines(table), "", *dropwhile(lambda line: not line, rest), ""])
    if not any(f"<!-- {table.title} -->\n\n" in old for table in tables):
        raise UserError(f"{path} has no line `<!-- {tables[0].title} -->` above a table that could be replaced.")
    path.write_text(text, encoding="utf-8")


def _lines(table: Table) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [table.header, ["---"] * len(table.header), *table.rows])
