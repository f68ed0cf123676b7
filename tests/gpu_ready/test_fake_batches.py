"""A training step is launched before the host waits for the batch of the next one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_cuda import DEVICE, GpuRank, fake_cuda
from replay import PlainEngine
from test_fake_towers import CONFIG, ROWS, TOKENIZER, batch

from neuclip_ds.data.loader import RankBatch
from neuclip_ds.engine.start import build_optimizer
from neuclip_ds.models.build import build_dual_encoder
from neuclip_ds.objectives import build_objective
from neuclip_ds.objectives.base import Context, Step
from neuclip_ds.training.step import TrainStep

STEPS = 3


@pytest.mark.parametrize("micro", [ROWS, ROWS // 2])
def test_the_loader_is_waited_for_after_a_backward_pass(micro: int) -> None:
    events: list[str] = []

    class LoggingEngine(PlainEngine):
        def backward(self, scalar: torch.Tensor) -> Any:
            found = super().backward(scalar)
            events.append("backward pass")
            return found

        def step(self) -> Any:
            events.append("update")
            return super().step()

    def loader() -> Iterator[RankBatch]:
        for number in range(STEPS):
            events.append(f"wait for batch {number}")
            yield RankBatch([batch()])

    model, passes = build_dual_encoder(CONFIG.model, TOKENIZER), ["backward pass"] * (ROWS // micro)
    with fake_cuda() as gpu:
        rank = GpuRank(1)
        engine = LoggingEngine(model.to(DEVICE), build_optimizer(model, CONFIG.optimizer))
        step = TrainStep(engine, build_objective(CONFIG, Context(16, 100, rank), torch.float32), rank, micro, seed=0)
        step.batches.start(loader())
        for number in range(STEPS):
            arrived = next(step.batches)
            gpu.syncs.clear()
            step(arrived, Step(number, 0, 1e-3, 1e-3))
            assert gpu.syncs == {"engine/update.py": 1}
    waits = [[f"wait for batch {number}"] for number in range(1, STEPS)]
    assert events == ["wait for batch 0", *(event for wait in [*waits, []] for event in [*passes, *wait, "update"])]
