"""The report of a run, with what only its live objective knows: how u and individual temperatures are distributed."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor

from neuclip_ds.objectives.base import Objective
from neuclip_ds.reporting.run_report import write_report
from neuclip_ds.state.sample_store import columns

log = logging.getLogger(__name__)

_TITLES = {"samples": "u of samples, logarithm", "temperatures": "individual temperatures"}
_DRAWN = 200_000  # samples, evenly spaced


def report_run(folder: Path, objective: Objective) -> None:
    """Writes RUN/report.html on rank 0, of whose samples the distributions are."""
    tables = objective.row_tables()
    histograms = {
        title: {name: _drawn(column) for name, column in columns(tables[table]).items()}
        for table, title in _TITLES.items()
        if table in tables
    }
    log.info("report: %s", write_report(folder, histograms))


def _drawn(column: Tensor) -> list[float]:
    """Values of samples that have been seen."""
    some = column[:: max(1, len(column) // _DRAWN)].float().cpu()
    return list(some[torch.isfinite(some)].tolist())
