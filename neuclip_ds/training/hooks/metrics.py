"""Write metrics, show progress and profile steps."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from neuclip_ds.data.bad_samples import BadSampleLog
from neuclip_ds.profiling.recorder import Recorder
from neuclip_ds.reporting.metrics import MetricsLog
from neuclip_ds.reporting.progress import Progress
from neuclip_ds.reporting.weights_and_biases import WeightsAndBiases
from neuclip_ds.training.hooks.base import Hook

if TYPE_CHECKING:
    from neuclip_ds.training.loop import Loop, StepResult


def open_metrics(loop: Loop) -> MetricsLog | None:
    """Open metrics.jsonl, TensorBoard and, if the config names a project, Weights & Biases; None beyond rank 0."""
    config = loop.context.config
    if loop.context.communicator.rank != 0:
        return None
    if config.run.wandb is None:
        return MetricsLog(loop.folder, loop.done or None)
    name = loop.folder.relative_to(config.run.folder).as_posix()
    online = WeightsAndBiases(
        config.run.wandb, loop.folder, name, config.model_dump(mode="json"), resumed=loop.done > 0
    )
    return MetricsLog(loop.folder, loop.done or None, [online])


class WriteMetrics(Hook):
    """Write the metrics of every `run.log_every`-th step, with throughput and shares of waiting since the last one."""

    def __init__(self, metrics: MetricsLog | None, bad_samples: BadSampleLog) -> None:
        self._metrics, self._bad_samples = metrics, bad_samples

    def start(self, loop: Loop) -> None:
        if self._metrics is not None:
            loop.resources.enter_context(self._metrics)
        self._begin_interval(loop)

    def after_step(self, loop: Loop, result: StepResult) -> None:
        self._waited += result.waited
        if not result.logs:
            return
        if self._metrics is not None:
            # the values of an epoch's rest, with fewer negatives, would end every curve in a step
            of_step = {"lr": result.lr, "skipped_steps": result.skipped} if result.rest else result.metrics
            self._metrics.write(result.step, {**of_step, **self._of_interval(loop, result)})
        self._begin_interval(loop)

    def _of_interval(self, loop: Loop, result: StepResult) -> dict[str, float]:
        passed = time.perf_counter() - self._since
        found: dict[str, float] = {f"bad_samples/{cause}": n for cause, n in self._bad_samples.causes.items()}
        found["samples_per_second"], found["data_wait_share"] = result.samples_per_second, self._waited / passed
        communicator = loop.context.communicator
        if communicator.world_size > 1:
            found["objective_communication_share"] = (communicator.seconds() - self._communicated) / passed
        return found

    def _begin_interval(self, loop: Loop) -> None:
        self._waited, self._since = 0.0, time.perf_counter()
        self._communicated = loop.context.communicator.seconds()


class ShowProgress(Hook):
    """Show step, loss of the newest full batch, temperature, throughput and time left on rank 0."""

    def start(self, loop: Loop) -> None:
        shown = loop.context.communicator.rank == 0 and loop.done < loop.total
        self._progress = loop.resources.enter_context(Progress(loop.total, loop.done, enabled=shown))
        self._loss = math.nan

    def after_step(self, loop: Loop, result: StepResult) -> None:
        self._loss = self._loss if result.rest else result.loss
        self._progress.update(
            result.step, loss=self._loss, tau=result.tau, samples_per_second=result.samples_per_second
        )


class ProfileSteps(Hook):
    """Record `run.profile_steps` steps, the wait for their batches included, into profile/."""

    def start(self, loop: Loop) -> None:
        context, run, folder = loop.context, loop.context.config.run, loop.folder / "profile"
        labels = {"method": loop.fingerprint["method"], "zero_stage": int(context.engine.zero_optimization_stage())}
        recorder = Recorder(folder, context.communicator, run.profile_steps, run.profile_after, labels)
        self._recorder, self._step = loop.resources.enter_context(recorder), ExitStack()

    def before_step(self, loop: Loop) -> None:
        self._step.enter_context(self._recorder.step())

    def after_step(self, loop: Loop, result: StepResult) -> None:
        self._step.close()
