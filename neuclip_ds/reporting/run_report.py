"""report.html of a run, one self-contained file: plots, events, last values, environment, config.

The plots are also PNG files in the run's folder `plots/`.
"""

import base64
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from neuclip_ds.errors import UserError
from neuclip_ds.reporting.events import read_events
from neuclip_ds.reporting.figures import PANELS, Series, collect, draw, draw_histogram
from neuclip_ds.reporting.metrics import read_metrics
from neuclip_ds.reporting.page import Table, section, write_html

_EVENTS = 200  # listed; the others are counted


def write_report(
    run: Path, histograms: Mapping[str, Mapping[str, list[float]]] | None = None, tables: Sequence[Table] = ()
) -> Path:
    """Write RUN/report.html and RUN/plots/, and return the page's path; raise UserError if RUN has no metrics.

    Args:
        run: a run's folder.
        histograms: title -> column -> values, for distributions that are not in metrics.jsonl.
        tables: further content.
    """
    series = read_run(run)
    plots = {panel.title: draw(panel, {run.name: series}) for panel in PANELS}
    plots |= {title: draw_histogram(title, columns) for title, columns in (histograms or {}).items()}
    config = (run / "config.yaml").read_text(encoding="utf-8")
    sections = [_images(plots, run / "plots"), _events(run), *map(section, tables)]
    sections += [_last_values({run.name: series}), _environment(run)]
    sections.append(f"<h2>Config</h2><pre>{html.escape(config)}</pre>")
    method = yaml.safe_load(config)["objective"]["method"]
    return write_html(run / "report.html", f"{run.name}: {method}", sections)


def write_comparison(runs: Mapping[str, Path], folder: Path) -> Path:
    """Write FOLDER/report.html and FOLDER/plots/ with the curves of several runs (label -> folder) in the same plots.

    Raises:
        UserError: a folder has no metrics.
    """
    series = {label: read_run(run) for label, run in runs.items()}
    plots = {panel.title: draw(panel, series) for panel in PANELS}
    sections = [_images(plots, folder / "plots"), _last_values(series), _differences(runs)]
    return write_html(folder / "report.html", "Comparison of " + ", ".join(runs), sections)


def read_run(run: Path) -> Series:
    """Read the curves of a run; raise UserError if its folder has no metrics."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{run} has no metrics.jsonl; name the folder of a run.")
    return collect(read_metrics(path))


def _images(plots: Mapping[str, bytes | None], folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    cells = []
    for title, image in plots.items():
        if image is not None:
            (folder / f"{title.replace(' ', '_').replace(',', '')}.png").write_bytes(image)
            data = base64.b64encode(image).decode()
            cells.append(f'<img alt="{html.escape(title)}" src="data:image/png;base64,{data}">')
    return f'<div class="plots">{"".join(cells)}</div>'


def _events(run: Path) -> str:
    """Return a table of the events, empty if there are none."""
    found = list(read_events(run))
    if not found:
        return ""
    rows = [[str(event.step), str(event.rank), event.kind, event.words] for event in found[:_EVENTS]]
    beyond = len(found) - _EVENTS
    more = f"<p>and {beyond} more in events.jsonl</p>" if beyond > 0 else ""
    return section(Table("Events", ["step", "rank", "kind", "message"], rows)) + more


def _last_values(runs: Mapping[str, Series]) -> str:
    names = sorted({name for series in runs.values() for name in series})
    rows = [
        [name, *(f"{series[name][1][-1]:.5g}" if name in series else "-" for series in runs.values())] for name in names
    ]
    return section(Table("Last values", ["metric", *runs], rows))


def _environment(run: Path) -> str:
    path = run / "environment.json"
    if not path.is_file():
        return ""
    rows = [[key, str(value)] for key, value in json.loads(path.read_text(encoding="utf-8")).items()]
    return section(Table("Environment", ["", ""], rows))


def _differences(runs: Mapping[str, Path]) -> str:
    """Return a table of the options in which the runs' configs differ."""
    flat = [_flatten(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))) for run in runs.values()]
    keys = sorted({key for config in flat for key in config})
    rows = [[key, *(str(config.get(key)) for config in flat)] for key in keys]
    return section(Table("Options that differ", ["option", *runs], [row for row in rows if len(set(row[1:])) > 1]))


def _flatten(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tree.items():
        flat.update(_flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat
