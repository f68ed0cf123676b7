"""Helpers that write shards of samples with uids, encode samples without a model, and write the features."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tars import jpeg, tokenize, write_tar
from torch import Tensor
from torch.nn import functional

from neuclip_ds.data.build import build_manifest
from neuclip_ds.data.images import DECODERS, EvalTransform, RandomCrop
from neuclip_ds.data.loader import LoaderOptions
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.embedding.embed import Parts, Summary, embed
from neuclip_ds.embedding.encoders import FeatureEncoders
from neuclip_ds.embedding.reader import RowReader

DIM = 12  # width of the features
SIDE = 8  # pixels
SHARD_SIZES = [5, 7, 3, 6]
WEIGHTS = torch.randn(3 * SIDE * SIDE, DIM, generator=torch.Generator().manual_seed(0))


def uid(index: int) -> str:
    return f"{index * 0x9E3779B97F4A7C15 % 2**64:016x}{index:016x}"


def members(index: int) -> dict[str, bytes]:
    return {
        "jpg": jpeg(index),
        "txt": f"caption {index} {'x' * (index % 5)}".encode(),
        "json": json.dumps({"uid": uid(index)}).encode(),
    }


def write_samples(folder: Path) -> Manifest:
    """Write 21 samples to four shards: 6 has a broken image, 13 lacks a caption, and odd ones lack a uid."""
    folder.mkdir()
    first_of_shard = 0
    for shard, size in enumerate(SHARD_SIZES):
        shard_members = []
        for index in range(first_of_shard, first_of_shard + size):
            sample = members(index)
            if index == 6:
                sample["jpg"] = b"no image"
            if index == 13:
                del sample["txt"]
            if index % 2 == 1:
                sample["json"] = b"{}"
            shard_members += [(f"k{index:04d}.{extension}", data) for extension, data in sample.items()]
        first_of_shard += size
        write_tar(folder / f"{shard:05d}.tar", shard_members)
    return build_manifest([str(path) for path in sorted(folder.iterdir())], processes=1)


def encode_images(pixels: Tensor) -> Tensor:
    return functional.normalize((pixels.flatten(1).float() - 127) @ WEIGHTS, dim=1)


def encode_captions(tokens: Tensor) -> Tensor:
    return functional.normalize(tokens.float() - 80, dim=1)


ENCODERS = FeatureEncoders(name="m", output="joint", image=encode_images, text=encode_captions, tokenize=tokenize)
IDENTITY: dict[str, Any] = {
    "model": "m",
    "output": "joint",
    "dtype": "float32",
    "captions": ["txt"],
    "all_captions": False,
    "crops": 0,
    "crop_scale": None,
    "seed": 0,
    "image_width": DIM,
    "text_width": DIM,
}


def write(
    out: Path, manifest: Manifest, communicator: Communicator | None = None, workers: int = 0, **changes: Any
) -> Summary:
    """Write the features of the dataset; `changes` are fields of embedding.json that differ from IDENTITY."""
    identity = {**IDENTITY, **changes}
    options = LoaderOptions(workers=workers, captions=identity["captions"])
    encoders = replace(
        ENCODERS,
        image=None if identity["image_width"] is None else encode_images,
        text=None if identity["text_width"] is None else encode_captions,
    )
    transform: EvalTransform | RandomCrop = EvalTransform(SIDE)
    if identity["crops"]:
        transform = RandomCrop(SIDE, identity["crop_scale"], DECODERS["simplejpeg"])
    reader = RowReader(
        manifest,
        options,
        transform=None if encoders.image is None else transform,
        tokenize=None if encoders.text is None else tokenize,
        crops=identity["crops"],
        all_captions=identity["all_captions"],
        seed=identity["seed"],
    )
    return embed(encoders, reader, manifest, Parts(out, identity), 4, options, communicator or Communicator())
