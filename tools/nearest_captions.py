"""Writes a page of images with the captions that a model finds nearest to them, and their similarities.

Example: python tools/nearest_captions.py runs/vitb32_tuneclip --set /data/evalsets/wds_flickr30k --out nearest.html
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from neuclip_ds.cli import exit_on_mistake


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a run's folder (its newest checkpoint), a checkpoint, or a pretrained model")
    parser.add_argument("--set", type=Path, required=True, help="folder of a retrieval set")
    parser.add_argument("--out", type=Path, required=True, help="file of the page")
    parser.add_argument("--images", type=int, default=50, help="how many images of the set")
    parser.add_argument("--captions", type=int, default=5, help="how many captions an image")
    arguments = parser.parse_args(argv)
    exit_on_mistake(lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> None:
    from neuclip_ds.training.scoring import write_caption_page  # torch takes seconds to import

    write_caption_page(
        arguments.model, arguments.set, arguments.out, max(1, arguments.images), max(1, arguments.captions)
    )
    print(f"Wrote {arguments.out}.")


if __name__ == "__main__":
    main()
