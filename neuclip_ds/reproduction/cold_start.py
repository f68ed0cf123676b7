"""TuneCLIP's comparisons in miniature: a pretrained model is fine-tuned on other data, with and without recovery.

For each seed a small model is pretrained (OpenCLIP's loss) on the first part of the training shards. Its statistics are
recovered on the fine-tuning pairs, on which it is then fine-tuned. Runs are named after what they compare.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from neuclip_ds.reproduction.study import Job, Options, read_by

SEARCH = "tune-search"  # what names of its runs begin with
RATES = tuple(float(f"{digit}e{power}") for power in range(-5, 2) for digit in (1, 3))
_FIRST = (1e-4, 3e-4, 1e-3)  # the search starts here and continues until its best rate is not on the edge
_FIRST_SGD = (1e-2, 3e-2, 1e-1)
_TRANSFER, _MARGIN = "recovery.transfer", "objective.hinge.margin"
_NONE: Options = MappingProxyType({})
_SGD: Options = MappingProxyType({"optimizer.name": "sgd"})


class Variant(NamedTuple):
    """One way to fine-tune."""

    method: str
    recovered: str | None = None  # key of RECOVERIES whose statistics are taken over
    options: Options = _NONE
    searched: str | None = None  # variant whose best learning rate it takes; None searches its own
    warmup_epochs: int = 0
    noisy: bool = False  # on the pairs with mismatched captions
    first: Sequence[float] = _FIRST  # learning rates that the search begins with


class Recovery(NamedTuple):
    """One way to recover."""

    options: Options
    batches: int = 1  # batches of fine-tuning in a batch of the recovery
    noisy: bool = False


FULL, CACHED, HINGED, SGD = "full", "cached", "full, hinged loss", "full, momentum SGD"
NOTHING = "nothing"  # what the error of u is compared with
LARGER, NOISY = "larger batch", "full, mismatched captions"
_GCL: Options = {"objective.method": "gcl"}  # the error of u is measured with the loss that it was recovered with
_FULL: Options = {"recovery.mode": "full", **_GCL}
RECOVERIES: dict[str, Recovery] = {
    NOTHING: Recovery(_GCL),
    FULL: Recovery(_FULL),
    CACHED: Recovery({"recovery.mode": "cached", **_GCL}),
    HINGED: Recovery({"recovery.mode": "full", "recovery.loss": "hgcl"}),
    SGD: Recovery({**_FULL, **_SGD}),
    # with gamma 1, u is the batch's own estimate: the gradient of a larger batch, and nothing of earlier ones
    LARGER: Recovery(
        {**_FULL, "objective.moving_average.gamma": "constant", "objective.moving_average.gamma_min": 1.0}, batches=2
    ),
    NOISY: Recovery(_FULL, noisy=True),
}
_TUNECLIP, _PLAIN = "TuneCLIP", "GCL, moments and u recovered"
VARIANTS: dict[str, Variant] = {
    "OpenCLIP": Variant("openclip"),
    "FastCLIP, constant tau": Variant("fastclip_v1"),  # the paper's form: SogCLR's u, the checkpoint's tau
    "HGCL, nothing recovered": Variant("tuneclip"),
    "HGCL, moments recovered": Variant("tuneclip", FULL, {_TRANSFER: ["moments"]}, _TUNECLIP),
    "HGCL, u recovered": Variant("tuneclip", FULL, {_TRANSFER: ["statistics"]}, _TUNECLIP),
    _TUNECLIP: Variant("tuneclip", FULL),
    _PLAIN: Variant("gcl", FULL),
    "TuneCLIP, cached recovery": Variant("tuneclip", CACHED, searched=_TUNECLIP),
    "TuneCLIP, recovery with the hinged loss": Variant("tuneclip", HINGED, searched=_TUNECLIP),
    "TuneCLIP, momentum SGD": Variant("tuneclip", SGD, _SGD, first=_FIRST_SGD),
    "HGCL, warm-up with momentum SGD": Variant("tuneclip", None, _SGD, "TuneCLIP, momentum SGD", warmup_epochs=1),
    "HGCL, warm-up of one epoch": Variant("tuneclip", searched=_TUNECLIP, warmup_epochs=1),
    "HGCL, moments of a larger batch": Variant("tuneclip", LARGER, {_TRANSFER: ["moments"]}, _TUNECLIP),
    **{
        f"TuneCLIP, margin {margin}": Variant("tuneclip", FULL, {_MARGIN: margin}, _TUNECLIP)
        for margin in (0.01, 0.05, 0.2, 0.4)
    },
    "TuneCLIP, mismatched captions": Variant("tuneclip", NOISY, searched=_TUNECLIP, noisy=True),
    "GCL, mismatched captions": Variant("gcl", NOISY, searched=_PLAIN, noisy=True),
    "OpenCLIP, mismatched captions": Variant("openclip", searched="OpenCLIP", noisy=True),
}
MEASURED = (_TUNECLIP, _PLAIN, "OpenCLIP")  # whose nearest negatives are measured at the end


class Plan(NamedTuple):
    """Data, sizes and folders of the study."""

    pretraining: str  # shards, below the study's data
    tuning: str
    noisy: str  # the fine-tuning pairs, a share of them with another pair's caption
    batch: int
    pretraining_epochs: int
    temperature: float | None  # of pretraining, constant; None learns it
    epochs: int
    epoch_steps: int  # of fine-tuning
    captions: Sequence[str]  # of fine-tuning, as `data.captions` names them
    models: Path  # exported pretrained models, by seed
    runs: Path
    checkpoints: int  # pretrained models, which the seeds share in turn, with what is recovered for them

    def checkpoint(self, seed: int) -> int:
        """Return the seed of the pretrained model that a seed's runs start from."""
        return seed % self.checkpoints


