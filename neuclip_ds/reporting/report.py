"""Write a run's report.html: scores, plots, events, last metric values, config and environment in one file."""

import fnmatch
import html
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import yaml

from neuclip_ds.reporting.blends import FILE as BLENDS_FILE
from neuclip_ds.reporting.blends import Blends, blends_plot
from neuclip_ds.reporting.events import read_events
from neuclip_ds.reporting.metrics import AVERAGED, CHANCE, Series, read_series, scores_among

_MAX_EVENTS = 200  # events that are listed; the others are only counted
_MAX_CURVES = 8  # curves per plot, each in a different color
_MAX_POINTS = 1000  # points per curve; a longer curve is reduced to the extremes of neighboring points

_FILES = Path(__file__).parent
_PAGE = Template((_FILES / "page.html").read_text(encoding="utf-8"))
_SCRIPT = (_FILES / "page.js").read_text(encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class Plot:
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
_COUNT_METRICS = ("retrieval_pairs", "zero_shot_images", "normalizer_anchors", "normalizer_unseen")


def write_report(run: Path) -> Path:
    """Write RUN/report.html from a run's files and return its path; raise `UserError` if the run has no metrics."""
    series = read_series(run)
    config_text = (run / "config.yaml").read_text(encoding="utf-8")
    config = yaml.safe_load(config_text)
    environment = {}
    environment_file = run / "environment.json"
    if environment_file.is_file():
        environment = json.loads(environment_file.read_text(encoding="utf-8"))

    last_values = [[name, f"{values[-1]:.5g}"] for name, (_, values) in series.items()]
    tables = [
        *_events(run),
        _table("Last values", ["metric", "value"], last_values),
        _table("Environment", ["", ""], [[name, str(value)] for name, value in environment.items()]),
        f"<h2>Config</h2><pre>{html.escape(config_text)}</pre>",
    ]
    title = f"{run.name}: {config['objective']['method']}"
    plots = json.dumps(list(_plots(series)), allow_nan=False)
    page = _PAGE.substitute(
        title=html.escape(title),
        scores="\n".join([*_scores(series, config["data"]["val"]), *_blends(run)]),
        tables="\n".join(tables),
        data=plots.replace("<", "\\u003c"),  # "</" would end the script
        script=_SCRIPT,
    )
    path = run / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _scores(series: Mapping[str, Series], val: str | int) -> Iterator[str]:
    """Yield a table of each score's last and best values in percent, with the chance level, if the run has scores.

    Also yields a sentence about the retrieval pairs; `val` is their path, or the number of held-out training pairs.
    """
    rows = []
    for name in scores_among(series):
        steps, values = series[name]
        best = values.index(max(values))
        chance = "-"
        chance_series = series.get(CHANCE + name.removeprefix(AVERAGED))
        if chance_series is not None:
            chance = _percent(chance_series[1][-1])
        rows.append([name, _percent(values[-1]), f"{steps[-1]:,}", _percent(values[best]), f"{steps[best]:,}", chance])
    if rows:
        yield _table("Scores, %", ["score", "last", "at step", "best", "at step", "chance"], rows)
    if "retrieval_pairs" in series:
        _, pair_counts = series["retrieval_pairs"]
        origin = "held out of data.train" if isinstance(val, int) else f"of {html.escape(val)}"
        yield f"<p>Recall is measured on {pair_counts[-1]:,.0f} pairs {origin}.</p>"
    elif val == "":
        yield "<p>There is no recall: no pairs were held out (data.val is empty).</p>"


def _blends(run: Path) -> Iterator[str]:
    """Yield a plot and a table of each checkpoint's blends with the start of the run, if they have been scored."""
    for path in sorted((run / "evaluation").glob(f"*/{BLENDS_FILE}")):
        blends = Blends.read(path.parent)
        header, *rows = blends.rows()
        yield _table(f"Blends of {path.parent.name} with its start, %", header, rows)
        yield f"<p>0 is the start, {html.escape(blends.start)}; 1 is the result.</p>"
        yield blends_plot(blends)


def _percent(score: float) -> str:
    return f"{100 * score:.2f}"


def _plots(series: Mapping[str, Series]) -> Iterator[dict[str, Any]]:
    """Yield `PLOTS`, and a plot for each remaining metric, for page.js; split crowded plots into one plot per curve.

    A metric with fewer than two finite values is not plotted; it appears only in the tables.
    """
    names = []
    for name, (_, values) in series.items():
        is_count_or_chance = name in _COUNT_METRICS or name.startswith(CHANCE)
        if not is_count_or_chance and np.isfinite(values).sum() > 1:
            names.append(name)
    names.sort(key=_natural_order)

    remaining = list(names)
    for plot in PLOTS:
        remaining = [name for name in remaining if not plot.has(name)]
        curves = []
        for name in names:
            steps, values = series[name]
            if plot.has(name) and any(values):
                curves.append(_curve(name, steps, values))
        if len(curves) > _MAX_CURVES:
            for curve in curves:
                yield {**asdict(plot), "title": curve["name"], "curves": [curve]}
        elif curves:
            yield {**asdict(plot), "curves": curves}
    for name in remaining:
        steps, values = series[name]
        plot = Plot(title=name, metrics=[name], unit=name, meaning="")
        yield {**asdict(plot), "curves": [_curve(name, steps, values)]}


def _natural_order(name: str) -> str:
    """Return a sort key that places recall@5 before recall@10."""
    return re.sub(r"\d+", lambda digits: digits[0].zfill(9), name)


def _curve(name: str, steps: Sequence[int], values: Sequence[float]) -> dict[str, Any]:
    """Return a curve for page.js, with None in place of values that are not finite."""
    shown: Sequence[int] = range(len(values))
    if len(values) > _MAX_POINTS:
        # keep the first and the last point, and the extremes of equal sections
        extremes = {0, len(values) - 1}
        start = 0
        for section in np.array_split(np.nan_to_num(values), _MAX_POINTS // 2):
            extremes.add(start + int(section.argmin()))
            extremes.add(start + int(section.argmax()))
            start += len(section)
        shown = sorted(extremes)
    return {
        "name": name,
        "x": [steps[i] for i in shown],
        "y": [values[i] if math.isfinite(values[i]) else None for i in shown],
    }


def _events(run: Path) -> Iterator[str]:
    """Yield a table of the events, if there are any."""
    events = list(read_events(run))
    rows = []
    for event in events[:_MAX_EVENTS]:
        rows.append([str(event.step), str(event.rank), event.kind, event.message])
    if rows:
        yield _table("Events", ["step", "rank", "kind", "message"], rows)
    if len(events) > _MAX_EVENTS:
        yield f"<p>and {len(events) - _MAX_EVENTS} more in events.jsonl</p>"


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the HTML of a title and a table with escaped cells."""
    html_rows = ["".join(f"<th>{html.escape(name)}</th>" for name in header)]
    for row in rows:
        html_rows.append("".join(f"<td>{html.escape(cell)}</td>" for cell in row))
    table = f"<table><tr>{'</tr><tr>'.join(html_rows)}</tr></table>"
    return f'<h2>{html.escape(title)}</h2><div class="table">{table}</div>'
