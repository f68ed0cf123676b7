"""Scores of runs: which metrics are scores, tiles and a table of them for a page, and lines of the log."""

import html
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from neuclip_ds.reporting.page import Table
from neuclip_ds.reporting.panels import AVERAGED

Series = Mapping[str, tuple[Sequence[int], Sequence[float]]]  # metric -> steps and values

CHANCE = "chance/"  # before a score's name: what a random choice scores
_KINDS = ("average/", "zero_shot_top", "image_to_text_recall@", "text_to_image_recall@", "task/")  # in their order
_TILES = 6


class Reference(NamedTuple):
    """What the scores of runs are held against."""

    labels: Mapping[str, str] = {}  # score -> its name in words, where it has one
    published: Mapping[str, Mapping[str, str]] = {}  # score -> row of a paper's table -> percent
    sources: Sequence[str] = ()  # of the published scores


NO_REFERENCE = Reference()


class _Row(NamedTuple):
    """A score, and what there is to hold it against."""

    label: str
    runs: list[tuple[Sequence[int], Sequence[float]]]  # steps and values of each, empty where it has none
    chance: float | None
    published: Mapping[str, str]

    def last(self) -> list[float | None]:
        return [values[-1] if values else None for _, values in self.runs]


def scores_among(names: Iterable[str]) -> list[str]:
    """Return the names of metrics that are shares of right answers: averages first, single tasks last."""
    found = list(dict.fromkeys(names))
    return [name for kind in _KINDS for name in found if name.removeprefix(AVERAGED).startswith(kind)]


def headline(runs: Mapping[str, Series], reference: Reference) -> str:
    """Return tiles of a few scores as HTML: averages, zero-shot top1 and recall@1, or else the first of all."""
    found = scores_among(name for series in runs.values() for name in series)
    scores = [name for name in found if not name.startswith(AVERAGED)] or found
    chosen = [name for name in scores if "average/" in name or name.endswith(("_top1", "_recall@1"))]
    tiles = "".join(_tile(_row(name, runs, reference), list(runs)) for name in (chosen or scores)[:_TILES])
    return f'<div class="tiles">{tiles}</div>' if tiles else ""


def score_table(runs: Mapping[str, Series], reference: Reference) -> Table | None:
    """Return the last value of every score in percent, next to chance and what papers publish; None without scores.

    Of one run also the best value and the steps; of several the best run stands out.
    """
    scores = scores_among(name for series in runs.values() for name in series)
    rows = [_row(name, runs, reference) for name in scores]
    papers = list(dict.fromkeys(name for row in rows for name in row.published))
    columns = ["last", "at step", "best", "at step"] if len(runs) == 1 else list(runs)
    cells = [
        [
            row.label,
            *(_history(*row.runs[0]) if len(runs) == 1 else map(percent, row.last())),
            percent(row.chance),
            *(row.published.get(name, "-") for name in papers),
        ]
        for row in rows
    ]
    title = "Scores, %" + (f" (papers: {'; '.join(reference.sources)})" if papers else "")
    best = {
        (number, 1 + column)
        for number, row in enumerate(rows if len(runs) > 1 else ())
        for column, value in enumerate(row.last())
        if value is not None and value == max(other for other in row.last() if other is not None)
    }
    return Table(title, ["score", *columns, "chance", *papers], cells, frozenset(best)) if rows else None


def score_lines(results: Mapping[str, float]) -> Iterator[str]:
    """Yield a line of the log for each result of an evaluation, with what chance gives."""
    for name, value in results.items():
        if not name.startswith(CHANCE):
            chance = results.get(CHANCE + name.removeprefix(AVERAGED))
            yield f"{name}: {value:.4g}" + (f" (chance {chance:.3g})" if chance is not None else "")


def percent(share: float | None) -> str:
    """Return a share of 1 in percent, without the sign."""
    return "-" if share is None else f"{100 * share:.2f}"


def _row(name: str, runs: Mapping[str, Series], reference: Reference) -> _Row:
    plain = name.removeprefix(AVERAGED)
    chances = [series[CHANCE + plain][1][-1] for series in runs.values() if CHANCE + plain in series]
    return _Row(
        (reference.labels.get(plain) or _label(plain)) + (", EMA" if plain != name else ""),
        [series.get(name, ((), ())) for series in runs.values()],
        chances[0] if chances else None,
        reference.published.get(plain, {}),
    )


def _label(name: str) -> str:
    direction = re.fullmatch(r"(image|text)_to_(image|text)_recall(@\d+)", name)
    if direction:
        return f"{direction[1].capitalize()} to {direction[2]} recall{direction[3]}"
    return re.sub(r"zero_shot_top(\d+)", r"Zero-shot top-\1 accuracy", name.removeprefix("task/"))


def _history(steps: Sequence[int], values: Sequence[float]) -> list[str]:
    best = max(range(len(values)), key=values.__getitem__)
    return [percent(values[-1]), f"{steps[-1]:,}", percent(values[best]), f"{steps[best]:,}"]


def _tile(row: _Row, names: Sequence[str]) -> str:
    """Return one score: of one run in large figures, of several a line each."""
    runs = list(zip(names, map(percent, row.last()), strict=True))
    large = f"<b>{runs[0][1]} %</b>" if len(runs) == 1 else ""
    lines = [*(runs if len(runs) > 1 else []), ("chance", percent(row.chance)), *row.published.items()]
    facts = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in lines)
    return f'<div class="tile">{html.escape(row.label)}{large}<dl>{facts}</dl></div>'
