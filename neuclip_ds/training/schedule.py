"""A step's place in the data, phase and learning rate, as functions of its number."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from neuclip_ds.config import OptimizerConfig
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.mixture import BatchOrder
from neuclip_ds.data.prefetch import ShardRequest, shards_ahead

_FITTED_WARMUP = 10  # a warm-up that does not fit into the run becomes this fraction of it
_COOLDOWN = 5  # by default the last fifth


class Span(NamedTuple):
    """Training steps with the same shards, from step `step` on, at which epoch `epoch` begins."""

    step: int
    epoch: int
    order: BatchOrder
    shards: int  # of the manifest
    removed: tuple[int, ...]  # numbers of unused shards


class StepLocation(NamedTuple):
    """A training step's place in the data."""

    order: BatchOrder
    epoch: int
    step: int  # within the epoch


class DataPosition:
    """The map from training steps to epochs: spans of steps, nearly always one."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = tuple(spans)

    @classmethod
    def start(cls, order: BatchOrder, manifest: Manifest) -> "DataPosition":
        """Return the position of a run that begins."""
        return cls([Span(0, 0, order, manifest.n_shards, manifest.removed)])

    def at(self, number: int) -> StepLocation:
        """Return a training step's place, counted from 0."""
        span = self._span(number)
        epochs, step = divmod(number - span.step, span.order.steps_per_epoch)
        return StepLocation(span.order, span.epoch + epochs, step)

    def is_rest(self, number: int) -> bool:
        """Return whether a step's batch is the last of an epoch and less than half full."""
        order, _, step = self.at(number)
        return 0 < step == order.steps_per_epoch - 1 and 2 * order.last_batch_size < order.batch_size

    def _span(self, number: int) -> Span:
        return next(span for span in reversed(self.spans) if span.step <= number or span is self.spans[0])

    def parts(self, begin: int, end: int) -> Iterator[tuple[StepLocation, int]]:
        """Yield the place of the first of the training steps begin ... end - 1 in each span, and their number."""
        ends = [span.step for span in self.spans[1:]]
        for stop in [min(stop, end) for stop in ends if stop > begin] + [end]:
            if begin < stop:
                yield self.at(begin), stop - begin
            begin = max(begin, stop)

    def batch(self, number: int) -> NDArray[np.int64]:
        """Return the global indices of a training step's batch."""
        place = self.at(number)
        return place.order.batch(place.epoch, place.step)

    def shards_ahead(self, number: int, rows: Sequence[slice]) -> Iterator[ShardRequest]:
        """Yield the order's `shards_ahead` from a training step on, with batches counted in training steps."""
        ends = [span.step for span in self.spans[1:]] + [None]
        for span, end in zip(self.spans, ends, strict=True):
            if end is not None and end <= number:
                continue
            place = self.at(max(number, span.step))
            offset = span.step - span.epoch * span.order.steps_per_epoch
            for request in shards_ahead(place.order, place.epoch, place.step, rows):
                if end is not None and request.first + offset >= end:
                    break
                yield request._replace(first=request.first + offset, last=request.last + offset)

    def end(self, epochs: float, max_steps: int | None = None) -> int:
        """Return the number of steps after which training ends: `max_steps`, or the steps of all epochs."""
        if max_steps:
            return max_steps
        span = next(span for span in reversed(self.spans) if span.epoch < epochs or span is self.spans[0])
        left = round((epochs - span.epoch) * span.order.steps_per_epoch)
        return max(span.step + left, span.step, 1)

    def record(self, manifest: Manifest) -> dict[str, Any]:
        """Return the record of the data for a checkpoint."""
        spans = [
            {"step": span.step, "epoch": span.epoch, "shards": span.shards, "removed": list(span.removed)}
            for span in self.spans
        ]
        held_out = sorted(manifest.held_out.items())
        return {"hash": manifest.content_hash, "shards": manifest.n_shards, "spans": spans, "held_out": held_out}


class Phase(NamedTuple):
    """Steps [start, stop) with the same inputs, and the schedule of learning rates that they are part of."""

    start: int
    stop: int
    image_size: int | None  # side in pixels; None is the model's
    context_length: int | None  # tokens of a caption, likewise
    patch_drop: float  # share of the image's patches to drop
    rates: OptimizerConfig
    rates_start: int  # of the schedule, which may span several phases
    rates_stop: int

    def learning_rate(self, step: int) -> float:
        """Return the encoders' learning rate of a step of the run."""
        return learning_rate(step - self.rates_start, self.rates_stop - self.rates_start, self.rates)

    def describe(self) -> str:
        """Return a description of the phase's inputs."""
        images = "full images" if self.image_size is None else f"images of {self.image_size} pixels"
        captions = "" if self.context_length is None else f", captions of {self.context_length} tokens"
        dropped = f", {self.patch_drop:.0%} of the patches dropped" if self.patch_drop else ""
        return f"steps {self.start + 1} to {self.stop}: {images}{captions}{dropped}, peak lr {self.rates.lr:.3g}"


def phase_at(phases: Sequence[Phase], step: int) -> Phase:
    """Return the phase of a step of the run, counted from 0."""
    return next(phase for phase in phases if step < phase.stop)


def learning_rate(step: int, total: int, config: OptimizerConfig) -> float:
    """Return the learning rate of a step: lr (step + 1) / warmup, then `config.schedule` from lr to min_lr at `total`.

    Warm-up, cosine and cooldown have the form of open_clip's. `wsd` is warm-up, stable, decay (Hu et al. 2024,
    MiniCPM), with the decay of Haegele et al. 2024, arXiv:2405.18392.
    """
    warmup = fitted_warmup(config.warmup_steps, total)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    cooldown = max(1, total // _COOLDOWN) if config.cooldown_steps is None else config.cooldown_steps
    step, total = step - warmup, max(1, total - warmup)
    cooldown = min(cooldown, total)
    cooled = min(1.0, max(0, step - (total - cooldown)) / cooldown)  # share of the cooldown that is done
    match config.schedule:
        case "cosine":
            height = 0.5 * (1 + math.cos(math.pi * min(1.0, step / total)))
        case "constant":
            height = 1.0
        case "cooldown":
            height = 1 - cooled
        case "wsd":
            height = 1 - math.sqrt(cooled)
    return config.min_lr + height * (config.lr - config.min_lr)


def fitted_warmup(steps: int, total: int) -> int:
    """Return the warm-up steps in a run of `total`: as given if shorter than the run, else a tenth of it."""
    return steps if steps < total else total // _FITTED_WARMUP
