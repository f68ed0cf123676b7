"""Published times of a step against the cost model, and the rates that they imply.

The published codes are modelled as they ran: replicated weights, whose float32 gradients are all-reduced under the
backward pass (DistributedDataParallel), and OpenCLIP's own communication in its rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import yaml

from neuclip_ds.distributed.ring import ring_bytes
from neuclip_ds.objectives import build_objective
from neuclip_ds.planning.cost_model import Cluster, Compute, Network, Range, Work, step_time
from neuclip_ds.planning.machines import find_machine
from neuclip_ds.planning.openclip_reference import REFERENCES
from neuclip_ds.planning.scaling import CountedModel, count_model, step_work
from neuclip_ds.recipe import parse_for

_ENGINE = "--deepspeed=zero0_fp32"  # the traffic of DistributedDataParallel


class Parts(NamedTuple):
    """The parts of a step, in seconds."""

    computation: float
    communication: float  # all of it
    exposed: float  # that no computation hides


class PublishedStep(NamedTuple):
    """A published time of a step."""

    source: str  # paper and table
    setting: str
    method: str
    recipe: str  # of model and optimizer
    machine: str
    network: str
    gpus: int  # of a node
    nodes: int
    rows: int  # pairs of a GPU
    assumed: tuple[str, ...]  # names of the fields above that the paper does not tell
    total: float  # seconds
    parts: Parts | None  # where the paper has them

    @property
    def ranks(self) -> int:
        return self.gpus * self.nodes


class Comparison(NamedTuple):
    """A published step and the model's range for it."""

    published: PublishedStep
    work: Work
    total: Range
    exposed: Range
    tower_peak: float  # of the GPU by its data sheet


class ImpliedRates(NamedTuple):
    """The rates at which the model has the published parts of a method's steps in one table."""

    published: PublishedStep  # one of them
    utilisation: Range  # of the towers' peak, in the whole step
    pairs_per_second: Range  # of a GPU, in the whole step
    fitted: FittedRates | None  # where the parts are published


class FittedRates(NamedTuple):
    """Rates from the parts of steps on several numbers of nodes."""

    utilisation: Range  # of the towers' peak, while the GPU computes
    overhead: Range  # seconds that neither compute nor communicate
    inner_bandwidth: Range  # bytes a second on one node
    bandwidth: Range  # of a node, between nodes
    error: Range  # of the totals that the model has at the means of these rates, relative


def read_published() -> list[PublishedStep]:
    """Return the rows of published.yaml, those of a table and method by number of nodes."""
    tables = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))
    return [step for table in tables for step in _steps(**table)]


def _steps(
    methods: Mapping[str, Mapping[str, Sequence[float]]],
    nodes: Sequence[int],
    assumed: Sequence[str] = (),
    **table: Any,
) -> Iterator[PublishedStep]:
    for method, lists in methods.items():
        for place, count in enumerate(nodes):
            found = {part: values[place] / 1e3 for part, values in lists.items()}
            total = found.pop("total")
            parts = Parts(**found) if found else None
            yield PublishedStep(method=method, nodes=count, assumed=tuple(assumed), total=total, parts=parts, **table)


def compare(published: Sequence[PublishedStep]) -> Iterator[Comparison]:
    """Yield each published step with the model's range."""
    models: dict[str, CountedModel] = {}
    works: dict[tuple[str, str, int, int], Work] = {}
    for step in published:
        case = (step.recipe, step.method, step.rows, step.ranks)
        if case not in works:
            known = None if step.method in REFERENCES else step.method
            config = parse_for(known, [step.recipe, f"--data.batch_size={step.rows * step.ranks}", _ENGINE])
            if step.recipe not in models:
                models[step.recipe] = count_model(config)
            build = REFERENCES.get(step.method, build_objective)
            works[case] = step_work(config, models[step.recipe], step.ranks, build)._replace(overlaps=True)
        yield _compare(step, works[case])


def _compare(step: PublishedStep, work: Work) -> Comparison:
    machine = find_machine(step.machine, step.network)
    times = machine.cases(lambda rates: step_time(work, rates.compute, Cluster(step.nodes, step.gpus, rates.network)))
    total, exposed = Range.of(time.total for time in times), Range.of(time.exposed for time in times)
    return Comparison(step, work, total, exposed, machine.tower_peak)


def implied_rates(found: Sequence[Comparison]) -> list[ImpliedRates]:
    """Return the rates of each table and method."""
    return [_implied(list(steps)) for _, steps in groupby(found, key=lambda one: one.published[:3])]


def _implied(steps: Sequence[Comparison]) -> ImpliedRates:
    utilisation = Range.of(_utilisation(one, one.published.total) for one in steps)
    speeds = Range.of(one.published.rows / one.published.total for one in steps)
    parts = [(one, one.published.parts) for one in steps if one.published.parts is not None]
    return ImpliedRates(steps[0].published, utilisation, speeds, _fit(parts) if parts else None)


def _utilisation(one: Comparison, seconds: float) -> float:
    return one.work.tower_flops / seconds / one.tower_peak


def _fit(steps: Sequence[tuple[Comparison, Parts]]) -> FittedRates:
    utilisation = [_utilisation(one, parts.computation) for one, parts in steps]
    overheads = [one.published.total - parts.computation - parts.exposed for one, parts in steps]
    reached = [(one.published.nodes > 1, _received(one) / parts.communication) for one, parts in steps]
    within, between = ([rate for crosses, rate in reached if crosses is wanted] for wanted in (False, True))
    tower_rate = fmean(one.work.tower_flops / parts.computation for one, parts in steps)
    # the published computation has the objective and the optimizer in it
    compute = Compute(fmean(overheads), tower_rate, math.inf, math.inf, math.inf, math.inf, overlaps_engine=True)
    network = Network(0, 0, inner_bandwidth=fmean(within), bandwidth=fmean(between))
    errors = [_total(one, compute, network) / one.published.total - 1 for one, _ in steps]
    return FittedRates(*map(Range.of, (utilisation, overheads, within, between, errors)))


def _received(one: Comparison) -> float:
    """Return the bytes that a rank receives in all collectives of a step."""
    return sum(call.times * ring_bytes(call.op, call.size, one.published.ranks) for call in one.work.calls)


def _total(one: Comparison, compute: Compute, network: Network) -> float:
    return step_time(one.work, compute, Cluster(one.published.nodes, one.published.gpus, network)).total
