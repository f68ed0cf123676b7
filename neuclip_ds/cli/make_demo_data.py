"""Render the demo data set: coloured shapes with captions, held-out pairs and a zero-shot set.

Example:
  neuclip-ds make-demo-data /tmp/demo --pairs 5000
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from neuclip_ds.cli.program import Parser, progress_bar
from neuclip_ds.data.demo import make_demo_data


def main(arguments: Sequence[str]) -> None:
    parser = Parser(prog="neuclip-ds make-demo-data", description=__doc__, argument_default=argparse.SUPPRESS)
    parser.add_argument("folder", type=Path, help="folder to write to; must be absent or empty")
    parser.add_argument("--pairs", type=int, help="training pairs (default: 20000)")
    parser.add_argument("--held-out", type=int, help="held-out pairs (default: 1000)")
    parser.add_argument("--zero-shot", type=int, help="images of the zero-shot set (default: 2000)")
    parser.add_argument("--size", type=int, help="side of the images in pixels (default: 64)")
    parser.add_argument("--duplicate-share", type=float, help="fraction of near-duplicate pairs (default: 0.05)")
    parser.add_argument("--seed", type=int, help="of the random scenes (default: 0)")
    parser.add_argument("--processes", type=int, help="processes that render (default: one per core)")
    _render(**vars(parser.parse(arguments)))


def _render(folder: Path, **options: Any) -> None:
    began = time.monotonic()
    written = 0
    with progress_bar("rendering") as show:

        def on_progress(done: int, total: int) -> None:
            nonlocal written
            written = total
            show(done, total)

        make_demo_data(folder, on_progress=on_progress, **options)
    seconds = time.monotonic() - began
    print(f"Wrote {written:,} images to {folder} (train, val, zero_shot) in {seconds:.0f} s.")
