"""Tables and charts of the cost model: how well it fits, what it predicts, and how far published times are from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from neuclip_ds.planning.cost_model import Compute, Network, Observation, Range, StepTime
from neuclip_ds.planning.published import Comparison, ImpliedRates, PublishedStep
from neuclip_ds.reporting.page import Table, write_page

Record = Mapping[str, Any]


class Fitted(NamedTuple):
    """A profiled configuration and its prediction."""

    name: str
    measured: Observation
    predicted: StepTime
    same_collectives: bool  # purpose, operation, size and number of each are as predicted


def write_fit(rows: Sequence[Fitted], compute: Compute, network: Network, folder: Path) -> list[Table]:
    """Write fit.md, fit.html and fit.png into the folder and return the tables."""
    table = Table("Predicted and measured steps", ["profile", "ranks", "ms", "predicted", "ratio", "collectives, ms", "predicted", "same collectives"], [])  # fmt: skip  # noqa: E501
    for row in rows:
        times, transfer = (row.measured.total, row.predicted.total), sum(n.times * s for n, s in row.measured.transfers)
        of_steps, of_collectives = (
            [f"{1e3 * x:.1f}" for x in pair] for pair in (times, (transfer, row.predicted.communication))
        )
        cells = [*of_steps, f"{times[1] / times[0]:.2f}", *of_collectives]
        table.rows.append([row.name, str(row.measured.world_size), *cells, "yes" if row.same_collectives else "NO"])
    machine = Table("The machine", ["quantity", "fitted"], [
        ["overhead of a step, ms", f"{1e3 * compute.overhead:.2f}"],
        ["towers, GFLOP/s", f"{compute.tower_rate / 1e9:,.1f}"],
        ["objective, GFLOP/s", f"{compute.objective_rate / 1e9:,.1f}"],
        ["objective, million elements/s written", f"{compute.element_rate / 1e6:,.1f}"],
        ["optimizer, million elements/s", f"{compute.update_rate / 1e6:,.1f}"],
        ["a parameter of ZeRO 3, ms", f"{1e3 / compute.hook_rate:.2f}"],
        ["waiting for other ranks, share", f"{compute.skew:.0%}"],
        ["slower where all cores work, share", f"{compute.sharing:.0%}"],
        ["start of a collective, ms", f"{1e3 * network.start:.2f}"],
        ["a message, ms", f"{1e3 * network.inner_latency:.3f}"],
        ["bandwidth, MB/s", f"{network.inner_bandwidth / 1e6:,.0f}"],
    ])  # fmt: skip
    figure = Figure(figsize=(6, 6), layout="tight")
    axes = figure.subplots()
    for ranks in sorted({row.measured.world_size for row in rows}):
        own = [(1e3 * x.measured.total, 1e3 * x.predicted.total) for x in rows if x.measured.world_size == ranks]
        axes.scatter(*zip(*own, strict=True), label=f"{ranks} ranks")
    ends = [1e3 * end(row.measured.total for row in rows) for end in (min, max)]
    for factor, style in ((1.0, "-"), (1.25, ":"), (0.75, ":")):
        axes.plot(ends, [factor * end for end in ends], style, color="grey", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="measured, ms a step", ylabel="model, ms (dotted: 25 % off)")
    axes.legend()
    heading = "The cost model and the profiled steps"
    write_page([table, machine], {"fit.png": figure}, folder / "fit", heading)
    return [table, machine]


def write_scaling(found: Sequence[Record], described: Record, folder: Path) -> list[Table]:
    """Write scale.md, scale.html and scale.png into the folder and return the tables.

    Each record has the fields of a `Prediction`, its method and its network.
    """
    networks = list(dict.fromkeys(one["network"] for one in found))
    first = networks[0]
    places: defaultdict[tuple[str, int], dict[str, Record]] = defaultdict(dict)
    for one in found:
        places[one["method"], one["nodes"]][one["network"]] = one
    header = ["method", "nodes", "batch", *(f"{network}: ms (exposed)" for network in networks)]
    header += [f"objective's share, {first}", f"samples/s of a GPU, {first}", f"of the peak, {first}", "MB received"]
    times = Table("A step, predicted", header, [])
    header = ["method", "nodes", "memory of a rank, GB", "u and normalisers received, MB", "checkpoint, GB"]
    header += ["its time, s", f"loading, MB/s of a node, {first}", f"GPU hours of the run, {first}"]
    costs = Table("Other costs, predicted", header, [])
    for (method, nodes), by_network in places.items():
        one, name = by_network[first], [method, str(nodes)]
        steps = [f"{span(of['step'], 1e3)} ({span(of['exposed'], 1e3)})" for of in by_network.values()]
        speed = Range(*(samples / one["ranks"] for samples in one["samples_per_second"]))
        share, reached = (f"{span(one[key], 100, 1)} %" for key in ("objective_share", "utilisation"))
        received = f"{one['received'] / 1e6:,.0f}"
        times.rows.append([*name, f"{one['batch']:,}", *steps, share, span(speed), reached, received])
        sizes = [f"{one['memory'] / 1e9:,.1f}", f"{one['per_sample_received'] / 1e6:,.1f}"]
        sizes += [f"{one['checkpoint'] / 1e9:,.2f}", f"{one['checkpoint_seconds']:,.1f}"]
        costs.rows.append([*name, *sizes, span(one["loading"], 1e-6), span(one["gpu_hours"])])
    facts = Table("For", ["what", "value"], [[str(key), str(value)] for key, value in described.items()])
    tables = [facts, times, costs]
    write_page(tables, {"scale.png": _plot_scaling(found)}, folder / "scale", "The cost model's predictions")
    return tables


def _plot_scaling(found: Sequence[Record]) -> Figure:
    """Plot ranges over nodes, per network: the time of a step, and a GPU's speed relative to the fewest nodes."""
    networks = list(dict.fromkeys(one["network"] for one in found))
    figure = Figure(figsize=(4.5 * len(networks), 7.5), layout="tight")
    panels = figure.subplots(2, len(networks), squeeze=False, sharex=True, sharey="row")
    for column, network in enumerate(networks):
        for method in dict.fromkeys(one["method"] for one in found):
            own = [one for one in found if (one["network"], one["method"]) == (network, method)]
            nodes, ranks = [one["nodes"] for one in own], [one["ranks"] for one in own]
            slow, fast = ([1e3 * one["step"][end] for one in own] for end in (1, 0))
            (line,) = panels[0][column].plot(nodes, fast, "o-", label=method)
            panels[0][column].plot(nodes, slow, ":", color=line.get_color())
            for end, style in ((1, "o-"), (0, ":")):
                speeds = [one["samples_per_second"][end] / count for one, count in zip(own, ranks, strict=True)]
                relative = [speed / speeds[0] for speed in speeds]
                panels[1][column].plot(nodes, relative, style, color=line.get_color())
        panels[0][column].set(title=network, xscale="log", yscale="log", ylabel="ms a step (dotted: slow end)")
        panels[1][column].set(xlabel="nodes", ylabel="efficiency against the fewest nodes", ylim=(0, 1.05))
    panels[0][0].legend()
    return figure


