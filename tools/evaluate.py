"""Scores a model on evaluation sets in the webdataset layout of DataComp and CLIP_benchmark.

Examples:
    python tools/evaluate.py runs/cc3m_neuclip --data /data/evalsets
    deepspeed tools/evaluate.py runs/cc3m_neuclip/checkpoints/step_000100640 --data /data/evalsets --tasks 'imagenet*'
    mpirun -n 8 python tools/evaluate.py openai/clip-vit-base-patch32 --data /data/evalsets --out scores/openai_b32

Tasks that have a score in the results' folder are not scored again. docs/evaluation.md says what the tasks and their
metrics are and where to get the data.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from neuclip_ds.cli import exit_on_mistake
from neuclip_ds.distributed.environment import read_environment


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a run's folder (its newest checkpoint), a checkpoint, or a pretrained model")
    parser.add_argument("--data", type=Path, required=True, help="folder of the tasks' folders")
    parser.add_argument("--tasks", nargs="+", default=[], help="names, keys or patterns; default: all on disk")
    parser.add_argument("--out", type=Path, help="folder of the results; default: RUN/evaluation/STEP")
    parser.add_argument("--batch-size", type=int, default=256, help="rows a rank encodes at once")
    parser.add_argument("--workers", type=int, default=4, help="threads a rank decodes images with")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32", help="of the towers")
    parser.add_argument("--setting", help="of the papers (cc3m, ...), to print their scores; default: the run's own")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # which DeepSpeed's launcher adds
    arguments = parser.parse_args(argv)
    exit_on_mistake(lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> None:
    from neuclip_ds.training.scoring import Scoring, score  # torch and deepspeed take seconds to import

    first = read_environment().rank == 0
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("neuclip_ds").setLevel(logging.INFO if first else logging.ERROR)
    scoring = Scoring(
        arguments.data,
        arguments.tasks,
        arguments.out,
        arguments.batch_size,
        arguments.workers,
        arguments.precision,
        arguments.setting,
    )
    text = score(arguments.model, scoring)
    if first:
        print(text)


if __name__ == "__main__":
    main()
