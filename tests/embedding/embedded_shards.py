"""Samples with uids, an encoder without weights, and how features are written with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tars import jpeg, tokenize
from torch import Tensor
from torch.nn import functional

from neuclip_ds.data.loader import LoaderOptions
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.transforms import EvalTransform
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.embedding.embed import Summary, embed
from neuclip_ds.embedding.parts import Parts
from neuclip_ds.embedding.rows import RowReader

DIM, SIDE = 12, 8
WEIGHTS = torch.randn(3 * SIDE * SIDE, DIM, generator=torch.Generator().manual_seed(0))


def uid(index: int) -> str:
    return f"{index * 0x9E3779B97F4A7C15 % 2**64:016x}{index:016x}"


def members(index: int) -> dict[str, bytes]:
    return {
        "jpg": jpeg(index),
        "txt": f"caption {index} {'x' * (index % 5)}".encode(),
        "json": json.dumps({"uid": uid(index)}).encode(),
    }


def encode(image: Tensor | None, tokens: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return (
        None if image is None else functional.normalize((image.flatten(1).float() - 127) @ WEIGHTS, dim=1),
        None if tokens is None else functional.normalize(tokens.float() - 80, dim=1),
    )


def write(
    out: Path,
    manifest: Manifest,
    communicator: Communicator | None = None,
    kinds: Sequence[str] = ("image", "text"),
    file_format: str = "parquet",
    workers: int = 0,
    dtype: str = "float32",
) -> Summary:
    communicator = communicator or Communicator()
    identity = {"model": "m", "features": list(kinds), "dim": DIM, "format": file_format, "dtype": dtype}
    parts = communicator.on_rank_zero(lambda: Parts.create(out, identity, manifest))
    options = LoaderOptions(workers)
    reader = RowReader(manifest, EvalTransform(SIDE), tokenize, kinds, "uid", options)
    return embed(encode, reader, manifest, parts, 4, options, communicator)
