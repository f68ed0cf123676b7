"""report.html of a run: scores, plots, events, last values, config and environment in one file."""

import base64
import fnmatch
import html
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import NamedTuple

import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from neuclip_ds.reporting.events import read_events
from neuclip_ds.reporting.metrics import AVERAGED, CHANCE, Series, read_series, scores_among

_EVENTS = 200  # at most this many are listed; the others are counted
_CURVES = 8  # curves per plot; a larger legend would hide them

_FILES = Path(__file__).parent
_PAGE = Template((_FILES / "page.html").read_text(encoding="utf-8"))


class Plot(NamedTuple):
    """A plot of curves that share an axis; plots.yaml explains the fields."""

    title: str
    metrics: Sequence[str]  # also shows metrics of the averaged weights
    unit: str
    meaning: str
    log_scale: bool = False

    def has(self, metric: str) -> bool:
        """Return whether the plot shows a metric."""
        return any(fnmatch.fnmatchcase(metric.removeprefix(AVERAGED), pattern) for pattern in self.metrics)


PLOTS = [Plot(**plot) for plot in yaml.safe_load((_FILES / "plots.yaml").read_text(encoding="utf-8"))]
_COUNTS = ("retrieval_pairs", "zero_shot_images", "normalizer_anchors", "normalizer_unseen")


class Histogram(NamedTuple):
    """Distributions of values, normalized per column."""

    title: str
    unit: str
    meaning: str
    columns: Mapping[str, Sequence[float]]

    def draw(self) -> Figure:
        figure, axes = _figure(self.title)
        for name, values in self.columns.items():
            axes.hist(values, bins=60, histtype="step", label=name, weights=[1 / max(1, len(values))] * len(values))
        axes.set(xlabel=self.unit, ylabel="share of samples")
        axes.legend()
        return figure


def write_report(run: Path, histograms: Sequence[Histogram] = ()) -> Path:
    """Write RUN/report.html from the files of a run's folder and return its path; raise UserError without metrics."""
    series = read_series(run)
    config = (run / "config.yaml").read_text(encoding="utf-8")
    figures = [*_plots(series), *(_element(one.draw(), one.meaning) for one in histograms)]
    environment = run / "environment.json"
    found = json.loads(environment.read_text(encoding="utf-8")) if environment.is_file() else {}
    sections = [
        *_scores(series, yaml.safe_load(config)["data"]["val"]),
        f'<h2>Curves</h2><div class="plots">{"".join(figures)}</div>',
        *_events(run),
        _table("Last values", ["metric", "value"], [[name, f"{x[-1]:.5g}"] for name, (_, x) in series.items()]),
        _table("Environment", ["", ""], [[key, str(value)] for key, value in found.items()]),
        f"<h2>Config</h2><pre>{html.escape(config)}</pre>",
    ]
    path = run / "report.html"
    heading = f"{run.name}: {yaml.safe_load(config)['objective']['method']}"
    path.write_text(_PAGE.substitute(title=html.escape(heading), content="\n".join(sections)), encoding="utf-8")
    return path


def _scores(series: Mapping[str, Series], val: str | int) -> Iterator[str]:
    """Yield a table of the last and best value of each score in percent, next to chance, if the run has scores.

    `val` is the source of the retrieval pairs: a path, or a number of pairs held out of the training data.
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
        pairs, origin = (
            series["retrieval_pairs"][1][-1],
            "held out of data.train" if isinstance(val, int) else f"of {val}",
        )
        yield f"<p>Recall is that among {pairs:,} pairs {html.escape(origin)}.</p>"


def _plots(series: Mapping[str, Series]) -> Iterator[str]:
    """Yield the plots: those of `PLOTS`, and one for each other metric or if a plot would have too many curves."""
    shown = (name for name in series if name not in _COUNTS and not name.startswith(CHANCE))
    # natural order: recall@5 before recall@10
    names = sorted(shown, key=lambda name: re.sub(r"\d+", lambda number: number[0].zfill(9), name))
    left = list(names)
    for plot in PLOTS:
        curves = {name: series[name] for name in names if plot.has(name) and any(series[name][1])}
        left = [name for name in left if not plot.has(name)]
        if len(curves) > _CURVES:
            for name, curve in curves.items():
                yield _element(_draw(plot._replace(title=name), {name: curve}), plot.meaning)
        elif curves:
            yield _element(_draw(plot, curves), plot.meaning)
    for name in left:
        yield _element(_draw(Plot(name, [name], name, ""), {name: series[name]}), "")


def _draw(plot: Plot, curves: Mapping[str, Series]) -> Figure:
    figure, axes = _figure(plot.title)
    for name, (steps, values) in curves.items():
        axes.plot(steps, values, label=name, linewidth=1, marker="o" if len(steps) < 30 else "", markersize=3)
    axes.set(xlabel="training step", ylabel=plot.unit, yscale="log" if plot.log_scale else "linear")
    if plot.unit == "%":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    if len(curves) > 1:
        axes.legend(fontsize=8)
    return figure


def _figure(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(4.8, 3))
    axes = figure.add_axes((0.16, 0.16, 0.81, 0.74))
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(alpha=0.4)
    return figure, axes


def _element(figure: Figure, meaning: str) -> str:
    """Return a figure as HTML, with its picture in it."""
    figure.savefig(out := io.BytesIO(), format="png", dpi=110)
    source = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
    label = html.escape(figure.axes[0].get_title(loc="left"))
    return f'<figure><img alt="{label}" src="{source}"><figcaption>{html.escape(meaning)}</figcaption></figure>'


def _events(run: Path) -> Iterator[str]:
    """Yield a table of the events, if there are any."""
    found = list(read_events(run))
    rows = [[str(event.step), str(event.rank), event.kind, event.message] for event in found[:_EVENTS]]
    if rows:
        yield _table("Events", ["step", "rank", "kind", "message"], rows)
    if len(found) > _EVENTS:
        yield f"<p>and {len(found) - _EVENTS} more in events.jsonl</p>"


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as HTML below its title, with its cells escaped."""
    lines = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    names = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    return f"<h2>{html.escape(title)}</h2><table><tr>{'</tr><tr>'.join([names, *lines])}</tr></table>"
