"""TuneCLIP's Figure 2 in miniature: a pretrained model goes on with other data, with and without recovered statistics.

For each seed a small model is pretrained (OpenCLIP's loss) on the first part of the training shards. Its statistics are
recovered on the rest, on which it is then fine-tuned. A run's name says what it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from neuclip_ds.reproduction.study import Job, Options

LEARNING_RATES = (1e-4, 3e-4, 1e-3)
_TRANSFER = "recovery.transfer"


class Variant(NamedTuple):
    """A way to fine-tune."""

    method: str
    recovered: str | None = None  # whose statistics are taken over, of RECOVERIES
    options: Options = MappingProxyType({})
    searched: str | None = None  # variant whose learning rate it takes; None has its own search
    warmup_epochs: int = 0


FULL, CACHED, HINGED = "full", "cached", "full, hinged loss"
NOTHING = "nothing"  # what a recovery's duration is compared with
_GCL = {"objective.method": "gcl"}  # u is judged by the loss that it was recovered with
RECOVERIES: dict[str, Options] = {
    NOTHING: _GCL,
    FULL: {"recovery.mode": "full", **_GCL},
    CACHED: {"recovery.mode": "cached", **_GCL},
    HINGED: {"recovery.mode": "full", "recovery.loss": "hgcl"},
}
VARIANTS: dict[str, Variant] = {
    "OpenCLIP": Variant("openclip"),
    "FastCLIP-v3": Variant("fastclip_v3", None, {"objective.temperature.rho": 6.5}),
    "HGCL, nothing recovered": Variant("tuneclip"),
    "HGCL, moments recovered": Variant("tuneclip", FULL, {_TRANSFER: ["moments"]}),
    "HGCL, u recovered": Variant("tuneclip", FULL, {_TRANSFER: ["statistics"]}),
    "TuneCLIP": Variant("tuneclip", FULL),
    "TuneCLIP, cached recovery": Variant("tuneclip", CACHED, searched="TuneCLIP"),
    "TuneCLIP, recovery with the hinged loss": Variant("tuneclip", HINGED, searched="TuneCLIP"),
    "TuneCLIP, gamma begins anew": Variant("tuneclip", FULL, {"recovery.gamma": "anew"}, "TuneCLIP"),
    "HGCL, warm-up of one epoch": Variant("tuneclip", searched="TuneCLIP", warmup_epochs=1),
}


class Plan(NamedTuple):
    """What the study runs on."""

    pretraining: str  # shards, below the study's data
    tuning: str
    batch: int
    pretraining_epochs: int
    epochs: int
    epoch_steps: int  # of fine-tuning
    models: Path  # exported pretrained models, by seed
    runs: Path


def pretraining(plan: Plan, seed: int) -> Job:
    """The model that is fine-tuned afterwards, in a form that transformers knows."""
    options = {
        "objective.method": "openclip",
        "data.batch_size": plan.batch,
        "budget.epochs": plan.pretraining_epochs,
        "optimizer.lr": 3e-3,
        "model.vision.name": "vit_base_patch32_clip_224",
    }
    return Job(f"pretrain/seed{seed}", "openclip", seed, "validation", options, plan.pretraining, keep=True)


def recovery(plan: Plan, name: str, seed: int) -> Job:
    """Statistics that the seed's runs share; one step that moves nothing ends the run."""
    options = {**_tuning("tuneclip", plan, seed), **RECOVERIES[name], "budget.steps": 1, "optimizer.lr": 0}
    options["run.normalizer_anchors"] = 1000
    return Job(f"recover/{name}/seed{seed}", "tuneclip", seed, "validation", options, plan.tuning)


def search(plan: Plan) -> list[Job]:
    """Three learning rates a variant, seed 0, judged on the validation split."""
    return [
        _fine_tuning(f"tune-search/{name}/lr{lr:g}", variant, plan, 0, "validation", lr)
        for name, variant in VARIANTS.items()
        if variant.searched is None
        for lr in LEARNING_RATES
    ]


def finals(plan: Plan, best: Mapping[str, float], seeds: int) -> list[Job]:
    """Every variant at its best learning rate, judged on the test split by step."""
    return [
        _fine_tuning(f"tune/{name}/seed{seed}", variant, plan, seed, "test", best[variant.searched or name])
        for name, variant in VARIANTS.items()
        for seed in range(1, seeds + 1)
    ]


def _tuning(method: str, plan: Plan, seed: int) -> dict[str, Any]:
    """Stage II as in TuneCLIP Table 7, but for the data's size."""
    return {
        "objective.method": method,
        "model.pretrained": plan.models / f"seed{seed}",
        "data.batch_size": plan.batch,
        "budget.epochs": plan.epochs,
        "objective.moving_average.gamma_min": 0.9,
        "objective.moving_average.gamma_epochs": 4,
        "optimizer.warmup_steps": 0,
        "optimizer.weight_decay": 0.02,
        "optimizer.clip_norm": 0,
    }


def _fine_tuning(name: str, variant: Variant, plan: Plan, seed: int, split: str, lr: float) -> Job:
    options = {**_tuning(variant.method, plan, seed), **variant.options, "optimizer.lr": lr}
    options["optimizer.warmup_steps"] = variant.warmup_epochs * plan.epoch_steps
    if variant.recovered is not None:
        options["recovery.reuse"] = plan.runs / f"recover/{variant.recovered}/seed{seed}"
    options |= {"run.evaluate_start": True, "run.evaluate_every": max(1, plan.epoch_steps // 6)}
    return Job(name, variant.method, seed, split, options, plan.tuning)
