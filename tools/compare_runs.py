"""Overlays the curves of several runs in one page, with the options in which they differ.

Example: python tools/compare_runs.py runs/dfn14m_neuclip runs/dfn14m_openclip --out runs/comparison
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from neuclip_ds.cli import exit_on_mistake
from neuclip_ds.errors import UserError
from neuclip_ds.reporting.run_report import write_comparison


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs")
    parser.add_argument("--out", type=Path, required=True, help="folder for report.html and plots/")
    arguments = parser.parse_args(argv)
    print(f"The comparison is {exit_on_mistake(lambda: compare(arguments.runs, arguments.out))}.")


def compare(runs: Sequence[Path], out: Path) -> Path:
    """Labels are the folders' names, or whole paths where two share one."""
    names = [run.resolve().name for run in runs]
    labels = names if len(set(names)) == len(names) else [str(run) for run in runs]
    if len(set(labels)) < len(labels):
        raise UserError(f"A run is named twice among {', '.join(labels)}.")
    return write_comparison(dict(zip(labels, runs, strict=True)), out)


if __name__ == "__main__":
    main()
