"""Repeat the papers' comparisons in miniature, with small towers that train on two CPU cores.

`methods`: every method with the same data, towers, budget and search. Stages: `search` (a grid of 2 x 2 per method, one
seed, validation split), `finals` (the best point, several seeds, test split), `sweeps` (batch size, data set size,
ablations), `cost` (time of a step, one run at a time).

`tuneclip`: models pretrained on one part of the data are fine-tuned on another, with and without recovered statistics.

The same command resumes a study that was interrupted.

Examples:
  neuclip-ds reproduce methods ../shared/data/flickr8k/train --out runs/flickr --stages search finals
  neuclip-ds reproduce tuneclip demo:train --out runs/cold_start
"""

from collections.abc import Sequence
from pathlib import Path

from neuclip_ds.cli.program import Parser

STAGES = ("search", "finals", "sweeps", "cost")


def main(arguments: Sequence[str]) -> None:
    parser = Parser(prog="neuclip-ds reproduce", description=__doc__)
    parser.add_argument("study", choices=("methods", "tuneclip"), help="which comparison")
    parser.add_argument("source", nargs="?", default="demo:train", help="folder of img2dataset shards, or demo:train")
    parser.add_argument("--out", type=Path, default=Path("runs/reproduction"), help="folder for data, runs and report")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES), help="of `methods`")
    parser.add_argument("--batch", type=int, default=128, help="global batch B")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of each run, or of fine-tuning in `tuneclip`")
    parser.add_argument("--pretraining-epochs", type=int, default=8, help="of `tuneclip`")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of finals and sweeps")
    parser.add_argument("--anchors", type=int, default=1000, help="anchors for the error of the normalizer")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    options = parser.parse(arguments)
    from neuclip_ds.cli.reproduce_studies import methods, tuneclip  # torch and matplotlib take seconds to import

    {"methods": methods, "tuneclip": tuneclip}[options.study](options)
