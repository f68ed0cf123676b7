"""Write the records of a loop: metrics.jsonl, TensorBoard, events.jsonl and bad_samples.jsonl."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from neuclip_ds.data.bad_samples import BadSampleLog
from neuclip_ds.data.loader import RankBatch
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.stop_signals import deferring, take_signal
from neuclip_ds.errors import UserError
from neuclip_ds.training.hooks import Hook

_STOP_LIMIT = 300.0  # longest time in seconds to wait until all ranks have requested the same stop

if TYPE_CHECKING:
    from neuclip_ds.training.trainer import Loop, StepResult


def wait_for_requests_of_all(communicator: Communicator, done: int) -> None:
    """Wait, without a collective, until all ranks have requested a stop after step `done`.

    Raises `UserError` after 5 minutes, because the other ranks must then have continued training, and are waiting for
    this rank in a collective.
    """
    name = f"stops after step {done}"
    requests = communicator.count(name)
    deadline = time.monotonic() + _STOP_LIMIT
    while requests < communicator.world_size:
        if time.monotonic() > deadline:
            raise UserError(
                f"A hook has set loop.stop_requested on {requests} of {communicator.world_size} ranks after step "
                f"{done}: change the hook so that it sets stop_requested on all ranks after the same step."
            )
        time.sleep(0.1)
        requests = communicator.count(name, 0)


def is_log_step(loop: Loop) -> bool:
    """Return whether metrics are logged after the last completed step."""
    return loop.done == loop.total or loop.done % loop.context.config.run.log_every == 0


class WriteRecords(Hook):
    """Writes metrics, events and bad samples, and ends the run if too many samples are bad or a stop signal arrives.

    Metrics are written every `run.log_every` steps and after the last step, with the throughput, the fraction of time
    spent waiting for batches and, on several ranks, the fraction spent in collectives other than DeepSpeed's. At these
    steps, one exchange informs all ranks of the other ranks' bad samples and stop signals; if any rank has received a
    signal, or a hook has requested a stop on any rank, all ranks stop after the same step, with a checkpoint.
    """

    def __init__(self, bad_samples: BadSampleLog) -> None:
        """
        Args:
            bad_samples: the loop's log of bad samples.
        """
        self._bad_samples = bad_samples
        # since the last record
        self._waited = 0.0
        self._interval_start = 0.0
        self._communication_before = 0.0

    def load_state(self, state: dict[str, Any]) -> None:
        self._bad_samples.restore(**state)

    def state(self, loop: Loop) -> dict[str, Any]:
        new = self._bad_samples.take_new()
        self._bad_samples.merge(loop.context.communicator.gather_objects(new))
        return {"seen": self._bad_samples.seen, "causes": dict(self._bad_samples.causes)}

    def start(self, loop: Loop) -> None:
        loop.resources.enter_context(deferring())  # from now on, signals wait for the exchange
        self._begin_interval(loop)

    def on_batch(self, loop: Loop, batch: RankBatch) -> None:
        self._bad_samples.record(batch)

    def after_step(self, loop: Loop, result: StepResult) -> None:
        self._waited += result.waited
        if not is_log_step(loop):
            if loop.stop_requested:
                wait_for_requests_of_all(loop.context.communicator, loop.done)
            return
        self._exchange(loop)
        if loop.metrics is not None:
            metrics = result.metrics
            if result.is_partial_batch:
                # a small last batch has fewer negatives, so its values would appear as jumps in every curve
                metrics = {"lr": result.lr, "skipped_steps": result.skipped}
            loop.metrics.write(result.step, {**metrics, **self._record_metrics(loop, result)})
        self._begin_interval(loop)

    def _exchange(self, loop: Loop) -> None:
        """Merge the bad samples of all ranks, and stop the loop if any rank received a signal or requested a stop.

        Raises `UserError` on all ranks if too many samples are bad.
        """
        local = (self._bad_samples.take_new(), take_signal(), loop.stop_requested)
        gathered = loop.context.communicator.gather_objects(local)
        self._bad_samples.merge([new for new, _, _ in gathered])
        for _, signal_number, stop_requested in gathered:
            if stop_requested:
                loop.stop_requested = True
            if signal_number is not None:
                loop.stop_requested = True
                loop.stop_signal = signal_number

    def _record_metrics(self, loop: Loop, result: StepResult) -> dict[str, float]:
        """Return the metrics that a record contains in addition to the step's metrics."""
        communicator = loop.context.communicator
        seconds = time.perf_counter() - self._interval_start
        metrics: dict[str, float] = {}
        for cause, count in self._bad_samples.causes.items():
            metrics[f"bad_samples/{cause}"] = count
        metrics["samples_per_second"] = result.samples_per_second
        metrics["data_wait_share"] = self._waited / seconds
        if communicator.world_size > 1:
            communication_seconds = communicator.seconds() - self._communication_before
            metrics["objective_communication_share"] = communication_seconds / seconds
        return metrics

    def _begin_interval(self, loop: Loop) -> None:
        self._waited = 0.0
        self._interval_start = time.perf_counter()
        self._communication_before = loop.context.communicator.seconds()
