"""Warnings of a run: data stalls, loss spikes and gradients that are not finite, with the step and its samples.

Every rank watches its own loader. Loss and gradient norms are equal on all ranks, so all ranks detect the same and
rank 0 reports it. Nothing here communicates with other ranks or waits for a GPU.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from neuclip_ds.data.dataset import PADDING
from neuclip_ds.errors import TrainingDiverged
from neuclip_ds.reporting.events import EventLog
from neuclip_ds.reporting.loss_spikes import LossSpikeDetector, Spike
from neuclip_ds.reporting.stalls import Stall, StallDetector

_SHOWN = 8  # sample indices in a message; events.jsonl has all of them
_PATIENCE = 10  # updates in a row that may be skipped
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
    """

    def __init__(self, events: EventLog, samples: SampleLookup, rank: int, workers: int) -> None:
        self._events, self._samples, self._reports, self._workers = events, samples, rank == 0, workers
        self._spikes, self._stalls = LossSpikeDetector(), StallDetector()
        self._stalled = 0
        self._skipped = 0  # updates in a row

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

    def check_update(self, step: int, norm: float | None, applied: bool) -> None:
        """Report an update that DeepSpeed has skipped because the encoders' gradient is not finite.

        Args:
            norm: of the encoders' gradient; None where DeepSpeed does not compute it (float32 without ZeRO).
            applied: whether DeepSpeed has updated the weights.

        Raises:
            TrainingDiverged: on all ranks, where such a gradient was applied, or too many updates were skipped.
        """
        if norm is None or (math.isfinite(norm) and norm >= 0 and applied):  # DeepSpeed also reports -1 for NaN
            self._skipped = 0
            return
        samples = self._first_samples(self._samples.batch(step))
        problem = f"step {step}: the encoders' gradient norm is not finite, although loss and feature gradients are"
        if applied:
            raise TrainingDiverged(
                f"{problem}, and DeepSpeed has applied it (bf16.check_grad_overflow is off in the DeepSpeed JSON), so "
                f"the weights are corrupted; {samples}. Resume from the newest checkpoint with a lower optimizer.lr."
            )
        self._skipped += 1
        if self._skipped >= _PATIENCE:
            raise TrainingDiverged(
                f"{problem}, for the {_PATIENCE}th step in a row. DeepSpeed has skipped these updates, so the weights "
                f"are those before step {step - _PATIENCE + 1}; {samples}. Lower optimizer.lr, or train in float32 "
                "(--deepspeed=zero1_fp32), and resume from the checkpoint."
            )
        if self._skipped == 1 and self._reports:
            message = (
                f"{problem}. DeepSpeed has skipped the update: the encoders are unchanged, the temperature and the "
                f"normaliser are updated; {samples}."
            )
            self._events.add(step, "update_skipped", message, self._samples.batch(step))

    def diverged(self, step: int, error: TrainingDiverged) -> None:
        """Record the message with which the run ends."""
        if self._reports:
            self._events.add(step, "diverged", str(error), self._samples.batch(step), logging.ERROR)

    def _report_stall(self, step: int, stall: Stall, indices: Sequence[int]) -> None:
        self._stalled += 1
        # warns of the 1st, 2nd, 4th, 8th, ..., so that many stalls do not flood the log
        level = logging.WARNING if self._stalled & (self._stalled - 1) == 0 else logging.DEBUG
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
        values = ", ".join(f"{label} {found[name]:.4g}" for name, label in _METRICS.items() if name in found)
        message = (
            f"step {step}: loss {loss:.4g} is far above its level {spike.level:.4g} (usual deviation "
            f"{spike.deviation:.2g}); {values}; {self._first_samples(batch)}. If spikes recur, lower optimizer.lr or "
            "set optimizer.clip_norm."
        )
        self._events.add(step, spike.kind, message, batch)

    def _first_samples(self, indices: Sequence[int]) -> str:
        shown = [index for index in indices[:_SHOWN] if index != PADDING]
        return f"its samples begin with indices {shown}"
