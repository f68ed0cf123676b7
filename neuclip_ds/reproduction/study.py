"""Runs of the miniature study: in each regime all arms train over the same seeds, at rates that were searched alike.

A run is `neuclip-ds train` with a recipe and options, named after what it compares.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from neuclip_ds.errors import UserError
from neuclip_ds.objectives import METHODS
from neuclip_ds.objectives.method import Search
from neuclip_ds.objectives.sogclr_family import CONSTANT_GAMMA

Options = Mapping[str, Any]
Arm = tuple[str, Options]  # method, and what is changed in it

_T, _N, _A, _U, _Q = (
    f"objective.{section}." for section in ("temperature", "npn", "amortized", "moving_average", "queue")
)
_HELD: Options = {_T + "initial": 0.02, _T + "lr": 0.0}
_RHO, _RULE, _GRAD = _T + "rho", _T + "rule", _N + "alpha_grad"
_FROM_003: Options = {_T + "initial": 0.03}
_WITH_RHO: Options = {**_FROM_003, _RULE: "robust", _RHO: 6.5}
_METHODS: dict[str, Search] = {name: method.search for name, method in METHODS.items() if method.search is not None}
ARMS: dict[str, Arm] = {
    "openclip": ("openclip", {}),
    "neuclip": ("neuclip", {}),
    "neuclip_queue": ("neuclip_queue", {}),
    "neuclip, alpha's part along the positive": ("neuclip", {_GRAD: "positive"}),
    "neuclip, alpha constant": ("neuclip", {_GRAD: "stop"}),
    "neuclip, no rho": ("neuclip", {_RULE: "learned"}),
    "neuclip, alpha's part along the positive, no rho": ("neuclip", {_GRAD: "positive", _RULE: "learned"}),
    "neuclip, alpha constant, no rho": ("neuclip", {_GRAD: "stop", _RULE: "learned"}),
    "fastclip_v3": ("fastclip_v3", {}),
    "fastclip_v3, drift corrected": ("fastclip_v3", {_U + "drift_rate": 0.1}),
    "siglip": ("siglip", {}),
    "amorlip": ("amorlip", {}),
}
"""What every regime compares."""
_AT_PEERS = "at OpenCLIP's rate and start"
ALIKE: dict[str, Arm] = {
    f"neuclip, {_AT_PEERS}": ("neuclip", {}),
    f"neuclip_queue, {_AT_PEERS}": ("neuclip_queue", {}),
    f"neuclip_queue, kappa 0.25, {_AT_PEERS}": ("neuclip_queue", {_Q + "kappa": 0.25}),
    f"neuclip_queue, kappa rises, {_AT_PEERS}": ("neuclip_queue", {_Q + "kappa_steps": 96}),
}
"""At the learning rate and the first tau that the search found for OpenCLIP, so that nothing but the loss differs."""
_V3 = "fastclip_v3"
OPTIMIZERS: dict[str, tuple[Options, tuple[float, float]]] = {
    f"{_V3}, Lion": ({"optimizer.name": "lion", "optimizer.weight_decay": 0.3}, (1e-4, 2e-4)),
    f"{_V3}, LAMB": ({"optimizer.name": "lamb"}, (2e-3, 4e-3)),
    f"{_V3}, momentum SGD": ({"optimizer.name": "sgd", "optimizer.weight_decay": 3e-6}, (0.1, 0.2)),
}
"""The encoders' optimizer with the published weight decay (FastCLIP Table 10), and where its search of rates starts."""
ABLATIONS: dict[str, Arm] = {
    **{name: (name, {}) for name in _METHODS if name not in ARMS},
    **{name: (_V3, options) for name, (options, _) in OPTIMIZERS.items()},
    **{f"{name}, bf16": (name, {"deepspeed": "zero0_bf16"}) for name in ("openclip", "neuclip", "neuclip_queue")},
    **{f"{name}, tau 0.02": (name, _HELD) for name in ("openclip", "neuclip", "neuclip_queue")},
    "neuclip, m = 64": ("neuclip", {_N + "prototypes": 64}),
    "neuclip_queue, m = 64": ("neuclip_queue", {_Q + "prototypes": 64}),
    **{f"{name}, tau from 0.03": (name, _FROM_003) for name in ("openclip", "neuclip", "neuclip_queue")},
    "neuclip, no rho, tau from 0.03": ("neuclip", {**_FROM_003, _RULE: "learned"}),
    "neuclip, alpha's part along the positive, no rho, tau from 0.03": (
        "neuclip",
        {**_FROM_003, _RULE: "learned", _GRAD: "positive"},
    ),
    "neuclip_queue, tau from 0.03, rho": ("neuclip_queue", _WITH_RHO),
    "neuclip_queue, tau from 0.03, rho, kappa rises": ("neuclip_queue", {**_WITH_RHO, _Q + "kappa_steps": 150}),
    "neuclip_queue, kappa 0.3": ("neuclip_queue", {_Q + "kappa": 0.3}),
    "neuclip_queue, kappa 3": ("neuclip_queue", {_Q + "kappa": 3.0}),
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
    "neuclip, one AdamW step (Algorithm 3)": ("neuclip", {_N + "order": "joint"}),
    "neuclip, ratio at most 2": ("neuclip", {_N + "max_ratio": 2.0}),
    "neuclip, prototypes without the current batch": ("neuclip", {_N + "restart_with": "earlier"}),
    "neuclip, accumulator reset": ("neuclip", {_N + "reset_accumulator": True}),
    "neuclip, NPN rate 1.0": ("neuclip", {_N + "lr": 1.0}),
    "neuclip, tau's data term doubled": ("neuclip", {_T + "data_term": "released_code"}),
    "neuclip, rho 4": ("neuclip", {_RHO: 4.0}),
    "neuclip, rho 11": ("neuclip", {_RHO: 11.0}),
    "neuclip, rho 5, tau from 0.03": ("neuclip", {_RHO: 5.0, _T + "initial": 0.03}),
    "fastclip_v3, tau's data term doubled": ("fastclip_v3", {_T + "data_term": "released_code"}),
    "fastclip_v3, drift corrected, tau from 0.03": (_V3, {_U + "drift_rate": 0.1, **_FROM_003}),
    "fastclip_v3, constant gamma 0.6": ("fastclip_v3", {f"objective.{name}": x for name, x in CONSTANT_GAMMA.items()}),
    "fastclip_v3, eps 1e-6": ("fastclip_v3", {"objective.eps": 1e-6}),
    "fastclip_v3, gamma_min 0.8": ("fastclip_v3", {_U + "gamma_min": 0.8}),
    "siglip, lr 0.001": ("siglip", {"optimizer.lr": 1e-3}),
    "amorlip, lr 0.002": ("amorlip", {"optimizer.lr": 2e-3}),
    "amorlip, combined target": ("amorlip", {_A + "stage2": "combined"}),
    "amorlip, KL divergence": ("amorlip", {_A + "loss": "kl"}),
    "amorlip, JS divergence": ("amorlip", {_A + "loss": "js"}),
    "amorlip, T_online = 8": ("amorlip", {_A + "online_every": 8}),
    "amorlip, T_online = 32": ("amorlip", {_A + "online_every": 32}),
    "amorlip, partition of negatives alone": ("amorlip", {_A + "positive_weight": 0.0}),
    "amorlip, width 0.25": ("amorlip", {_A + "width": 0.25}),
    "amorlip, EMA 0.999": ("amorlip", {_A + "ema": 0.999}),
    "amorlip, no earlier epoch in the target": ("amorlip", {_A + "previous_weight": 0.0}),
}
"""What the first regime compares on top."""
KNOWN: dict[str, Arm] = {**ARMS, **ALIKE, **ABLATIONS}
SEARCHES: dict[str, Search] = {
    **_METHODS,
    **{name: _METHODS[_V3]._replace(rates=rates) for name, (_, rates) in OPTIMIZERS.items()},
}
"""The arms that are searched, all in the same way: learning rate, then one option of the method."""


