"""Warnings of a run: data stalls, loss spikes and gradients that are not finite, with the step and its samples.

Every rank watches its own loader. Loss and gradient norms are equal on all ranks, so all ranks detect the same and
rank 0 reports it. Nothing here communicates with other ranks or waits for a GPU.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from neuclip_ds.data.dataset import PADDING
from neuclip_ds.errors import RollBack, TrainingDiverged
from neuclip_ds.reporting.events import EventLog
from neuclip_ds.reporting.loss_spikes import LossSpikeDetector, Spike
from neuclip_ds.reporting.stalls import Stall, StallDetector

_SHOWN = 8  # sample indices in a message; events.jsonl has all of them
_METRICS = {
    "tau": "temperature",
    "feature_grad_norm": "feature-gradient norm",
    "grad_norm": "the encoders' gradient norm",
    "lr": "learning rate",
}


class SampleLookup(NamedTuple):
    """Which samples a step uses, and where they are stored."""

    batch: Callable[[int], list[int]]  # step -> indices of its global batch, known on every rank
    shard: Callable[[int], str]  # sample index -> name of its shard


class StepHealth:
    """Checks of every step since the run was started or resumed; steps count from 1.

    Args:
        events: log of the findings.
        samples: of the steps.
        rank: of this process.
        workers: `data.workers`, for the messages.
        patience: `run.max_skipped`, steps in a row that may be skipped.
    """

    def __init__(self, events: EventLog, samples: SampleLookup, rank: int, workers: int, patience: int) -> None:
        self._patience = patience
        self._events, self._samples, self._reports, self._workers = events, samples, rank == 0, workers
        self._spikes, self._stalls = LossSpikeDetector(), StallDetector()
        self._stalled = 0
        self._skipped: list[Sequence[int]] = []  # samples of each of the steps in a row

    def check_times(self, step: int, waited: float, seconds: float, indices: Sequence[int]) -> None:
        """Report a step or an interval in which this rank's loader was slow.

        Args:
            waited: seconds until the batch was there.
            seconds: duration of the whole step.
            indices: of this rank's rows.
        """
        for stall in self._stalls.update(waited, seconds):
            if stall.kind == "data_stall":
                self._report_stall(step, stall, indices)
            else:
                self._report_interval(step, stall)

    def check_loss(self, step: int, loss: float, metrics: Callable[[], Mapping[str, float]]) -> None:
        """Report the beginning and the end of a spike of the global batch's loss, with `metrics()` of the step."""
        spike = self._spikes.update(loss)
        if spike is not None and self._reports:
            self._report_spike(step, loss, spike, metrics)

    def check_update(
        self, step: int, applied: bool, metrics: Callable[[], Mapping[str, float]], not_finite: Sequence[int]
    ) -> str | None:
        """Report a step that was skipped, as its loss or gradient is not finite.

        Args:
            applied: whether the step was not skipped.
            metrics: of the step.
            not_finite: indices of the samples whose features are not finite.

        Returns:
            Once `patience` steps in a row were skipped, what happened: the beginning of a sentence, on all ranks.
        """
        if applied:
            self._skipped.clear()
            return None
        batch = self._samples.batch(step)
        self._skipped.append(not_finite or batch)
        values = metrics()
        which = f"the features of samples {list(not_finite[:_SHOWN])} are" if not_finite else "loss or gradient is"
        found = f"{which} not finite (loss {values['loss']:.4g}, {self._values(values)}; {self._first_samples(batch)})"
        if self._reports:
            message = f"step {step} is skipped and changes nothing: {found}"
            level = _flood_level(int(values["skipped_steps"]))
            self._events.add(step, "step_skipped", message, self._skipped[-1], level)
        if len(self._skipped) < self._patience:
            return None
        return f"steps {step - self._patience + 1} to {step} were skipped: in the last, {found}"

    def report_overflow(self, step: int, scale: float) -> None:
        """Report a step that was skipped, as its gradient overflows float16: a smaller loss scale is the remedy."""
        if self._reports:
            message = f"step {step} is skipped: its gradient overflows float16; the loss scale is now {scale:g}"
            self._events.add(step, "loss_scale", message, level=logging.INFO)

    def rolled_back(self, step: int, error: RollBack) -> None:
        """Record why the run returns to a step, with the samples of all skipped steps."""
        if self._reports:
            self._events.add(step, "rolled_back", str(error), [index for step in self._skipped for index in step])

    def diverged(self, step: int, error: TrainingDiverged) -> None:
        """Record the message with which the run ends."""
        if self._reports:
            self._events.add(step, "diverged", str(error), self._samples.batch(step), logging.ERROR)

    def _report_stall(self, step: int, stall: Stall, indices: Sequence[int]) -> None:
        self._stalled += 1
        level = _flood_level(self._stalled)
        first = next((index for index in indices if index != PADDING), None)
        shard = "" if first is None else f", the first in {self._samples.shard(first)}"
        message = (
            f"step {step} waited {stall.waited:.1f} s for its batch, {stall.share:.0%} of the step; a usual step takes "
            f"{stall.usual:.2g} s (stall {self._stalled} since the start); {self._first_samples(indices)}{shard}. "
            f"If this recurs, set more data.workers (now {self._workers}), or check the disk, the network and the "
            "cache (data.cache_dir, data.cache_gb)."
        )
        self._events.add(step, stall.kind, message, indices, level)

    def _report_interval(self, step: int, stall: Stall) -> None:
        waiting = (
            f"steps {step - stall.steps + 1} to {step}: waiting for data took {stall.share:.0%} of the time "
            f"({stall.waited:.1f} of {stall.seconds:.0f} s)"
        )
        if stall.kind == "data_fast":
            self._events.add(step, stall.kind, f"{waiting}; the loader keeps up again", level=logging.INFO)
            return
        message = (
            f"{waiting}. Set more data.workers (now {self._workers}) or a faster data.decoder, or move the data to a "
            "faster disk or the cache."
        )
        self._events.add(step, stall.kind, message)

    def _report_spike(self, step: int, loss: float, spike: Spike, metrics: Callable[[], Mapping[str, float]]) -> None:
        if spike.kind == "loss_back":
            message = (
                f"step {step}: the loss is back at {loss:.4g} (level {spike.level:.4g}) after {spike.steps} steps above"
            )
            self._events.add(step, spike.kind, message, level=logging.INFO)
            return
        if spike.kind == "loss_stays":
            message = f"step {step}: the loss has stayed above {spike.level:.4g}; its new level is {loss:.4g}"
            self._events.add(step, spike.kind, message)
            return
        found, batch = metrics(), self._samples.batch(step)
        message = (
            f"step {step}: loss {loss:.4g} is far above its level {spike.level:.4g} (usual deviation "
            f"{spike.deviation:.2g}); {self._values(found)}; {self._first_samples(batch)}. "
            "If spikes recur, lower optimizer.lr or set optimizer.clip_norm."
        )
        self._events.add(step, spike.kind, message, batch)

    def _values(self, metrics: Mapping[str, float]) -> str:
        return ", ".join(f"{label} {metrics[name]:.4g}" for name, label in _METRICS.items() if name in metrics)

    def _first_samples(self, indices: Sequence[int]) -> str:
        shown = [index for index in indices[:_SHOWN] if index != PADDING]
        return f"its samples begin with indices {shown}"


def _flood_level(count: int) -> int:
    """Return the level of a message's count-th repetition: a warning for the 1st, 2nd, 4th, 8th, ..., so that many do
    not flood the log."""
    return logging.WARNING if count & (count - 1) == 0 else logging.DEBUG
