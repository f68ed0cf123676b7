"""Compiled towers train to the weights of plain ones, up to the order of float sums."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_runs import demo_shards, newest_checkpoint, train

from neuclip_ds.checkpoint.sharded_state import StateFiles
from neuclip_ds.config import Config
from neuclip_ds.engine.config import load_engine_config
from neuclip_ds.errors import UserError

STEPS = 3


@pytest.mark.slow
def test_compiled_towers_learn_the_same(tmp_path: Path) -> None:
    shards = demo_shards(tmp_path / "demo", pairs=40)
    found = []
    for name, options in (("plain", []), ("compiled", ["--model.compile=true"])):
        done = train(tmp_path / name, str(shards), STEPS, *options, ranks=2)
        assert done.returncode == 0, done.stderr
        found.append(StateFiles(newest_checkpoint(tmp_path / name) / "engine").weights())
    assert found[0].keys() == found[1].keys()
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=0, atol=1e-4, msg=key)


def test_zero_3_is_refused() -> None:
    config = Config.model_validate({"model": {"compile": True}, "deepspeed": "zero3_fp32"})
    with pytest.raises(UserError, match="does not work with ZeRO 3"):
        load_engine_config(config, world_size=1)
