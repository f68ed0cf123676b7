"""Write the report of a run, with the distributions of u and individual temperatures, and the papers' scores."""

import logging
from pathlib import Path

import torch
from torch import Tensor

from neuclip_ds.data.disk import explain_disk
from neuclip_ds.evaluation.summary import compare_with_published, setting_of
from neuclip_ds.evaluation.tasks import load_tasks
from neuclip_ds.objectives.base import Objective
from neuclip_ds.reporting.page import Table
from neuclip_ds.reporting.run_report import read_run, write_report
from neuclip_ds.state.sample_store import columns

log = logging.getLogger(__name__)

_TITLES = {"samples": "u of samples, logarithm", "temperatures": "individual temperatures"}
_DRAWN = 200_000  # samples, evenly spaced
_AVERAGE, _TASK = "average/", "task/"  # what the evaluator's names of averages and tasks begin with


def report_run(folder: Path, objective: Objective) -> None:
    """Write FOLDER/report.html; the distributions are over this rank's samples."""
    tables = objective.row_tables()
    histograms = {
        title: {name: _drawn(column) for name, column in columns(tables[table]).items()}
        for table, title in _TITLES.items()
        if table in tables
    }
    with explain_disk(folder):
        log.info("report: %s", write_report(folder, histograms, _with_published(folder)))


def _with_published(folder: Path) -> list[Table]:
    """Return tables of the run's last scores below the papers', where its setting is published."""
    names = {f"{_TASK}{task.key}": task.name for task in load_tasks().tasks}
    found = {
        names.get(name, name.removeprefix(_AVERAGE)): values[-1]
        for name, (_, values) in read_run(folder).items()
        if name in names or name.startswith(_AVERAGE)
    }
    setting = setting_of(folder.name)
    tables = compare_with_published(setting, found) if setting and found else []
    return [Table(*table) for table in tables]


def _drawn(column: Tensor) -> list[float]:
    """Return up to `_DRAWN` values of samples that have been seen."""
    some = column[:: max(1, len(column) // _DRAWN)].float().cpu()
    return list(some[torch.isfinite(some)].tolist())
