"""Report of one or several breakdowns: report.md, report.html and chart.png."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from neuclip_ds.profiling.breakdown import COLUMNS
from neuclip_ds.reporting.page import Table, write_page

Breakdown = Mapping[str, Any]
_LABELS = {"method": "method", "zero_stage": "ZeRO", "world_size": "ranks"}
_HEADINGS = [column.replace("_", " ") for column in COLUMNS]


def write(breakdowns: Sequence[Breakdown], folder: Path, heading: str) -> str:
    """Write report.md, whose text is returned, report.html and chart.png on the contents of breakdown.json files."""
    tables = [times(breakdowns), traffic(breakdowns)]
    return write_page(tables, {"chart.png": _plot(breakdowns)}, folder / "report", heading)


def times(breakdowns: Sequence[Breakdown]) -> Table:
    """Return the table of times as in FastCLIP's Tables 15-22, a row per breakdown."""
    table = Table("Time of a step, ms (mean and deviation over steps)", [*_LABELS.values(), "steps", *_HEADINGS], [])
    for found in breakdowns:
        seconds = [found["seconds"][column] for column in COLUMNS]
        cells = [f"{1e3 * of['mean']:.1f} ± {1e3 * of['deviation']:.1f}" for of in seconds]
        table.rows.append([*_labels(found), str(found["steps"]), *cells])
    return table


def traffic(breakdowns: Sequence[Breakdown]) -> Table:
    """Return the table of calls, bytes and times by purpose, per step and rank."""
    header = ["purpose", "calls", "kB sent", "kB received", "ms", "without waiting", "hidden"]
    table = Table("Collectives per step and rank by purpose", [*_LABELS.values(), *header], [])
    for found in breakdowns:
        for purpose, values in found["purposes"].items():
            kilobytes = [f"{values[key] / 1e3:,.3f}" for key in ("bytes_sent", "bytes_received")]
            milliseconds = [f"{1e3 * values[key]:.2f}" for key in ("seconds", "transfer_seconds")]
            hidden = f"{values['hidden_seconds'] / values['seconds']:.0%}" if values["seconds"] else "-"
            cells = [purpose, f"{values['calls']:g}", *kilobytes, *milliseconds, hidden]
            table.rows.append([*_labels(found), *cells])
    return table


def _labels(found: Breakdown) -> list[str]:
    return [str(found.get(label, "-")) for label in _LABELS]


def _plot(breakdowns: Sequence[Breakdown]) -> Figure:
    """Plot bars of a step's time and of the bytes that a rank receives."""
    labels = [f"{method}, ZeRO {stage}, {ranks} ranks" for method, stage, ranks in map(_labels, breakdowns)]
    figure = Figure(figsize=(12, 0.4 * len(labels) + 2.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _plot_times(left, labels, [found["seconds"] for found in breakdowns])
    _plot_traffic(right, labels, [found["purposes"] for found in breakdowns])
    left.invert_yaxis()
    return figure


def _plot_times(axes: Axes, labels: Sequence[str], seconds: Sequence[Any]) -> None:
    colours = {"computation": "#4c72b0", "pure_communication": "#c44e52", "others": "#bbbbbb"}
    parts = {name: [1e3 * step[name]["mean"] for step in seconds] for name in colours}
    _bars(axes, labels, parts, list(colours.values()))
    means, deviations = ([1e3 * step["total"][key] for step in seconds] for key in ("mean", "deviation"))
    axes.errorbar(means, labels, xerr=deviations, fmt="none", ecolor="black", capsize=3)
    axes.set_xlabel("ms per step (deviation over steps); overlap is part of computation")


def _plot_traffic(axes: Axes, labels: Sequence[str], purposes: Sequence[Any]) -> None:
    names = {name: None for found in purposes for name in found}
    parts = {name: [found.get(name, {}).get("bytes_received", 0) / 1e3 for found in purposes] for name in names}
    _bars(axes, labels, parts, [matplotlib.colormaps["tab10"](number % 10) for number in range(len(parts))])
    axes.set_xlabel("kB received per step and rank")


def _bars(axes: Axes, labels: Sequence[str], parts: Mapping[str, Sequence[float]], colours: Sequence[Any]) -> None:
    """Draw stacked horizontal bars with a legend above."""
    low = [0.0] * len(labels)
    for (name, widths), colour in zip(parts.items(), colours, strict=True):
        axes.barh(labels, widths, left=low, label=name.replace("_", " "), color=colour)
        low = [start + width for start, width in zip(low, widths, strict=True)]
    if parts:
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize="small", frameon=False)
