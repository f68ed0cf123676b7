"""Write small shards for the tests of data loading."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from PIL import Image


def write_tar(path: Path, members: Iterable[tuple[str, bytes]], tar_format: int = tarfile.USTAR_FORMAT) -> Path:
    with tarfile.open(path, "w", format=tar_format) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def jpeg(seed: int, width: int = 40, height: int = 30) -> bytes:
    """Return a smooth random image."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    picture = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    out = io.BytesIO()
    picture.save(out, "JPEG", quality=90)
    return out.getvalue()


def write_pairs(folder: Path, sizes: Iterable[int], replace: dict[int, dict[str, bytes]] | None = None) -> Path:
    """Write shards of `sizes` pairs; `replace` sets the members of single samples by global index and extension."""
    folder.mkdir(parents=True, exist_ok=True)
    index = 0
    for shard, size in enumerate(sizes):
        members: list[tuple[str, bytes]] = []
        for _ in range(size):
            pair = {"jpg": jpeg(index), "txt": f"caption {index}".encode(), "json": b"{}"}
            pair = (replace or {}).get(index, pair)
            members += [(f"{index:06d}.{extension}", data) for extension, data in pair.items()]
            index += 1
        write_tar(folder / f"{shard:05d}.tar", members)
    return folder


def tokenize(captions: list[str]) -> torch.Tensor:
    """Return code points, truncated or padded to 12."""
    rows = [[ord(letter) for letter in caption[:12].ljust(12, "\0")] for caption in captions]
    return torch.tensor(rows, dtype=torch.int64).reshape(len(captions), 12)
