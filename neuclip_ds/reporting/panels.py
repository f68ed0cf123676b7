"""The plots of a report: which metrics each shows, their unit, and what they mean."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from typing import NamedTuple

AVERAGED = "ema/"  # before a metric's name: that of the averaged weights


class Panel(NamedTuple):
    """Plot of curves that share an axis."""

    title: str  # of the plot and of its file
    metrics: tuple[str, ...]  # names in metrics.jsonl, or patterns of names
    unit: str  # of the values' axis; "%" of metrics that are shares of 1
    meaning: str = ""  # sentences below the plot
    log_scale: bool = False
    averages: bool = True  # whether it also shows the metrics of averaged weights

    def has(self, metric: str) -> bool:
        """Return whether the panel shows a metric, of the weights or of their average."""
        names = {metric, metric.removeprefix(AVERAGED)} if self.averages else {metric}
        return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in self.metrics)

    def split(self, names: Iterable[str]) -> list[Panel]:
        """Return a panel for each of several metrics, which it shows alone."""
        found = [name for name in names if self.has(name)]
        if len(found) == 1:
            return [self]
        return [self._replace(title=f"{self.title}: {short(name)}", metrics=(name,), averages=False) for name in found]


PANELS = (
    Panel(
        "Image to text recall",
        ("image_to_text_recall@*",),
        "%",
        "Share of held-out images whose own caption is among the k nearest of all held-out captions (@k).",
    ),
    Panel(
        "Text to image recall",
        ("text_to_image_recall@*",),
        "%",
        "Share of held-out captions whose own image is among the k nearest of all held-out images (@k).",
    ),
    Panel(
        "Zero-shot accuracy",
        ("zero_shot_top*",),
        "%",
        "Share of images whose class is the nearest (top1) or among the five nearest (top5), by prompts of its name.",
    ),
    Panel("Averages of evaluation sets", ("average/*",), "%", "Means of main metrics over groups of DataComp's sets."),
    Panel("Evaluation sets", ("task/*",), "%", "The main metric of each set."),
    Panel(
        "Training loss",
        ("loss",),
        "loss of the global batch",
        "The method's own objective: losses of different methods are different things, so compare recall. An epoch's "
        "last batch is left out where it is less than half as large as the others.",
    ),
    Panel(
        "OpenCLIP's loss of the batch",
        ("batch_loss",),
        "cross-entropy, nats",
        "Cross-entropy of each pair among the pairs of its batch, at the run's temperature; the same for all methods.",
    ),
    Panel(
        "Temperature",
        ("tau", "tau_*"),
        "temperature τ",
        "Similarities are divided by τ before the exponential: a smaller one contrasts more sharply.",
    ),
    Panel("Bias", ("bias",), "bias b", "SigLIP adds it to the logits, as nearly all of its pairs are negatives."),
    Panel("Learning rate", ("lr",), "learning rate", "Of the encoders, by its schedule."),
    Panel(
        "Gradient norm",
        ("grad_norm",),
        "L2 norm",
        "Of the encoders' gradient, before it is clipped.",
        log_scale=True,
    ),
    Panel(
        "Feature gradient norm",
        ("feature_grad_norm",),
        "L2 norm",
        "Of the loss's gradient with respect to all features of the batch, before the towers.",
        log_scale=True,
    ),
    Panel(
        "Log-normaliser alpha",
        ("alpha",),
        "α, nats",
        "α is the logarithm of an anchor's normaliser, ε + mean of exp((s_ij - s_ii)/τ) over its negatives j, as the "
        "method estimates it; the mean of the batch. An anchor's weight is exp(-α).",
    ),
    Panel(
        "NPN ratio, mean",
        ("npn_ratio_mean",),
        "ratio",
        "The normaliser of the batch over the one that the normaliser-predicting network (NPN) predicts, "
        "(ε + g)/(ε + ĝ). 1 is right; outside 0.5 to 2 the network has lost the normaliser.",
    ),
    Panel("NPN ratio, largest", ("npn_ratio_max",), "ratio", "The same ratio of the worst anchor.", log_scale=True),
    Panel(
        "Queue ratio",
        ("normalizer_ratio",),
        "ratio",
        "The normaliser of the batch over the pooled one of batch and queue; 1 where they agree.",
    ),
    Panel(
        "Gamma",
        ("gamma",),
        "γ",
        "Share of the batch in the moving average u of each sample's normaliser; 1 forgets the past.",
    ),
    Panel(
        "Log of u",
        ("log_u",),
        "log u, nats",
        "u is the moving average of a sample's normaliser; the mean over the batch. An anchor's weight is 1/(ε + u).",
    ),
    Panel(
        "Amortization ratio",
        ("amortization_ratio",),
        "ratio",
        "The normaliser of the batch over the one that AmorLIP's MLP predicts; 1 is right.",
    ),
    Panel("Amortization error", ("amortization_error",), "loss", "What AmorLIP's MLP minimizes.", log_scale=True),
    Panel(
        "Log of lambda", ("log_lambda",), "log λ, nats", "λ is the normaliser that AmorLIP's MLP predicts, the mean."
    ),
    Panel(
        "Normaliser error",
        ("normalizer_mse", "normalizer_mse_*"),
        "squared error, nats²",
        "Mean squared difference of the method's log-normalisers from those over the whole training set; _image and "
        "_text are those of image and text anchors.",
        log_scale=True,
    ),
    Panel("Normaliser bias", ("normalizer_bias",), "error, nats", "Mean difference of the same; below 0 is too small."),
    Panel("Throughput", ("samples_per_second",), "samples/s", "Of all ranks together."),
    Panel("Waiting for data", ("data_wait_share",), "%", "Share of the time in which rank 0 waits for its batch."),
    Panel(
        "Objective's communication",
        ("objective_communication_share",),
        "%",
        "Share of the time in which rank 0 waits for the objective's collectives.",
    ),
    Panel("Skipped steps", ("skipped_steps",), "steps", "Steps without an update, as a gradient was not finite."),
    Panel("Bad samples", ("bad_samples/*",), "samples", "Samples that could not be used, by reason."),
)
_COUNTS = ("retrieval_pairs", "zero_shot_images", "normalizer_anchors", "normalizer_unseen", "chance/*")


def panels_of(names: Iterable[str]) -> list[Panel]:
    """Return the panels of some metrics; those that no panel knows get one each."""
    found = in_order(names)
    known = [panel for panel in PANELS if any(map(panel.has, found))]
    counts = Panel("", _COUNTS, "")
    rest = [name for name in found if not counts.has(name) and not any(panel.has(name) for panel in PANELS)]
    return [*known, *(Panel(name, (name,), name) for name in rest)]


def short(metric: str) -> str:
    """Return what tells a metric from the others of its panel."""
    name = re.sub(r"(image_to_text|text_to_image|zero_shot)_", "", metric).rpartition("/")[2]
    return f"{name}, EMA" if metric.startswith(AVERAGED) else name


def in_order(names: Iterable[str]) -> list[str]:
    """Return names in the order of the alphabet and of the numbers in them, recall@5 before recall@10."""
    return sorted(set(names), key=lambda name: re.sub(r"\d+", lambda number: number[0].zfill(9), name))
