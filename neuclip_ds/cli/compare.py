"""Overlay the curves of several runs on one page, with the options in which they differ.

Example:
  neuclip-ds compare runs/dfn14m_neuclip runs/dfn14m_openclip --out runs/comparison
"""

from collections.abc import Sequence
from pathlib import Path

from neuclip_ds.cli.program import Parser
from neuclip_ds.errors import UserError


def main(arguments: Sequence[str]) -> None:
    parser = Parser(prog="neuclip-ds compare", description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs")
    parser.add_argument("--out", type=Path, required=True, help="folder for report.html and plots/")
    options = parser.parse(arguments)
    from neuclip_ds.training.report import page_of  # torch and matplotlib take seconds to import

    print(f"The comparison is {page_of(labelled(options.runs)).write(options.out)}.")


def labelled(runs: Sequence[Path]) -> dict[str, Path]:
    """Return the runs by their folders' names, or by whole paths where two share a name."""
    names = [run.resolve().name for run in runs]
    labels = names if len(set(names)) == len(names) else [str(run) for run in runs]
    if len(set(labels)) < len(labels):
        raise UserError(f"A run is listed twice among {', '.join(labels)}.")
    return dict(zip(labels, runs, strict=True))