class Regime(NamedTuple):
    """Size of a run; written BATCHxEPOCHS, with /10 for a tenth of the training pairs."""

    batch: int  # global
    epochs: int
    tenth: bool = False

    def __str__(self) -> str:
        return f"{self.batch}x{self.epochs}" + "/10" * self.tenth

    @classmethod
    def parse(cls, text: str) -> "Regime":
        """Read what `str` writes.

        Raises:
            UserError: it is something else.
        """
        match = re.fullmatch(r"(\d+)x(\d+)(/10)?", text)
        if match is None:
            raise UserError(f"{text} is no regime: write BATCHxEPOCHS, such as 32x3, or 32x30/10 for n/10 pairs.")
        return cls(int(match[1]), int(match[2]), match[3] is not None)


REGIMES = tuple(map(Regime.parse, ("32x3", "128x12", "16x3", "512x12", "32x12", "512x30", "32x30/10")))
SEARCHED = (REGIMES[0], REGIMES[1])
"""Regimes with a search; the others take the rate of the one whose batch is nearest as a ratio."""


@dataclass(frozen=True)
class Job:
    """One training run."""

    name: str
    method: str
    seed: int
    split: str  # held-out pairs that it is evaluated on: validation for the search, test for everything else
    options: Options = field(default_factory=dict, hash=False)
    train: str = "train"
    keep: bool = False  # its last checkpoint


