"""Helpers that write shards of samples with uids, encode samples without a model, and write the features."""

import json
from pathlib import Path

import torch
from tars import jpeg, tokenize, write_tar
from torch import Tensor
from torch.nn import functional

from neuclip_ds.data.build import build_manifest
from neuclip_ds.data.images import EvalTransform
from neuclip_ds.data.loader import LoaderOptions
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.embedding.embed import Parts, RowReader, Summary, embed

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
    """Write 21 samples to four shards: number 6 has a broken image, number 13 no caption, and odd numbers no uid."""
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


def encode(image: Tensor | None, tokens: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    assert image is not None and tokens is not None
    image_features = (image.flatten(1).float() - 127) @ WEIGHTS
    text_features = tokens.float() - 80
    return functional.normalize(image_features, dim=1), functional.normalize(text_features, dim=1)


def write(
    out: Path,
    manifest: Manifest,
    communicator: Communicator | None = None,
    workers: int = 0,
    dtype: str = "float32",
) -> Summary:
    options = LoaderOptions(workers=workers)
    reader = RowReader(manifest, EvalTransform(SIDE), tokenize, "uid", options)
    parts = Parts(out, {"model": "m", "dtype": dtype})
    return embed(encode, reader, manifest, parts, 4, options, communicator or Communicator())
