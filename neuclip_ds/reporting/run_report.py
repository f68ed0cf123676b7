"""The page of a run, or of several in comparison: scores, plots, nearest captions, events, last values, config.

A page is one self-contained file. What is written has the same plots as PNG files in the folder `plots/` next to it.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml
from matplotlib.figure import Figure

from neuclip_ds.errors import UserError
from neuclip_ds.reporting.events import read_events
from neuclip_ds.reporting.figures import collect, draw, png, svg
from neuclip_ds.reporting.gallery import gallery, read_gallery
from neuclip_ds.reporting.metrics import read_metrics
from neuclip_ds.reporting.page import Table, html_page, section
from neuclip_ds.reporting.panels import Panel, in_order, panels_of
from neuclip_ds.reporting.scores import CHANCE, NO_REFERENCE, Reference, Series, headline, score_table

_EVENTS = 200  # listed; the others are counted
_CURVES = 8  # that share a plot at most
_READING = (
    "A line is a mean over a fortieth of a long curve; the values of a single run, or their range, are pale behind it. "
    "Where far outliers would flatten a plot, they are outside, and the range of all values is given."
)


class Plot(NamedTuple):
    """A figure, and what it means."""

    figure: Figure
    meaning: str = ""

    def element(self) -> str:
        """Return it as HTML."""
        return f"<figure>{svg(self.figure)}<figcaption>{html.escape(self.meaning)}</figcaption></figure>"


class Page(NamedTuple):
    """A page of runs."""

    heading: str
    before: Sequence[str]  # sections above the plots
    plots: Sequence[Plot]
    folded: Sequence[Plot]  # that are shown on demand
    after: Sequence[str]

    def html(self, status: str = "") -> str:
        """Return the page as HTML, with a first section."""
        sections = [status, *self.before, f"<h2>Curves</h2><p>{_READING}</p>", _grid(self.plots)]
        if self.folded:
            sections.append(f"<details><summary>{len(self.folded)} more plots</summary>{_grid(self.folded)}</details>")
        return html_page(self.heading, [*sections, *self.after])

    def write(self, folder: Path) -> Path:
        """Write FOLDER/report.html and FOLDER/plots/, and return the page's path."""
        plots = folder / "plots"
        plots.mkdir(parents=True, exist_ok=True)
        for plot in (*self.plots, *self.folded):
            name = re.sub(r"[^\w@.-]+", "_", str(plot.figure.get_label())).strip("_")
            (plots / f"{name}.png").write_bytes(png(plot.figure))
        path = folder / "report.html"
        path.write_text(self.html(), encoding="utf-8")
        return path


def run_page(
    run: Path, reference: Reference = NO_REFERENCE, distributions: Sequence[Plot] = (), tables: Sequence[Table] = ()
) -> Page:
    """Return the page of a run's folder.

    Args:
        run: the folder.
        reference: what its scores are held against.
        distributions: plots of what is not in metrics.jsonl.
        tables: further content.

    Raises:
        UserError: the folder has no metrics.
    """
    runs = {run.name: read_run(run)}
    plots, folded = _plots(runs)
    config = (run / "config.yaml").read_text(encoding="utf-8")
    after = [
        gallery({run.name: read_gallery(run)}),
        *map(section, tables),
        _events(run),
        section(_last_values(runs)),
        _environment(run),
        f"<h2>Config</h2><pre>{html.escape(config)}</pre>",
    ]
    heading = f"{run.name}: {yaml.safe_load(config)['objective']['method']}"
    return Page(heading, _scores(runs, reference), [*plots, *distributions], folded, after)


def comparison_page(runs: Mapping[str, Path], reference: Reference = NO_REFERENCE) -> Page:
    """Return the page of several runs (label -> folder), with their curves in the same plots.

    Raises:
        UserError: a folder has no metrics.
    """
    series = {label: read_run(run) for label, run in runs.items()}
    plots, folded = _plots(series)
    after = [
        gallery({label: read_gallery(run) for label, run in runs.items()}),
        section(_differences(runs)),
        section(_last_values(series)),
    ]
    return Page("Comparison of " + ", ".join(runs), _scores(series, reference), plots, folded, after)


def read_run(run: Path) -> Series:
    """Read the curves of a run; raise UserError if its folder has no metrics."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{run} has no metrics.jsonl; name the folder of a run.")
    return collect(read_metrics(path))


def _scores(runs: Mapping[str, Series], reference: Reference) -> list[str]:
    table = score_table(runs, reference)
    return [headline(runs, reference), section(table) if table is not None else ""]


def _plots(runs: Mapping[str, Series]) -> tuple[list[Plot], list[Plot]]:
    """Return the plots of runs, and those of panels that would hold too many curves, a plot for each of these.

    Runs that are compared share a plot for each metric, so that a colour is a run.
    """
    names = in_order(name for series in runs.values() for name in series)
    shown: list[Panel] = []
    folded: list[Panel] = []
    for panel in panels_of(names):
        parts = panel.split(names)
        if len(parts) > _CURVES:
            folded += parts
        else:
            shown += [panel] if len(runs) == 1 else parts
    return [*_drawn(shown, runs)], [*_drawn(folded, runs)]


def _drawn(panels: Sequence[Panel], runs: Mapping[str, Series]) -> Iterator[Plot]:
    for panel in panels:
        figure = draw(panel, runs)
        if figure is not None:
            yield Plot(figure, panel.meaning)


def _grid(plots: Sequence[Plot]) -> str:
    return f'<div class="plots">{"".join(plot.element() for plot in plots)}</div>'


def _events(run: Path) -> str:
    """Return a table of the events, empty if there are none."""
    found = list(read_events(run))
    if not found:
        return ""
    rows = [[str(event.step), str(event.rank), event.kind, event.words] for event in found[:_EVENTS]]
    beyond = len(found) - _EVENTS
    more = f"<p>and {beyond} more in events.jsonl</p>" if beyond > 0 else ""
    return section(Table("Events", ["step", "rank", "kind", "message"], rows)) + more


def _last_values(runs: Mapping[str, Series]) -> Table:
    names = in_order(name for series in runs.values() for name in series if not name.startswith(CHANCE))
    titles = {name: panel.title for panel in panels_of(names) for name in names if panel.has(name)}
    rows = [
        [
            name,
            titles.get(name, ""),
            *(f"{series[name][1][-1]:.5g}" if name in series else "-" for series in runs.values()),
        ]
        for name in names
    ]
    return Table("Last values", ["metric", "plot", *runs], rows)


def _environment(run: Path) -> str:
    path = run / "environment.json"
    if not path.is_file():
        return ""
    rows = [[key, str(value)] for key, value in json.loads(path.read_text(encoding="utf-8")).items()]
    return section(Table("Environment", ["", ""], rows))


def _differences(runs: Mapping[str, Path]) -> Table:
    """Return a table of the options in which the runs' configs differ."""
    flat = [_flatten(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))) for run in runs.values()]
    keys = sorted({key for config in flat for key in config})
    rows = [[key, *(str(config.get(key)) for config in flat)] for key in keys]
    return Table("Options that differ", ["option", *runs], [row for row in rows if len(set(row[1:])) > 1])


def _flatten(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tree.items():
        flat.update(_flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat
