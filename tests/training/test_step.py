"""Training under DeepSpeed equals plain PyTorch training, for ZeRO 0-3, micro-batches and two real ranks.

DeepSpeed's engines train on packed captions, and plain PyTorch on padded captions.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from small_checkpoints import PlainDeepSpeed, gathered_weights

from neuclip_ds.config import Config
from neuclip_ds.data.dataset import Batch
from neuclip_ds.data.loader import RankBatch
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.config import load_engine_config
from neuclip_ds.engine.device_batches import DeviceBatches
from neuclip_ds.engine.engine import Engine
from neuclip_ds.engine.start import build_optimizer, start_engine
from neuclip_ds.losses.base import LossFunction, LossOutput, Position
from neuclip_ds.losses.contrastive_loss import ContrastiveLoss
from neuclip_ds.losses.gather import GatheredFeatures
from neuclip_ds.models.build import build_dual_encoder
from neuclip_ds.models.compilation import compile_towers
from neuclip_ds.recipe import validate
from neuclip_ds.section import merge
from neuclip_ds.training.step import StepOutcome, train_step

ROWS, STEPS, LR = 16, 3, 1e-3
MODEL: dict[str, Any] = {
    "vision": {
        "name": "vit_tiny_patch16_224",
        "image_size": 16,
        "options": {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2},
    },
    "text": {"width": 32, "layers": 1, "heads": 2, "context_length": 8, "vocab_size": 300},
    "embed_dim": 16,
}
TREE: dict[str, Any] = {
    "data": {"batch_size": ROWS},
    "model": MODEL,
    "objective": {
        "temperature": {"rho": 2.0},
        "other_methods": {"npn": {"prototypes": 24}},
    },
    "optimizer": {"lr": LR, "weight_decay": 0.1, "max_grad_norm": 0.5},
}
TOKENS = SimpleNamespace(vocab_size=300, bos_id=0, eos_id=1, pad_id=1, context_length=8)


def config_of(method: str, engine: str = "zero0_fp32", **options: Any) -> Config:
    return validate(merge(TREE, {"objective": {"method": method}, "deepspeed": engine, **options}))


def data(number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    image = torch.randint(0, 256, (ROWS, 3, 16, 16), generator=generator, dtype=torch.uint8)
    tokens = torch.randint(2, 300, (ROWS, 8), generator=generator)
    lengths = torch.randint(3, 9, (ROWS, 1), generator=generator)
    tokens[:, 0] = TOKENS.bos_id
    tokens[torch.arange(8) >= lengths - 1] = TOKENS.eos_id  # EOS is also the padding
    return Batch(image, tokens, torch.arange(ROWS) + number, torch.ones(ROWS, dtype=torch.bool))


def rank_part(batch: Batch, communicator: Communicator) -> Batch:
    rows = ROWS // communicator.world_size
    mine = slice(communicator.rank * rows, (communicator.rank + 1) * rows)
    return Batch(batch.image[mine], batch.tokens[mine], batch.index[mine], batch.valid[mine])


def position_of(number: int) -> Position:
    return Position(step=number, lr=LR, peak_lr=LR)


def new_loss(config: Config, communicator: Communicator) -> ContrastiveLoss:
    """Return the loss of a run with 100 samples, as the trainer builds it."""
    return ContrastiveLoss(
        config.objective,
        dim=16,
        samples=100,
        epochs=config.epochs,
        steps_per_epoch=STEPS,
        lr=config.optimizer.lr,
        betas=config.optimizer.betas,
        adam_eps=config.optimizer.eps,
        communicator=communicator,
        undo=True,
        validate=False,
        spare_row=False,
    )


class Trainee:
    """An engine, a loss and a source of batches, which together take training steps."""

    def __init__(self, engine: Engine, loss: ContrastiveLoss, micro_batch: int) -> None:
        self.engine = engine
        self.loss = loss
        self._batches = DeviceBatches(engine.device, micro_batch, engine.pack)

    def step(self, batch: Batch, position: Position) -> StepOutcome:
        self._batches.start(iter([RankBatch([batch])]))
        return train_step(self.engine, self.loss, self._batches, next(self._batches), position)


def plain(method: str, clip: float, options: Mapping[str, Any] = {}) -> tuple[dict[str, torch.Tensor], float]:
    """Train on whole batches in one process without DeepSpeed; return the weights and the temperature.

    The last image block computes all tokens, unlike under DeepSpeed.
    """
    config = config_of(method, **merge(options, {"model": {"vision": {"class_token_only": False}}}))
    torch.manual_seed(0)
    model = build_dual_encoder(config.model, TOKENS)  # type: ignore[arg-type]
    model.text.packed = False
    optimizer = build_optimizer(model.train(), config.optimizer)
    for group in optimizer.param_groups:
        group["lr"] = LR * group["lr_scale"]
    loss = new_loss(config, Communicator())
    for number in range(STEPS):
        batch = data(number)
        image, text = model(batch.image, batch.tokens)
        value = loss(image, text, batch.index, batch.valid, position=position_of(number))
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return {name: weight.detach() for name, weight in model.named_parameters()}, loss.temperature


def under_deepspeed(
    communicator: Communicator, method: str, engines: list[str], micro: int, options: Mapping[str, Any] = {}
) -> list[tuple[dict[str, torch.Tensor], float]]:
    """Train with each engine; return the weights and the temperature for each."""
    results = []
    for name in engines:
        config = config_of(method, name, **options)
        torch.manual_seed(0)
        model = build_dual_encoder(config.model, TOKENS)  # type: ignore[arg-type]
        if config.model.compile:
            compile_towers(model, config.model.compile)
        engine_config = load_engine_config(config, communicator.world_size)
        engine = start_engine(model, config.optimizer, engine_config, communicator)
        trainee = Trainee(engine, new_loss(config, communicator), micro)
        for number in range(STEPS):
            trainee.step(rank_part(data(number), communicator), position_of(number))
        weights = {key: value.float() for key, value in gathered_weights(model).items()}
        results.append((weights, trainee.loss.temperature))
    return results


FLOAT32 = [f"zero{stage}_fp32" for stage in range(4)]
BFLOAT16 = [f"zero{stage}_bf16" for stage in range(4)]


PARTS: dict[str, Any] = {  # only parts of the towers train, at different learning rates
    "model": {"vision": {"trainable": 1}, "text": {"trainable": "frozen"}, "activation_checkpointing": True},
    "optimizer": {"vision_lr": 3 * LR, "layer_decay": 0.5},
}
Case = tuple[str, list[str], dict[str, Any]]  # method, engines, options
QUICK: list[Case] = [  # every stage and every kind of method once
    ("fastclip_v3", FLOAT32[:3], {}),
    ("openclip", FLOAT32[3:], {}),
    ("neuclip", FLOAT32[3:], PARTS),
]
OTHERS: list[Case] = [
    ("fastclip_v3", FLOAT32[3:], {}),
    ("fastclip_v3", FLOAT32, PARTS),
    ("openclip", FLOAT32[:3], {}),
    ("neuclip", FLOAT32, {}),
]


def train_cases(communicator: Communicator, cases: list[Case]) -> list[Any]:
    return [under_deepspeed(communicator, method, engines, 4, options) for method, engines, options in cases]


@pytest.mark.parametrize("cases", [QUICK, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["quick", "others"])
def test_zero_stages_with_micro_batches_equal_plain_pytorch(cases: list[Case]) -> None:
    """Two ranks take three clipped AdamW steps in micro-batches of 4 of 8 rows; frozen parts stay bit-identical."""
    for (method, engines, options), *ranks in zip(cases, *run_ranks(2, train_cases, cases), strict=True):
        expected, expected_tau = plain(method, clip=0.5, options=options)
        torch.manual_seed(0)
        before = dict(build_dual_encoder(config_of(method, **options).model, TOKENS).named_parameters())  # type: ignore[arg-type]
        for results in ranks:
            for name, (weights, tau) in zip(engines, results, strict=True):
                assert tau == pytest.approx(expected_tau, rel=1e-5)
                for key, value in weights.items():
                    torch.testing.assert_close(value, expected[key], rtol=0, atol=2e-5, msg=f"{method} {name} {key}")
                    assert torch.equal(value, before[key]) != before[key].requires_grad, f"{method} {name} {key}"


def test_zero_3_gathers_the_weights_of_every_layer(tmp_path: Path) -> None:
    """By default, ZeRO 3 does not partition weights as small as those of this model."""
    path = tmp_path / "zero3.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}))
    options: dict[str, Any] = {"model": {"activation_checkpointing": 1}}  # of two image blocks
    wanted, _ = plain("openclip", clip=0.5, options=options)
    for ((weights, _),) in run_ranks(2, under_deepspeed, "openclip", [str(path)], 4, options):
        for key, value in weights.items():
            torch.testing.assert_close(value, wanted[key], rtol=0, atol=2e-5, msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("compilation", ["blocks", "towers"])
def test_compiled_towers_learn_what_towers_that_are_not_compiled_learn(compilation: str) -> None:
    wanted, _ = plain("openclip", clip=0.5)
    compiled = {"model": {"compile": compilation}}
    for ((weights, _),) in run_ranks(2, under_deepspeed, "openclip", ["zero1_fp32"], 4, compiled):
        for key, value in weights.items():
            torch.testing.assert_close(value, wanted[key], rtol=0, atol=1e-4, msg=key)


def test_bf16_stays_close_to_float32() -> None:
    """After a few steps, every ZeRO stage in bf16 agrees with float32 to about bf16's precision (8 bits)."""
    wanted, _ = plain("openclip", clip=0.5)
    (results,) = run_ranks(1, under_deepspeed, "openclip", BFLOAT16, 8)
    for name, (weights, _) in zip(BFLOAT16, results, strict=True):
        for key, value in weights.items():
            torch.testing.assert_close(value, wanted[key], rtol=2**-7, atol=1.2e-2, msg=f"{name} {key}")


class _NormOverflows(LossFunction):
    """Loss that reports an infinite norm for a finite feature gradient."""

    def __call__(self, batch: GatheredFeatures, position: Position, training: bool) -> LossOutput:
        gradient = torch.ones(ROWS, 16)
        return LossOutput(
            loss=torch.tensor(1.0),
            image_gradient=gradient,
            text_gradient=gradient,
            gradient_norm=torch.tensor(torch.inf),
            metrics={"tau": torch.tensor(0.07)},
        )


class _BatchNormTowers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 16), torch.nn.BatchNorm1d(16))

    def forward(
        self, image: torch.Tensor, tokens: torch.Tensor, ready: Any, image_first: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.layers(image / 255)
        ready(features)
        return features, features


def test_a_norm_that_overflows_skips_the_step_and_leaves_batch_norm() -> None:
    """The feature gradient itself is finite."""
    model = _BatchNormTowers()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine = Engine(PlainDeepSpeed(model, torch.optim.SGD(model.parameters(), lr=1.0)), Communicator())
    loss = ContrastiveLoss(lambda config, context: _NormOverflows({}), dim=16, undo=True, validate=False)
    outcome = Trainee(engine, loss, micro_batch=ROWS).step(data(7), position_of(3))
    assert not outcome.applied
    assert outcome.not_finite == []
    assert engine.skipped_steps == 1
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
