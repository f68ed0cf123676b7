"""Plots of runs: panels of related curves, as PNG images."""

import fnmatch
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Series = Mapping[str, tuple[Sequence[int], Sequence[float]]]  # metric -> steps and values


class Panel(NamedTuple):
    """Plot of curves that share an axis."""

    title: str  # of the plot and of its file
    metrics: tuple[str, ...]  # names or patterns of names in metrics.jsonl
    log_scale: bool = False  # whether the values' axis is logarithmic


PANELS = (
    Panel("loss", ("loss", "batch_loss")),
    Panel("temperature", ("tau", "tau_*")),
    Panel("learning rate", ("lr",)),
    Panel("gradient norms", ("grad_norm", "feature_grad_norm"), log_scale=True),
    Panel("gamma", ("gamma",)),
    Panel("u in the batch, logarithm", ("log_u",)),
    Panel("network against normaliser", ("npn_*", "amortized_*", "lambda_*")),
    Panel("normaliser's error", ("normalizer_*",)),
    Panel("held-out retrieval, recall", ("*_recall@*",)),
    Panel("zero-shot accuracy", ("zero_shot_top*",)),
    Panel("evaluation sets", ("task/*", "average/*")),
    Panel("samples per second", ("samples_per_second",)),
    Panel("share of time waiting for data", ("data_wait_share",)),
    Panel("share of time in the objective's collectives", ("objective_communication_share",)),
    Panel("bad samples", ("bad_samples/*",)),
)


def collect(records: Iterable[Mapping[str, float]]) -> Series:
    """Collect the curves of the metrics from the records of a metrics.jsonl."""
    series: dict[str, tuple[list[int], list[float]]] = {}
    for record in records:
        for name, value in record.items():
            if name != "step":
                steps, values = series.setdefault(name, ([], []))
                steps.append(int(record["step"]))
                values.append(value)
    return series


def draw(panel: Panel, runs: Mapping[str, Series]) -> bytes | None:
    """Draw a panel's curves as PNG, labelled by run if there are several; None if no run has any of the metrics."""
    found = [
        (name if len(runs) == 1 else f"{run}: {name}", *series[name])
        for run, series in runs.items()
        for name in series
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in panel.metrics)
    ]
    if not found:
        return None
    figure, axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    for label, steps, values in found:
        axes.plot(steps, values, label=label, linewidth=1.2, marker="." if len(steps) < 30 else None)
    axes.set(xlabel="step", title=panel.title, yscale="log" if panel.log_scale else "linear")
    axes.grid(alpha=0.3)
    if len(found) > 1 or len(runs) > 1:
        axes.legend(fontsize=7)
    return png(figure)


def draw_histogram(title: str, columns: Mapping[str, Sequence[float]]) -> bytes:
    """Draw the distribution of each column's values as PNG, normalised per column."""
    figure, axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    for name, values in columns.items():
        axes.hist(values, bins=60, histtype="step", label=name, weights=[1 / max(1, len(values))] * len(values))
    axes.set(title=title, ylabel="share of samples")
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
    return png(figure)


def png(figure: plt.Figure) -> bytes:
    """Return a figure as PNG and close it."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    plt.close(figure)
    return out.getvalue()
