"""Batch-norm statistics of bf16 towers are computed in float32, saved, resumed and loaded; extra passes keep them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from small_runs import demo_shards, newest_checkpoint, train_connected
from torch import Tensor

from neuclip_ds.checkpoint.saved_model import open_model
from neuclip_ds.checkpoint.sharded_state import BUFFER, STATE, StateFiles
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.losses.batch_norm import batch_norms, kept_statistics
from neuclip_ds.recipe import validate
from neuclip_ds.reporting.metrics import read_metrics
from neuclip_ds.training.hooks import Hook
from neuclip_ds.training.trainer import Loop, StepResult

STATISTICS = ("running_mean", "running_var")
RESNET: dict[str, Any] = {
    "vision": {"name": "resnet50", "image_size": 32, "options": {"layers": [1] * 4, "channels": [8, 8, 16, 16]}},
    "text": {"width": 16, "layers": 1, "heads": 2, "vocab_size": 300},
    "embed_dim": 16,
}
OPTIONS: dict[str, Any] = {
    "model": RESNET,
    "objective": {"method": "openclip"},
    "optimizer": {"lr": 0.01},
    "data": {"batch_size": 16, "micro_batch": 4, "workers": 0, "zero_shot": ""},
}


class FollowStatistics(Hook):
    """Hook that computes every layer's statistics from its inputs in float64 and compares them with the layer's."""

    def __init__(self) -> None:
        self.at_start: dict[str, Tensor] = {}

    def start(self, loop: Loop) -> None:
        module = loop.context.engine.module
        self.at_start = {name: buffer.clone() for name, buffer in module.named_buffers() if "running_" in name}
        self._layers = batch_norms(module)
        self._wanted = [{name: getattr(layer, name).double() for name in STATISTICS} for layer in self._layers]
        for layer, wanted in zip(self._layers, self._wanted, strict=True):
            handle = layer.register_forward_pre_hook(lambda layer, inputs, wanted=wanted: _move(layer, inputs, wanted))
            loop.resources.callback(handle.remove)

    def after_step(self, loop: Loop, result: StepResult) -> None:
        assert result.applied
        for layer, wanted in zip(self._layers, self._wanted, strict=True):
            for name, value in wanted.items():
                found = getattr(layer, name)
                assert found.dtype == torch.float32
                torch.testing.assert_close(found.double(), value, rtol=1e-5, atol=1e-6)


def _move(layer: Any, inputs: tuple[Tensor], wanted: dict[str, Tensor]) -> None:
    (x,) = inputs
    assert x.dtype == torch.bfloat16
    if layer.training:
        variance, mean = torch.var_mean(x.detach().double(), dim=(0, 2, 3))
        for name, value in zip(STATISTICS, (mean, variance), strict=True):
            wanted[name].lerp_(value, layer.momentum)  # the momentum is 0 in the first of two passes


def train(communicator: Communicator, shards: str, runs: Path, engines: list[str]) -> None:
    """With each engine, train two steps with an evaluation and a checkpoint, then resume for two more steps."""
    for name in engines:
        run = {"name": name, "output_dir": str(runs), "evaluate_every": 2, "checkpoint_every": 2}
        data = {**OPTIONS["data"], "train": shards, "val": str(Path(shards).parent / "val")}
        options = {**OPTIONS, "deepspeed": name, "data": data, "run": run}
        train_connected(communicator, validate({**options, "max_steps": 2}), FollowStatistics())
        resumed = FollowStatistics()
        train_connected(communicator, validate({**options, "max_steps": 4}), resumed)
        saved = StateFiles(runs / name / "checkpoints" / "step_000000002" / STATE).replicated(BUFFER)
        assert len(resumed.at_start) > 20
        for key, value in resumed.at_start.items():
            assert torch.equal(value, saved[key]), key


@pytest.mark.slow
def test_every_stage_trains_resumes_and_loads_float32_statistics_of_a_bf16_resnet(tmp_path: Path) -> None:
    shards, engines = demo_shards(tmp_path / "data", pairs=96), [f"zero{stage}_bf16" for stage in range(4)]
    run_ranks(2, train, str(shards), tmp_path / "runs", engines)
    for name in engines:
        run = tmp_path / "runs" / name
        assert sum("retrieval_pairs" in record for record in read_metrics(run / "metrics.jsonl")) == 2
        opened = dict(open_model(str(run), Communicator()).model.named_buffers())
        saved = StateFiles(newest_checkpoint(tmp_path / "runs", name) / STATE).replicated(BUFFER)
        statistics = {key: x for key, x in saved.items() if "running_" in key}
        assert all(torch.equal(opened[key], value) for key, value in statistics.items())
        assert {x.dtype for x in statistics.values()} == {torch.float32}
        assert any((x != x.bfloat16()).any() for x in statistics.values())


@pytest.mark.parametrize("momentum", [0.1, None])
def test_passes_that_keep_the_statistics_do_not_change_later_averages(momentum: float | None) -> None:
    """With momentum=None, a layer averages over as many passes as it has counted."""
    layer = torch.nn.BatchNorm1d(3, momentum=momentum)
    single = torch.nn.BatchNorm1d(3, momentum=momentum)
    for seed in range(3):
        features = torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))
        with kept_statistics([layer]):
            layer(features)
        layer(features)
        single(features)
    for name, value in single.state_dict().items():
        assert torch.equal(layer.state_dict()[name], value), name
