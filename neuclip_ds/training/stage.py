"""A stage of a run: one objective over the data in their order, from its newest checkpoint to its last step.

Training is a stage; the recovery of an optimizer's state before fine-tuning is another one. Each has a folder with its
checkpoints, metrics, bad samples and, if asked for, its log of samples.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from neuclip_ds.checkpoint.checkpoints import Best, Checkpoints
from neuclip_ds.config import BudgetConfig, Config
from neuclip_ds.data.bad_samples import BadSampleLog
from neuclip_ds.data.loader import Batch, LoaderOptions, Tokenize, train_loader
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.data.transforms import ImageTransform
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import TrainingDiverged, UserError
from neuclip_ds.objectives.base import FeatureGradients, Objective, Step
from neuclip_ds.profiling.recorder import Recorder
from neuclip_ds.reporting.events import EventLog
from neuclip_ds.reporting.health import StepHealth
from neuclip_ds.reporting.metrics import MetricsLog
from neuclip_ds.reporting.progress import Progress, SlidingRate
from neuclip_ds.reporting.sample_log import SampleLog, drop_samples_beyond
from neuclip_ds.training.data_position import DataPosition, resume
from neuclip_ds.training.monitoring import is_rest, open_metrics, samples_of_steps
from neuclip_ds.training.signals import stop_signals
from neuclip_ds.training.sources import prefetching
from neuclip_ds.training.step import TrainStep

log = logging.getLogger(__name__)

LearningRate = Callable[[int, int], float]  # of a step of so many


class RunContext(NamedTuple):
    """What the stages of a run share."""

    config: Config
    communicator: Communicator
    manifest: Manifest
    order: GlobalOrder
    transform: ImageTransform
    tokenizer: Tokenize
    loading: LoaderOptions
    engine: Any  # DeepSpeed's, around the encoders
    micro_batch: int

    def batches(self, epoch: int, step: int, steps: int) -> Iterator[Batch]:
        """This rank's training batches from a place in the data on."""
        return train_loader(
            self.manifest,
            self.order,
            self.transform,
            self.tokenizer,
            rank=self.communicator.rank,
            world_size=self.communicator.world_size,
            epoch=epoch,
            step=step,
            steps=steps,
            options=self.loading,
        )