def pretraining(plan: Plan, seed: int) -> Job:
    """Return the run of the model that is fine-tuned afterwards, in a form that transformers knows."""
    options: dict[str, Any] = {
        "objective.method": "openclip",
        "data.batch_size": plan.batch,
        "budget.epochs": plan.pretraining_epochs,
        "optimizer.lr": 3e-3,
        "model.vision.name": "vit_base_patch32_clip_224",
    }
    if plan.temperature is not None:
        options |= {"objective.temperature.initial": plan.temperature, "objective.temperature.lr": 0.0}
    return Job(f"pretrain/seed{seed}", "openclip", seed, "validation", options, plan.pretraining, keep=True)


def recovery(plan: Plan, name: str, seed: int) -> Job:
    """Return the run whose statistics the seed's runs share; it ends with one step at learning rate 0."""
    chosen = RECOVERIES[name]
    options = {**_tuning("tuneclip", plan, seed), **chosen.options, "budget.steps": 1, "optimizer.lr": 0}
    options |= {"run.normalizer_anchors": 1000, "data.batch_size": chosen.batches * plan.batch}
    if "recovery.mode" in options:
        options["recovery.epochs"] = plan.epochs  # as many as of fine-tuning, as published
    train = plan.noisy if chosen.noisy else plan.tuning
    return Job(f"recover/{name}/seed{seed}", "tuneclip", seed, "validation", options, train)


def has_adamw(name: str) -> bool:
    """Return whether a variant's optimizer is AdamW."""
    return "optimizer.name" not in VARIANTS[name].options


def rates_to_try(found: Mapping[float, float], first: Sequence[float]) -> Sequence[float]:
    """Return the learning rates to search next: `first`, then the neighbour of a best rate on the edge, then none.

    Args:
        found: scores, larger is better, by the rates that were tried.
    """
    if not found:
        return first
    tried = sorted(found)
    best = RATES.index(max(tried, key=lambda rate: found[rate]))
    neighbours = RATES[max(0, best - 1) : best + 2]
    return [rate for rate in neighbours if rate not in found]


def searching(plan: Plan, name: str, lr: float) -> Job:
    """Return a variant's run at a learning rate, seed 0, evaluated on the validation split at its end."""
    return _fine_tuning(f"{SEARCH}/{name}/lr{lr:g}", VARIANTS[name], plan, 0, "validation", lr)


def final(plan: Plan, name: str, lr: float, seed: int) -> Job:
    """Return a variant's run, evaluated on the test split before and after training, if it has a curve each epoch."""
    job = _fine_tuning(f"tune/{name}/seed{seed}", VARIANTS[name], plan, seed, "test", lr)
    options = {**job.options, "run.evaluate_start": True}
    if VARIANTS[name].searched is None:
        options["run.evaluate_every"] = plan.epoch_steps
    return Job(job.name, job.method, seed, job.split, options, job.train, keep=name in MEASURED)


def _tuning(method: str, plan: Plan, seed: int) -> dict[str, Any]:
    """Return the options of stage II as in TuneCLIP Table 7, except for the data's size."""
    options = {
        "objective.method": method,
        "model.pretrained": plan.models / f"seed{plan.checkpoint(seed)}",
        "data.batch_size": plan.batch,
        "data.captions": list(plan.captions),
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
        options["recovery.epochs"] = plan.epochs  # gamma continues after these
        options["recovery.reuse"] = plan.runs / f"recover/{variant.recovered}/seed{plan.checkpoint(seed)}"
    return Job(name, variant.method, seed, split, options, plan.noisy if variant.noisy else plan.tuning)
