"""Write the features of all images and captions of a dataset, for filtering, search and analysis.

The features are written to --out, one file per shard. After an interruption, the same command writes the missing
files, on any number of ranks. docs/how-to/prepare_data.md shows how to use the features.

Examples:
  neuclip-ds embed runs/cc3m_neuclip manifests/cc12m --out features/cc12m
  deepspeed --module neuclip_ds embed openai/clip-vit-large-patch14 manifests/pool --out features/pool
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from neuclip_ds.cli.early_checks import check_model, check_path
from neuclip_ds.cli.program import Parser
from neuclip_ds.distributed.environment import read_environment
from neuclip_ds.errors import UserError

if TYPE_CHECKING:  # torch and deepspeed take seconds to import
    from neuclip_ds.embedding.embed import Summary


def main(arguments: Sequence[str]) -> None:
    parser = Parser(prog="neuclip-ds embed", description=__doc__)
    parser.add_argument("model", help="a run's folder (its newest checkpoint), a checkpoint, or a pretrained model")
    parser.add_argument("shards", help="dataset, as in data.train: a folder, glob, brace pattern or manifest")
    parser.add_argument("--out", type=Path, required=True, help="folder for the features, shared by all nodes")
    parser.add_argument("--ema", action="store_true", help="use the moving average of a run's weights (ema.decay)")
    parser.add_argument(
        "--dtype", choices=("float16", "float32"), default="float16", help="dtype of the features on disk"
    )
    parser.add_argument("--batch-size", type=int, default=256, help="rows that each rank encodes at once")
    parser.add_argument("--workers", type=int, default=4, help="loader processes per rank; 0 loads in the main process")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32", help="dtype of the towers")
    parser.add_argument("--captions", nargs="+", default=["txt"], help="sources of captions, as in data.captions")
    parser.add_argument("--uid-key", default="uid", help="key of the uid in a sample's JSON")
    parser.add_argument("--cache-dir", type=Path, help="folder on each node for copies of remote shards")
    parser.add_argument("--cache-gb", type=float, default=100, help="size limit of --cache-dir, in GB")
    options = parser.parse(arguments)
    check_model("MODEL", options.model)
    check_path("SHARDS", options.shards)
    is_rank_zero = read_environment().rank == 0
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("neuclip_ds").setLevel(logging.INFO if is_rank_zero else logging.WARNING)
    summary = write_features(options)
    if is_rank_zero:
        rate = summary.samples / summary.seconds
        print(f"{options.out}: {summary.samples:,} samples of {summary.shards:,} shards, {rate:,.0f} samples/s.")
    unreadable = summary.unreadable
    if unreadable:
        raise UserError(
            f"{len(unreadable)} shards cannot be read and have no features: try again. The first: {unreadable[0]}"
        )


def write_features(options: argparse.Namespace) -> Summary:
    """Write the features on all ranks; raise UserError if the model, the data or the output folder cannot be used."""
    import torch

    from neuclip_ds.checkpoint.saved_model import open_model
    from neuclip_ds.data.images import EvalTransform
    from neuclip_ds.data.open_data import loader_options, open_data
    from neuclip_ds.distributed.launch import check_shared, process_group
    from neuclip_ds.embedding.embed import Parts, RowReader, embed
    from neuclip_ds.evaluation.encoding import encoder_of
    from neuclip_ds.files import explain_disk
    from neuclip_ds.recipe import validate

    data_options = {
        "train": options.shards,
        "workers": options.workers,
        "captions": options.captions,
        "cache_dir": options.cache_dir,
        "cache_gb": options.cache_gb,
    }
    data = validate({"data": data_options}).data
    batch_size = max(1, options.batch_size)
    with explain_disk(options.out, "choose another --out"):
        options.out.mkdir(parents=True, exist_ok=True)
    task = "\n".join(f"{name}: {value}" for name, value in vars(options).items())
    with process_group(task, data.max_outage) as communicator:
        check_shared(options.out, communicator)
        saved = open_model(options.model, communicator, options.ema)
        device = communicator.device
        manifest = open_data(options.shards, data, communicator, options.out)
        identity = {
            "ema": options.ema,
            "dtype": options.dtype,
            "precision": options.precision,
            "uid_key": options.uid_key,
            "captions": options.captions,
            "model": str(saved.checkpoint or saved.name),
            "batch_size": batch_size,
        }
        loading = loader_options(data, communicator, manifest)
        transform = EvalTransform(saved.preprocessing.size, saved.preprocessing.squash)
        reader = RowReader(manifest, transform, saved.tokenizer, options.uid_key, loading)
        encode = encoder_of(saved.model.to(device, getattr(torch, options.precision)), device)
        return embed(encode, reader, manifest, Parts(options.out, identity), batch_size, loading, communicator)
