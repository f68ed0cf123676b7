"""Shards that a node lacks are noticed before training, by a message that names one."""

from __future__ import annotations

from pathlib import Path

import pytest
from tars import write_pairs

from neuclip_ds.config import DataConfig
from neuclip_ds.data.build import open_manifest
from neuclip_ds.data.scan import ScanOptions
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.training.data import open_data


def test_a_shard_that_is_not_here(tmp_path: Path) -> None:
    shards = write_pairs(tmp_path / "shards", [3, 3])
    open_manifest(str(shards), tmp_path / "manifests", options=ScanOptions())
    (table,) = (tmp_path / "manifests").rglob("*.parquet")
    manifest, run = str(table.parent), tmp_path / "run"
    assert open_data(manifest, DataConfig(), Communicator(), run).n == 6
    (shards / "00001.tar").rename(tmp_path / "elsewhere.tar")
    with pytest.raises(UserError, match=r"1 of 2 shards are missing on this node, such as .*/00001.tar. .* every node"):
        open_data(manifest, DataConfig(), Communicator(), run)
