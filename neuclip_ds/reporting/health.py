"""Trouble in words: data stalls, loss spikes and gradients that are not finite, with the step and its samples.

Every rank watches its own loader. Loss and gradient norms are equal on all ranks, which therefore come to the same
findings; rank 0 tells them. Nothing here talks to other ranks or waits for a GPU.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from neuclip_ds.errors import TrainingDiverged
from neuclip_ds.reporting.events import EventLog
from neuclip_ds.reporting.loss_level import LossLevel, Spike
from neuclip_ds.reporting.stalls import Stall, StallWatch

_SHOWN = 8  # sample indices in words; all of them are in events.jsonl
_PATIENCE = 10  # updates in a row that may be skipped
_FACTS = {
    "tau": "temperature",
    "feature_grad_norm": "feature-gradient norm",
    "grad_norm": "the encoders' gradient norm",
    "lr": "learning rate",
}


class Samples(NamedTuple):
    """Who says which samples a step saw.

    Attributes:
        batch: the global batch's indices of a step (from 1), known on every rank.
        place: name of the shard that a sample is in.
        padding: the index of rows that hold none.
    """

    batch: Callable[[int], list[int]]
    place: Callable[[int], str]
    padding: int = -1


class StepHealth:
    """Looks at every step of a start."""

    def __init__(self, events: EventLog, samples: Samples, rank: int, workers: int) -> None:
        """
        Args:
            events: where findings go.
            samples: of the steps.
            rank: of this process.
            workers: `data.workers`, which the advice names.
        """
        self._events, self._samples, self._tells, self._workers = events, samples, rank == 0, workers
        self._level, self._stalls = LossLevel(), StallWatch()
        self._stalled = 0
        self._skipped = 0  # updates in a row

    def check_times(self, step: int, waited: float, seconds: float, indices: Sequence[int]) -> None:
        """Tells when this rank's loader was slow.

        Args:
            step: from 1.
            waited: seconds for the batch.
            seconds: of the whole step.
            indices: of this rank's rows.
        """
        for stall in self._stalls.update(waited, seconds):
            if stall.kind == "data_stall":
                self._tell_stall(step, stall, indices)
            else:
                self._tell_share(step, stall)

    def check_loss(self, step: int, loss: float, facts: Callable[[], Mapping[str, float]]) -> None:
        """Tells when the loss has left its level, and when it is back.

        Args:
            step: from 1.
            loss: of the global batch.
            facts: the step's metrics, asked for only when they are told.
        """
        spike = self._level.update(loss)
        if spike is not None and self._tells:
            self._tell_spike(step, loss, spike, facts)

    def check_update(self, step: int, norm: float | None, applied: bool) -> None:
        """Tells of an update that DeepSpeed has skipped because the encoders' gradient is not finite.

        Args:
            step: from 1.
            norm: of the encoders' gradient; None where DeepSpeed knows none (float32 without ZeRO).
            applied: whether DeepSpeed moved the weights.

        Raises:
            TrainingDiverged: on all ranks, where the weights took such a gradient, or too many updates were skipped.
        """
        if norm is None or (math.isfinite(norm) and norm >= 0 and applied):  # DeepSpeed writes -1 for NaN, too
            self._skipped = 0
            return
        samples = self._begin_with(self._samples.batch(step))
        trouble = f"step {step}: the encoders' gradient norm is not finite while the loss and its gradient are"
        if applied:
            raise TrainingDiverged(
                f"{trouble}, and DeepSpeed has applied it (bf16.check_grad_overflow is off in the DeepSpeed JSON), so "
                f"the weights are spoilt; {samples}. Go on from the newest checkpoint, with a lower optimizer.lr."
            )
        self._skipped += 1
        if self._skipped >= _PATIENCE:
            raise TrainingDiverged(
                f"{trouble}, for the {_PATIENCE}th step in a row; DeepSpeed has skipped these updates, so the weights "
                f"are those before step {step - _PATIENCE + 1}; {samples}. Lower optimizer.lr, or train in float32 "
                "(--deepspeed=zero1_fp32), and go on from the checkpoint."
            )
        if self._skipped == 1 and self._tells:
            words = (
                f"{trouble}; DeepSpeed has skipped the update: the encoders are as before, the temperature and the "
                f"normaliser have moved; {samples}."
            )
            self._events.add(step, "update_skipped", words, self._samples.batch(step))

    def diverged(self, step: int, error: TrainingDiverged) -> None:
        """Keeps the words that the run ends with."""
        if self._tells:
            self._events.add(step, "diverged", str(error), self._samples.batch(step), logging.ERROR)

    def _tell_stall(self, step: int, stall: Stall, indices: Sequence[int]) -> None:
        self._stalled += 1
        told = self._stalled & (self._stalled - 1) == 0  # the 1st, 2nd, 4th, 8th ...: a flood does not flood the log
        first = next((index for index in indices if index != self._samples.padding), None)
        where = "" if first is None else f", the first in {self._samples.place(first)}"
        words = (
            f"step {step} waited {stall.waited:.1f} s for its batch, {stall.share:.0%} of the step, where one usually "
            f"takes {stall.usual:.2g} s (stall {self._stalled} of this start); {self._begin_with(indices)}{where}. "
            f"If it recurs: more data.workers (now {self._workers}), or a look at the disk, the network or the cache "
            "(data.cache_dir, data.cache_gb)."
        )
        self._events.add(step, stall.kind, words, indices, logging.WARNING if told else logging.DEBUG)

    def _tell_share(self, step: int, stall: Stall) -> None:
        steps = f"steps {step - stall.steps + 1} to {step}: the loader took {stall.share:.0%} of the time"
        took = f"{stall.waited:.1f} of {stall.seconds:.0f} s"
        if stall.kind == "data_fast":
            self._events.add(step, stall.kind, f"{steps} ({took}): it keeps up again", level=logging.INFO)
            return
        mend = (
            f"more data.workers (now {self._workers}), a faster data.decoder, or data on a faster disk or in the cache"
        )
        self._events.add(step, stall.kind, f"{steps} ({took}), while the model waited: {mend}")

    def _tell_spike(self, step: int, loss: float, spike: Spike, facts: Callable[[], Mapping[str, float]]) -> None:
        if spike.kind == "loss_back":
            words = f"step {step}: the loss is back at {loss:.4g} (level {spike.level:.4g}); steps above: {spike.steps}"
            self._events.add(step, spike.kind, words, level=logging.INFO)
            return
        if spike.kind == "loss_stays":
            words = f"step {step}: the loss has not come back to {spike.level:.4g} and is {loss:.4g}: its new level"
            self._events.add(step, spike.kind, words)
            return
        found, batch = facts(), self._samples.batch(step)
        told = ", ".join(f"{words} {found[name]:.4g}" for name, words in _FACTS.items() if name in found)
        words = (
            f"step {step}: loss {loss:.4g} is far above its level {spike.level:.4g} (usual deviation "
            f"{spike.deviation:.2g}); {told}; {self._begin_with(batch)}."
        )
        self._events.add(step, spike.kind, words, batch)

    def _begin_with(self, indices: Sequence[int]) -> str:
        shown = [index for index in indices[:_SHOWN] if index != self._samples.padding]
        return f"its samples begin with indices {shown}"
