"""Write a run's report again, or compare several runs on one page.

Examples:
  neuclip-ds report runs/demo
  neuclip-ds report runs/demo_openclip runs/demo_fastclip_v3 --out comparison.html

With one run, the command writes RUN/report.html, even while the run trains. With several runs, it writes a page with
their scores, the options that differ, and plots of the metrics with a curve per run.
"""

from collections.abc import Sequence
from pathlib import Path

from neuclip_ds.cli.early_checks import check_path
from neuclip_ds.cli.program import Parser, local_path
from neuclip_ds.errors import UserError


def main(arguments: Sequence[str]) -> None:
    parser = Parser(prog="neuclip-ds report", description=__doc__)
    parser.add_argument("runs", nargs="+", type=local_path, metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--out", type=local_path, help="page to write if you pass several runs (default: comparison.html)"
    )
    options = parser.parse(arguments)
    for run in options.runs:
        check_path("RUN", str(run))
        if not (run / "config.yaml").is_file():
            raise UserError(f"{run} contains no config.yaml; pass the folder of a run.")
    if len(options.runs) == 1 and options.out is not None:
        raise UserError("--out is for several runs; the report of a single run is always RUN/report.html: omit --out.")
    from neuclip_ds.files import explain_disk
    from neuclip_ds.reporting.report import write_comparison, write_report  # imports torch, which takes seconds

    if len(options.runs) == 1:
        (run,) = options.runs
        with explain_disk(run, "copy the run to another folder"):
            print(write_report(run))
        return
    out = options.out or Path("comparison.html")
    with explain_disk(out, "choose another --out"):
        write_comparison(options.runs, out)
    print(out)
