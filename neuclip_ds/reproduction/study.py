"""Runs of the miniature study: a search for each method, its final seeds, and the papers' sweeps.

A run is `train.py miniature` with options, named after what it compares; a run that has its results is not repeated.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from neuclip_ds.objectives import METHODS
from neuclip_ds.objectives.method import Search
from neuclip_ds.objectives.sogclr_family import CONSTANT_GAMMA

Options = Mapping[str, Any]

LEARNING_RATES = (1e-3, 3e-3)
_T, _N, _A, _U = (f"objective.{section}." for section in ("temperature", "npn", "amortized", "moving_average"))
_RHO = _T + "rho"
SEARCHES: dict[str, Search] = {name: method.search for name, method in METHODS.items() if method.search is not None}
"""The methods of the study. The search is the same 2 x 2 grid for each: learning rate, and one option of its own."""
ESTIMATORS = ("openclip", "fastclip_v3", "amorlip", "neuclip")  # of NeuCLIP Figures 2c and 4
ABLATIONS: dict[str, tuple[str, Options]] = {
    "neuclip, T_u = 1": ("neuclip", {_N + "updates": 1}),
    "neuclip, T_u = 5": ("neuclip", {_N + "updates": 5}),
    "neuclip, T_u = 20": ("neuclip", {_N + "updates": 20}),
    "neuclip, T_u = 50": ("neuclip", {_N + "updates": 50}),
    "neuclip, T_r = 1": ("neuclip", {_N + "restart_every": 1}),
    "neuclip, T_r = 5": ("neuclip", {_N + "restart_every": 5}),
    "neuclip, T_r = 100": ("neuclip", {_N + "restart_every": 100}),
    "neuclip, T_r = infinity": ("neuclip", {_N + "restart_every": 0}),
    "neuclip, separate objective": ("neuclip", {_N + "objective": "separate"}),
    "neuclip, MLP for NPN": ("neuclip", {_N + "network": "mlp"}),
    "neuclip, simultaneous updates": ("neuclip", {_N + "order": "simultaneous"}),
    "neuclip, alpha constant": ("neuclip", {_N + "alpha_grad": "stop"}),
    "neuclip, alpha's part along the positive": ("neuclip", {_N + "alpha_grad": "positive"}),
    "neuclip, no rho": ("neuclip", {_T + "rule": "learned"}),
    "neuclip, ratio at most 2": ("neuclip", {_N + "max_ratio": 2.0}),
    "neuclip, prototypes without the current batch": ("neuclip", {_N + "restart_with": "earlier"}),
    "neuclip, accumulator reset": ("neuclip", {_N + "reset_accumulator": True}),
    "neuclip, NPN rate 1.0": ("neuclip", {_N + "lr": 1.0}),
    "neuclip, tau's data term doubled": ("neuclip", {_T + "data_term": "released_code"}),
    "fastclip_v3, tau's data term doubled": ("fastclip_v3", {_T + "data_term": "released_code"}),
    "fastclip_v3, drift corrected": ("fastclip_v3", {"objective.moving_average.drift_rate": 0.1}),
    "fastclip_v3, constant gamma 0.6": ("fastclip_v3", {f"objective.{name}": x for name, x in CONSTANT_GAMMA.items()}),
    "neuclip, rho 4": ("neuclip", {_RHO: 4.0}),
    "neuclip, rho 11": ("neuclip", {_RHO: 11.0}),
    "neuclip, rho 5, tau from 0.03": ("neuclip", {_RHO: 5.0, _T + "initial": 0.03}),
    "amorlip, combined target": ("amorlip", {_A + "stage2": "combined"}),
    "amorlip, KL divergence": ("amorlip", {_A + "loss": "kl"}),
    "amorlip, JS divergence": ("amorlip", {_A + "loss": "js"}),
    "amorlip, T_online = 8": ("amorlip", {_A + "online_every": 8}),
    "amorlip, T_online = 32": ("amorlip", {_A + "online_every": 32}),
    "amorlip, partition of negatives alone": ("amorlip", {_A + "positive_weight": 0.0}),
    "amorlip, width 0.25": ("amorlip", {_A + "width": 0.25}),
    "amorlip, EMA 0.999": ("amorlip", {_A + "ema": 0.999}),
    "amorlip, no earlier epoch in the target": ("amorlip", {_A + "previous_weight": 0.0}),
    "neuclip, one AdamW step (Algorithm 3)": ("neuclip", {_N + "order": "joint"}),
    "fastclip_v3, eps 1e-6": ("fastclip_v3", {"objective.eps": 1e-6}),
    "fastclip_v3, gamma_min 0.8": ("fastclip_v3", {_U + "gamma_min": 0.8}),
}


@dataclass(frozen=True)
class Job:
    """One training run."""

    name: str
    method: str
    seed: int
    split: str  # held-out pairs that it is evaluated on: validation for the search, test for everything else
    options: Options = field(default_factory=dict)
    train: str = "train"
    keep: bool = False  # its last checkpoint


@dataclass(frozen=True)
class Budget:
    """Size of the study."""

    batch: int
    epochs: int
    seeds: int
    anchors: int  # of the normaliser's error


def base(method: str, lr: float, knob: Any, budget: Budget) -> Options:
    """Return the options of a method at a point of its grid."""
    search = SEARCHES[method]
    options = {
        "objective.method": method,
        "data.batch_size": budget.batch,
        "budget.epochs": budget.epochs,
        "optimizer.lr": lr,
        # half and all of the run, as published
        "objective.moving_average.gamma_epochs": budget.epochs / 2,
        "objective.amortized.previous_epochs": budget.epochs,
        **{f"objective.{key}": value for key, value in search.fixed.items()},
        f"objective.{search.option}": knob,
    }
    return read_by(method, options)


def read_by(method: str, options: Options) -> Options:
    """Return the options without those of sections that the method does not read."""
    return {name: value for name, value in options.items() if METHODS[method].reads(name)}


def search(budget: Budget) -> list[Job]:
    """Return the 2 x 2 grid of every method, one seed, evaluated on the validation split."""
    return [
        Job(f"search/{method}/lr{lr:g}_{knob}", method, 0, "validation", base(method, lr, knob, budget))
        for method, searched in SEARCHES.items()
        for lr, knob in itertools.product(LEARNING_RATES, searched.values)
    ]


def finals(best: Mapping[str, Options], budget: Budget) -> list[Job]:
    """Return every method at its best point, over the seeds, with its normaliser's error."""
    measured = {"run.normalizer_anchors": budget.anchors}
    return [
        Job(f"final/{method}/seed{seed}", method, seed, "test", _measured(method, {**best[method], **measured}))
        for method in SEARCHES
        for seed in range(1, budget.seeds + 1)
    ]


