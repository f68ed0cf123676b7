"""An encoders' gradient that is not finite, from finite feature gradients: the step is skipped in every stage."""

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
from neuclip_ds.objectives.base import Context, FeatureGradients, Objective, Step
from neuclip_ds.training.step import TrainStep


class _Overflows(Objective):
    """A feature gradient that is finite, of a size that the encoders' is not."""

    def __init__(self) -> None:
        super().__init__(Context(16, 100, Communicator()), {})

    def __call__(self, features: Any, step: Step) -> FeatureGradients:
        huge = torch.full_like(features.image, 3e38 if step.number == 1 else 1e-3) * torch.sign(features.image)
        one = features.image.new_tensor(1.0)
        return FeatureGradients(huge, huge, one, {"feature_grad_norm": one, "tau": 0.07 * one})


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
        step = TrainStep(engine, _Overflows(), communicator, ROWS, seed=0)
        seen = []
        for number in range(3):
            before = [value.detach().clone() for value in model.parameters()]
            outcome = step(data(number), place(number))
            moved = any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
            seen.append((outcome.grad_norm, outcome.applied, moved))
        found.append(seen)
    return found


ENGINES = [f"zero{stage}_{precision}" for stage in range(3) for precision in ("bf16", "fp32")]


@pytest.mark.slow
def test_updates_with_an_infinite_gradient_are_skipped() -> None:
    check_skipping("cpu")


def check_skipping(device: str) -> None:
    (results,) = run_ranks(1, steps_under, ENGINES, device=device)
    for name, (first, second, third) in zip(ENGINES, results, strict=True):
        assert (first[1:], third[1:]) == ((True, True), (True, True)), name
        assert math.isfinite(first[0]), name
        assert math.isfinite(third[0]), name
        assert not math.isfinite(second[0]), name
        assert second[1:] == (False, False), name
