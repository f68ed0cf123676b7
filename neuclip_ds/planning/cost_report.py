"""Tables and charts of the cost model: how well it fits, and what it predicts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from neuclip_ds.planning.cost_model import Compute, Network, Observation, StepTime
from neuclip_ds.reporting.page import Table, write_page

Record = Mapping[str, Any]


class Fitted(NamedTuple):
    """A profiled configuration and its prediction."""

    name: str
    measured: Observation
    predicted: StepTime
    same_collectives: bool  # purpose, operation, size and number of each are as predicted


def write_fit(rows: Sequence[Fitted], compute: Compute, network: Network, folder: Path) -> str:
    """Write fit.md, fit.html and fit.png into the folder and return the text of fit.md."""
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
    return write_page([table, machine], {"fit.png": figure}, folder / "fit", heading)


def write_scaling(found: Sequence[Record], described: Record, folder: Path) -> str:
    """Write scale.md, scale.html and scale.png into the folder and return the text of scale.md."""
    header = ["method", "network", "nodes", "ranks", "batch", "ms", "computation", "objective", "communication",
              "exposed", "samples/s", "MB received", "of which u, normalisers"]  # fmt: skip
    times = Table("A step, predicted", header, [])
    header = ["method", "network", "nodes", "memory of a rank, GB", "checkpoint, GB", "its time, s",
              "loading, MB/s of a node", "GPU hours of the run"]  # fmt: skip
    costs = Table("Other costs, predicted", header, [])
    for one in found:
        name = [one["method"], one["network"], str(one["nodes"])]
        parts = ("step", "computation", "communication", "exposed")
        step, computation, *rest = (f"{1e3 * one[key]:,.1f}" for key in parts)
        milliseconds = [step, computation, f"{one['objective_share']:.1%}", *rest]
        traffic = [f"{one[key] / 1e6:,.3f}" for key in ("received", "per_sample_received")]
        speed = f"{one['samples_per_second']:,.0f}"
        times.rows.append([*name, str(one["ranks"]), str(one["batch"]), *milliseconds, speed, *traffic])
        gigabytes = [f"{one[key] / 1e9:,.2f}" for key in ("memory", "checkpoint")]
        rest = [f"{one['checkpoint_seconds']:,.1f}", f"{one['loading'] / 1e6:,.0f}", f"{one['gpu_hours']:,.0f}"]
        costs.rows.append([*name, *gigabytes, *rest])
    facts = Table("For", ["what", "value"], [[str(key), str(value)] for key, value in described.items()])
    figures = {"scale.png": _plot_scaling(found)}
    return write_page([facts, times, costs], figures, folder / "scale", "The cost model's predictions")


def _plot_scaling(found: Sequence[Record]) -> Figure:
    """Plot over nodes, per network, the time of a step and a rank's samples a second relative to the fewest nodes."""
    networks = list(dict.fromkeys(one["network"] for one in found))
    figure = Figure(figsize=(4.5 * len(networks), 7.5), layout="tight")
    panels = figure.subplots(2, len(networks), squeeze=False, sharex=True)
    for column, network in enumerate(networks):
        for method in dict.fromkeys(one["method"] for one in found):
            own = [one for one in found if (one["network"], one["method"]) == (network, method)]
            nodes = [one["nodes"] for one in own]
            speeds = [one["samples_per_second"] / one["ranks"] for one in own]
            panels[0][column].plot(nodes, [1e3 * one["step"] for one in own], "o-", label=method)
            panels[1][column].plot(nodes, [speed / speeds[0] for speed in speeds], "o-", label=method)
        panels[0][column].set(title=network, xscale="log", ylabel="ms a step (model)")
        panels[1][column].set(xlabel="nodes", ylabel="efficiency against the fewest nodes (model)", ylim=(0, 1.05))
    panels[0][0].legend()
    return figure
