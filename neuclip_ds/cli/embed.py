"""Write the features of a dataset's images and captions, for training, filtering, search and analysis.

The features are written to --out, one file per shard. After an interruption, the same command writes the missing
files, on any number of ranks. docs/how-to/prepare_data.md shows how to use the features.

MODEL is a run's folder (its newest checkpoint), a checkpoint, or a pretrained model, as in model.pretrained. It may
also be a single encoder: timm:NAME encodes only the images, with a model of timm (timm:ARCHITECTURE.TAG,
timm:ARCHITECTURE/FILE or timm:FOLDER), and hf:NAME encodes only the captions, with a text encoder of transformers
(hf:FOLDER or hf:OWNER/NAME).

Examples:
  neuclip-ds embed runs/cc3m_neuclip manifests/cc12m --out features/cc12m
  deepspeed --module neuclip_ds embed openai/clip-vit-large-patch14 manifests/pool --out features/pool
  neuclip-ds embed timm:vit_small_patch14_dinov2.lvd142m manifests/cc12m --out features/images --crops 4
  neuclip-ds embed hf:sentence-transformers/all-MiniLM-L6-v2 manifests/cc12m --out features/texts --all-captions
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from neuclip_ds.cli.early_checks import check_model, check_path
from neuclip_ds.cli.program import Parser, local_path
from neuclip_ds.config import DataConfig
from neuclip_ds.distributed.environment import read_environment
from neuclip_ds.errors import UserError, counted

if TYPE_CHECKING:  # torch and deepspeed take seconds to import
    from neuclip_ds.data.images import EvalTransform, RandomCrop
    from neuclip_ds.distributed.communicator import Communicator
    from neuclip_ds.embedding.embed import Summary
    from neuclip_ds.embedding.encoders import FeatureEncoders, Output

_IMAGE_ENCODER = "timm:"
_TEXT_ENCODER = "hf:"


def main(arguments: Sequence[str]) -> None:
    parser = Parser(prog="neuclip-ds embed", description=__doc__)
    parser.add_argument("model", help="a run, a checkpoint, a pretrained model, timm:NAME or hf:NAME")
    parser.add_argument("shards", help="dataset, as in data.train: a folder, glob, brace pattern or manifest")
    parser.add_argument("--out", type=local_path, required=True, help="folder for the features, shared by all nodes")
    parser.add_argument("--ema", action="store_true", help="use the moving average of a run's weights (ema.decay)")
    parser.add_argument(
        "--output",
        choices=("joint", "trunk"),
        help="features to write: joint (default) for the normalized features of the joint space, or trunk for the "
        "towers' pooled outputs before the projection (default, and the only choice, for timm: and hf:)",
    )
    parser.add_argument(
        "--crops",
        type=int,
        default=0,
        metavar="N",
        help="instead of the evaluation crop, encode the random crops that training makes of each image in epochs 0 to "
        "N - 1",
    )
    default_crop_scale = DataConfig.model_fields["crop_scale"].default
    crop_scale_help = f"with --crops: the value of data.crop_scale in training (default: {default_crop_scale})"
    parser.add_argument("--crop-scale", type=float, help=crop_scale_help)
    parser.add_argument(
        "--seed",
        type=int,
        help="the value of run.seed in training, for --crops and for the caption that is encoded (default: 0)",
    )
    parser.add_argument(
        "--all-captions",
        action="store_true",
        help="encode all captions of each sample instead of the one that training draws in epoch 0",
    )
    parser.add_argument(
        "--pooling",
        choices=("cls", "mean", "eos", "last"),
        help="for hf: how a caption's tokens become its feature (default: as in the encoder's sentence-transformers "
        "config; required without this config)",
    )
    parser.add_argument(
        "--context-length",
        type=int,
        metavar="TOKENS",
        help="for hf: number of tokens to which captions are truncated (default: the largest that the encoder's "
        "configs allow)",
    )
    parser.add_argument(
        "--image-size",
        type=int,
        metavar="PIXELS",
        help="for timm: side length of the images, in pixels (default: the input size in timm's config, or 224)",
    )
    parser.add_argument(
        "--dtype", choices=("float16", "float32"), default="float16", help="dtype of the features on disk"
    )
    parser.add_argument("--batch-size", type=int, default=256, help="images or captions that each rank encodes at once")
    parser.add_argument("--workers", type=int, default=4, help="loader processes per rank; 0 loads in the main process")
    parser.add_argument(
        "--precision", choices=("float32", "bfloat16"), default="float32", help="dtype of the towers' weights"
    )
    parser.add_argument("--captions", nargs="+", default=["txt"], help="sources of captions, as in data.captions")
    parser.add_argument("--uid-key", default="uid", help="key of the uid in a sample's JSON")
    parser.add_argument(
        "--cache-dir",
        type=local_path,
        help="folder on each node for copies of remote shards (default: as for data.cache_dir)",
    )
    parser.add_argument("--cache-gb", type=float, default=100, help="size limit of --cache-dir, in GB")
    options = parser.parse(arguments)
    check_options(options)
    check_path("SHARDS", options.shards)
    is_rank_zero = read_environment().rank == 0
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("neuclip_ds").setLevel(logging.INFO if is_rank_zero else logging.WARNING)
    summary = write_features(options)
    if is_rank_zero:
        rate = summary.samples / summary.seconds
        shards = counted(summary.shards, "shard")
        print(f"{options.out}: {summary.samples:,} samples from {shards}, {rate:,.0f} samples/s.")
    unreadable = summary.unreadable
    if unreadable:
        raise UserError(
            f"{counted(len(unreadable), 'shard')} could not be read, so their features are missing: check the storage, "
            f"and run the command again. The first error: {unreadable[0]}"
        )


def check_options(options: argparse.Namespace) -> None:
    """Raise UserError if the model does not exist, or if an option has no effect or an invalid value."""
    encodes_images = not options.model.startswith(_TEXT_ENCODER)
    encodes_captions = not options.model.startswith(_IMAGE_ENCODER)
    is_dual = encodes_images and encodes_captions
    if is_dual:
        check_model("MODEL", options.model)
    if not is_dual and options.ema:
        raise UserError(f"{options.model} is not a run, so it contains no average of the weights: omit --ema.")
    if not is_dual and options.output == "joint":
        raise UserError(f"{options.model} has no joint space of images and texts: omit --output.")
    if encodes_images and options.pooling:
        raise UserError("--pooling applies only to text encoders (hf:NAME): omit --pooling.")
    if options.context_length is not None and (is_dual or not encodes_captions):
        raise UserError("--context-length applies only to text encoders (hf:NAME): omit --context-length.")
    if options.context_length is not None and not 4 <= options.context_length <= 1 << 16:
        raise UserError(f"--context-length={options.context_length} must be from 4 to {1 << 16} tokens.")
    if options.image_size is not None and (is_dual or not encodes_images):
        raise UserError("--image-size applies only to image encoders (timm:NAME): omit --image-size.")
    if options.image_size is not None and not 8 <= options.image_size <= 1 << 14:
        raise UserError(f"--image-size={options.image_size} must be from 8 to {1 << 14} pixels.")
    if options.crops and not encodes_images:
        raise UserError(f"{options.model} encodes no images: omit --crops.")
    if not encodes_captions and (options.all_captions or options.captions != ["txt"]):
        raise UserError(f"{options.model} encodes no captions: omit --captions and --all-captions.")
    if options.crops < 0:
        raise UserError(f"--crops={options.crops} must be 1 or more, or 0 for the evaluation crop.")
    if not options.crops and options.crop_scale is not None:
        raise UserError("--crop-scale has no effect without --crops: set --crops, or omit --crop-scale.")
    draws_captions = encodes_captions and not options.all_captions
    if options.seed is not None and not options.crops and not draws_captions:
        if not encodes_images:
            raise UserError(
                "--seed has no effect with --all-captions, because no caption is drawn: omit one of the two."
            )
        raise UserError(
            "--seed has no effect without --crops, because no caption is drawn: set --crops, or omit --seed."
        )
    if options.crop_scale is not None and not 0 < options.crop_scale < 1:
        raise UserError(f"--crop-scale={options.crop_scale:g} must be above 0 and below 1.")
    if options.seed is not None and options.seed < 0:
        raise UserError(f"--seed={options.seed} must be 0 or more.")


def write_features(options: argparse.Namespace) -> Summary:
    """Write the features on all ranks, and return a summary.

    Raises UserError if the model, the data or the output folder cannot be used.
    """
    from neuclip_ds.data.feature_parts import TRUNK_OUTPUTS
    from neuclip_ds.data.open_data import loader_options, open_data
    from neuclip_ds.distributed.launch import check_shared, process_group
    from neuclip_ds.embedding.embed import Parts, embed
    from neuclip_ds.embedding.reader import RowReader
    from neuclip_ds.files import explain_disk
    from neuclip_ds.recipe import validate

    data_options = {
        "train": options.shards,
        "workers": options.workers,
        "captions": options.captions,
        "cache_dir": options.cache_dir,
        "cache_gb": options.cache_gb,
    }
    if options.crop_scale is not None:
        data_options["crop_scale"] = options.crop_scale
    data = validate({"data": data_options}).data
    batch_size = max(1, options.batch_size)
    with explain_disk(options.out, "choose another --out"):
        options.out.mkdir(parents=True, exist_ok=True)
    task = "\n".join(f"{name}: {value}" for name, value in vars(options).items())
    with process_group(task, data.max_outage) as communicator:
        check_shared(options.out, communicator)
        encoders = open_encoders(options, communicator)
        manifest = open_data(options.shards, data, communicator, options.out)
        transform = image_transform(encoders, data, options.crops)
        identity = {
            "model": encoders.name,
            "ema": options.ema,
            "output": encoders.output,
            "pooling": encoders.pooling,
            "dtype": options.dtype,
            "precision": options.precision,
            "batch_size": batch_size,
            "uid_key": options.uid_key,
            "captions": options.captions,
            "all_captions": options.all_captions,
            "crops": options.crops,
            "crop_scale": data.crop_scale if options.crops else None,
            "seed": options.seed or 0,
            "image_size": None if transform is None else transform.image_size,
            "preprocessing": None if encoders.preprocessing is None else encoders.preprocessing.to_json(),
            "context_length": encoders.context_length,
            "trunk_weights": dict(encoders.trunks.weights),
            TRUNK_OUTPUTS: dict(encoders.trunks.outputs),
            "image_width": encoders.image_width(),
            "text_width": encoders.text_width(),
        }
        loading = loader_options(data, communicator, manifest)
        reader = RowReader(
            manifest,
            loading,
            transform=transform,
            tokenize=encoders.tokenize,
            uid_key=options.uid_key,
            crops=options.crops,
            all_captions=options.all_captions,
            seed=identity["seed"],
        )
        return embed(encoders, reader, manifest, Parts(options.out, identity), batch_size, loading, communicator)


def open_encoders(options: argparse.Namespace, communicator: Communicator) -> FeatureEncoders:
    """Open the model on all ranks; raise UserError if it cannot be opened or does not support the options."""
    import torch

    from neuclip_ds.checkpoint.saved_model import open_model
    from neuclip_ds.embedding.encoders import dual_encoders, image_encoders, record_trunks, text_encoders

    dtype: torch.dtype = getattr(torch, options.precision)
    if options.model.startswith(_IMAGE_ENCODER):
        name = options.model.removeprefix(_IMAGE_ENCODER)
        return image_encoders(name, communicator, dtype, options.image_size)
    if options.model.startswith(_TEXT_ENCODER):
        name = options.model.removeprefix(_TEXT_ENCODER)
        return text_encoders(name, communicator, dtype, options.pooling, options.context_length)
    saved = open_model(options.model, communicator, options.ema)
    name = str(saved.checkpoint or saved.name)
    output: Output = options.output or "joint"
    trunks = record_trunks(saved.model, saved.tokenizer, saved.preprocessing.size, output, communicator)
    model = saved.model.to(communicator.device, dtype)
    return dual_encoders(name, model, saved.tokenizer, saved.preprocessing, output, trunks)


def image_transform(encoders: FeatureEncoders, data: DataConfig, crops: int) -> EvalTransform | RandomCrop | None:
    """Return the transform of images (random crops or the evaluation crop), or None if no images are encoded."""
    from neuclip_ds.data.images import DECODERS, EvalTransform, RandomCrop

    if encoders.preprocessing is None:
        return None
    if crops:
        return RandomCrop(encoders.preprocessing.size, data.crop_scale, DECODERS[data.decoder])
    return EvalTransform.of(encoders.preprocessing)