class Stage:
    """Steps of one objective."""

    def __init__(
        self,
        parts: RunContext,
        objective: Objective,
        folder: Path,
        budget: BudgetConfig,
        learning_rate: LearningRate,
        facts: Mapping[str, Any],
        evaluate: Callable[[], dict[str, float]] | None = None,
        epochs_before: int = 0,
    ) -> None:
        """
        Args:
            parts: of the run.
            objective: what is descended.
            folder: of the stage; exists on rank 0.
            budget: how long.
            learning_rate: of each step.
            facts: what a resumed stage must share with the one that wrote the checkpoint.
            evaluate: called at the end, and before where the config says so; None evaluates nothing.
            epochs_before: how many the objective's schedules have behind them.
        """
        self._parts, self._objective, self._folder, self._budget = parts, objective, folder, budget
        self._learning_rate, self._evaluate, self._epochs_before = learning_rate, evaluate, epochs_before
        config = parts.config
        self._step = TrainStep(parts.engine, objective, parts.communicator, parts.micro_batch, config.run.seed)
        self._checkpoints = Checkpoints(folder / "checkpoints", parts.communicator, config.run.keep_checkpoints)
        self._facts = dict(facts)
        self._position = DataPosition(0, 0, parts.order.steps_per_epoch)
        self._total = self._position.end(budget)
        self._saved = 0  # last step with a checkpoint
        self._stop_asked = False

    def newest(self) -> Path | None:
        """The newest checkpoint, the same on all ranks; None where the stage has not begun."""
        return self._checkpoints.newest()

    def run(self) -> bool:
        """Goes on from the newest checkpoint, or starts; False when a signal has ended it early."""
        done = self._resume()
        self._announce(done)
        run = self._parts.config.run
        with (
            open_metrics(self._parts.config, self._folder, self._parts.communicator.rank, done) as metrics,
            self._sample_log(done) as samples,
            stop_signals(self._ask_to_stop),
        ):
            if done == 0 and (run.evaluate_start or run.best_metric is not None):
                self._measure(0, metrics)
            if done < self._total and not self._loop(done, metrics, samples):
                return False
            for name, value in self._measure(self._total, metrics).items():
                log.info("%s: %.4g", name, value)
        return True

    def _resume(self) -> int:
        """Fills everything from the newest checkpoint, if there is one; the number of steps done."""
        newest = self._checkpoints.newest()
        if newest is None:
            return 0
        done, saved = self._checkpoints.read(newest, self._facts)
        self._position = resume(saved, done, self._parts.manifest, self._parts.order.steps_per_epoch)
        self._total = self._position.end(self._budget)
        self._checkpoints.load(newest, self._parts.engine, self._objective)
        self._saved = done
        return done

    def _loop(self, done: int, metrics: MetricsLog | None, samples: SampleLog | None) -> bool:
        """Steps from `done` to the end; False when a signal ended it early, after a checkpoint."""
        config, run, communicator = self._parts.config, self._parts.config.run, self._parts.communicator
        bad_samples = BadSampleLog(self._folder, config.data.max_bad_fraction, writes=metrics is not None)
        events = EventLog(self._folder, communicator.rank, done)
        samples_of = samples_of_steps(self._parts.order, self._parts.manifest, self._position)
        health = StepHealth(events, samples_of, communicator.rank, config.data.workers)
        rate = SlidingRate()
        waited, since, talked = 0.0, time.perf_counter(), communicator.seconds()
        with (
            Progress(self._total, done, enabled=metrics is not None) as progress,
            self._prefetching(done) as advance,
            self._recorder() as recorder,
        ):
            batches = self._parts.batches(*self._position.at(done), self._total - done)
            for number in range(done, self._total):
                with recorder.step():
                    began = time.perf_counter()
                    advance(number)
                    batch = next(batches)
                    wait = time.perf_counter() - began
                    waited += wait
                    bad_samples.record(batch)
                    if samples is not None:
                        samples.write(number + 1, batch.index.tolist())
                    gradients = self._take_step(batch, number, health)
                speed = rate.update((number + 1) * config.data.batch_size)
                loss, tau = float(gradients.loss), float(gradients.metrics["tau"])
                progress.update(number + 1, loss=loss, tau=tau, samples_per_second=speed)
                health.check_times(number + 1, wait, time.perf_counter() - began, batch.index.tolist())
                if not is_rest(self._parts.order, self._position, number):
                    health.check_loss(number + 1, loss, partial(self._record, gradients, number))
                last = number + 1 == self._total
                logs, saves = (last or (number + 1) % every == 0 for every in (run.log_every, run.checkpoint_every))
                if logs or saves:
                    bad_samples.merge(communicator.gather_objects)
                if logs:
                    if metrics is not None:
                        record = self._record(gradients, number)
                        record.update({f"bad_samples/{cause}": count for cause, count in bad_samples.causes.items()})
                        passed = time.perf_counter() - since
                        record["samples_per_second"], record["data_wait_share"] = speed, waited / passed
                        if communicator.world_size > 1:
                            record["objective_communication_share"] = (communicator.seconds() - talked) / passed
                        metrics.write(number + 1, record)
                    waited, since, talked = 0.0, time.perf_counter(), communicator.seconds()
                    if self._stop_together():
                        events.settle(communicator.gather_objects)
                        self._save(number + 1)
                        log.warning(
                            "stopped by a signal after step %d; the same command goes on from there", number + 1
                        )
                        return False
                if saves:
                    events.settle(communicator.gather_objects)
                    self._save(number + 1)
                if run.evaluate_every and (number + 1) % run.evaluate_every == 0 and not last:
                    self._measure(number + 1, metrics)
        return True

    def _take_step(self, batch: Batch, number: int, health: StepHealth) -> FeatureGradients:
        """
        Raises:
            TrainingDiverged: on all ranks; its words are in events.jsonl.
        """
        engine = self._parts.engine
        try:
            gradients = self._step(batch, self._place(number))
            norm = engine.get_global_grad_norm()
            health.check_update(number + 1, None if norm is None else float(norm), engine.was_step_applied())
        except TrainingDiverged as error:
            health.diverged(number + 1, error)
            raise
        return gradients

    def _measure(self, step: int, metrics: MetricsLog | None) -> dict[str, float]:
        """Evaluates after `step` steps, and keeps a checkpoint where it is the best so far."""
        results = self._evaluate() if self._evaluate is not None else {}
        if metrics is not None and results:
            metrics.write(step, results)
        name = self._parts.config.run.best_metric
        if name is None or self._evaluate is None:
            return results
        if name not in results:
            raise UserError(
                f"run.best_metric={name} is no metric of this run's evaluation, which gives "
                f"{', '.join(results) or 'none: name data.val or data.zero_shot'}."
            )
        best = self._checkpoints.best()
        if step and (best is None or best.metric != name or best.step == step or results[name] > best.value):
            if self._saved != step:
                self._save(step)
            self._checkpoints.keep_best(Best(step, name, results[name]))
        return results

    def _sample_log(self, done: int) -> AbstractContextManager[SampleLog | None]:
        """This rank's, where the config asks for one; an earlier start's lines beyond `done` go, on all ranks."""
        if not self._parts.config.run.sample_log:
            return nullcontext()
        folder = self._folder / "samples"
        self._parts.communicator.on_rank_zero(lambda: drop_samples_beyond(folder, done))
        return SampleLog(folder, self._parts.communicator.rank)

    def _recorder(self) -> Recorder:
        parts = self._parts
        facts = {"method": self._facts["method"], "zero_stage": int(parts.engine.zero_optimization_stage())}
        run = parts.config.run
        return Recorder(self._folder / "profile", parts.communicator, run.profile_steps, run.profile_after, facts)

    def _prefetching(self, done: int) -> AbstractContextManager[Callable[[int], None]]:
        """Fetches remote shards ahead while training goes on; it is told of every step."""
        parts, communicator = self._parts, self._parts.communicator
        share = parts.config.data.batch_size // communicator.world_size
        node = communicator.ranks_of_node()
        rows = slice(node[0] * share, (node[-1] + 1) * share)
        if parts.loading.cache is None or communicator.rank != node[0]:
            return nullcontext(lambda number: None)
        return prefetching(parts.loading.cache, parts.manifest, parts.order, self._position, rows, done, self._total)

    def _place(self, number: int) -> Step:
        epoch, _ = self._position.at(number)
        lr, peak = self._learning_rate(number, self._total), self._parts.config.optimizer.lr
        return Step(number, self._epochs_before + epoch, lr, peak, progress=number / self._total)

    def _record(self, gradients: FeatureGradients, number: int) -> dict[str, float]:
        record = {"loss": float(gradients.loss), "lr": self._place(number).lr}
        record.update({name: float(value) for name, value in gradients.metrics.items()})
        norm = self._parts.engine.get_global_grad_norm()
        return record if norm is None else {**record, "grad_norm": float(norm)}

    def _stop_together(self) -> bool:
        """Whether any rank has been asked to stop."""
        communicator = self._parts.communicator
        asked = torch.tensor(int(self._stop_asked), device=communicator.device).reshape(1)
        return bool(communicator.all_reduce(asked, "control").item())

    def _ask_to_stop(self) -> None:
        self._stop_asked = True

    def _save(self, step: int) -> None:
        data = self._position.record(self._parts.manifest)
        self._checkpoints.save(step, self._parts.engine, self._objective, self._facts, data)
        self._saved = step

    def _announce(self, done: int) -> None:
        manifest, world_size = self._parts.manifest, self._parts.communicator.world_size
        log.info(
            "%s: %d pairs in %d shards, %d parameters, %d ranks, batch %d, %d steps of which %d are done",
            self._facts["method"], manifest.n_used, manifest.n_shards, self._facts["parameters"],
            world_size, self._parts.config.data.batch_size, self._total, done,
        )  # fmt: skip
