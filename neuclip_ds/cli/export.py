"""Write a trained model in the format of a library, with its tokenizer and a model card.

Examples:
  neuclip-ds export runs/vitb32_tuneclip --format transformers --out exported/vitb32_tuneclip
  neuclip-ds export runs/vitb32_tuneclip --format open_clip --out exported/vitb32_open_clip --license mit
"""

from collections.abc import Sequence
from pathlib import Path

from neuclip_ds.cli.early_checks import check_path
from neuclip_ds.cli.program import Parser


def main(arguments: Sequence[str]) -> None:
    parser = Parser(prog="neuclip-ds export", description=__doc__)
    parser.add_argument("run", type=Path, help="a run's folder (its newest checkpoint), or a checkpoint in it")
    forms = ("transformers", "open_clip", "sentence_transformers")
    parser.add_argument("--format", choices=forms, default="transformers", help="library to write the model for")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to; must be absent or empty")
    parser.add_argument("--best", action="store_true", help="export the run's best checkpoint (run.best_metric)")
    parser.add_argument("--ema", action="store_true", help="export the moving average of the weights (ema.decay)")
    parser.add_argument("--license", help="license for the model card, as the hub names it, such as apache-2.0")
    options = parser.parse(arguments)
    check_path("RUN", str(options.run))
    from neuclip_ds.checkpoint.export_run import export_run  # torch and deepspeed take seconds to import

    checkpoint = export_run(options.run, options.format, options.out, options.best, options.ema, options.license)
    print(f"Wrote {checkpoint} to {options.out} in {options.format} format.")
