"""Writes a trained model in the files of transformers or open_clip, with tokenizer and model card.

Example: python tools/export.py runs/vitb32_tuneclip --format transformers --out exported/vitb32_tuneclip
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from neuclip_ds.cli import exit_on_mistake


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run's folder (its newest checkpoint is taken), or a checkpoint in it")
    parser.add_argument("--format", choices=("transformers", "open_clip"), default="transformers")
    parser.add_argument("--out", type=Path, required=True, help="where to write; must be absent or empty")
    parser.add_argument("--best", action="store_true", help="the run's best checkpoint (run.best_metric) instead")
    arguments = parser.parse_args(argv)
    exit_on_mistake(lambda: _run(arguments.run, arguments.format, arguments.out, arguments.best))


def _run(run: Path, form: str, out: Path, best: bool) -> None:
    from neuclip_ds.checkpoint.export import export_run  # torch and deepspeed take seconds to import

    checkpoint = export_run(run, form, out, best)
    print(f"Wrote {checkpoint} to {out} in the format of {form}.")


if __name__ == "__main__":
    main()