def write_published(found: Sequence[Comparison], implied: Sequence[ImpliedRates], folder: Path) -> list[Table]:
    """Write published.md and published.html into the folder and return the tables."""
    tables = [
        _comparison("Published and predicted steps, ms", found, lambda one: (one.published.total, one.total)),
        _comparison("Published and predicted exposed communication, ms", found, _exposed),
        _rates(implied),
    ]
    write_page(tables, {}, folder / "published", "The cost model and published times")
    return tables


def _exposed(one: Comparison) -> tuple[float, Range] | None:
    return (one.published.parts.exposed, one.exposed) if one.published.parts else None


def _comparison(
    title: str, found: Sequence[Comparison], quantity: Callable[[Comparison], tuple[float, Range] | None]
) -> Table:
    """Return a row for each table and method, with the model's range and its error at each number of nodes."""
    counts = sorted({one.published.nodes for one in found})
    table = Table(title, [*_LABELS, *(f"{count} nodes" if count > 1 else "1 node" for count in counts)], [])
    for _, steps in groupby(found, key=lambda one: one.published[:3]):
        rows = {one.published.nodes: one for one in steps}
        cells = [_against(quantity(rows[count])) if count in rows else "-" for count in counts]
        if set(cells) != {"-"}:
            table.rows.append([*_labels(next(iter(rows.values())).published), *cells])
    return table


def _against(quantity: tuple[float, Range] | None) -> str:
    """Return a published time, the model's range, and the range's errors: +10 % where the model is that much longer."""
    if quantity is None:
        return "-"
    published, model = quantity
    errors = [f"{100 * (end / published - 1):+,.0f}" for end in model]
    return f"{1e3 * published:,.0f}: {span(model, 1e3)} ({' to '.join(errors)} %)"


def _rates(implied: Sequence[ImpliedRates]) -> Table:
    header = ["of the peak in the step", "pairs/s of a GPU", "of the peak while computing", "overhead, ms"]
    header += ["GB/s within a node", "GB/s between nodes", "error of the totals at these rates"]
    table = Table("Rates that the published times imply", [*_LABELS, *header], [])
    for one in implied:
        cells = [f"{span(one.utilisation, 100, 1)} %", span(one.pairs_per_second)]
        fitted = one.fitted
        if fitted is None:
            cells += ["-"] * 5
        else:
            links = [span(rate, 1e-9, 1) for rate in (fitted.inner_bandwidth, fitted.bandwidth)]
            errors = " to ".join(f"{100 * error:+.0f}" for error in fitted.error)
            cells += [f"{span(fitted.utilisation, 100, 1)} %", span(fitted.overhead, 1e3), *links, f"{errors} %"]
        table.rows.append([*_labels(one.published), *cells])
    return table


_LABELS = ["published in", "towers", "method", "pairs a GPU", "GPUs of a node"]


def _labels(step: PublishedStep) -> list[str]:
    """Return what a row is of; a star marks what the paper does not tell."""
    rows, machine = ("*" if name in step.assumed else "" for name in ("rows", "machine"))
    return [
        step.source,
        step.setting,
        f"`{step.method}`",
        f"{step.rows}{rows}",
        f"{step.gpus} x {step.machine}{machine}",
    ]


def span(values: Range, scale: float = 1.0, digits: int = 0) -> str:
    """Return both ends of a range, or one number where they do not differ in the digits that are shown."""
    low, high = (f"{scale * value:,.{digits}f}" for value in values)
    return low if low == high else f"{low} - {high}"
