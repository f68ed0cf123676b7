"""TuneCLIP's Figure 2 in miniature: a pretrained model continues on other data, with and without recovered statistics.

For each seed a small model is pretrained (OpenCLIP's loss) on the first part of the training shards. Its statistics are
recovered on the rest, on which it is then fine-tuned. Runs are named after what they compare.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from neuclip_ds.reproduction.study import Job, Options, read_by

LEARNING_RATES = (1e-4, 3e-4, 1e-3)
_TRANSFER = "recovery.transfer"


class Variant(NamedTuple):
    """One way to fine-tune."""

    method: str
    recovered: str | None = None  # key of RECOVERIES whose statistics are taken over
    options: Options = MappingProxyType({})
    searched: str | None = None  # variant whose best learning rate it takes; None searches its own
    warmup_epochs: int = 0


FULL, CACHED, HINGED = "full", "cached", "full, hinged loss"
NOTHING = "nothing"  # what a recovery's duration is compared with
_GCL = {"objective.method": "gcl"}  # the error of u is measured with the loss that it was recovered with
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
    "TuneCLIP, gamma restarts": Variant("tuneclip", FULL, {"recovery.gamma": "restart"}, "TuneCLIP"),
    "HGCL, warm-up of one epoch": Variant("tuneclip", searched="TuneCLIP", warmup_epochs=1),
}


class Plan(NamedTuple):
    """Data, sizes and folders of the study."""

    pretraining: str  # shards, below the study's data
    tuning: str
    batch: int
    pretraining_epochs: int
    epochs: int
    epoch_steps: int  # of fine-tuning
    models: Path  # exported pretrained models, by seed
    runs: Path


def pretraining(plan: Plan, seed: int) -> Job:
    """Return the run of the model that is fine-tuned afterwards, in a form that transformers knows."""
    options = {
        "objective.method": "openclip",
        "data.batch_size": plan.batch,
        "budget.epochs": plan.pretraining_epochs,
        "optimizer.lr": 3e-3,
        "model.vision.name": "vit_base_patch32_clip_224",
    }
    return Job(f"pretrain/seed{seed}", "openclip", seed, "validation", options, plan.pretraining, keep=True)


def recovery(plan: Plan, name: str, seed: int) -> Job:
    """Return the run whose statistics the seed's runs share; it ends with one step at learning rate 0."""
    options = {**_tuning("tuneclip", plan, seed), **RECOVERIES[name], "budget.steps": 1, "optimizer.lr": 0}
    options["run.normalizer_anchors"] = 1000
    return Job(f"recover/{name}/seed{seed}", "tuneclip", seed, "validation", options, plan.tuning)


def search(plan: Plan) -> list[Job]:
    """Return three learning rates per variant, seed 0, evaluated on the validation split."""
    return [
        _fine_tuning(f"tune-search/{name}/lr{lr:g}", variant, plan, 0, "validation", lr)
        for name, variant in VARIANTS.items()
        if variant.searched is None
        for lr in LEARNING_RATES
    ]


def finals(plan: Plan, best: Mapping[str, float], seeds: int) -> list[Job]:
    """Return every variant at its best learning rate, evaluated on the test split during training."""
    return [
        _fine_tuning(f"tune/{name}/seed{seed}", variant, plan, seed, "test", best[variant.searched or name])
        for name, variant in VARIANTS.items()
        for seed in range(1, seeds + 1)
    ]


def _tuning(method: str, plan: Plan, seed: int) -> dict[str, Any]:
    """Return the options of stage II as in TuneCLIP Table 7, except for the data's size."""
    options = {
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
    return dict(read_by(method, options))


def _fine_tuning(name: str, variant: Variant, plan: Plan, seed: int, split: str, lr: float) -> Job:
    options = {**_tuning(variant.method, plan, seed), **variant.options, "optimizer.lr": lr}
    options["optimizer.warmup_steps"] = variant.warmup_epochs * plan.epoch_steps
    if variant.recovered is not None:
        options["recovery.reuse"] = plan.runs / f"recover/{variant.recovered}/seed{seed}"
    options |= {"run.evaluate_start": True, "run.evaluate_every": max(1, plan.epoch_steps // 6)}
    return Job(name, variant.method, seed, split, options, plan.tuning)
