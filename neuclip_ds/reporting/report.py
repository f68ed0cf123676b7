"""Write reports as single HTML files.

A run's report.html contains the run's scores (also those of its blends), example retrievals, plots, events, launches,
last metric values, environment and config. A comparison of several runs contains their scores, the options that differ,
and plots with a curve per run.
"""

import fnmatch
import html
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import yaml

from neuclip_ds.config import CONFIG, without_replaced
from neuclip_ds.errors import UserError, counted
from neuclip_ds.files import atomic_write
from neuclip_ds.reporting.blends import FILE as BLENDS_FILE
from neuclip_ds.reporting.blends import Blends, blends_plot
from neuclip_ds.reporting.events import read_events
from neuclip_ds.reporting.history import Launch, changed_options, duration, read_launches
from neuclip_ds.reporting.metrics import (
    AVERAGED,
    CHANCE,
    Series,
    name_of_full_model,
    percent,
    read_series,
    scores_among,
)
from neuclip_ds.reporting.retrieved import retrieved_lines
from neuclip_ds.section import read_options

_MAX_EVENTS = 200  # events that are listed; the others are only counted
_MAX_CURVES = 8  # curves per plot, each in a different color
_MAX_POINTS = 1000  # points per curve; a longer curve is reduced to the extremes of neighboring points

_NORMAL_QUANTILE = 1.959964  # 97.5% quantile of the normal distribution
_SCORES_WITH_INTERVAL = ("image_to_text_recall@", "text_to_image_recall@", "zero_shot_top")  # prefixes of their names
_SIZES = ("retrieval_pairs", "zero_shot_images", "normalizer_anchors", "normalizer_unseen")  # not plotted

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
    least_range: float = 0.0  # smallest range of the axis, as a share of the largest value

    def has(self, metric: str) -> bool:
        """Return whether the plot shows a metric."""
        return any(fnmatch.fnmatchcase(metric.removeprefix(AVERAGED), pattern) for pattern in self.metrics)


@cache
def known_plots() -> Sequence[Plot]:
    """Return the plots in plots.yaml."""
    fields = yaml.safe_load((_FILES / "plots.yaml").read_text(encoding="utf-8"))
    return [Plot(**plot) for plot in fields]


def write_report(run: Path) -> Path:
    """Write RUN/report.html from a run's files and return its path.

    Raises `UserError` if the run has no metrics.jsonl, or its config.yaml is missing or damaged, and `OSError` if the
    report cannot be written.
    """
    series = read_series(run)
    options = {name: value for name, (_, value) in changed_options({}, _read_config(run)).items()}
    config_text = (run / CONFIG).read_text(encoding="utf-8", errors="replace")
    last_values = [[name, f"{values[-1]:.5g}"] for name, (_, values) in series.items()]
    launches = read_launches(run)
    tables = [
        *_events(run),
        *_launches(launches),
        _table("Last values", ["metric", "value"], last_values),
        *_environment(run),
        f"<h2>Config</h2><pre>{html.escape(config_text)}</pre>",
    ]
    title = f"{run.resolve().name}: {options.get('objective.method')}"
    page = _PAGE.substitute(
        title=html.escape(title),
        scores="\n".join([*_progress(series, launches, run), *_scores(series, options.get("data.val")), *_blends(run)]),
        examples="\n".join(retrieved_lines(run)),
        tables="\n".join(tables),
        data=_plot_data(_plots(series)),
        script=_SCRIPT,
    )
    path = run / "report.html"
    with atomic_write(path) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return path


