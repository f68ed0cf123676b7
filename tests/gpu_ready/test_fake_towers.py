"""Run both towers, in float32 and bf16, and training steps on a simulated GPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from benchmarking.run_loss import build_loss
from fake_cuda import DEVICE, GpuRank, fake_cuda
from small_checkpoints import PlainDeepSpeed
from test_step import TOKENS, config_of
from torch._dynamo.utils import counters

from neuclip_ds.config import Config, VisionConfig
from neuclip_ds.data.dataset import Batch
from neuclip_ds.data.loader import RankBatch
from neuclip_ds.distributed.communicator import Pending
from neuclip_ds.engine.average import AVERAGE, WeightAverage
from neuclip_ds.engine.device_batches import DeviceBatches
from neuclip_ds.engine.engine import Engine
from neuclip_ds.engine.start import build_optimizer
from neuclip_ds.losses.base import Position
from neuclip_ds.models.build import build_dual_encoder
from neuclip_ds.models.towers import DualEncoder
from neuclip_ds.section import merge
from neuclip_ds.training.step import StepOutcome, train_step

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


@pytest.mark.slow
def test_compiled_towers_are_one_graph_each_with_every_option() -> None:
    """A graph break would return to Python within a pass; a second batch of the same shape is not recompiled."""
    options: dict[str, Any] = {"vision": {"patch_drop": 0.5}, "text": {"packed": False}, "lora": {"rank": 2}}
    options["activation_checkpointing"] = True
    config = config_of("openclip", model=merge(ONE_BLOCK, options))
    towers = build_dual_encoder(config.model, TOKENS).train()
    torch.compiler.reset()
    counters.clear()
    for tower in (towers.vision, towers.text):
        tower.compile(backend="eager")
    for _ in range(2):
        features = towers(batch().image, batch().tokens)
        torch.autograd.backward(features, [torch.ones_like(x) for x in features])
    assert not counters["graph_break"], counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize(("dtype", "patch_drop"), [(torch.float32, 0.5), (torch.bfloat16, 0.0)])
def test_the_passes_of_the_towers_do_not_wait(dtype: torch.dtype, patch_drop: float) -> None:
    vision = CONFIG.model.vision.model_copy(update={"patch_drop": patch_drop})
    towers = build_dual_encoder(CONFIG.model.model_copy(update={"vision": vision}), TOKENS)
    with fake_cuda() as gpu:
        model = towers.to(DEVICE, dtype).train()
        image = batch().image.to(DEVICE, non_blocking=True)
        tokens = batch().tokens.to(DEVICE, non_blocking=True)
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
        average = WeightAverage(Engine(PlainDeepSpeed(model, optimizer), GpuRank(1)), 0.99)
        for parameter in model.parameters():
            optimizer.state[parameter] = {"exp_avg": torch.zeros_like(parameter)}
        for step in (1, 2):
            gpu.syncs.clear()
            average.update(step)
            assert not gpu.syncs
    assert all(state[AVERAGE].device == DEVICE for state in optimizer.state.values())


class Trainee:
    """A model on the simulated GPU that takes training steps on one of several ranks, without DeepSpeed."""

    def __init__(
        self,
        config: Config,
        model: DualEncoder,
        rank: GpuRank,
        micro: int,
        engine_type: type[PlainDeepSpeed] = PlainDeepSpeed,
    ) -> None:
        optimizer = build_optimizer(model, config.optimizer)
        self._engine = Engine(engine_type(model, optimizer), rank)
        self._loss = build_loss(config, 16, 100, rank, torch.float32)
        self.batches = DeviceBatches(DEVICE, micro, self._engine.pack)

    def step(self, number: int) -> StepOutcome:
        """Run a step on the next of the batches."""
        position = Position(step=number, lr=1e-3, peak_lr=1e-3)
        return train_step(self._engine, self._loss, self.batches, next(self.batches), position)


@pytest.mark.parametrize("micro", [ROWS, ROWS // 2])
def test_a_training_step_of_frozen_parts_and_adapters(micro: int) -> None:
    config = config_of("openclip", model={**ONE_BLOCK, "lora": {"rank": 2}, "activation_checkpointing": True})
    towers = build_dual_encoder(config.model, TOKENS)
    with fake_cuda():
        model = towers.to(DEVICE)
        trainee = Trainee(config, model, GpuRank(2), micro)
        trainee.batches.start(iter([RankBatch([batch()])]))
        assert trainee.step(0).applied
        trained = {name for name, weight in model.named_parameters() if weight.grad is not None}
        assert trained == {name for name, _ in model.named_parameters() if ".lora_" in name}


@pytest.mark.parametrize(("micro", "world_size"), [(ROWS // 2, 1), (ROWS, 8)])
def test_the_host_waits_for_nothing_before_both_towers_are_launched(
    micro: int, world_size: int, towers: DualEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits neither for the device nor for tensors in host memory from other ranks.

    On one rank, the image tower runs first, because its kernels take longer. On several ranks, the text tower runs
    first, so that its features are gathered while the image tower runs.
    """
    towers_in_order = ["vision tower", "text tower"] if world_size == 1 else ["text tower", "vision tower"]
    events: list[str] = []
    wait = Pending.wait

    def recorded_wait(pending: Pending) -> torch.Tensor:
        result = wait(pending)
        if result.device.type == "cpu":
            events.append("wait for a host tensor")
        return result

    monkeypatch.setattr(Pending, "wait", recorded_wait)
    with fake_cuda() as gpu:
        model = copy.deepcopy(towers).to(DEVICE)
        for name in ("text", "vision"):
            model.get_submodule(name).register_forward_hook(lambda *_, name=name: events.append(f"{name} tower"))
        trainee = Trainee(config_of("fastclip_v3", model=ONE_BLOCK), model, GpuRank(world_size), micro)
        trainee.batches.start(RankBatch([batch()]) for _ in range(2))
        for number in range(2):
            events.clear()
            gpu.syncs.clear()
            trainee.step(number)
            assert events[:3] == [*towers_in_order, "wait for a host tensor"]
            assert gpu.syncs == {"engine/engine.py": 1}


