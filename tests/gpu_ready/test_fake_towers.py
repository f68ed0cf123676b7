"""Run both towers, in float32 and bf16, and training steps on a simulated GPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import DEVICE, GpuRank, fake_cuda
from replay import PlainEngine
from test_step import TOKENS, config_of
from torch._dynamo.utils import counters

from neuclip_ds.config import VisionConfig
from neuclip_ds.data.dataset import Batch
from neuclip_ds.data.loader import RankBatch
from neuclip_ds.engine.average import AVERAGE, WeightAverage
from neuclip_ds.engine.start import build_optimizer
from neuclip_ds.models.build import build_dual_encoder
from neuclip_ds.models.towers import DualEncoder
from neuclip_ds.objectives import build_objective
from neuclip_ds.objectives.base import Context, Step
from neuclip_ds.section import merge
from neuclip_ds.training.step import TrainStep

ROWS = 8
IMAGE_SIZE = 16
CONTEXT_LENGTH = 8
ONE_BLOCK = {"vision": {"options": {"depth": 1}}}
CONFIG = config_of("openclip", model=ONE_BLOCK)


@pytest.fixture(scope="module")
def towers() -> DualEncoder:
    return build_dual_encoder(CONFIG.model, TOKENS)


def batch() -> Batch:
    image = torch.zeros(ROWS, 3, IMAGE_SIZE, IMAGE_SIZE, dtype=torch.uint8)
    tokens = torch.ones(ROWS, CONTEXT_LENGTH, dtype=torch.int64)
    return Batch(image, tokens, torch.arange(ROWS), torch.ones(ROWS, dtype=torch.bool))


def test_compiled_towers_are_one_graph_each_with_every_option() -> None:
    """A graph break would return to Python within a pass; a second batch of the same shape is not recompiled."""
    options = {"vision": {"patch_drop": 0.5}, "lora": {"rank": 2}, "activation_checkpointing": True}
    config = config_of("openclip", model=merge(ONE_BLOCK, options))
    towers = build_dual_encoder(config.model, TOKENS).train()
    torch.compiler.reset()
    counters.clear()
    for tower in (towers.vision, towers.text):
        tower.compile(backend="eager")
    for _ in range(2):
        features = towers(*batch()[:2])
        torch.autograd.backward(features, [torch.ones_like(x) for x in features])
    assert not counters["graph_break"], counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize(("dtype", "patch_drop"), [(torch.float32, 0.5), (torch.bfloat16, 0.0)])
def test_the_passes_of_the_towers_do_not_wait(dtype: torch.dtype, patch_drop: float) -> None:
    vision = CONFIG.model.vision.model_copy(update={"patch_drop": patch_drop})
    towers = build_dual_encoder(CONFIG.model.model_copy(update={"vision": vision}), TOKENS)
    with fake_cuda() as gpu:
        model = towers.to(DEVICE, dtype).train()
        image, tokens = (x.to(DEVICE, non_blocking=True) for x in batch()[:2])
        gpu.syncs.clear()
        features = model(image, tokens)
        assert {x.dtype for x in features} == {torch.float32}
        torch.autograd.backward(features, [torch.ones_like(x) for x in features])
        assert not gpu.syncs
        assert all(p.grad is not None and p.grad.device == DEVICE for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(("name", "channels_last"), [("resnet10t", True), ("vit_tiny_patch16_224", False)])
def test_convolutions_of_resnets_run_channels_last(name: str, channels_last: bool) -> None:
    vision = VisionConfig(name=name, image_size=64, options={} if channels_last else {"depth": 1})
    model = build_dual_encoder(CONFIG.model.model_copy(update={"vision": vision}), TOKENS)
    layouts = []

    def record_layouts(layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        for x in (inputs[0], output):
            layouts.append(x.is_contiguous(memory_format=torch.channels_last))

    for layer in model.vision.modules():
        if isinstance(layer, torch.nn.Conv2d):
            layer.register_forward_hook(record_layouts)
    with fake_cuda(), torch.no_grad():  # with autograd, a fake tensor does not know its device
        model.to(DEVICE)(torch.zeros(2, 3, 64, 64, dtype=torch.uint8).to(DEVICE), None)
    assert layouts and all(layouts) == channels_last


def test_the_moving_average_waits_for_nothing(towers: DualEncoder) -> None:
    with fake_cuda() as gpu:
        model = copy.deepcopy(towers).to(DEVICE)
        optimizer = build_optimizer(model, CONFIG.optimizer)
        average = WeightAverage(SimpleNamespace(basic_optimizer=optimizer), 0.99)
        for parameter in model.parameters():
            optimizer.state[parameter] = {"exp_avg": torch.zeros_like(parameter)}
        for step in (1, 2):
            gpu.syncs.clear()
            average.update(step)
            assert not gpu.syncs
    assert all(state[AVERAGE].device == DEVICE for state in optimizer.state.values())


@pytest.mark.parametrize("micro", [ROWS, ROWS // 2])
def test_a_training_step_of_frozen_parts_and_adapters(micro: int) -> None:
    config = config_of("openclip", model={**ONE_BLOCK, "lora": {"rank": 2}, "activation_checkpointing": True})
    towers = build_dual_encoder(config.model, TOKENS)
    with fake_cuda():
        model = towers.to(DEVICE)
        rank = GpuRank(2)
        engine = PlainEngine(model, build_optimizer(model, config.optimizer))
        objective = build_objective(config, Context(16, 100, rank), torch.float32)
        step = TrainStep(engine, objective, rank, micro, seed=0)
        assert all(step(batch(), Step(number, 0, 1e-3, 1e-3)).applied for number in range(2))
        assert {name for name, p in model.named_parameters() if p.grad is not None} == {
            name for name, p in model.named_parameters() if ".lora_" in name
        }


def test_the_host_waits_for_the_loader_after_the_backward_passes() -> None:
    """A step's backward passes are launched before the host waits for the next step's batch."""
    steps = 3
    micro = ROWS // 2
    events: list[str] = []

    class LoggingEngine(PlainEngine):
        def backward(self, scalar: torch.Tensor) -> Any:
            result = super().backward(scalar)
            events.append("backward pass")
            return result

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
        engine = LoggingEngine(model.to(DEVICE), build_optimizer(model, CONFIG.optimizer))
        step = TrainStep(engine, build_objective(CONFIG, Context(16, 100, rank), torch.float32), rank, micro, seed=0)
        step.batches.start(loader())
        for number in range(steps):
            arrived = next(step.batches)
            gpu.syncs.clear()
            step(arrived, Step(number, 0, 1e-3, 1e-3))
            assert gpu.syncs == {"engine/update.py": 1}
    assert events == [
        "wait for batch 0",
        *("backward pass", "backward pass", "wait for batch 1", "update"),
        *("backward pass", "backward pass", "wait for batch 2", "update"),
        *("backward pass", "backward pass", "update"),
    ]
