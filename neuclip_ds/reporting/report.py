"""Write a run's report.html: scores, plots, events, last metric values, config and environment in one file."""

import fnmatch
import html
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import numpy as np
import yaml

from neuclip_ds.reporting.events import read_events
from neuclip_ds.reporting.metrics import AVERAGED, CHANCE, Series, read_series, scores_among

_EVENTS = 200  # maximum number of events listed; the others are only counted
_CURVES = 8  # maximum number of curves per plot, each in a different color
_POINTS = 1000  # points per curve; a longer curve is reduced to the extremes of neighboring points

_FILES = Path(__file__).parent
_PAGE = Template((_FILES / "page.html").read_text(encoding="utf-8"))
_SCRIPT = (_FILES / "page.js").read_text(encoding="utf-8")


class Plot(NamedTuple):
    """A plot of curves that share an axis; plots.yaml explains the fields."""

    title: str
    metrics: Sequence[str]  # name patterns; they also match metrics of the averaged weights
    unit: str
    meaning: str
    log_scale: bool = False

    def has(self, metric: str) -> bool:
        """Return whether the plot shows a metric."""
        return any(fnmatch.fnmatchcase(metric.removeprefix(AVERAGED), pattern) for pattern in self.metrics)


PLOTS = [Plot(**plot) for plot in yaml.safe_load((_FILES / "plots.yaml").read_text(encoding="utf-8"))]
_COUNTS = ("retrieval_pairs", "zero_shot_images", "normalizer_anchors", "normalizer_unseen")


def write_report(run: Path) -> Path:
    """Write RUN/report.html from a run's files and return its path; raise `UserError` if the run has no metrics."""
    series = read_series(run)
    config = (run / "config.yaml").read_text(encoding="utf-8")
    environment = run / "environment.json"
    found = json.loads(environment.read_text(encoding="utf-8")) if environment.is_file() else {}
    scores = _scores(series, yaml.safe_load(config)["data"]["val"])
    tables = [
        *_events(run),
        _table("Last values", ["metric", "value"], [[name, f"{x[-1]:.5g}"] for name, (_, x) in series.items()]),
        _table("Environment", ["", ""], [[key, str(value)] for key, value in found.items()]),
        f"<h2>Config</h2><pre>{html.escape(config)}</pre>",
    ]
    path = run / "report.html"
    heading = f"{run.name}: {yaml.safe_load(config)['objective']['method']}"
    data = json.dumps(list(_plots(series)), allow_nan=False).replace("<", "\\u003c")  # "</" would end the script
    content = {"title": html.escape(heading), "scores": "\n".join(scores), "tables": "\n".join(tables)}
    path.write_text(_PAGE.substitute(content, data=data, script=_SCRIPT), encoding="utf-8")
    return path


def _scores(series: Mapping[str, Series], val: str | int) -> Iterator[str]:
    """Yield a table of each score's last and best values in percent, with the chance level, if the run has scores.

    Also yields a sentence about the retrieval pairs; `val` is their path, or the number of held-out training pairs.
    """
    rows = []
    for name in scores_among(series):
        steps, values = series[name]
        best = max(range(len(values)), key=values.__getitem__)
        chance = series.get(CHANCE + name.removeprefix(AVERAGED))
        row = [values[-1], steps[-1], values[best], steps[best], chance[1][-1] if chance else None]
        rows.append([name, *("-" if x is None else f"{x:,}" if isinstance(x, int) else f"{100 * x:.2f}" for x in row)])
    if rows:
        yield _table("Scores, %", ["score", "last", "at step", "best", "at step", "chance"], rows)
    if "retrieval_pairs" in series:
        origin = "held out of data.train" if isinstance(val, int) else f"of {html.escape(val)}"
        yield f"<p>Recall is measured on {series['retrieval_pairs'][1][-1]:,.0f} pairs {origin}.</p>"
    elif val == "":
        yield "<p>There is no recall: no pairs were held out (data.val is empty).</p>"


def _plots(series: Mapping[str, Series]) -> Iterator[dict[str, Any]]:
    """Yield `PLOTS`, and a plot for each remaining metric, for page.js; split crowded plots into one plot per curve.

    A metric with fewer than two finite values is not plotted; it appears only in the tables.
    """
    shown = (name for name in series if name not in _COUNTS and not name.startswith(CHANCE))
    # natural order: recall@5 before recall@10
    names = sorted(shown, key=lambda name: re.sub(r"\d+", lambda number: number[0].zfill(9), name))
    names = [name for name in names if np.isfinite(series[name][1]).sum() > 1]
    left = list(names)
    for plot in PLOTS:
        curves = [_curve(name, *series[name]) for name in names if plot.has(name) and any(series[name][1])]
        left = [name for name in left if not plot.has(name)]
        if len(curves) > _CURVES:
            yield from ({**plot._asdict(), "title": curve["name"], "curves": [curve]} for curve in curves)
        elif curves:
            yield {**plot._asdict(), "curves": curves}
    for name in left:
        yield {**Plot(name, [name], name, "")._asdict(), "curves": [_curve(name, *series[name])]}


def _curve(name: str, steps: Sequence[int], values: Sequence[float]) -> dict[str, Any]:
    """Return a curve for page.js, with None in place of values that are not finite."""
    kept: Sequence[int] = range(len(values))
    if len(values) > _POINTS:
        parts = np.array_split(np.nan_to_num(values), _POINTS // 2)
        starts = np.cumsum([0, *map(len, parts[:-1])])
        ends = [
            start + end for start, part in zip(starts, parts, strict=True) for end in (part.argmin(), part.argmax())
        ]
        kept = sorted({0, len(values) - 1, *map(int, ends)})
    return {
        "name": name,
        "x": [steps[i] for i in kept],
        "y": [values[i] if math.isfinite(values[i]) else None for i in kept],
    }


def _events(run: Path) -> Iterator[str]:
    """Yield a table of the events, if there are any."""
    found = list(read_events(run))
    rows = [[str(event.step), str(event.rank), event.kind, event.message] for event in found[:_EVENTS]]
    if rows:
        yield _table("Events", ["step", "rank", "kind", "message"], rows)
    if len(found) > _EVENTS:
        yield f"<p>and {len(found) - _EVENTS} more in events.jsonl</p>"


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the HTML of a title and a table with escaped cells."""
    lines = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    names = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    table = f"<table><tr>{'</tr><tr>'.join([names, *lines])}</tr></table>"
    return f'<h2>{html.escape(title)}</h2><div class="table">{table}</div>'
