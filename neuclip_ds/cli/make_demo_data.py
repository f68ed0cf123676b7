"""Render the demo dataset: colored shapes with captions, held-out pairs and a zero-shot set.

Example:
  neuclip-ds make-demo-data /tmp/demo --pairs 5000
"""

from collections.abc import Sequence

from neuclip_ds.cli.program import Parser, local_path, progress_bar
from neuclip_ds.data.demo import make_demo_data


def main(arguments: Sequence[str]) -> None:
    parser = Parser(prog="neuclip-ds make-demo-data", description=__doc__)
    parser.add_argument("folder", type=local_path, help="folder to write to; must be absent or empty")
    parser.add_argument("--pairs", type=int, default=20_000, help="number of training pairs")
    parser.add_argument("--held-out", type=int, default=1_000, help="number of held-out pairs")
    parser.add_argument("--zero-shot", type=int, default=2_000, help="number of images in the zero-shot set")
    parser.add_argument("--size", type=int, default=64, help="side length of the images in pixels")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random scenes")
    options = parser.parse(arguments)
    with progress_bar("rendering") as on_progress:
        make_demo_data(on_progress=on_progress, **vars(options))
    images = options.pairs + options.held_out + options.zero_shot
    print(f"Wrote {images:,} images to {options.folder} (train, val, zero_shot).")
