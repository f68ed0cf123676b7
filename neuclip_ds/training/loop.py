"""The training loop, which runs the steps of one objective from the newest checkpoint to the last step.

Training is one loop; the recovery of optimizer state before fine-tuning is a second loop. Each loop has a folder with
its checkpoints, metrics and logs.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from neuclip_ds.checkpoint.checkpoints import Checkpoints, Fingerprint
from neuclip_ds.config import Config
from neuclip_ds.data.loader import RankBatch
from neuclip_ds.data.training_data import TrainingData
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.average import WeightAverage, discard_average
from neuclip_ds.engine.device_batches import DeviceBatch
from neuclip_ds.engine.engine import Engine
from neuclip_ds.errors import Interrupted, RollBack, TrainingDiverged
from neuclip_ds.objectives.base import Context, Objective, Step
from neuclip_ds.reporting.events import EventLog
from neuclip_ds.reporting.metrics import MetricsLog
from neuclip_ds.training.checks import check_data
from neuclip_ds.training.hooks import Hook
from neuclip_ds.training.hooks.evaluation import Evaluate, EvaluateModel
from neuclip_ds.training.hooks.standard import SaveCheckpoints, standard_hooks
from neuclip_ds.training.replicas import compare_replicas
from neuclip_ds.training.schedule import is_rest, learning_rate, run_length
from neuclip_ds.training.step import StepOutcome, TrainStep

log = logging.getLogger(__name__)


class RunContext(NamedTuple):
    """Objects that the loops of a run share."""

    config: Config
    communicator: Communicator
    folder: Path
    data: TrainingData
    engine: Engine
    objective_context: Context
    comm_dtype: torch.dtype
    fingerprint: Fingerprint
    trained_with: Mapping[str, bytes]  # contents of the config, tokenizer and model description files, by name


@dataclass(frozen=True)
class StepResult(StepOutcome):
    """Result of a training step, and the step's position in the run."""

    step: int  # number of steps done, including this one
    last: bool  # whether this is the last step of the loop
    logs: bool  # whether metrics are logged after this step
    saves: bool  # whether a checkpoint is saved after this step
    rest: bool  # whether the batch is the small last one of an epoch, whose loss is not comparable to a full batch's
    batch: RankBatch  # this rank's samples, whose pixels have been released
    lr: float  # learning rate of the encoders
    skipped: int  # number of steps skipped in the run so far
    waited: float  # seconds lost to waiting for the batch
    seconds: float  # duration of the whole step
    samples_per_second: float  # throughput of all ranks over the last steps

    @cached_property
    def metrics(self) -> dict[str, float]:
        """All metrics of the step, by name; the first access waits for the device."""
        found = {"loss": self.loss, "lr": self.lr, "grad_norm": self.grad_norm, "skipped_steps": self.skipped}
        values = torch.stack([value.double() for value in self.gradients.metrics.values()]).tolist()
        return found | dict(zip(self.gradients.metrics, values, strict=True))


