"""Pages of runs, with the papers' scores next to theirs, and the distributions of u and individual temperatures."""

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from neuclip_ds.data.disk import explain_disk
from neuclip_ds.evaluation.summary import compare_with_published, published_for, setting_of
from neuclip_ds.evaluation.tasks import load_tasks
from neuclip_ds.objectives.base import Objective
from neuclip_ds.reporting.figures import draw_histogram
from neuclip_ds.reporting.page import Table
from neuclip_ds.reporting.run_report import Page, Plot, comparison_page, read_run, run_page
from neuclip_ds.reporting.scores import Reference
from neuclip_ds.state.sample_store import columns

log = logging.getLogger(__name__)

_DISTRIBUTIONS = {  # table -> title, unit and meaning of a plot
    "samples": ("Log of u of samples", "log u, nats", "u is the moving average of each sample's normaliser."),
    "temperatures": ("Individual temperatures", "temperature τ", "Each sample's own τ, as an image and as a text."),
}
_DRAWN = 200_000  # samples, evenly spaced
_AVERAGE, _TASK = "average/", "task/"  # what the evaluator's names of averages and tasks begin with


def report_run(folder: Path, objective: Objective) -> None:
    """Write FOLDER/report.html; the distributions are over this rank's samples."""
    tables = objective.row_tables()
    distributions = []
    for name, (title, unit, meaning) in _DISTRIBUTIONS.items():
        if name in tables:
            values = {field: _drawn(column) for field, column in columns(tables[name]).items()}
            distributions.append(Plot(draw_histogram(title, unit, values), meaning))
    with explain_disk(folder):
        log.info("report: %s", page_of({folder.name: folder}, distributions).write(folder))


def page_of(runs: Mapping[str, Path], distributions: list[Plot] | None = None) -> Page:
    """Return the page of a run, or the comparison of several (label -> folder); distributions are of the only one.

    Raises:
        UserError: a folder has no metrics.
    """
    names = _names()
    setting = next(filter(None, (setting_of(run.resolve().name) for run in runs.values())), "")
    published = {name: found for name, words in names.items() if (found := published_for(setting, words))}
    reference = Reference(
        {
            name: words if name.startswith(_TASK) else f"Average, {words.replace('_', ' ')}"
            for name, words in names.items()
        },
        {name: scores for name, (_, scores) in published.items()},
        list(dict.fromkeys(source for source, _ in published.values())),
    )
    if len(runs) > 1:
        return comparison_page(runs, reference)
    (run,) = runs.values()
    return run_page(run, reference, distributions or [], _with_published(run))


def _names() -> dict[str, str]:
    """Return names of averages and tasks, as the evaluator and as the papers' tables have them."""
    tasks = load_tasks()
    averages = {f"{_AVERAGE}{name}": name for name in tasks.averages}
    return averages | {f"{_TASK}{task.key}": task.name for task in tasks.tasks}


def _with_published(folder: Path) -> list[Table]:
    """Return tables of the run's last scores below the papers', where its setting is published."""
    names = _names()
    found = {names[name]: values[-1] for name, (_, values) in read_run(folder).items() if name in names}
    setting = setting_of(folder.resolve().name)
    tables = compare_with_published(setting, found) if setting and found else []
    return [Table(*table) for table in tables]


def _drawn(column: Tensor) -> list[float]:
    """Return up to `_DRAWN` values of samples that have been seen."""
    some = column[:: max(1, len(column) // _DRAWN)].float().cpu()
    return list(some[torch.isfinite(some)].tolist())
