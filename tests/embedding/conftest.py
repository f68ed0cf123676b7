"""Shards of images whose features are read from their pixels."""

from __future__ import annotations

from pathlib import Path

import pytest
from embedded_shards import members
from tars import write_tar

from neuclip_ds.data.build import build_manifest
from neuclip_ds.data.manifest import Manifest

SIZES = [5, 7, 3, 6]


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """Four shards of 21 samples: number 6 has a broken image, number 13 no caption, number 20 no uid."""
    folder, index = tmp_path / "shards", 0
    folder.mkdir()
    for shard, size in enumerate(SIZES):
        samples = {number: members(number) for number in range(index, index + size)}
        if 6 in samples:
            samples[6]["jpg"] = b"no image"
        if 13 in samples:
            del samples[13]["txt"]
        if 20 in samples:
            samples[20]["json"] = b"{}"
        named = [(f"k{n:04d}.{name}", data) for n, sample in samples.items() for name, data in sample.items()]
        write_tar(folder / f"{shard:05d}.tar", named)
        index += size
    return build_manifest([str(path) for path in sorted(folder.iterdir())], processes=1)
