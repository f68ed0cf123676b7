"""Export a trained model, its tokenizer and a model card to transformers, open_clip or sentence-transformers.

Examples:
  neuclip-ds export runs/vitb32_tuneclip --format transformers --out exported/vitb32_tuneclip
  neuclip-ds export runs/vitb32_tuneclip --format open_clip --out exported/vitb32_open_clip --license mit
  neuclip-ds export runs/tuned --blend 0.5 --out exported/blend
  neuclip-ds export --soup runs/tuned runs/tuned_low_lr --out exported/soup

A blend averages a run's weights with the weights that it was fine-tuned from, and often keeps most abilities of both
models. A soup averages the weights of several runs that were fine-tuned from the same checkpoint.
docs/tutorials/fine_tuning.md shows how to choose a blend.
"""

from collections.abc import Sequence
from typing import Any

from neuclip_ds.cli.early_checks import check_path
from neuclip_ds.cli.program import Parser, fraction, local_path
from neuclip_ds.errors import UserError
from neuclip_ds.files import seen_from_here


def main(arguments: Sequence[str]) -> None:
    parser = Parser(prog="neuclip-ds export", description=__doc__)
    run_help = "a run's folder (its newest checkpoint), or a checkpoint in it"
    parser.add_argument("run", type=local_path, nargs="?", help=run_help)
    parser.add_argument(
        "--soup",
        type=local_path,
        nargs="+",
        metavar="RUNS",
        help="several runs instead of one: export the average of their weights",
    )
    forms = ("transformers", "open_clip", "sentence_transformers")
    parser.add_argument(
        "--format", choices=forms, default="transformers", help="library that will load the exported model"
    )
    parser.add_argument("--out", type=local_path, required=True, help="folder to write to; must be absent or empty")
    parser.add_argument("--best", action="store_true", help="export the run's best checkpoint (run.best_metric)")
    parser.add_argument("--ema", action="store_true", help="export the moving average of the weights (ema.decay)")
    blend_help = "share of the run's final weights in a blend with its initial weights, from 0 (initial) to 1 (final)"
    parser.add_argument("--blend", type=fraction, metavar="FRACTION", default=1.0, help=blend_help)
    license_help = "license for the model card, as the hub names it, such as apache-2.0 (default: unknown)"
    parser.add_argument("--license", help=license_help)
    options = parser.parse(arguments)
    if (options.run is None) == (options.soup is None):
        raise UserError("Pass one run, or several runs after --soup.")
    if options.soup is not None and options.blend != 1:
        raise UserError("--blend applies only to a single run: omit --blend, or omit --soup.")
    for run in options.soup or [options.run]:
        check_path("RUN", str(run))
    from neuclip_ds.checkpoint.export_run import export_run, export_soup  # torch and deepspeed take seconds to import

    settings: dict[str, Any] = {
        "library": options.format,
        "folder": options.out,
        "best": options.best,
        "average": options.ema,
        "license": options.license,
    }
    if options.soup is not None:
        checkpoints = export_soup(options.soup, **settings)
        written = f"the mean of {', '.join(str(seen_from_here(checkpoint)) for checkpoint in checkpoints)}"
    else:
        exported = export_run(options.run, **settings, fraction=options.blend)
        checkpoint = seen_from_here(exported)
        written = str(checkpoint)
        if options.blend != 1:
            written = f"a blend of {checkpoint} ({options.blend:g}) with its initial weights ({1 - options.blend:g})"
    print(f"Wrote {written} to {options.out} in {options.format} format.")
