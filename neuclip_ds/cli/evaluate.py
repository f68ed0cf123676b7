"""Score a model on DataComp's evaluation sets and on sets of your own.

Examples:
  neuclip-ds evaluate runs/cc3m_neuclip --data /data/evalsets
  neuclip-ds evaluate runs/cc3m_neuclip --data /data/images_by_class /data/pairs.csv
  deepspeed --module neuclip_ds evaluate runs/cc3m_neuclip --data /data/evalsets --tasks 'imagenet*'
  mpirun -n 8 neuclip-ds evaluate openai/clip-vit-base-patch32 --data /data/evalsets --out scores/openai_b32

A set of your own is a folder with a folder of images for each class, a file of pairs (.csv, .tsv, .jsonl, .parquet), or
a folder in the webdataset layout of CLIP_benchmark under any name. Tasks with a score in the results folder are not
scored again. docs/reference/evaluation.md explains the tasks, their metrics and where to get the data.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from neuclip_ds.cli.program import Parser
from neuclip_ds.distributed.environment import read_environment


def main(arguments: Sequence[str]) -> None:
    parser = Parser(prog="neuclip-ds evaluate", description=__doc__)
    parser.add_argument("model", help="a run's folder (its newest checkpoint), a checkpoint, or a pretrained model")
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="folders that hold sets, or sets")
    parser.add_argument("--tasks", nargs="+", default=[], help="names, keys or patterns (default: all on disk)")
    parser.add_argument("--out", type=Path, help="folder for results (default: RUN/evaluation/STEP)")
    parser.add_argument("--batch-size", type=int, default=256, help="rows that each rank encodes at once")
    parser.add_argument("--workers", type=int, default=4, help="loader processes per rank; 0 loads in this one")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32", help="of the towers")
    parser.add_argument("--ema", action="store_true", help="score the moving average of a run's weights (ema.decay)")
    parser.add_argument("--setting", help="also print the papers' scores for this setting (default: the run's own)")
    options = parser.parse(arguments)
    from neuclip_ds.cli.scoring import Scoring, score  # torch and deepspeed take seconds to import

    first = read_environment().rank == 0
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("neuclip_ds").setLevel(logging.INFO if first else logging.ERROR)
    values = vars(options)
    text = score(values.pop("model"), Scoring(**values))
    if first:
        print(text)
