"""Report loss spikes, skipped steps, divergence and slow data, with the step and its samples.

Every rank monitors its own loader. The loss and the gradient norms are equal on all ranks, so all ranks detect the same
events and rank 0 reports them. In a normal step, the hook neither communicates with other ranks nor waits for a GPU.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from neuclip_ds.data.dataset import PADDING
from neuclip_ds.data.loader import RankBatch
from neuclip_ds.data.stored_towers import reads_images
from neuclip_ds.errors import RollBack, TrainingDiverged, is_power_of_two
from neuclip_ds.training.hooks import Hook

if TYPE_CHECKING:
    from neuclip_ds.training.trainer import Loop, StepResult

_SHOWN_INDICES = 8  # sample indices in a message; events.jsonl contains all of them
_SHOWN_METRICS = {  # metrics that messages contain, and their names in messages
    "tau": "temperature",
    "feature_grad_norm": "feature-gradient norm",
    "grad_norm": "encoders' gradient norm",
    "lr": "learning rate",
}

_FASTEST_DECODER = "simplejpeg"  # value of `data.decoder`

# loss spikes
_LEVEL_WINDOW = 100  # number of last losses that define the level
_MIN_LOSSES = 50  # minimum number of losses that define the level
_SPIKE_DEVIATIONS = 10.0  # a loss this many deviations above the level is a spike
_MIN_DEVIATION = 1e-3  # smallest deviation, as a fraction of the level, for losses that hardly vary
_GAUSSIAN_DEVIATIONS = 1.4826  # standard deviation of a Gaussian, in units of its median absolute deviation

# loaders that limit the speed
_WAIT_WINDOW = 100  # number of steps over which the share of time spent waiting is measured
_MAX_WAIT_SHARE = 0.1  # a loader limits the speed if steps wait for a larger share of their time

# stalls: a stall is longer than both of the following limits
_STALL_SECONDS = 2.0
_STALL_STEPS = 5.0  # multiple of the median step time
_STEP_WINDOW = 50  # number of last steps that define the median step time
_MIN_STEPS = 5  # minimum number of steps that define the median step time


@dataclass(frozen=True, kw_only=True)
class Spike:
    """A loss far above the level of the previous steps."""

    level: float
    deviation: float


class LossSpikeDetector:
    """Detects loss spikes by comparing each loss with robust statistics of the preceding losses.

    The level is the median of the last 100 losses; the deviation is 1.4826 times their median absolute deviation (the
    standard deviation if losses are Gaussian), but at least 0.1% of the level. A spike is a loss above `level + 10 *
    deviation`, once there have been 50 losses. By chance, Gaussian losses practically never exceed this threshold, and
    Laplace-distributed losses exceed it once in about 60,000 steps. After a spike, no new spike is reported for 100
    steps; a loss that stays high longer becomes the new level.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_LEVEL_WINDOW)
        self._steps_of_spike = 0  # further steps that belong to the last spike

    def update(self, loss: float) -> Spike | None:
        """Add a step's loss; return a spike that begins with this step, otherwise None."""
        spike = None
        if self._steps_of_spike > 0:
            self._steps_of_spike -= 1
        elif len(self._losses) >= _MIN_LOSSES:
            spike = self._compare(loss)
            if spike is not None:
                self._steps_of_spike = _LEVEL_WINDOW
        if math.isfinite(loss):
            self._losses.append(loss)
        return spike

    def _compare(self, loss: float) -> Spike | None:
        """Return a spike if a loss is far above the level of the last losses, otherwise None."""
        level = median(self._losses)
        median_absolute_deviation = median(abs(earlier - level) for earlier in self._losses)
        deviation = max(_GAUSSIAN_DEVIATIONS * median_absolute_deviation, _MIN_DEVIATION * abs(level))
        if loss > level + _SPIKE_DEVIATIONS * deviation:
            return Spike(level=level, deviation=deviation)
        return None