def write_comparison(runs: Sequence[Path], path: Path) -> None:
    """Write a page that compares runs: durations, scores, options that differ, and plots with a curve per run.

    Raises `UserError` if the same folder is listed twice, or if a run has no metrics.jsonl or a missing or damaged
    config.yaml, and `OSError` if the page cannot be written.
    """
    names = run_names(runs)
    series_of_runs = {name: read_series(run) for name, run in zip(names, runs, strict=True)}
    configs = [without_replaced(_read_config(run)) for run in runs]
    durations = [_duration(read_launches(run), run) for run in runs]
    distinct_scores = dict.fromkeys(score for series in series_of_runs.values() for score in scores_among(series))
    rows = [["duration", *durations]]
    for score in scores_among(distinct_scores):
        cells = []
        for series in series_of_runs.values():
            cells.append(_last_and_best(series[score]) if score in series else "-")
        rows.append([score, *cells])
    page = _PAGE.substitute(
        title=html.escape(" and ".join(names)),
        scores=_table("Scores in %: last (best)", ["score", *names], rows),
        examples="",
        tables=_table("Options that differ", ["option", *names], differing_options(configs)),
        data=_plot_data(_plots_of_runs(series_of_runs)),
        script=_SCRIPT,
    )
    with atomic_write(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def _read_config(run: Path) -> dict[str, Any]:
    """Return the options of a run as a tree; raise `UserError` if its config.yaml is missing or damaged."""
    path = run / CONFIG
    config = read_options(path)
    if not isinstance(config, dict):
        raise UserError(f"{path} is not the config of a run: restore it from a copy, or resume the run.")
    return config


def _environment(run: Path) -> Iterator[str]:
    """Yield a table of the environment of a run's last launch, if environment.json is intact."""
    try:
        environment = dict(json.loads((run / "environment.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return
    yield _table("Environment", ["", ""], [[name, str(value)] for name, value in environment.items()])


def run_names(runs: Sequence[Path]) -> list[str]:
    """Return the names of runs, with as many of their parent folders as are needed to distinguish the names.

    Raises `UserError` if the same folder is listed twice.
    """
    folders = [run.resolve() for run in runs]
    if len(set(folders)) < len(folders):
        raise UserError(f"A run is listed twice ({', '.join(map(str, runs))}); pass each run once.")
    parts = 1
    names = [folder.name for folder in folders]
    while len(set(names)) < len(names):
        parts += 1
        names = ["/".join(folder.parts[-parts:]) for folder in folders]
    return names


def differing_options(configs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a row for each option that differs, except run.name: its dotted name and its value in each config."""
    rows: dict[str, list[str]] = {}
    for number, config in enumerate(configs):
        for name, (_, value) in changed_options({}, config).items():
            row = rows.setdefault(name, ["-"] * len(configs))
            row[number] = json.dumps(value)
    return [[name, *values] for name, values in rows.items() if len(set(values)) > 1 and name != "run.name"]


def _last_and_best(series: Series) -> str:
    _, values = series
    return f"{percent(values[-1])} ({percent(max(values))})"


def _progress(series: Mapping[str, Series], launches: list[Launch], run: Path) -> Iterator[str]:
    """Yield a sentence about the steps and the duration of the run."""
    last_step = max((steps[-1] for steps, _ in series.values()), default=0)
    yield f"<p>{last_step:,} steps in {_duration(launches, run)}.</p>"


def _duration(launches: list[Launch], run: Path) -> str:
    """Describe the total duration of the launches, not counting killed launches before the last one."""
    if not launches:
        return "an unknown time"
    unknown = sum(launch.end is None for launch in launches[:-1])
    text = str(duration(_with_end(launches, run)))
    if not unknown:
        return text
    return f"{text}, not counting {counted(unknown, 'launch that was', 'launches that were')} killed"


def _with_end(launches: list[Launch], run: Path) -> list[Launch]:
    """Return a run's launches, with an estimated end of the last one if it is running or was killed.

    The estimate is the time at which metrics.jsonl was last written.
    """
    *earlier, last = launches
    if last.end is None:
        written = datetime.fromtimestamp((run / "metrics.jsonl").stat().st_mtime, timezone.utc)
        last = replace(last, end=max(written, last.start))
    return [*earlier, last]


def _launches(launches: list[Launch]) -> Iterator[str]:
    """Yield a table of the launches and of the options that each changed, if any launches are known."""
    rows = []
    for launch in launches:
        changes = [f"{name}: {json.dumps(old)} to {json.dumps(new)}" for name, (old, new) in launch.changes.items()]
        last_step = "" if launch.last_step is None else f"{launch.last_step:,}"
        time = "" if launch.end is None else str(launch.end - launch.start)
        start = launch.start.isoformat(sep=" ", timespec="seconds")
        rows.append([start, f"{launch.first_step:,}", last_step, time, "; ".join(changes), launch.command])
    if rows:
        header = ["start", "from step", "to step", "duration", "changed options", "command"]
        yield _table("Launches", header, rows)


def _scores(series: Mapping[str, Series], val: object) -> Iterator[str]:
    """If there are scores, yield a table of their last and best values in percent, with chance levels and intervals.

    Also yields a sentence about the retrieval pairs; `val` is the value of `data.val`.
    """
    rows = []
    for name in scores_among(series):
        steps, values = series[name]
        best = values.index(max(values))
        chance = _chance_of(name, series)
        shown_chance = percent(chance)
        trials = _trials(name, series)
        interval = "-"
        if trials and math.isfinite(values[-1]):
            low, high = wilson_interval(values[-1], trials)
            interval = f"{percent(low)} to {percent(high)}"
        last = [percent(values[-1]), f"{steps[-1]:,}"]
        rows.append([name, *last, percent(values[best]), f"{steps[best]:,}", shown_chance, interval])
    if rows:
        header = ["score", "last", "at step", "best", "at step", "chance", "95% interval of the last score"]
        yield _table("Scores, %", header, rows)
    if "retrieval_pairs" in series:
        _, pair_counts = series["retrieval_pairs"]
        origin = f"of {html.escape(str(val))}"
        if isinstance(val, int):
            origin = "held out of data.train"
        elif val == "auto":
            origin = "of the val folder next to data.train, or held out of data.train (data.val is auto)"
        yield f"<p>Recall is measured on {pair_counts[-1]:,.0f} pairs {origin}.</p>"
    elif val == "":
        yield "<p>There is no recall: no pairs were held out (data.val is empty).</p>"


def wilson_interval(share: float, trials: int) -> tuple[float, float]:
    """Return Wilson's 95% confidence interval for a probability, given the share of successes in independent trials."""
    z_squared = _NORMAL_QUANTILE**2
    middle = (share + z_squared / (2 * trials)) / (1 + z_squared / trials)
    spread = math.sqrt(share * (1 - share) / trials + z_squared / (4 * trials**2))
    half_width = _NORMAL_QUANTILE * spread / (1 + z_squared / trials)
    return max(0.0, middle - half_width), min(1.0, middle + half_width)


def _chance_of(score: str, series: Mapping[str, Series]) -> float | None:
    """Return the last chance level of a score, if it is known."""
    chance_series = series.get(CHANCE + score.removeprefix(AVERAGED))
    return None if chance_series is None else chance_series[1][-1]


def _trials(score: str, series: Mapping[str, Series]) -> int:
    """Return the number of queries or images over which a score is averaged, or 0 if the number is unknown."""
    name = name_of_full_model(score)
    size = "zero_shot_images" if name.startswith("zero_shot_top") else "retrieval_pairs"
    if size not in series or not name.startswith(_SCORES_WITH_INTERVAL):
        return 0
    _, numbers = series[size]
    return int(numbers[-1])


def _blends(run: Path) -> Iterator[str]:
    """Yield a plot and a table of each checkpoint's blends with the start of the run, if they have been scored."""
    for path in sorted((run / "evaluation").glob(f"*/{BLENDS_FILE}")):
        try:
            blends = Blends.read(path.parent)
            header, *rows = blends.rows()
        except (OSError, ValueError, TypeError, KeyError, AttributeError):  # damaged; `evaluate` writes it again
            continue
        yield _table(f"Blends of {path.parent.name} with the run's start, %", header, rows)
        yield f"<p>Blend 0 is the start, {html.escape(blends.start)}; blend 1 is the result.</p>"
        yield blends_plot(blends)


def _plot_data(plots: Iterable[dict[str, Any]]) -> str:
    """Return the JSON of plots for page.js."""
    return json.dumps(list(plots), allow_nan=False).replace("<", "\\u003c")  # "</" would end the script


def _plots_of_runs(series_of_runs: Mapping[str, Mapping[str, Series]]) -> Iterator[dict[str, Any]]:
    """Yield a plot of each metric that `_plotted_metrics` returns for any run, with a curve per run, scores first.

    A run whose values are all zero has no curve.
    """
    plotted: dict[str, None] = {}
    for series in series_of_runs.values():
        plotted.update(dict.fromkeys(_plotted_metrics(series)))
    scores = scores_among(plotted)
    for metric in [*scores, *(metric for metric in plotted if metric not in scores)]:
        known = next((plot for plot in known_plots() if plot.has(metric)), None)
        plot = known or Plot(title=metric, metrics=[metric], unit=metric, meaning="")
        curves = []
        levels = []
        for name, series in series_of_runs.items():
            if metric in series and any(series[metric][1]):
                curves.append(_curve(name, *series[metric]))
                levels += _chance_lines([metric], series)
        if curves:
            yield {**asdict(plot), "title": metric, "curves": curves, "chance": levels}


def _plotted_metrics(series: Mapping[str, Series]) -> list[str]:
    """Return the metrics with at least two finite values, without sizes and chance levels, in natural order."""
    names = []
    for name, (_, values) in series.items():
        is_size_or_chance = name in _SIZES or name.startswith(CHANCE)
        if not is_size_or_chance and np.isfinite(values).sum() > 1:
            names.append(name)
    return sorted(names, key=_natural_order)


def _chance_lines(metrics: Iterable[str], series: Mapping[str, Series]) -> list[dict[str, Any]]:
    """Return, for page.js, a line at the chance level of each metric that has a finite one."""
    lines = []
    for name in metrics:
        chance = _chance_of(name, series)
        if chance is not None and math.isfinite(chance):
            lines.append({"name": f"chance of {name}", "y": chance})
    return lines


def _plots(series: Mapping[str, Series]) -> Iterator[dict[str, Any]]:
    """Yield the known plots, and a plot of each remaining metric, for page.js; split crowded plots into one per curve.

    A metric with fewer than two finite values is not plotted, and the known plots omit metrics that are always zero;
    these metrics appear only in the tables.
    """
    names = _plotted_metrics(series)
    remaining = list(names)
    for plot in known_plots():
        remaining = [name for name in remaining if not plot.has(name)]
        curves = []
        for name in names:
            steps, values = series[name]
            if plot.has(name) and any(values):
                curves.append(_curve(name, steps, values))
        if len(curves) > _MAX_CURVES:
            for curve in curves:
                levels = _chance_lines([curve["name"]], series)
                yield {**asdict(plot), "title": curve["name"], "curves": [curve], "chance": levels}
        elif curves:
            levels = _chance_lines([curve["name"] for curve in curves], series)
            yield {**asdict(plot), "curves": curves, "chance": levels}
    for name in remaining:
        steps, values = series[name]
        plot = Plot(title=name, metrics=[name], unit=name, meaning="")
        yield {**asdict(plot), "curves": [_curve(name, steps, values)], "chance": []}


def _natural_order(name: str) -> str:
    """Return a sort key that places recall@5 before recall@10."""
    return re.sub(r"\d+", lambda digits: digits[0].zfill(9), name)


def _curve(name: str, steps: Sequence[int], values: Sequence[float]) -> dict[str, Any]:
    """Return a curve of up to about 1,000 points for page.js, with None in place of values that are not finite."""
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
        yield f"<p>and {len(events) - _MAX_EVENTS} more events in events.jsonl</p>"


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the HTML of a title and a table with escaped cells."""
    html_rows = ["".join(f"<th>{html.escape(name)}</th>" for name in header)]
    for row in rows:
        html_rows.append("".join(f"<td>{html.escape(cell)}</td>" for cell in row))
    table = f"<table><tr>{'</tr><tr>'.join(html_rows)}</tr></table>"
    return f'<h2>{html.escape(title)}</h2><div class="table">{table}</div>'
