"""Pages of tables and plots, as Markdown and HTML."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from neuclip_ds.errors import UserError
from neuclip_ds.reporting.colours import COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HERE = Path(__file__).parent


class Table(NamedTuple):
    """Table with a title."""

    title: str
    header: list[str]
    rows: list[list[str]]
    best: frozenset[tuple[int, int]] = frozenset()  # (row, column) of cells that stand out


def write_page(tables: Sequence[Table], figures: Mapping[str, Figure], path: Path, heading: str) -> str:
    """Write PATH.md with the tables, PATH.html with tables and figures, and the figures by file name next to them.

    Returns:
        The text of PATH.md.
    """
    text = markdown(tables)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    for name, figure in figures.items():
        figure.savefig(path.parent / name, dpi=120)
    images = (f'<p class="pictures"><img src="{name}"></p>' for name in figures)
    path.with_suffix(".html").write_text(html_page(heading, [*map(section, tables), *images]), encoding="utf-8")
    return text


def html_page(heading: str, sections: Sequence[str]) -> str:
    """Return an HTML page in the reader's light or dark theme, which loads no file but those its sections name."""
    title = html.escape(heading)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_style()}</style><script>{(_HERE / 'page.js').read_text(encoding='utf-8')}</script>"
        f"<body><h1>{title}</h1>{''.join(sections)}</body></html>"
    )


def section(table: Table) -> str:
    """Return a table as HTML below its title and a button that copies it, with its cells escaped."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in table.header)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=best' if (row, column) in table.best else ''}>{html.escape(cell)}</td>"
            for column, cell in enumerate(cells)
        )
        + "</tr>"
        for row, cells in enumerate(table.rows)
    )
    return (
        f'<section><h2>{html.escape(table.title)}<button class="copy">Copy</button></h2>'
        f'<div class="table"><table><tr>{head}</tr>{body}</table></div></section>'
    )


def _style() -> str:
    """Return the style, with the colours of figures in both themes."""
    style = (_HERE / "page.css").read_text(encoding="utf-8")
    for number, theme in enumerate(("LIGHT", "DARK")):
        style = style.replace(theme, " ".join(f"--{name}: {pair[number]};" for name, pair in COLOURS.items()))
    return style


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
