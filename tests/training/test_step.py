"""Training under DeepSpeed equals training without it: ZeRO 0-3, micro-batches, two real ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from reference import PlainEngine

from neuclip_ds.config import Config
from neuclip_ds.data.dataset import Batch
from neuclip_ds.data.rank_batch import RankBatch, part_rows
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.config import load_engine_config
from neuclip_ds.engine.optimizers import build_optimizer, set_learning_rate
from neuclip_ds.engine.start import start_engine
from neuclip_ds.models.dual_encoder import build_dual_encoder
from neuclip_ds.objectives import build_objective
from neuclip_ds.objectives.base import Context, FeatureGradients, Objective, Step
from neuclip_ds.objectives.gather import Features
from neuclip_ds.recipe import validate
from neuclip_ds.section import merge
from neuclip_ds.training.step import TrainStep

ROWS, STEPS, LR = 16, 5, 1e-3
TREE: dict[str, Any] = {
    "data": {"batch_size": ROWS},
    "model": {
        "vision": {
            "name": "vit_tiny_patch16_224",
            "image_size": 16,
            "options": {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2},
        },
        "text": {"width": 32, "layers": 1, "heads": 2, "context_length": 8, "vocab_size": 300},
        "embed_dim": 16,
    },
    # a warm accumulator: from zero, AdaGrad's first step is a sign, which turns with the last bit of a small gradient
    "objective": {
        "temperature": {"rho": 2.0},
        "other_methods": {"npn": {"prototypes": 24, "lr": 0.05, "initial_accumulator": 0.01}},
    },
    "optimizer": {"lr": LR, "weight_decay": 0.1, "clip_norm": 0.5},
}
TOKENS = SimpleNamespace(vocab_size=300, bos_id=0, eos_id=1, pad_id=1, context_length=8)


def config_of(method: str, engine: str = "zero0_fp32", **options: Any) -> Config:
    return validate(merge(TREE, {"objective": {"method": method}, "deepspeed": engine, **options}))


def data(number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    image = torch.randint(0, 256, (ROWS, 3, 16, 16), generator=generator, dtype=torch.uint8)
    tokens = torch.randint(2, 300, (ROWS, 8), generator=generator)
    tokens[:, 0], tokens[:, -1] = TOKENS.bos_id, TOKENS.eos_id
    return Batch(image, tokens, torch.arange(ROWS) + number, torch.ones(ROWS, dtype=torch.bool))


def share(batch: Batch, communicator: Communicator) -> Batch:
    rows = ROWS // communicator.world_size
    mine = slice(communicator.rank * rows, (communicator.rank + 1) * rows)
    return Batch(batch.image[mine], batch.tokens[mine], batch.index[mine], batch.valid[mine])


def tau_of(objective: Objective) -> float:
    return math.exp(-float(objective.replicated_state()["temperature.theta"]))


def place(number: int) -> Step:
    return Step(number, 0, LR, LR)


def plain(method: str, clip: float, options: Mapping[str, Any] = {}) -> tuple[dict[str, torch.Tensor], float]:
    """One process, the whole batch, no DeepSpeed: autograd through the towers from the feature gradients."""
    config = config_of(method, **options)
    torch.manual_seed(0)
    model = build_dual_encoder(config.model, TOKENS)  # type: ignore[arg-type]
    optimizer = build_optimizer(model.train(), config.optimizer)
    set_learning_rate(optimizer, LR)
    objective = build_objective(config, Context(16, 100, Communicator()), torch.float32)
    for number in range(STEPS):
        batch = data(number)
        features = model(batch.image, batch.tokens)
        detached = Features(features[0].detach(), features[1].detach(), batch.index, batch.valid)
        found = objective(detached, place(number))
        optimizer.zero_grad()
        learning = [pair for pair in zip(features, (found.image, found.text), strict=True) if pair[0].requires_grad]
        torch.autograd.backward(*zip(*learning, strict=True))
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}, tau_of(objective)


def under_deepspeed(
    communicator: Communicator, method: str, engines: list[str], micro: int, options: Mapping[str, Any] = {}
) -> list[Any]:
    import deepspeed

    from neuclip_ds.distributed.launch import join

    join()
    results = []
    for name in engines:
        config = config_of(method, name, **options)
        torch.manual_seed(0)
        model = build_dual_encoder(config.model, TOKENS)  # type: ignore[arg-type]
        if config.model.compile:
            model.compile_towers()
        engine_config = load_engine_config(config, communicator.world_size)
        engine = start_engine(model, config.optimizer, engine_config, communicator)
        objective = build_objective(config, Context(16, 100, communicator), torch.float32)
        step = TrainStep(engine, objective, communicator, micro, seed=0)
        for number in range(STEPS):
            step(share(data(number), communicator), place(number))
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            weights = {key: value.detach().float().cpu().clone() for key, value in model.named_parameters()}
        results.append((weights, tau_of(objective)))
    return results


FLOAT32 = [f"zero{stage}_fp32" for stage in range(4)]
BFLOAT16 = [f"zero{stage}_bf16" for stage in range(4)]


@pytest.mark.parametrize("method", ["openclip", "fastclip_v3", "neuclip"])
def test_zero_stages_with_micro_batches_equal_plain_pytorch(method: str) -> None:
    """Two ranks, micro-batches of 4 out of 8, clipping, five AdamW steps; ZeRO 0, 1, 2 and 3."""
    wanted, tau = plain(method, clip=0.5)
    ranks = run_ranks(2, under_deepspeed, method, FLOAT32, 4)
    for rank in ranks:
        for name, (weights, found_tau) in zip(FLOAT32, rank, strict=True):
            assert found_tau == pytest.approx(tau, rel=1e-5)
            for key, value in weights.items():
                torch.testing.assert_close(value, wanted[key], rtol=0, atol=2e-5, msg=f"{name} {key}")


PARTS: dict[str, Any] = {  # of the towers train, at several learning rates
    "model": {"vision": {"train": 1}, "text": {"train": "frozen"}, "activation_checkpointing": True},
    "optimizer": {"vision": {"lr": 3 * LR, "layer_decay": 0.5}},
}


@pytest.mark.parametrize("engines", [FLOAT32[3:], pytest.param(FLOAT32[:3], marks=pytest.mark.slow)])
def test_frozen_parts_and_their_rates_under_every_stage(engines: list[str]) -> None:
    """Two ranks, micro-batches, two passes, activation checkpointing."""
    wanted, tau = plain("fastclip_v3", clip=0.5, options=PARTS)
    torch.manual_seed(0)
    before = dict(build_dual_encoder(config_of("fastclip_v3", **PARTS).model, TOKENS).named_parameters())  # type: ignore[arg-type]
    for rank in run_ranks(2, under_deepspeed, "fastclip_v3", engines, 4, PARTS):
        for name, (weights, found_tau) in zip(engines, rank, strict=True):
            assert found_tau == pytest.approx(tau, rel=1e-5)
            for key, value in weights.items():
                torch.testing.assert_close(value, wanted[key], rtol=0, atol=2e-5, msg=f"{name} {key}")
                assert before[key].requires_grad or torch.equal(value, before[key]), f"{name} {key}"
                assert not before[key].requires_grad or not torch.equal(value, before[key]), f"{name} {key}"


@pytest.mark.parametrize("micro", [4, ROWS])
def test_a_batch_in_parts_is_the_same_step(micro: int) -> None:
    """Parts of five and six rows, so that micro-batches lie over two of them; the weights have the same bits."""
    config, found = config_of("fastclip_v3"), []
    for parts in (1, 3):
        torch.manual_seed(0)
        model = build_dual_encoder(config.model, TOKENS)  # type: ignore[arg-type]
        engine = PlainEngine(model, torch.optim.AdamW(model.parameters(), LR))
        objective = build_objective(config, Context(16, 100, Communicator()), torch.float32)
        step = TrainStep(engine, objective, Communicator(), micro, seed=0)
        batches = [
            RankBatch(
                [Batch(*(column[part_rows(ROWS, parts, part)] for column in data(number)[:4])) for part in range(parts)]
            )
            for number in range(2)
        ]
        for number, batch in enumerate(step.copies.ahead(iter(batches))):
            step(batch, place(number))
        found.append([value.detach() for value in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_bf16_stays_close_to_float32() -> None:
    """bf16 has 8 bits: five steps of 1e-3 agree to bf16's spacing, in every ZeRO stage, and the stages with another."""
    wanted, _ = plain("openclip", clip=0.5)
    (results,) = run_ranks(1, under_deepspeed, "openclip", BFLOAT16, 8)
    for name, (weights, _) in zip(BFLOAT16, results, strict=True):
        for key, value in weights.items():
            torch.testing.assert_close(value, wanted[key], rtol=2**-7, atol=1.2e-2, msg=f"{name} {key}")


class _Explodes(Objective):
    """An objective whose gradient is not finite."""

    def __init__(self) -> None:
        super().__init__(Context(16, 100, Communicator()), {})

    def __call__(self, features: Any, step: Step) -> FeatureGradients:
        gradient = torch.ones_like(features.image)
        metrics = {"feature_grad_norm": torch.tensor(torch.inf), "tau": torch.tensor(0.07)}
        return FeatureGradients(gradient, gradient, torch.tensor(1.0), metrics)


class _BatchNormTowers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 16), torch.nn.BatchNorm1d(16))

    def forward(self, image: torch.Tensor, tokens: torch.Tensor, ready: Any) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.layers(image / 255)
        ready(features)
        return features, features


def test_a_norm_that_overflows_skips_the_step_and_leaves_batch_norm() -> None:
    """The feature gradient itself is finite."""
    model = _BatchNormTowers()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine = PlainEngine(model, torch.optim.SGD(model.parameters(), lr=1.0))
    outcome = TrainStep(engine, _Explodes(), Communicator(), ROWS, seed=0)(data(7), place(3))
    assert (outcome.applied, outcome.not_finite, engine.skipped_steps) == (False, [], 1)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
