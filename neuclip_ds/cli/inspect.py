"""Inspect a dataset before training: image sizes, caption lengths, repetitions, unusable samples, and pictures.

Examples:
  neuclip-ds inspect /data/mine
  neuclip-ds inspect manifests/cc12m --recipe cc12m_openclip --data.captions=txt:lines

The command prints statistics of evenly spaced samples, and writes a page with pictures and captions. The lengths of
captions are counted in tokens of the text tower that the recipe trains. Options of `neuclip-ds train` override those of
the recipe.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from neuclip_ds.cli.early_checks import check_path
from neuclip_ds.cli.program import Parser, local_path
from neuclip_ds.config import Config
from neuclip_ds.errors import UserError, counted
from neuclip_ds.recipe import parse

if TYPE_CHECKING:  # imports torch, which takes seconds
    from neuclip_ds.data.inspection import CaptionLengths, Inspection
    from neuclip_ds.data.manifest import Manifest


def main(arguments: Sequence[str]) -> None:
    parser = Parser(prog="neuclip-ds inspect", description=__doc__)
    parser.add_argument("data", help="dataset, as in data.train: a folder, glob, brace pattern or manifest")
    parser.add_argument(
        "--recipe", default="demo", help="recipe whose tokenizer, context length and batch size the report uses"
    )
    parser.add_argument("--samples", type=int, default=2000, help="number of samples to read")
    parser.add_argument("--examples", type=int, default=24, help="number of samples to show on the page")
    parser.add_argument("--out", type=local_path, default=Path("inspect.html"), help="HTML page to write")
    options, overrides = parser.parse_with_overrides(arguments)
    if options.samples < 1 or options.examples < 0:
        raise UserError("--samples must be 1 or more, and --examples must be 0 or more.")
    command, config = parse([options.recipe, f"--data.train={options.data}", *overrides])
    if command.dry_run or command.print_config or command.profile:
        raise UserError("--dry-run, --print-config and --profile belong to `neuclip-ds train`: omit them.")
    check_path("DATA", options.data)
    write_inspection(options, config)


def write_inspection(options: argparse.Namespace, config: Config) -> None:
    """Print a summary of the data, and write a page with samples.

    Raises UserError if the data or tokenizer cannot be opened, no sample can be used, or the page cannot be written.
    """
    from neuclip_ds.data.inspection import caption_lengths, inspect_pairs, pair_warnings, size_warnings
    from neuclip_ds.data.open_data import iter_captions, open_cache
    from neuclip_ds.data.training_data import new_tokenizer
    from neuclip_ds.data.training_set import needs_cache
    from neuclip_ds.files import explain_disk
    from neuclip_ds.models.source import locate_model, model_source
    from neuclip_ds.reporting.contact_sheet import write_contact_sheet

    manifest = open_dataset(config)
    captions = config.data.captions
    cache = open_cache(config.data) if needs_cache(manifest) else None
    inspection = inspect_pairs(manifest, options.samples, options.examples, captions, cache)
    if not inspection.captions:
        causes = ", ".join(f"{cause} ({count:,})" for cause, count in inspection.unusable.most_common())
        raise UserError(
            f"None of the {inspection.read:,} samples read can be used: {causes}. Check the data and data.captions."
        )
    source = model_source(config.model, locate_model(config.model, weights=False))
    tokenizer = source.own_tokenizer()
    if tokenizer is None:
        tokenizer = new_tokenizer(config.model.text, iter_captions(manifest, options.samples, captions, cache))
    lengths = caption_lengths(inspection.captions, tokenizer, tokenizer.context_length)
    warnings = [
        *size_warnings(config.data.batch_size, manifest.n_used),
        *pair_warnings(inspection.captions, lengths, inspection.repeated_images, len(inspection.sides)),
    ]
    facts = list(describe(inspection, lengths, manifest))
    for name, value in facts:
        print(f"{name:<18}{value}")
    for warning in warnings:
        print(f"{'warning':<18}{warning}")
    with explain_disk(options.out, "choose another --out"):
        write_contact_sheet(options.out, options.data, facts, warnings, inspection.examples)
    print(f"{'pictures':<18}{options.out}")


def open_dataset(config: Config) -> "Manifest":
    """Open all sources of the training data; raise UserError if one cannot be used."""
    from neuclip_ds.data.build import open_manifest
    from neuclip_ds.data.manifest import join
    from neuclip_ds.data.open_data import CACHE, resolve
    from neuclip_ds.data.scan import ScanOptions

    scan = ScanOptions(captions=tuple(config.data.captions))
    manifests = [open_manifest(resolve(path), CACHE / "manifests", options=scan) for path in config.data.train_paths]
    return manifests[0] if len(manifests) == 1 else join(manifests)


def describe(inspection: "Inspection", lengths: "CaptionLengths", manifest: "Manifest") -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each property of the data."""
    import numpy as np

    from neuclip_ds.data.inspection import repeated_captions

    yield "samples", f"{manifest.n:,} in {counted(manifest.n_shards, 'shard')}, {manifest.n_bad:,} incomplete"
    yield "read", f"{inspection.read:,} evenly spaced samples; the lines below describe them"
    unusable = ", ".join(f"{cause} ({count:,})" for cause, count in inspection.unusable.most_common())
    yield "unusable", unusable or "none"
    shorter = inspection.sides.min(axis=1)
    low, middle, high = np.percentile(shorter, [5, 50, 95]).round().astype(int)
    yield (
        "image size",
        f"shorter side {low} to {high} px (5th to 95th percentile), median {middle}, smallest {shorter.min()}",
    )
    yield "repeated images", f"{inspection.repeated_images:,} of {len(inspection.sides):,} equal an earlier one"
    count = len(inspection.captions)
    low, middle, high = np.percentile(lengths.tokens, [5, 50, 95]).round().astype(int)
    yield "captions", f"{count:,}, {low} to {high} tokens without padding (5th to 95th percentile), median {middle}"
    yield "truncated", f"{lengths.truncated_share:.1%} of captions are cut off after {lengths.context} tokens"
    yield "repeated captions", f"{repeated_captions(inspection.captions):,} of {count:,} equal an earlier one"
