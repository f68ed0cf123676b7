"""Run both towers, in float32 and bf16, and training steps on a simulated GPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import DEVICE, GpuRank, fake_cuda
from neuclip_ds.objectives import build_objective
from neuclip_ds.training.step import TrainStep
from replay import PlainEngine
from test_step import TOKENS, config_of
from torch._dynamo.utils import counters

from neuclip_ds.config import VisionConfig
from neuclip_ds.data.dataset import Batch
from neuclip_ds.data.loader import RankBatch
from neuclip_ds.engine.average import AVERAGE, WeightAverage
from neuclip_ds.engine.engine import Engine
from neuclip_ds.engine.start import build_optimizer
from neuclip_ds.losses.base import Context, Step
from neuclip_ds.models.build import build_dual_encoder
from neuclip_ds.models.towers import DualEncoder

ROWS, SIDE, LENGTH = 8, 16, 8
CONFIG = config_of("openclip")


@pytest.fixture(scope="module")
def towers() -> DualEncoder:
    return build_dual_encoder(CONFIG.model, TOKENS)


def batch() -> Batch:
    image = torch.zeros(ROWS, 3, SIDE, SIDE, dtype=torch.uint8)
    tokens = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    return Batch(image, tokens, torch.arange(ROWS), torch.ones(ROWS, dtype=torch.bool))


@pytest.mark.parametrize(
    "options", [{}, {"vision": {"patch_drop": 0.5}}, {"activation_checkpointing": True}, {"lora": {"rank": 2}}], ids=str
)
def test_compiled_towers_are_one_graph_each(options: dict[str, Any]) -> None:
    """A graph break would return to Python within a pass; a second batch of the same shape is not recompiled."""
    towers = build_dual_encoder(config_of("openclip", model=options).model, TOKENS).train()
    torch.compiler.reset()
    counters.clear()
    for tower in (towers.vision, towers.text):
        tower.compile(backend="eager")
    for _ in range(2):
        features = towers(batch().image, batch().tokens)
        torch.autograd.backward(features, [torch.ones_like(x) for x in features])
    assert not counters["graph_break"], counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize(("dtype", "patch_drop"), [(torch.float32, 0.0), (torch.bfloat16, 0.0), (torch.float32, 0.5)])
def test_forward_and_backward(dtype: torch.dtype, patch_drop: float) -> None:
    vision = CONFIG.model.vision.model_copy(update={"patch_drop": patch_drop})
    towers = build_dual_encoder(CONFIG.model.model_copy(update={"vision": vision}), TOKENS)
    with fake_cuda() as gpu:
        model = towers.to(DEVICE, dtype).train()
        image, tokens = (x.to(DEVICE, non_blocking=True) for x in (batch().image, batch().tokens))
        gpu.syncs.clear()
        features = model(image, tokens)
        assert {x.dtype for x in features} == {torch.float32}
        torch.autograd.backward(features, [torch.ones_like(x) for x in features])
        assert not gpu.syncs
        assert all(p.grad is not None and p.grad.device == DEVICE for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(("name", "channels_last"), [("resnet50", True), ("vit_tiny_patch16_224", False)])
def test_convolutions_run_channels_last(name: str, channels_last: bool) -> None:
    vision = VisionConfig(name=name, image_size=64)
    model = build_dual_encoder(CONFIG.model.model_copy(update={"vision": vision}), TOKENS)
    layouts = []
    for layer in model.vision.modules():
        if isinstance(layer, torch.nn.Conv2d):
            layer.register_forward_hook(
                lambda _, inputs, output: layouts.extend(
                    x.is_contiguous(memory_format=torch.channels_last) for x in (inputs[0], output)
                )
            )
    with fake_cuda(), torch.no_grad():  # with autograd, a fake tensor does not know its device
        model.to(DEVICE)(torch.zeros(2, 3, 64, 64, dtype=torch.uint8).to(DEVICE), None)
    assert layouts and all(layouts) == channels_last


def test_the_moving_average_waits_for_nothing(towers: DualEncoder) -> None:
    with fake_cuda() as gpu:
        model = copy.deepcopy(towers).to(DEVICE)
        optimizer = build_optimizer(model, CONFIG.optimizer)
        average = WeightAverage(SimpleNamespace(optimizer_state=optimizer.state), 0.99)
        for parameter in model.parameters():
            optimizer.state[parameter] = {"exp_avg": torch.zeros_like(parameter)}
        for step in (1, 2):
            gpu.syncs.clear()
            average.update(step)
            assert not gpu.syncs
    assert all(state[AVERAGE].device == DEVICE for state in optimizer.state.values())


@pytest.mark.parametrize("micro", [ROWS, ROWS // 2])
def test_a_training_step_of_frozen_parts_and_adapters(micro: int) -> None:
    parts = {"lora": {"rank": 2}, "activation_checkpointing": True}
    config = config_of("openclip", model=parts)
    towers = build_dual_encoder(config.model, TOKENS)
    with fake_cuda():
        model, rank = towers.to(DEVICE), GpuRank(2)
        engine = Engine(PlainEngine(model, build_optimizer(model, config.optimizer)), rank)
        objective = build_objective(config, Context(16, 100, rank), torch.float32)
        step = TrainStep(engine, objective, rank, micro)
        assert all(step(batch(), Step(number, 0, 1e-3, 1e-3)).applied for number in range(2))
        assert {name for name, p in model.named_parameters() if p.grad is not None} == {
            name for name, p in model.named_parameters() if ".lora_" in name
        }


def test_the_loader_is_waited_for_after_the_backward_passes() -> None:
    """A step's backward passes are launched before the host waits for the next step's batch."""
    steps, micro, events = 3, ROWS // 2, list[str]()

    class LoggingEngine(PlainEngine):
        def backward(self, scalar: torch.Tensor) -> Any:
            found = super().backward(scalar)
            events.append("backward pass")
            return found

        def step(self) -> Any:
            events.append("update")
            return super().step()

    def loader() -> Iterator[RankBatch]:
        for number in range(steps):
            events.append(f"wait for batch {number}")
            yield RankBatch([batch()])

    model = build_dual_encoder(CONFIG.model, TOKENS)
    with fake_cuda() as gpu:
        rank = GpuRank(1)
        engine = Engine(LoggingEngine(model.to(DEVICE), build_optimizer(model, CONFIG.optimizer)), rank)
        step = TrainStep(engine, build_objective(CONFIG, Context(16, 100, rank), torch.float32), rank, micro)
        step.batches.start(loader())
        for number in range(steps):
            arrived = next(step.batches)
            gpu.syncs.clear()
            step(arrived, Step(number, 0, 1e-3, 1e-3))
            assert gpu.syncs == {"engine/engine.py": 1}
    waits = [[f"wait for batch {number}"] for number in range(1, steps)]
    passes = ["backward pass"] * 2
    assert events == ["wait for batch 0", *(event for wait in [*waits, []] for event in [*passes, *wait, "update"])]