class Loop:
    """A loop over the training steps of one objective, with hooks around each step.

    Attributes:
        context: the objects that the loops of the run share.
        objective: computes the gradients of the features.
        folder: folder for the checkpoints and records of this loop; rank 0 creates it.
        fingerprint: settings that a resumed loop must share with its checkpoint.
        checkpoints: checkpoints of this loop.
        order: the order of the samples.
        done: number of steps done.
        total: number of steps after which the loop ends.
        saved: last step after which a checkpoint was saved.
        stop_requested: set this to True on all ranks to end the loop after the current step, with a checkpoint.
        stop_signal: the signal that requested the stop, if any; the loop then raises `Interrupted`.
        resources: stack of the context managers that hooks enter when they start; the stack closes when the loop ends.
        events: the log of problems.
        metrics: the log of metrics (metrics.jsonl and TensorBoard), open on rank 0 while the loop runs.
    """

    metrics: MetricsLog | None

    def __init__(
        self,
        context: RunContext,
        config: Config,
        objective: Objective,
        folder: Path,
        fingerprint: Fingerprint,
        epochs_before: int = 0,
    ) -> None:
        """
        Args:
            context, objective, folder, fingerprint: see the attributes.
            config: the run's config, with this loop's length and learning rates.
            epochs_before: offset of the objective's schedules, in epochs.
        """
        self.context, self.folder, self.fingerprint = context, folder, dict(fingerprint)
        self.objective, self._config, self._epochs_before = objective, config, epochs_before
        run, engine, communicator = context.config.run, context.engine, context.communicator
        micro_batch = config.micro_batch(communicator.world_size)
        self._step = TrainStep(engine, objective, communicator, micro_batch)
        self.checkpoints = Checkpoints(folder / "checkpoints", communicator, run.keep_checkpoints, context.trained_with)
        self.events = EventLog(folder, communicator.rank)
        self.order = context.data.order
        self.total = run_length(self.order, config.epochs, config.max_steps)
        self.done = self.saved = 0
        self.stop_requested = False
        self._tried = 0  # steps done at the last attempt to save
        self._failed_at = -1  # steps done at the last rollback
        self.stop_signal: int | None = None
        self._hooks: list[Hook] = []
        self._hook_states: dict[str, Any] = {}  # from the checkpoint, by class name
        self.resources = ExitStack()

    def resume(self, checkpoint: Path) -> None:
        """Load the engine and the objective from an intact checkpoint, and set `done` to its step.

        Writes nothing; raises `UserError` if the checkpoint belongs to a different run, model or dataset.
        """
        self.done, saved = self.checkpoints.read(checkpoint, self.fingerprint)
        check_data(saved, self.context.data.manifest)
        self.checkpoints.load(checkpoint, self.context.engine, self.objective)
        if not self.context.config.ema.decay:
            discard_average(self.context.engine)
        self.saved = self._tried = self.done
        self._hook_states = saved.get("hooks", {})

    def run(
        self, evaluate: Evaluate | None = None, hooks: Sequence[Hook] = (), average: WeightAverage | None = None
    ) -> bool:
        """Train from `done` to `total` steps; return False if a stop was requested before the end.

        Calls `evaluate` if given, runs `hooks` before the standard hooks, and updates `average` after each step that
        was not skipped. After a `roll_back`, the loop resumes from the checkpoint, and all hooks start again. Raises
        `Interrupted` if a signal requested the stop.
        """
        while True:
            try:
                return self._run(evaluate, hooks, average)
            except RollBack as end:
                checkpoint = end.checkpoint
            self.resume(checkpoint)

    def _run(self, evaluate: Evaluate | None, hooks: Sequence[Hook], average: WeightAverage | None) -> bool:
        self.checkpoints.set_aside_beyond(self.done)
        manifest, facts = self.context.data.manifest, self.fingerprint
        log.info(
            "%s: %d pairs in %d shards, %d parameters, %d ranks, batch %d, %d steps of which %d are done",
            *(facts["method"], manifest.n_used, manifest.n_shards, facts["parameters"]),
            *(self.context.communicator.world_size, facts["batch_size"], self.total, self.done),
        )
        batches_of_rank = self.context.data.batches(self.context.communicator, self.done, self.total - self.done)
        with self.resources, closing(batches_of_rank) as source:
            saver = SaveCheckpoints()
            evaluating = [] if evaluate is None else [EvaluateModel(evaluate, saver)]
            self._hooks = every_hook = [*hooks, *standard_hooks(saver), *evaluating]
            for hook in every_hook:
                if (state := self._hook_states.get(type(hook).__name__)) is not None:
                    hook.load_state(state)
                hook.start(self)
                self.resources.push(lambda kind, error, trace, hook=hook: hook.close(self, error))
            batches = self._step.batches
            batches.start(source)
            ends: deque[float] = deque(maxlen=51)  # end times of recent steps; excludes the first step, which compiles
            while self.done < self.total and not self.stop_requested:
                for hook in every_hook:
                    hook.before_step(self)
                began = time.perf_counter()
                batch = next(batches)
                for hook in every_hook:
                    hook.on_batch(self, batch.host)
                result = self._train_on(batch, began, ends)
                self.done += 1
                if average is not None and result.applied:
                    average.update(self.done)
                for hook in every_hook:
                    hook.after_step(self, result)
            if not self.stop_requested:
                for hook in every_hook:
                    hook.finish(self)
        if self.stop_signal is not None:
            raise Interrupted(self.stop_signal, f" after step {self.done}")
        if self.stop_requested:
            log.warning("stopped after step %d; the same command resumes there", self.done)
        return not self.stop_requested

    def save(self) -> None:
        """Save a checkpoint after the last completed step; all ranks call this together.

        Compares the ranks' replicated state first, and raises `TrainingDiverged` if it differs. Raises `SaveFailed` on
        all ranks if any rank could not write.
        """
        compare_replicas(self.done, self.context.engine, self.objective, self.context.communicator)
        self._tried = self.done
        states = {type(hook).__name__: hook.state(self) for hook in self._hooks}
        data = {
            **self.context.data.record(),
            "hooks": {name: state for name, state in states.items() if state},
        }
        self.checkpoints.save(self.done, self.context.engine, self.objective, self.fingerprint, data)
        self.saved = self.done

    def roll_back(self, problem: str) -> NoReturn:
        """Return to the newest checkpoint, on all ranks, after `run.max_skipped_steps` consecutive skipped steps.

        Raises:
            RollBack: always; `run` catches it and resumes from the checkpoint.
            TrainingDiverged: no checkpoint exists, or training has failed at the same step before.
        """
        newest, before = self.checkpoints.newest(), self.done - self.context.config.run.max_skipped_steps
        advice = "lower optimizer.lr, or objective.npn.lr if npn_ratio_mean was outside 0.5 to 2, and start again."
        if newest is None:
            raise TrainingDiverged(f"{problem}, and there is no checkpoint to return to: {advice}")
        if before <= self._failed_at:
            raise TrainingDiverged(f"{problem}, as before the return to {newest.name}: {advice}")
        self._failed_at = self.done
        raise RollBack(f"{problem}: the run returns to {newest.name}.", newest)

    def _train_on(self, batch: DeviceBatch, began: float, ends: deque[float]) -> StepResult:
        config, number = self.context.config, self.done
        lr = learning_rate(number, self.total, self._config.optimizer)
        last, every = number + 1 == self.total, config.run.checkpoint_every
        logs = last or (number + 1) % config.run.log_every == 0
        epoch = self._epochs_before + number // self.order.steps_per_epoch
        outcome = self._step(batch, Step(number, epoch, lr, config.optimizer.lr, number / self.total))
        ends.append(time.monotonic())
        passed = ends[-1] - ends[0]
        return StepResult(
            step=number + 1,
            last=last,
            logs=logs,
            # earlier updates may have caused a skipped step, so a checkpoint waits for the next applied step
            saves=last or (outcome.applied and (number + 1) // every > self._tried // every),
            rest=is_rest(self.order, number),
            batch=batch.host,
            lr=lr,
            **vars(outcome),
            skipped=self.context.engine.skipped_steps,
            waited=batch.waited,
            seconds=time.perf_counter() - began,
            samples_per_second=(len(ends) - 1) * config.data.batch_size / passed if passed else math.nan,
        )
