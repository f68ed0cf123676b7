"""Report loss spikes, skipped steps, divergence and slow data, with the step and its samples.

Every rank monitors its own loader. The loss and the gradient norms are equal on all ranks, so all ranks detect the same
events and rank 0 reports them. Nothing here communicates with other ranks or waits for a GPU.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from neuclip_ds.data.dataset import PADDING
from neuclip_ds.data.loader import RankBatch
from neuclip_ds.errors import RollBack, TrainingDiverged
from neuclip_ds.training.hooks import Hook

if TYPE_CHECKING:
    from neuclip_ds.training.trainer import Loop, StepResult

_SHOWN = 8  # sample indices in a message; events.jsonl contains all of them
_VALUES = {
    "tau": "temperature",
    "feature_grad_norm": "feature-gradient norm",
    "grad_norm": "the encoders' gradient norm",
    "lr": "learning rate",
}
_WINDOW, _MIN_LOSSES = 100, 50  # window of the loss level in steps, and the fewest steps that define it
_DEVIATIONS = 10.0  # a loss this many deviations above the level is a spike
_MIN_DEVIATION = 1e-3  # as a fraction of the level, for losses that hardly vary
_USUAL, _MIN_STEPS = 50, 5  # window of the median step time in steps, and the fewest steps that define it
_STALL_SECONDS, _STALL_TIMES = 2.0, 5.0  # a stall is longer than this many seconds and this many median step times


class Spike(NamedTuple):
    """A loss far above the level of the previous steps."""

    level: float
    deviation: float


class LossSpikeDetector:
    """Detects loss spikes by comparing each loss with robust statistics of the preceding losses.

    The level is the median of the last 100 losses; the deviation is 1.4826 times their median absolute deviation (the
    standard deviation if losses are Gaussian). A spike is a loss above `level + 10 * deviation`. By chance, Gaussian
    losses practically never exceed this threshold, and Laplace-distributed losses exceed it once in about 60,000 steps.
    After a spike, no new spike is reported for 100 steps; a loss that stays high longer becomes the new level.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._left = 0  # steps that still belong to the last spike

    def update(self, loss: float) -> Spike | None:
        """Add a step's loss; return a spike that begins with this step, otherwise None."""
        found = None
        if self._left:
            self._left -= 1
        elif len(self._losses) >= _MIN_LOSSES:
            level = median(self._losses)
            deviation = max(1.4826 * median(abs(x - level) for x in self._losses), _MIN_DEVIATION * abs(level))
            if loss > level + _DEVIATIONS * deviation:
                found, self._left = Spike(level, deviation), _WINDOW
        if math.isfinite(loss):
            self._losses.append(loss)
        return found