@dataclass(frozen=True)
class Study:
    """What all runs share."""

    seeds: int
    anchors: int  # of the normaliser's error
    towers: Options = field(default_factory=dict)  # options of the weights that every run starts from; else random
    search_seeds: int = 1  # of each point of a search, whose scores are averaged


class Point(NamedTuple):
    """Point of a search: the learning rate, and the value of the method's own option."""

    lr: float
    value: Any


def next_points(scores: Mapping[Point, float], search: Search) -> list[Point]:
    """Return the points that a search asks for next; none once it has ended.

    Rates are doubled or halved until the best one has a worse one on both sides; then the option's other value is tried
    at the best rate.
    """
    first, other = search.values
    rates = {point.lr: score for point, score in scores.items() if point.value == first}
    if not rates:
        return [Point(lr, first) for lr in search.rates]
    best = max(rates, key=lambda lr: rates[lr])
    around = {max(rates): best * 2, min(rates): best / 2}
    if best in around:
        return [Point(around[best], first)]
    last = Point(best, other)
    return [] if last in scores else [last]


def search_jobs(name: str, regime: Regime, point: Point, study: Study) -> list[Job]:
    """Return the runs of a point of a search, one for each of its seeds (from 0), evaluated on the validation split."""
    options = _options(name, regime, point, study)
    run = f"search/{regime}/{name}/lr{point.lr:g}_{point.value}"
    seeds = range(study.search_seeds)
    return [Job(f"{run}, seed {seed}" if seed else run, KNOWN[name][0], seed, "validation", options) for seed in seeds]


def at_point(name: str, point: Point) -> Options:
    """Return the options of a point of an arm's search."""
    return {"optimizer.lr": point.lr, f"objective.{SEARCHES[name].option}": point.value}


def nearest_search(regime: Regime) -> Regime:
    """Return the regime whose search a regime takes its rates from."""
    return min(SEARCHED, key=lambda searched: abs(math.log(searched.batch / regime.batch)))


def searched(arm: str) -> str:
    """Return the arm whose search an arm takes its rate and start from."""
    if arm in SEARCHES:
        return arm
    return "openclip" if arm in ALIKE else KNOWN[arm][0]


def finals(
    regimes: Iterable[Regime], arms: Iterable[str], best: Mapping[tuple[Regime, str], Point], study: Study
) -> Iterator[Job]:
    """Yield every arm in every regime over the seeds, judged on the test split, with its normaliser's error."""
    for regime, seed, name in itertools.product(regimes, range(1, study.seeds + 1), arms):
        method, _ = KNOWN[name]
        options = _options(name, regime, best[nearest_search(regime), searched(name)], study)
        if METHODS[method].normalizer is not None:
            options["run.normalizer_anchors"] = study.anchors
        train = "train_tenth" if regime.tenth else "train"
        yield Job(f"{regime}/{name}/seed{seed}", method, seed, "test", options, train)


def cost(best: Mapping[tuple[Regime, str], Point], study: Study) -> list[Job]:
    """Return a short run of every method at B = 128 for the time of a step; they run one after the other."""
    regime = SEARCHED[1]
    return [
        Job(
            f"cost/{method}/seed1",
            method,
            1,
            "validation",
            {
                **_base(method, regime, study),
                **at_point(method, best[regime, method]),
                "budget.steps": 100,
                "run.log_every": 5,
            },
        )
        for method in _METHODS
        if (regime, method) in best
    ]


def read_by(method: str, options: Options) -> Options:
    """Return the options without those of sections that the method does not read."""
    return {name: value for name, value in options.items() if METHODS[method].reads(name)}


def _options(name: str, regime: Regime, point: Point, study: Study) -> dict[str, Any]:
    method, changes = KNOWN[name]
    return {**_base(method, regime, study), **at_point(searched(name), point), **changes}


def _base(method: str, regime: Regime, study: Study) -> dict[str, Any]:
    options = {
        "objective.method": method,
        "data.batch_size": regime.batch,
        "budget.epochs": regime.epochs,
        # half and all of the run, as published
        "objective.moving_average.gamma_epochs": regime.epochs / 2,
        "objective.amortized.previous_epochs": regime.epochs,
        **{f"objective.{key}": value for key, value in _METHODS[method].fixed.items()},
        **study.towers,
    }
    return dict(read_by(method, options))