def sweeps(best: Mapping[str, Options], budget: Budget) -> Iterator[Job]:
    """Yield batch size and data set size for the estimators, and the ablations, over the seeds."""
    measured = {"run.normalizer_anchors": budget.anchors}
    for seed in range(1, budget.seeds + 1):
        for method in ESTIMATORS:
            for share in (2, 4):
                options = {**best[method], **measured, "data.batch_size": budget.batch // share}
                yield Job(f"batch/{method}/B_over_{share}/seed{seed}", method, seed, "test", options)
            # as many steps as on the whole set
            options = {**best[method], **measured, "budget.epochs": budget.epochs * 10}
            yield Job(f"data/{method}/n_over_10/seed{seed}", method, seed, "test", options, train="train_tenth")
        for name, (method, changes) in ABLATIONS.items():
            options = {**best[method], **measured, **changes}
            yield Job(f"ablation/{name}/seed{seed}", method, seed, "test", options)


def cost(best: Mapping[str, Options]) -> list[Job]:
    """Return a short run of every method for the time of a step; they run one after the other."""
    return [
        Job(f"cost/{method}/seed1", method, 1, "validation", {**best[method], "budget.steps": 100, "run.log_every": 5})
        for method in SEARCHES
    ]


def _measured(method: str, options: Options) -> Options:
    """Omit the normalisers' error for a method without normalisers."""
    without = METHODS[method].normalizer is None
    return {key: value for key, value in options.items() if not (without and key == "run.normalizer_anchors")}