class StallDetector:
    """Detects steps that wait for this rank's loader far longer than the median duration of a step.

    The wait must exceed both 2 seconds and 5 times the median over the last 50 steps. No stall is reported before five
    steps have been recorded. The first step after a launch is ignored, because the worker processes are still starting
    and filling their queues.
    """

    def __init__(self) -> None:
        self._step_seconds: deque[float] = deque(maxlen=_STEP_WINDOW)
        self._is_first = True

    def update(self, waited: float, seconds: float) -> float | None:
        """Record how many seconds a step waited for its batch, and how many it took in total.

        Returns the median duration of a step if this step waited far longer than that, otherwise None.
        """
        if self._is_first:
            self._is_first = False
            return None
        usual_seconds = math.inf
        if len(self._step_seconds) >= _MIN_STEPS:
            usual_seconds = median(self._step_seconds)
        self._step_seconds.append(seconds)
        if waited > max(_STALL_SECONDS, _STALL_STEPS * usual_seconds):
            return usual_seconds
        return None


class LoaderMonitor:
    """Detects a loader that limits the speed: steps spend more than 10% of their time waiting for this rank's batches.

    The share is measured over successive windows of 100 steps. The first window after a launch is ignored, because the
    worker processes are still starting and filling their queues, and shards may still be on their way to the cache.
    """

    def __init__(self) -> None:
        self._is_first_window = True
        self._begin_window()

    def update(self, waited: float, seconds: float) -> float | None:
        """Record how many seconds a step waited for its batch, and how many it took in total.

        Returns the share of their time that the last 100 steps spent waiting, if this step ends a window other than the
        first and the share is above 10%; otherwise None.
        """
        self._steps += 1
        self._waited += waited
        self._seconds += seconds
        if self._steps < _WAIT_WINDOW:
            return None
        share = self._waited / self._seconds
        is_ignored = self._is_first_window or share <= _MAX_WAIT_SHARE
        self._is_first_window = False
        self._begin_window()
        return None if is_ignored else share

    def _begin_window(self) -> None:
        self._steps = 0
        self._waited = 0.0
        self._seconds = 0.0


