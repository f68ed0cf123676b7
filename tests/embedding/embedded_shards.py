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

DIM, SIDE = 12, 8
SIZES = [5, 7, 3, 6]
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
    samples = [members(number) for number in range(sum(SIZES))]
    samples[6]["jpg"] = b"no image"
    del samples[13]["txt"]
    for sample in samples[1::2]:
        sample["json"] = b"{}"
    named = ([(f"k{n:04d}.{name}", data) for name, data in sample.items()] for n, sample in enumerate(samples))
    for shard, size in enumerate(SIZES):
        write_tar(folder / f"{shard:05d}.tar", [member for _ in range(size) for member in next(named)])
    return build_manifest([str(path) for path in sorted(folder.iterdir())], processes=1)


def encode(image: Tensor | None, tokens: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    assert image is not None and tokens is not None
    return (
        functional.normalize((image.flatten(1).float() - 127) @ WEIGHTS, dim=1),
        functional.normalize(tokens.float() - 80, dim=1),
    )


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
