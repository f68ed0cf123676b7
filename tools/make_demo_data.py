"""Renders the demo data set: coloured shapes with captions, held-out pairs and a zero-shot set.

Example: python tools/make_demo_data.py /tmp/demo --pairs 5000
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from neuclip_ds.cli import exit_on_mistake
from neuclip_ds.data.demo import make_demo_data


def main(argv: Sequence[str] | None = None) -> None:
    options = vars(_parser().parse_args(argv))
    exit_on_mistake(lambda: _run(**options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=argparse.SUPPRESS
    )
    parser.add_argument("folder", type=Path, help="where to write; must be absent or empty")
    parser.add_argument("--pairs", type=int, help="training pairs (20000)")
    parser.add_argument("--held-out", type=int, help="held-out pairs (1000)")
    parser.add_argument("--zero-shot", type=int, help="images of the zero-shot set (2000)")
    parser.add_argument("--size", type=int, help="side of the pictures in pixels (64)")
    parser.add_argument("--duplicate-share", type=float, help="share of near-duplicate pairs (0.05)")
    parser.add_argument("--seed", type=int, help="another seed, another set (0)")
    parser.add_argument("--processes", type=int, help="processes that render (one a core)")
    return parser


def _run(folder: Path, **options: Any) -> None:
    began = time.monotonic()
    written = 0
    columns = (TextColumn("rendering"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("")

        def on_progress(done: int, total: int) -> None:
            nonlocal written
            written = total
            progress.update(task, completed=done, total=total)

        make_demo_data(folder, on_progress=on_progress, **options)
    seconds = time.monotonic() - began
    print(f"Wrote {written:,} images to {folder} (train, val, zero_shot) in {seconds:.0f} s.")


if __name__ == "__main__":
    main()