class WatchHealth(Hook):
    """Checks every step, and reports spikes, skipped steps, divergence and slow data in the log and in events.jsonl."""

    def __init__(self) -> None:
        self._spike_detector = LossSpikeDetector()
        self._stall_detector = StallDetector()
        self._stalls = 0  # stalled steps since the start
        self._loader_monitor = LoaderMonitor()
        self._slow_windows = 0  # windows since the start in which the loader limited the speed
        self._samples_of_skipped: list[Sequence[int]] = []  # one entry per consecutive skipped step
        self._step = 0  # the step being run, counted from 1, or the last completed step

    def start(self, loop: Loop) -> None:
        self._step = loop.done

    def on_batch(self, loop: Loop, batch: RankBatch) -> None:
        self._step = loop.done + 1

    def after_step(self, loop: Loop, result: StepResult) -> None:
        usual_seconds = self._stall_detector.update(result.waited, result.seconds)
        if usual_seconds is not None:
            self._report_stall(loop, usual_seconds, result)
        wait_share = self._loader_monitor.update(result.waited, result.seconds)
        if wait_share is not None:
            self._report_slow_loader(loop, wait_share, result.step)
        if not result.applied:
            self._report_skipped_step(loop, result)
            return
        self._samples_of_skipped.clear()
        if not result.is_partial_batch:
            spike = self._spike_detector.update(result.loss)
            if spike is not None:
                self._report_spike(loop, spike, result)

    def close(self, loop: Loop, error: BaseException | None) -> None:
        """Record why the run rolls back, with the samples of all skipped steps, or why it diverged."""
        if isinstance(error, RollBack):
            step = int(error.checkpoint.name.rpartition("_")[2])  # the events of later steps are dropped
            samples: list[int] = []
            for samples_of_step in self._samples_of_skipped:
                samples.extend(samples_of_step)
            loop.events.add(step, "rolled_back", str(error), samples, shared=True)
        elif isinstance(error, TrainingDiverged):
            samples = self._global_batch(loop)
            loop.events.add(self._step, "diverged", str(error), samples, logging.ERROR, shared=True)

    def _report_skipped_step(self, loop: Loop, result: StepResult) -> None:
        """Report a step skipped due to a non-finite loss or gradient; roll back after too many consecutive skips."""
        batch = self._global_batch(loop)
        samples = result.not_finite or batch
        self._samples_of_skipped.append(samples)

        # describe what is not finite
        subject = "the loss or the gradient was"
        if result.not_finite:
            subject = f"the features of samples {list(result.not_finite[:_SHOWN_INDICES])} were"
        values = f"loss {result.metrics['loss']:.4g}, {_shown_metrics(result.metrics)}"
        problem = f"{subject} not finite ({values}; {_first_samples(batch)})"
        message = f"step {result.step} was skipped and changed nothing: {problem}"
        level = _flood_level(result.skipped)
        loop.events.add(result.step, "step_skipped", message, samples, level, shared=True)

        # too many in a row
        max_skipped = loop.context.config.run.max_skipped_steps
        if len(self._samples_of_skipped) >= max_skipped:
            skipped = f"step {result.step} was skipped:"
            if max_skipped > 1:
                skipped = f"steps {result.step - max_skipped + 1} to {result.step} were skipped: in the last step,"
            loop.roll_back(f"{skipped} {problem}")

    def _report_stall(self, loop: Loop, usual_seconds: float, result: StepResult) -> None:
        """Report a step that waited too long for this rank's loader."""
        self._stalls += 1
        indices = result.batch.index.tolist()
        manifest = loop.context.data.manifest
        shard = ""
        first_index = next((index for index in indices if index != PADDING), None)
        if first_index is not None:
            shard_number, _ = manifest.locate(first_index)
            shard = f", the first in {manifest.shards[shard_number].path}"
        message = (
            f"step {result.step} waited {result.waited:.1f} s for its batch; the median step takes "
            f"{usual_seconds:.2g} s (stall number {self._stalls} of this launch); {_first_samples(indices)}{shard}. "
            f"If this recurs, raise data.workers (now {loop.context.config.data.workers}), or check the disk, the "
            "network and the cache (data.cache_dir, data.cache_gb)."
        )
        loop.events.add(result.step, "data_stall", message, indices, _flood_level(self._stalls))

    def _report_slow_loader(self, loop: Loop, wait_share: float, step: int) -> None:
        """Report that this rank's loader limits the speed; the log shows the 1st, 2nd, 4th, 8th ... such window."""
        self._slow_windows += 1
        data = loop.context.config.data
        advice = [f"raise data.workers (now {data.workers} per rank) if CPU cores are idle"]
        if reads_images(loop.context.data.tables):
            if data.decoder != _FASTEST_DECODER:
                advice.append(f"set data.decoder={_FASTEST_DECODER}")
            advice.append("store smaller images in the shards")
        message = (
            f"the loader limits the speed: steps {step - _WAIT_WINDOW + 1} to {step} spent {wait_share:.0%} of their "
            f"time waiting for batches; {', '.join(advice)}, or use faster storage."
        )
        loop.events.add(step, "slow_loader", message, level=_flood_level(self._slow_windows))

    def _report_spike(self, loop: Loop, spike: Spike, result: StepResult) -> None:
        indices = self._global_batch(loop)
        message = (
            f"step {result.step}: loss {result.loss:.4g} is far above its usual level {spike.level:.4g} (usual "
            f"deviation {spike.deviation:.2g}); {_shown_metrics(result.metrics)}; {_first_samples(indices)}. If spikes "
            "recur, lower optimizer.lr, or clip gradients with optimizer.max_grad_norm."
        )
        loop.events.add(result.step, "loss_spike", message, indices, shared=True)

    def _global_batch(self, loop: Loop) -> list[int]:
        """Return the sample indices of the step's global batch, which every rank can compute from the sample order."""
        epoch, step_of_epoch = divmod(self._step - 1, loop.order.steps_per_epoch)
        return list(loop.order.batch(epoch, step_of_epoch).tolist())


def _shown_metrics(metrics: Mapping[str, float]) -> str:
    """Format the metrics in `_SHOWN_METRICS` for a message, as in "temperature 0.05, learning rate 0.001"."""
    values = []
    for name, label in _SHOWN_METRICS.items():
        if name in metrics:
            values.append(f"{label} {metrics[name]:.4g}")
    return ", ".join(values)


def _first_samples(indices: Sequence[int]) -> str:
    """Describe the first samples of a batch, without its padding."""
    shown = [index for index in indices[:_SHOWN_INDICES] if index != PADDING]
    return f"the batch begins with samples {shown}"


def _flood_level(count: int) -> int:
    """Return the log level for the count-th occurrence of a message: WARNING for powers of two, otherwise DEBUG."""
    return logging.WARNING if is_power_of_two(count) else logging.DEBUG