def test_the_host_waits_for_the_loader_after_the_backward_passes(towers: DualEncoder) -> None:
    """A step's backward passes are launched before the host waits for the next step's batch."""
    steps = 3
    events: list[str] = []

    class LoggingEngine(PlainDeepSpeed):
        def backward(self, loss: torch.Tensor) -> Any:
            result = super().backward(loss)
            events.append("backward pass")
            return result

        def step(self) -> Any:
            events.append("update")
            return super().step()

    def loader() -> Iterator[RankBatch]:
        for number in range(steps):
            events.append(f"wait for batch {number}")
            yield RankBatch([batch()])

    with fake_cuda() as gpu:
        model = copy.deepcopy(towers).to(DEVICE)
        trainee = Trainee(CONFIG, model, GpuRank(1), ROWS // 2, LoggingEngine)
        trainee.batches.start(loader())
        for number in range(steps):
            gpu.syncs.clear()
            trainee.step(number)
            assert gpu.syncs == {"engine/engine.py": 1}
    two_passes = ["backward pass", "backward pass"]
    assert events == [
        "wait for batch 0",
        *two_passes,
        "wait for batch 1",
        "update",
        *two_passes,
        "wait for batch 2",
        "update",
        *two_passes,
        "update",
    ]


@pytest.mark.parametrize("micro", [ROWS, ROWS // 2])
def test_a_training_step_on_packed_captions_waits_as_rarely(micro: int) -> None:
    """The host packs captions; attention is one kernel, whose arguments do not depend on the captions' lengths."""
    text = {"packed": True, "layers": 2}
    config = config_of("openclip", model=merge(ONE_BLOCK, {"text": text}))
    towers = build_dual_encoder(config.model, TOKENS)
    padded = batch()
    padded.tokens[:, 0] = 0
    padded.tokens[: ROWS // 2, 1:4] = 2
    tokens = 2 * ROWS + 3 * ROWS // 2
    rows: list[int] = []
    with fake_cuda() as gpu:
        model = towers.to(DEVICE, torch.bfloat16)
        for name in ("fc1", "fc2"):
            for layer in model.text.trunk.encoder.layers:
                layer.mlp.get_submodule(name).register_forward_hook(lambda *args: rows.append(len(args[2])))
        trainee = Trainee(config, model, GpuRank(1), micro)
        trainee.batches.start(RankBatch([padded]) for _ in range(2))
        for number in range(2):
            rows.clear()
            gpu.syncs.clear()
            assert trainee.step(number).applied
            assert gpu.syncs == {"engine/engine.py": 1}
    passes = 1 if micro == ROWS else 2
    assert sum(rows) == passes * 2 * (tokens + ROWS)  # the last layer computes one token of each caption
    assert all(weight.grad is not None for weight in model.parameters())
