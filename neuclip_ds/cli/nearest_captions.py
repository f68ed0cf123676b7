"""Write a page of images with the captions that a model finds nearest to them, and their similarities.

Example:
  neuclip-ds nearest-captions runs/vitb32_tuneclip --set /data/evalsets/wds_flickr30k --out nearest.html
"""

from collections.abc import Sequence
from pathlib import Path

from neuclip_ds.cli.program import Parser


def main(arguments: Sequence[str]) -> None:
    parser = Parser(prog="neuclip-ds nearest-captions", description=__doc__)
    parser.add_argument("model", help="a run's folder (its newest checkpoint), a checkpoint, or a pretrained model")
    parser.add_argument("--set", type=Path, required=True, help="folder of a retrieval set")
    parser.add_argument("--out", type=Path, required=True, help="HTML file to write")
    parser.add_argument("--images", type=int, default=50, help="number of images, from the beginning of the set")
    parser.add_argument("--captions", type=int, default=5, help="captions per image")
    options = parser.parse(arguments)
    from neuclip_ds.cli.scoring import write_caption_page  # torch takes seconds to import

    write_caption_page(options.model, options.set, options.out, max(1, options.images), max(1, options.captions))
    print(f"Wrote {options.out}.")
