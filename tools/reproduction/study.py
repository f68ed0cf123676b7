"""Runs of a comparison: in each regime all arms train over the same seeds, at rates that were searched alike.

A run is `neuclip-ds train` with a recipe and options, named after what it compares. The arms are in arms.yaml.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from neuclip_ds.errors import UserError
from neuclip_ds.objectives import METHODS
from neuclip_ds.recipe import nearest

Options = Mapping[str, Any]


class Search(NamedTuple):
    """What is searched together with the learning rate."""

    option: str
    values: tuple[Any, Any]
    rates: tuple[float, float]  # learning rates that it starts with


class Arm(NamedTuple):
    """A method or a variant of it."""

    method: str
    fixed: Options  # of all arms of the method
    options: Options  # of this arm
    like: str  # arm whose searched rate and value it takes, maybe its own
    search: Search | None  # its own


def read_arms() -> dict[str, Arm]:
    """Return the arms of arms.yaml by name; those that are compared by default come first."""
    content = yaml.safe_load(Path(__file__).with_name("arms.yaml").read_text(encoding="utf-8"))
    common, methods = content["search"], content["methods"]
    found = {}
    for name, arm in content["arms"].items():
        method = arm.get("method", name)
        own = method == name or "search" in arm
        search = {**common, **methods[method].get("search", {}), **arm.get("search", {})}
        like = name if own else arm.get("like", method)
        searched = Search(search["option"], tuple(search["values"]), tuple(search["rates"])) if own else None
        found[name] = Arm(method, methods[method].get("fixed", {}), arm.get("options", {}), like, searched)
    return found


ARMS = read_arms()


class Regime(NamedTuple):
    """Size of a run; written BATCHxEPOCHS, with /10 for a tenth of the training pairs."""

    batch: int  # global
    epochs: int
    tenth: bool = False

    def __str__(self) -> str:
        return f"{self.batch}x{self.epochs}" + "/10" * self.tenth

    @classmethod
    def parse(cls, text: str) -> Regime:
        """Read what `str` writes.

        Raises:
            UserError: it is something else.
        """
        match = re.fullmatch(r"(\d+)x(\d+)(/10)?", text)
        if match is None:
            raise UserError(f"{text} is not a regime: write BATCHxEPOCHS, such as 32x3, or 32x30/10 for n/10 pairs.")
        return cls(int(match[1]), int(match[2]), match[3] is not None)


SEARCHED = (Regime(32, 3), Regime(128, 12))
"""Regimes with a search; the others take the rate of the one whose batch is nearest as a ratio."""


@dataclass(frozen=True)
class Job:
    """One training run."""

    name: str
    seed: int
    split: str  # held-out pairs that it is evaluated on: validation for the search, test for the finals
    options: Options = field(default_factory=dict, hash=False)
    train: str = "train"


@dataclass(frozen=True)
class Study:
    """What all runs share."""

    seeds: int
    anchors: int  # of the normalizer's error
    towers: Options = field(default_factory=dict)  # options of the weights that every run starts from; else random
    search_seeds: int = 1  # of each point of a search, whose scores are averaged


class Point(NamedTuple):
    """Point of a search: the learning rate, and the value of the searched option."""

    lr: float
    value: Any


def chosen(names: Iterable[str]) -> list[str]:
    """Return names of arms.

    Raises:
        UserError: one is unknown.
    """
    for name in names:
        if name not in ARMS:
            raise UserError(f"Unknown arm {name}{nearest(name, ARMS) or '.'} Arms: {'; '.join(ARMS)}.")
    return list(names)


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
    run = f"search/{regime}/{name}/lr{point.lr:g}_{point.value}"
    options, seeds = _options(name, regime, point, study), range(study.search_seeds)
    return [Job(f"{run}, seed {seed}" if seed else run, seed, "validation", options) for seed in seeds]


def nearest_search(regime: Regime) -> Regime:
    """Return the regime whose search a regime takes its rates from."""
    return min(SEARCHED, key=lambda searched: abs(math.log(searched.batch / regime.batch)))


def finals(
    regimes: Iterable[Regime], arms: Iterable[str], best: Mapping[tuple[Regime, str], Point], study: Study
) -> Iterator[Job]:
    """Yield every arm in every regime over the seeds, judged on the test split, with its normalizer's error."""
    for regime, seed, name in itertools.product(regimes, range(1, study.seeds + 1), arms):
        options = _options(name, regime, best[nearest_search(regime), ARMS[name].like], study)
        if METHODS[ARMS[name].method].normalizer is not None:
            options["run.normalizer_anchors"] = study.anchors
        yield Job(f"{regime}/{name}/seed{seed}", seed, "test", options, "train_tenth" if regime.tenth else "train")


def _options(name: str, regime: Regime, point: Point, study: Study) -> dict[str, Any]:
    arm = ARMS[name]
    search = ARMS[arm.like].search
    assert search is not None, "arms.yaml names an arm that is not searched"
    options = {
        "objective.method": arm.method,
        "data.batch_size": regime.batch,
        "epochs": regime.epochs,
        # half and all of the run, as published
        "objective.moving_average.gamma_epochs": regime.epochs / 2,
        "objective.amortized.previous_epochs": regime.epochs,
        **arm.fixed,
        **study.towers,
        "optimizer.lr": point.lr,
        search.option: point.value,
    }
    read = {option: value for option, value in options.items() if METHODS[arm.method].reads(option)}
    return {**read, **arm.options}