class StallDetector:
    """Detects steps that wait for this rank's loader far longer than the median duration of a step.

    The first step after a launch is ignored, because the worker processes are still starting and filling their queues.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_USUAL)
        self._started = False

    def update(self, waited: float, seconds: float) -> float | None:
        """Record how many seconds a step waited for its batch, and how many it took in total.

        Returns the median duration of a step if this step waited far longer than that, otherwise None.
        """
        if not self._started:
            self._started = True
            return None
        usual = median(self._recent) if len(self._recent) >= _MIN_STEPS else math.inf
        self._recent.append(seconds)
        return usual if waited > max(_STALL_SECONDS, _STALL_TIMES * usual) else None


class WatchHealth(Hook):
    """Checks every step, and reports problems in the log and in events.jsonl."""

    def start(self, loop: Loop) -> None:
        self._spikes, self._stalls = LossSpikeDetector(), StallDetector()
        self._stalled = 0  # number of stalled steps
        self._skipped: list[Sequence[int]] = []  # samples of each consecutive skipped step
        self._step = loop.done

    def on_batch(self, loop: Loop, batch: RankBatch) -> None:
        self._step = loop.done + 1

    def after_step(self, loop: Loop, result: StepResult) -> None:
        usual = self._stalls.update(result.waited, result.seconds)
        if usual is not None:
            self._report_stall(loop, usual, result)
        if not result.applied:
            self._skip(loop, result)
        else:
            self._skipped.clear()
            spike = None if result.is_partial_batch else self._spikes.update(result.loss)
            if spike is not None:
                self._report_spike(loop, spike, result)

    def close(self, loop: Loop, error: BaseException | None) -> None:
        """Record why the run rolls back, with the samples of all skipped steps, or why it diverged."""
        if isinstance(error, RollBack):
            step = int(error.checkpoint.name.rpartition("_")[2])  # the events of later steps are dropped
            samples = [index for indices in self._skipped for index in indices]
            loop.events.add(step, "rolled_back", str(error), samples, shared=True)
        elif isinstance(error, TrainingDiverged):
            loop.events.add(self._step, "diverged", str(error), self._batch(loop), logging.ERROR, shared=True)

    def _skip(self, loop: Loop, result: StepResult) -> None:
        """Report a step skipped due to a non-finite loss or gradient; roll back after too many consecutive skips."""
        batch, metrics, patience = self._batch(loop), result.metrics, loop.context.config.run.max_skipped_steps
        self._skipped.append(result.not_finite or batch)
        samples = result.not_finite[:_SHOWN]
        which = f"the features of samples {samples} are" if samples else "the loss or the gradient is"
        found = f"{which} not finite (loss {metrics['loss']:.4g}, {_values(metrics)}; {_first_samples(batch)})"
        message = f"step {result.step} is skipped and changes nothing: {found}"
        level = _flood_level(result.skipped)
        loop.events.add(result.step, "step_skipped", message, self._skipped[-1], level, shared=True)
        if len(self._skipped) >= patience:
            loop.roll_back(f"steps {result.step - patience + 1} to {result.step} were skipped: in the last, {found}")

    def _report_stall(self, loop: Loop, usual: float, result: StepResult) -> None:
        """Report a step that waited too long for this rank's loader."""
        self._stalled += 1
        indices, manifest = result.batch.index.tolist(), loop.context.data.manifest
        first = next((index for index in indices if index != PADDING), None)
        shard = "" if first is None else f", the first in {manifest.shards[manifest.locate(first)[0]].path}"
        message = (
            f"step {result.step} waited {result.waited:.1f} s for its batch; a usual step takes {usual:.2g} s (stall "
            f"{self._stalled} since the start); {_first_samples(indices)}{shard}. If this recurs, raise "
            f"data.workers (now {loop.context.config.data.workers}), or check the disk, the network and the cache "
            "(data.cache_dir, data.cache_gb)."
        )
        loop.events.add(result.step, "data_stall", message, indices, _flood_level(self._stalled))

    def _report_spike(self, loop: Loop, spike: Spike, result: StepResult) -> None:
        indices = self._batch(loop)
        message = (
            f"step {result.step}: loss {result.loss:.4g} is far above its level {spike.level:.4g} (usual deviation "
            f"{spike.deviation:.2g}); {_values(result.metrics)}; {_first_samples(indices)}. If spikes recur, lower "
            "optimizer.lr or set optimizer.max_grad_norm."
        )
        loop.events.add(result.step, "loss_spike", message, indices, shared=True)

    def _batch(self, loop: Loop) -> list[int]:
        """Return the sample indices of the step's global batch, which every rank can compute from the sample order."""
        epoch, step = divmod(self._step - 1, loop.order.steps_per_epoch)
        return list(loop.order.batch(epoch, step).tolist())


def _values(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{label} {metrics[name]:.4g}" for name, label in _VALUES.items() if name in metrics)


def _first_samples(indices: Sequence[int]) -> str:
    return f"its samples begin with indices {[index for index in indices[:_SHOWN] if index != PADDING]}"


def _flood_level(count: int) -> int:
    """Return the log level for the count-th occurrence of a message: WARNING for powers of two, otherwise DEBUG."""
    return logging.WARNING if count & (count - 1) == 0 else logging.DEBUG
