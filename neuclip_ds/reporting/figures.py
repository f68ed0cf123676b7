"""Plots of runs: panels of related curves, as SVG that follows a page's colours, and as PNG."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from neuclip_ds.reporting.colours import COLOURS
from neuclip_ds.reporting.curves import Curve, limits, summarize
from neuclip_ds.reporting.panels import Panel, short
from neuclip_ds.reporting.scores import Series

_INK, _GRID = COLOURS["ink"][0], COLOURS["grid"][0]
_CYCLE = [light for name, (light, _) in COLOURS.items() if name.startswith("curve")]
_DASHES = ("-", "--", ":", "-.")  # of curves beyond the colours
_RC: Any = {  # typed by matplotlib as a dictionary of each key that it knows
    "font.size": 9,
    "svg.fonttype": "none",  # text stays text, in the page's font
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _GRID,
    "grid.linewidth": 0.7,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8,
}
_SIZE = 4.8, 2.8  # inches, without a legend
_LEGEND_LINE, _LEGEND_WIDTH = 0.2, 62  # inches, and characters


def collect(records: Iterable[Mapping[str, float]]) -> Series:
    """Collect the curves of the metrics from the records of a metrics.jsonl."""
    series: dict[str, tuple[list[int], list[float]]] = {}
    for record in records:
        for name, value in record.items():
            if name != "step":
                steps, values = series.setdefault(name, ([], []))
                steps.append(int(record["step"]))
                values.append(value)
    return series


def draw(panel: Panel, runs: Mapping[str, Series]) -> Figure | None:
    """Draw a panel's curves, None if there are none to draw, or nothing but zeros.

    Those of one run have a colour each, with their values or the range of each bin behind them in pale. Of several runs
    each has its colour, the same in all panels, and the smooth lines alone, which would vanish in each other's ranges.
    """
    curves: list[tuple[str, int, Curve]] = []  # with label and number of the colour
    for number, (run, series) in enumerate(runs.items()):
        for metric in filter(panel.has, series):
            curve = summarize(*series[metric], panel.log_scale)
            if curve is not None and len(runs) > 1:
                curves.append((run, number, curve._replace(low=curve.line, high=curve.line)))
            elif curve is not None:
                curves.append((short(metric), len(curves), curve))
    if not any(curve.low.any() or curve.high.any() for _, _, curve in curves):
        return None
    with rc_context(_RC):
        figure, axes = _figure(panel.title)
        for label, number, curve in curves:
            _plot(axes, curve, label, _CYCLE[number % len(_CYCLE)], _DASHES[number // len(_CYCLE) % len(_DASHES)])
        axes.set(xlabel="training step", yscale="log" if panel.log_scale else "linear")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(_thousands))
        if panel.unit == "%":
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        else:
            axes.set_ylabel(panel.unit)
        summaries = [curve for _, _, curve in curves]
        bounds = None if panel.log_scale else limits(summaries)
        if bounds is not None:
            axes.set_ylim(*bounds)
            ends = min(curve.low.min() for curve in summaries), max(curve.high.max() for curve in summaries)
            axes.set_title("values from {:.3g} to {:.3g}".format(*ends), loc="right", fontsize=7)
        if len(curves) > 1 or len(runs) > 1:
            _add_legend(figure, axes)
    return figure


def draw_histogram(title: str, unit: str, columns: Mapping[str, Sequence[float]]) -> Figure:
    """Draw the distribution of each column's values, normalised per column."""
    with rc_context(_RC):
        figure, axes = _figure(title)
        for number, (name, values) in enumerate(columns.items()):
            share = [1 / max(1, len(values))] * len(values)
            axes.hist(values, bins=60, histtype="step", label=name, weights=share, color=_CYCLE[number % len(_CYCLE)])
        axes.set(xlabel=unit, ylabel="share of samples")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        _add_legend(figure, axes)
    return figure


def svg(figure: Figure) -> str:
    """Return a figure as an SVG element, whose colours are the variables --NAME of the page's style."""
    # the salt makes ids differ among the figures of a page, and not from one page to the next
    label = str(figure.get_label())
    with rc_context({**_RC, "svg.hashsalt": label}):
        figure.savefig(out := io.StringIO(), format="svg", transparent=True, metadata={"Date": None})
    element = out.getvalue().partition("<svg")[2]
    attributes, _, content = element.partition(">")
    box = re.search(r'viewBox="[^"]*"', attributes)
    content = re.sub(r"(<!--.*?-->|<metadata>.*?</metadata>)\s*", "", content, flags=re.DOTALL)
    content = re.sub(r"font: (bold |700 )?([\d.]+)px [^;\"]*", r"font-size: \2px; font-weight: \1", content)
    for name, (light, _) in COLOURS.items():
        content = content.replace(light, f"var(--{name})")
    return f'<svg role="img" aria-label="{html.escape(label)}" {box[0] if box else ""}>{content}'


def png(figure: Figure) -> bytes:
    """Return a figure as PNG."""
    figure.savefig(out := io.BytesIO(), format="png", dpi=150)
    return out.getvalue()


def _figure(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=_SIZE, layout="constrained")
    figure.set_label(title)
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.grid()
    axes.set_axisbelow(True)
    return figure, axes


def _plot(axes: Axes, curve: Curve, label: str, colour: str, dashes: str) -> None:
    marker = "o" if len(curve.steps) < 30 else None
    if (curve.low < curve.high).any():
        axes.fill_between(curve.steps, curve.low, curve.high, color=colour, alpha=0.16, linewidth=0)
    elif curve.low is not curve.line:
        axes.plot(curve.steps, curve.low, color=colour, alpha=0.3, linewidth=0.7)
    axes.plot(curve.steps, curve.line, dashes, color=colour, label=label, linewidth=1.5, marker=marker, markersize=3)


def _add_legend(figure: Figure, axes: Axes) -> None:
    """Put the legend into lines below the axes, which the figure grows by."""
    labels = axes.get_legend_handles_labels()[1]
    per_line = max(1, min(4, _LEGEND_WIDTH // (max(map(len, labels)) + 6)))
    width, height = _SIZE
    figure.set_size_inches(width, height + _LEGEND_LINE * -(-len(labels) // per_line))
    figure.legend(loc="outside lower left", ncols=per_line, handlelength=1.4, columnspacing=1.2)


def _thousands(step: float, _: int) -> str:
    return f"{step / 1000:g}k" if abs(step) >= 10_000 else f"{step:g}"
