"""Two recoveries compared: in log u, and in moments over all parameters."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from neuclip_ds.checkpoint.sharded_state import StateShard, buffers_file, contents_of, index_file, shards_file
from neuclip_ds.errors import UserError
from neuclip_ds.reproduction.recovery_difference import recovery_difference

U = torch.tensor([[-1.0, -2.0], [-3.0, -math.inf], [-4.0, -5.0]])


def checkpoint(folder: Path, log_u: Tensor, moment: Tensor, kind: str = "exp_avg") -> Path:
    (folder / "engine").mkdir(parents=True)
    weight = torch.zeros(4)
    fragments = [StateShard("weight", "a", 0, 4, weight), StateShard(kind, "a", 0, 4, moment)]
    shards_file(0, 1, "one", fragments).write(folder / "engine")
    buffers_file("one", {}).write(folder / "engine")
    index_file("one", {"a": [4]}, [contents_of(fragments)], {}, {}).write(folder / "engine")
    for start in range(0, len(log_u), 2):  # as two ranks would write
        part = log_u[start : start + 2].contiguous()
        save_file({"log_u": part}, folder / f"samples.{start:012d}-{start + len(part):012d}.safetensors")
    return folder


def test_difference(tmp_path: Path) -> None:
    first = checkpoint(tmp_path / "a", U, torch.tensor([1.0, 0.0, 2.0, 0.0]))
    second = checkpoint(tmp_path / "b", U + torch.tensor([0.5, -0.1]), torch.tensor([2.0, 0.0, 0.0, 1.0]))
    found = recovery_difference(first, second)
    assert found["log_u_mean"] == pytest.approx((3 * 0.5 - 2 * 0.1) / 5, rel=1e-6)
    assert found["log_u_rms"] == pytest.approx(math.sqrt((3 * 0.25 + 2 * 0.01) / 5), rel=1e-6)
    assert (found["exp_avg cosine"], found["exp_avg norm_ratio"]) == pytest.approx((2 / 5, 1.0))
    same = recovery_difference(first, first)
    assert (same["log_u_rms"], same["log_u_correlation"]) == (0, pytest.approx(1))


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    first = checkpoint(tmp_path / "a", U, torch.ones(4))
    with pytest.raises(UserError, match="other data: 3 and 1 samples"):
        recovery_difference(first, checkpoint(tmp_path / "b", U[:1], torch.ones(4)))
    with pytest.raises(UserError, match="other optimizers"):
        recovery_difference(first, checkpoint(tmp_path / "c", U, torch.ones(4), kind="momentum"))
    (tmp_path / "d").mkdir()
    with pytest.raises(UserError, match="holds no u"):
        recovery_difference(first, tmp_path / "d")
