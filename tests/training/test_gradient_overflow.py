"""What DeepSpeed does with an encoders' gradient that is not finite: it skips the update, and says so to who asks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ranks import run_ranks
from test_step import ROWS, TOKENS, config_of, data, place

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.config import load_engine_config
from neuclip_ds.engine.start import start_engine
from neuclip_ds.models.dual_encoder import build_dual_encoder
from neuclip_ds.objectives.base import FeatureGradients, Step
from neuclip_ds.training.step import TrainStep


class _Overflows:
    """A feature gradient that is finite, of a size that the encoders' is not."""

    def begin_gather(self, index: torch.Tensor, valid: torch.Tensor) -> None:
        pass

    def __call__(self, features: Any, step: Step) -> FeatureGradients:
        huge = torch.full_like(features.image, 3e38 if step.number == 1 else 1e-3) * torch.sign(features.image)
        metrics = {"feature_grad_norm": torch.tensor(1.0), "tau": torch.tensor(0.07)}
        return FeatureGradients(huge, huge, torch.tensor(1.0), metrics)


def steps_under(communicator: Communicator, engines: list[str]) -> list[list[tuple[float, bool, bool]]]:
    """(norm, applied, weights moved) of three steps, of which the second overflows."""
    from neuclip_ds.distributed.launch import join

    join()
    found = []
    for name in engines:
        config = config_of("openclip", name)
        torch.manual_seed(0)
        model = build_dual_encoder(config.model, TOKENS)  # type: ignore[arg-type]
        engine = start_engine(model, config.optimizer, load_engine_config(config, 1), communicator)
        step = TrainStep(engine, _Overflows(), communicator, ROWS, seed=0)  # type: ignore[arg-type]
        seen = []
        for number in range(3):
            before = [value.detach().clone() for value in model.parameters()]
            step(data(number), place(number))
            moved = any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
            norm = engine.get_global_grad_norm()
            seen.append((math.nan if norm is None else float(norm), engine.was_step_applied(), moved))
        found.append(seen)
    return found


SKIPPING = ["zero0_bf16", "zero1_bf16", "zero1_fp32", "zero2_bf16", "zero2_fp32"]


@pytest.mark.slow
def test_updates_with_an_infinite_gradient_are_skipped() -> None:
    """But for float32 without ZeRO, where DeepSpeed knows no norm and applies what it gets."""
    (results,) = run_ranks(1, steps_under, [*SKIPPING, "zero0_fp32"])
    for name, (first, second, third) in zip(SKIPPING, results, strict=False):
        assert (first[1:], third[1:]) == ((True, True), (True, True)), name
        assert math.isfinite(first[0]), name
        assert math.isfinite(third[0]), name
        assert second == (math.inf, False, False), name
    for norm, applied, _ in results[-1]:
        assert math.isnan(norm)
        assert applied
