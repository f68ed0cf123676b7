"""Train a model: set up a run, then repeat the training step until the run ends.

`train` is the entry point. `build_run` opens the data, the model and the newest checkpoint. `Loop` runs the steps; one
step, from the batch to the updated weights, is the function `train_step` in step.py. Hooks write the records, save
checkpoints, evaluate the model, and run other code around a step (training/hooks/, records.py, checkpointing.py).
"""

import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor

from neuclip_ds.checkpoint.checkpoints import Checkpoints, Fingerprint
from neuclip_ds.checkpoint.integrity import read_meta
from neuclip_ds.checkpoint.saved_model import MODEL, initial_source
from neuclip_ds.config import Config, dump
from neuclip_ds.data.bad_samples import BadSampleLog
from neuclip_ds.data.loader import RankBatch
from neuclip_ds.data.stored_towers import TEXT, tower_folders
from neuclip_ds.data.training_data import TrainingData, open_training_data
from neuclip_ds.data.training_set import find_validation, interleave_settings
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.environment import RankEnvironment
from neuclip_ds.distributed.launch import leave, process_group
from neuclip_ds.distributed.stop_signals import raising_interrupted
from neuclip_ds.engine.average import WeightAverage, discard_average
from neuclip_ds.engine.config import EngineConfig, load_engine_config
from neuclip_ds.engine.device_batches import DeviceBatch, DeviceBatches
from neuclip_ds.engine.engine import Engine
from neuclip_ds.engine.precision import (
    deterministic_algorithms,
    fixed_library_algorithms,
    require_precision,
    resolve_comm_dtype,
    set_matmul_precision,
)
from neuclip_ds.engine.start import start_engine
from neuclip_ds.errors import Interrupted, RollBack, TrainingDiverged, counted
from neuclip_ds.evaluation.evaluator import Evaluator
from neuclip_ds.files import explain_disk
from neuclip_ds.losses.base import Position
from neuclip_ds.losses.contrastive_loss import ContrastiveLoss
from neuclip_ds.losses.methods import find_method
from neuclip_ds.losses.stored_features import stored_folders
from neuclip_ds.models.compilation import Compilation, compile_towers, resolve_compilation
from neuclip_ds.models.pretrained.base import (
    LogitParameters,
    read_start_hash,
    read_start_logits,
    read_start_preprocessing,
)
from neuclip_ds.models.source import ModelSource, resumed_source
from neuclip_ds.models.trained_parts import Parameters
from neuclip_ds.models.weights_hash import weights_hash
from neuclip_ds.reporting.events import EventLog
from neuclip_ds.reporting.history import Changes, log_changes, recorded_launch
from neuclip_ds.reporting.log import configure_logging
from neuclip_ds.reporting.metrics import MetricsLog
from neuclip_ds.training.checkpointing import SaveCheckpoints
from neuclip_ds.training.checks import (
    check_config,
    check_data,
    check_length,
    check_tables,
    config_warnings,
    fingerprint,
)
from neuclip_ds.training.hooks import Hook, hook_names
from neuclip_ds.training.hooks.evaluation import EvaluateModel
from neuclip_ds.training.hooks.health import WatchHealth
from neuclip_ds.training.hooks.standard import CollectGarbage, PrefetchShards, ShowProgress
from neuclip_ds.training.records import WriteRecords
from neuclip_ds.training.recovery import (
    find_reused,
    gamma_epoch_offset,
    load_recovered_state,
    recovered_objective,
    recovery_config,
    without_batch_norm_updates,
)
from neuclip_ds.training.replicas import compare_replicas
from neuclip_ds.training.run_folder import (
    RECOVERY,
    checkpoint_extras,
    move_staged_files,
    read_complete,
    record_environment,
    staging_folder,
    write_complete,
)
from neuclip_ds.training.run_lock import locked
from neuclip_ds.training.schedule import is_partial_batch, learning_rate, run_length
from neuclip_ds.training.step import StepOutcome, train_step
from neuclip_ds.training.stored_trunks import check_trunk_outputs, check_trunks

log = logging.getLogger(__name__)

_THROUGHPUT_STEPS = 50  # recent steps over which the throughput is measured


def train(config: Config, environment: RankEnvironment, hooks: Sequence[Hook] = ()) -> None:
    """Train and evaluate a model, and write all results to the run's folder.

    On several ranks, an error that occurs after the ranks have connected ends all processes (`FailureDetector`) instead
    of being raised to the caller.

    Args:
        config: the config of the run.
        environment: the environment of this rank.
        hooks: hooks in addition to the standard hooks of every run.

    Raises:
        UserError: the config, the data or a checkpoint is invalid, or another problem needs the user, such as a full
            disk; raised before the first step where possible.
        TrainingDiverged: losses or gradients stay non-finite, and there is no checkpoint to return to, or returning to
            one did not help; or replicated state differs between ranks.
        Interrupted: a signal stopped the run; if the run was training, it has saved a checkpoint, unless a rank was
            waiting for failing remote storage.
    """
    check_config(config, environment.world_size)  # a mistake in the config is reported before ranks connect
    folder = config.run.output_dir / str(config.run.name)
    # docs: train
    with (
        raising_interrupted(),
        fixed_library_algorithms(config.run.deterministic),
        process_group(dump(config), config.data.max_outage) as communicator,
        deterministic_algorithms(config.run.deterministic),
        locked(folder, communicator),
    ):
        # docs: end
        configure_logging(communicator.rank)
        # new files go to a staging folder until all checks have passed
        with staging_folder(folder, communicator) as staged:
            for hook in hooks:
                hook.before_run(config, communicator, folder)
            # docs: train
            run = build_run(config, communicator, folder, staged)
            # docs: end
            loop = run.loop
            completed_steps = communicator.on_rank_zero(lambda: read_complete(folder))
            is_complete = loop.done == loop.total and completed_steps == loop.total
            changes: Changes = {}  # of the options, since the previous launch
            if not is_complete:
                changes = communicator.value_from_rank_zero(
                    Changes, lambda: move_staged_files(staged, folder, loop.context.config)
                )

        with closed_at_end(loop.context.engine):
            if is_complete:
                log.info(
                    "%s is complete after %d steps; to train further, raise max_steps (or epochs, if max_steps is not "
                    "set)",
                    folder,
                    loop.done,
                )
                has_ended = True
            else:
                environment_of_launch = record_environment(folder, communicator)
                configure_logging(communicator.rank, folder / "log.txt")
                log_changes(changes)
                writes = communicator.rank == 0
                with recorded_launch(folder, environment_of_launch, changes, loop, writes):
                    # docs: train
                    has_ended = recover_and_train(run, hooks)
                    # docs: end
        if has_ended:
            leave()  # the other ranks do not wait while rank 0 writes the report and copies the run
            for hook in reversed(hooks):
                hook.after_run(loop)


@contextmanager
def closed_at_end(engine: Engine) -> Iterator[None]:
    """Close the engine after the block, so that a program that trains several times keeps no model of an earlier run.

    After an error in a run on several ranks, the engine stays open: closing it waits for the GPU, which may be waiting
    for other ranks.
    """
    try:
        yield
    except BaseException:
        if engine.communicator.world_size == 1:
            with suppress(RuntimeError):  # the error to report may have made the GPU unusable
                engine.close()
        raise
    engine.close()


def recover_and_train(run: "Run", hooks: Sequence[Hook]) -> bool:
    """Run the recovery loop, if the run has one, then train; return False if the recovery was stopped early."""
    context = run.loop.context
    if run.recovery is not None:
        recovery_folder = run.recovery.folder
        context.communicator.on_rank_zero(lambda: recovery_folder.mkdir(exist_ok=True))
        recovery_hooks = [hook for hook in hooks if hook.in_recovery]
        with without_batch_norm_updates(context.engine):
            is_recovered = run.recovery.run(recovery_hooks)
        recovered = run.recovery.checkpoints.newest() if is_recovered else None
        if recovered is None:
            return False
        load_recovered_state(recovered, context, run.loop.loss)

    with closing(run.evaluator):
        log.info("evaluation data: %s", run.evaluator.describe())
        is_complete = run.loop.run(hooks, run.evaluator)
    if is_complete:
        context.communicator.on_rank_zero(lambda: write_complete(context.folder, run.loop.done))
        log.info("all results are in %s", context.folder)
    return True


# Set-up


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Objects that the loops of a run share."""

    config: Config
    communicator: Communicator
    folder: Path
    data: TrainingData
    engine: Engine
    embed_dim: int
    """Width of the features."""
    logits: LogitParameters
    """Temperature and bias of the encoders' checkpoint; if there is no checkpoint, fixed defaults."""
    comm_dtype: torch.dtype
    """Dtype in which features are sent between ranks."""
    compilation: Compilation
    """Parts of the towers that torch.compile compiles."""
    fingerprint: Fingerprint
    checkpoint_extras: Mapping[str, bytes]
    """Files to add to each checkpoint: the config, tokenizer and model description, by name; empty except on rank 0."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that is ready to train, resumed from its checkpoint if it has one."""

    loop: "Loop"
    evaluator: Evaluator
    recovery: "Loop | None"
    """The loop that recovers statistics before `loop` runs; None if there is nothing to recover."""


def build_run(config: Config, communicator: Communicator, folder: Path, staged: Path) -> Run:
    """Build a run and resume it from its newest checkpoint, if any; all ranks call this together.

    Writes new files to `staged` instead of the run's folder. Raises `UserError` if the config, the data, the model or a
    checkpoint is invalid.
    """
    engine_config = load_engine_config(config, communicator.world_size)
    resumed = newest_checkpoint(config, communicator, folder)

    # data: its order, and the settings that the config leaves open
    source = initial_source(config.model, communicator)
    meta = None
    if resumed is not None:
        meta = communicator.on_rank_zero(partial(read_meta, resumed))
        preprocessing = communicator.on_rank_zero(partial(read_start_preprocessing, resumed / MODEL))
        source = resumed_source(source, preprocessing, resumed)
    folders = {**stored_folders(config.objective), **tower_folders(config.data)}
    # docs: build
    data = open_training_data(config, source, communicator, staged, resumed, meta, folders)
    # docs: end
    check_tables(data.tables)
    data_options = {**interleave_settings(data.order.interleave), "val": find_validation(config.data, data.manifest)}
    config = config.model_copy(update={"data": config.data.model_copy(update=data_options)})
    steps = run_length(data.order, config.epochs, config.max_steps)
    if communicator.rank == 0:
        for warning in config_warnings(config, steps):
            log.warning("%s", warning)
    evaluator = Evaluator(config, data, source.preprocessing, communicator, staged)

    # model
    require_precision(engine_config, config.deepspeed)
    set_matmul_precision(config, engine_config, communicator.device)
    device_type = communicator.device.type
    compilation = resolve_compilation(config.model.compile, device_type, engine_config.zero_stage)
    # docs: build
    engine, logits, parameters = start_encoders(
        config, engine_config, source, data, communicator, staged, compilation, resumed
    )
    # docs: end
    context = RunContext(
        config=config,
        communicator=communicator,
        folder=folder,
        data=data,
        engine=engine,
        embed_dim=source.embed_dim,
        logits=logits,
        comm_dtype=resolve_comm_dtype(config, engine_config),
        compilation=compilation,
        fingerprint={**fingerprint(config), "parameters": parameters},
        checkpoint_extras=checkpoint_extras(staged, folder, config) if communicator.rank == 0 else {},
    )

    # state: loaded from the newest checkpoint or from another run's recovery, or new
    # docs: build
    loop = Loop(context, config, folder, epoch_offset=gamma_epoch_offset(config))
    # docs: end
    recovery = None
    if resumed is not None and RECOVERY not in resumed.relative_to(folder).parts:
        # docs: build
        loop.resume(resumed)
        # docs: end
        check_length(loop.done, loop.total)
    elif config.recovery.reuse is not None:
        load_recovered_state(find_reused(context), context, loop.loss)
    elif config.recovery.epochs:
        recovery = Loop(context, recovery_config(config), folder / RECOVERY)
        if resumed is not None:
            recovery.resume(resumed)
    return Run(loop=loop, evaluator=evaluator, recovery=recovery)


def newest_checkpoint(config: Config, communicator: Communicator, folder: Path) -> Path | None:
    """Return the newest intact checkpoint of a run's training, else of its recovery, else None.

    Raises `UserError`, before anything is built, if the checkpoint does not match the config, or if all checkpoints are
    damaged.
    """
    training = Checkpoints(folder / "checkpoints", communicator, 1)
    newest = training.newest()
    if newest is not None:
        training.check(newest, fingerprint(config))
        return newest
    if not config.recovery.epochs or config.recovery.reuse is not None:
        return None
    recovery = Checkpoints(folder / RECOVERY / "checkpoints", communicator, 1)
    newest = recovery.newest()
    if newest is not None:
        recovery.check(newest, {**fingerprint(config), "method": recovered_objective(config).method})
    return newest


def start_encoders(
    config: Config,
    engine_config: EngineConfig,
    source: ModelSource,
    data: TrainingData,
    communicator: Communicator,
    staged: Path,
    compilation: Compilation,
    resumed: Path | None,
) -> tuple[Engine, LogitParameters, int]:
    """Build or load the encoders, write a description of them to `staged`, and start DeepSpeed's engine.

    If the run resumes from the checkpoint `resumed`, the description repeats what the checkpoint recorded about the
    run's start: the temperature, the bias and the hash of the weights. The model that `model.pretrained` names may have
    been replaced since. Returns the engine, the
    encoders' initial temperature and bias, and the number of parameters. Raises `UserError` if the model cannot be
    loaded or does not support an option, if `staged` cannot be written, or if stored outputs of frozen trunks do not
    fit the model.
    """
    torch.manual_seed(config.run.seed)  # the same weights on every rank
    model, logits = source.load(data.tokenizer)
    if resumed is not None:
        logits = communicator.value_from_rank_zero(LogitParameters, partial(read_start_logits, resumed / MODEL))
    check_trunk_outputs(data.tables, model, source.preprocessing, data.tokenizer)
    communicator.on_rank_zero(lambda: check_trunks(data.tables, model, source.preprocessing, data.tokenizer))

    def save() -> None:
        with explain_disk(staged / MODEL):
            if resumed is not None:
                start_hash = read_start_hash(resumed / MODEL)
            else:
                start_hash = weights_hash(model) if config.model.pretrained else None
            source.save(staged / MODEL, logits, start_hash)

    communicator.on_rank_zero(save)
    parameters = Parameters.of(model)  # before ZeRO 3 partitions them
    if parameters.frozen:
        log.info("%s of %s parameters are trainable", f"{parameters.trained:,}", f"{parameters.total:,}")
    compile_towers(model, compilation)
    engine = start_engine(model, config.optimizer, engine_config, communicator, config.run.seed)
    return engine, logits, parameters.total


# The loop


@dataclass(frozen=True, kw_only=True)
class StepResult(StepOutcome):
    """Result of a training step; equal on all ranks, except for the batch, the times and the throughput."""

    step: int
    """Number of steps done, including this one."""
    is_partial_batch: bool
    """Whether the batch is the last of an epoch and under half full; its loss is not comparable to a full batch's."""
    batch: RankBatch
    """This rank's samples, whose pixels have been released."""
    lr: float
    """Learning rate of the encoders."""
    skipped: int
    """Number of steps skipped in the run so far."""
    waited: float
    """Seconds that the step waited for the batch."""
    seconds: float
    """Duration of the whole step, in seconds."""
    samples_per_second: float
    """Throughput of all ranks over at most the last 50 steps; NaN after the first step since a launch or rollback."""
    metric_tensors: Mapping[str, Tensor]
    """Metrics of the loss, on the device."""

    @cached_property
    def metrics(self) -> dict[str, float]:
        """All metrics of the step, by name; the first access waits for the device."""
        metrics = {"loss": self.loss, "lr": self.lr, "grad_norm": self.grad_norm, "skipped_steps": self.skipped}
        if self.metric_tensors:
            values = torch.stack([value.double() for value in self.metric_tensors.values()]).tolist()
            metrics.update(zip(self.metric_tensors, values, strict=True))
        return metrics


class Throughput:
    """The throughput of a loop's last 50 steps, without the first step, which may include compilation."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._end_times: deque[float] = deque(maxlen=_THROUGHPUT_STEPS + 1)  # of the steps, in seconds

    def end_step(self) -> float:
        """Record that a step ends now, and return the throughput in samples per second; NaN after the first step."""
        self._end_times.append(time.monotonic())
        samples = (len(self._end_times) - 1) * self._batch_size
        seconds = self._end_times[-1] - self._end_times[0]
        return samples / seconds if seconds else math.nan


class Loop:
    """A loop over the training steps of one loss, with hooks around each step.

    Training is one loop; the recovery of statistics before fine-tuning is a second loop. Each loop has a folder with
    its checkpoints, metrics and logs.

    Attributes:
        context: the objects that the loops of the run share.
        loss: the loss, with its state.
        folder: folder for the checkpoints and records of this loop; rank 0 creates it.
        fingerprint: settings that a resumed loop must share with its checkpoint.
        checkpoints: checkpoints of this loop.
        order: the order of the samples.
        done: number of steps done.
        total: number of steps after which the loop ends.
        saved: last step after which a checkpoint was saved; 0 if there is none.
        stop_requested: set this to True on all ranks to end the loop after the current step, with a checkpoint. If only
            some ranks set it, all ranks stop if metrics are logged after that step, and fail with an error if not.
        stop_signal: the signal that requested the stop, if any; the loop then raises `Interrupted`.
        resources: stack of the context managers that hooks enter when they start; the stack closes when the loop ends.
        events: the log of events, such as problems (events.jsonl).
        metrics: the log of metrics (metrics.jsonl and TensorBoard), open on rank 0 while the loop runs, else None.
    """

    def __init__(self, context: RunContext, config: Config, folder: Path, epoch_offset: int = 0) -> None:
        """
        Args:
            context: see the attributes.
            config: the run's config, with this loop's loss, length and learning rates.
            folder: see the attributes.
            epoch_offset: offset of the loss's schedules, in epochs.
        """
        communicator = context.communicator
        self.context = context
        self.folder = folder
        self.fingerprint = {**context.fingerprint, "method": config.objective.method}
        self.order = context.data.order
        self.total = run_length(self.order, config.epochs, config.max_steps)
        self.loss = _build_loss(context, config, self.order.steps_per_epoch)
        self.checkpoints = Checkpoints(
            folder / "checkpoints", communicator, config.run.keep_checkpoints, context.checkpoint_extras
        )
        self.events = EventLog(folder, communicator.rank)
        self.metrics: MetricsLog | None = None
        self.resources = ExitStack()
        self.done = 0
        self.saved = 0
        self.stop_requested = False
        self.stop_signal: int | None = None

        self._config = config
        self._epoch_offset = epoch_offset
        micro_batch = config.micro_batch(communicator.world_size)
        self._pack = None if TEXT in context.data.tables else context.engine.pack
        self._batches = DeviceBatches(communicator.device, micro_batch, self._pack)
        self._done_at_rollback = -1  # number of steps done at the last rollback
        self._hooks: dict[str, Hook] = {}  # by the name of their state in a checkpoint, in the order of their calls
        self._hook_states: Mapping[str, Any] = {}  # from the checkpoint, by the hook's name
        self._compiled_before = context.compilation  # parts that were compiled when the checkpoint was written

    def resume(self, checkpoint: Path) -> None:
        """Load the engine and the loss from an intact checkpoint, and set `done` to its step.

        Writes nothing; raises `UserError` if the checkpoint belongs to a different run, model or dataset.
        """
        self.done, metadata = self.checkpoints.read(checkpoint, self.fingerprint)
        check_data(
            metadata,
            self.context.data.manifest,
            f"The checkpoint {checkpoint}",
            "give the run another name (run.name)",
        )
        self.checkpoints.load(checkpoint, self.context.engine, self.loss.function)
        if not self.context.config.ema.decay:
            discard_average(self.context.engine)
        self.saved = self.done
        self._hook_states = metadata.get("hooks", {})
        self._compiled_before = metadata.get("compilation", self.context.compilation)

    def run(self, hooks: Sequence[Hook] = (), evaluator: Evaluator | None = None) -> bool:
        """Train from `done` to `total` steps; return False if a stop was requested, even after the last step.

        Runs `hooks` before the standard hooks. With an `evaluator`, evaluates the model and, if the config enables it,
        keeps the moving average of the weights. After a `roll_back`, the loop resumes from the checkpoint, and all
        hooks start again. Raises `Interrupted` if a signal requested the stop, and the errors that hooks, `save` and
        `roll_back` raise.
        """
        while True:
            try:
                return self._run(hooks, evaluator)
            except RollBack as rollback:
                checkpoint = rollback.checkpoint
            self.resume(checkpoint)  # after the `except` block, so that the traceback of an error omits the rollback

    def save(self) -> None:
        """Save a checkpoint after the last completed step; all ranks call this together.

        Compares the ranks' replicated state first, and raises `TrainingDiverged` if it differs. Raises `SaveFailed` on
        all ranks if any rank could not write.
        """
        engine = self.context.engine
        compare_replicas(self.done, engine, self.loss.function, self.context.communicator)
        hook_states: dict[str, Any] = {}
        for name, hook in self._hooks.items():
            has_state = type(hook).state is not Hook.state
            if has_state:  # also an empty one, so that a rollback clears what the hook has collected since
                hook_states[name] = hook.state(self)
        data = {**self.context.data.record(), "hooks": hook_states, "compilation": self.context.compilation}
        self.checkpoints.save(self.done, engine, self.loss.function, self.fingerprint, data)
        self.saved = self.done

    def roll_back(self, problem: str) -> NoReturn:
        """Return to the newest checkpoint, on all ranks, after `run.max_skipped_steps` consecutive skipped steps.

        Raises:
            TrainingDiverged: no checkpoint exists, or training has not passed the steps that were skipped before the
                last rollback.
            UserError: all checkpoints are damaged.
            RollBack: otherwise; `run` catches it and resumes from the checkpoint.
        """
        newest = self.checkpoints.newest()
        done_before_skips = self.done - self.context.config.run.max_skipped_steps
        advice = "lower optimizer.lr"
        if "npn" in find_method(self._config.objective.method).sections:
            advice += ", or objective.npn.lr if the metric npn_ratio_mean was below 0.5 or above 2"
        advice += ", and start again."
        if newest is None:
            raise TrainingDiverged(f"{problem}, and there is no checkpoint to return to: {advice}")
        if done_before_skips <= self._done_at_rollback:
            raise TrainingDiverged(f"{problem}, which also happened before the last rollback: {advice}")
        self._done_at_rollback = self.done
        raise RollBack(f"{problem}. The run returns to {newest.name}.", newest)

    def _run(self, hooks: Sequence[Hook], evaluator: Evaluator | None) -> bool:
        context = self.context
        self.checkpoints.set_aside_beyond(self.done)
        log.info(
            "%s: %s in %s, %s, %s, batch %d, %s of %s done",
            self.fingerprint["method"],
            counted(context.data.manifest.n_used, "pair"),
            counted(context.data.manifest.n_shards, "shard"),
            counted(self.fingerprint["parameters"], "parameter"),
            counted(context.communicator.world_size, "rank"),
            self.fingerprint["batch_size"],
            f"{self.done:,}",
            counted(self.total, "step"),
        )
        ema_decay = context.config.ema.decay
        average = None
        if evaluator is not None and ema_decay:
            average = WeightAverage(context.engine, ema_decay)

        source = context.data.batches(context.communicator, self.done, self.total - self.done)
        with self.resources, closing(source):
            self._hooks = self._start_hooks(hooks, evaluator, average)
            self._batches.start(source)
            throughput = Throughput(self._config.data.batch_size)
            first_step = self.done
            # docs: loop
            while self.done < self.total and not self.stop_requested:
                for hook in self._hooks.values():
                    hook.before_step(self)
                start_time = time.perf_counter()
                batch = next(self._batches)
                # docs: end
                # Long captions may exhaust a GPU's memory after shorter ones have fit, so captions of the full length
                # are tried first. On CPUs, this trial would take as long as a step.
                is_first_step = self.done == first_step
                if is_first_step and self._pack is not None and context.engine.device.type == "cuda":
                    context.engine.try_full_captions(batch)
                for hook in self._hooks.values():
                    hook.on_batch(self, batch.host)
                # docs: loop
                result = self._train_step(batch, start_time, throughput)
                self.done += 1
                if average is not None and result.applied:
                    average.update(self.done)
                for hook in self._hooks.values():
                    hook.after_step(self, result)
                # docs: end
            if not self.stop_requested:
                for hook in self._hooks.values():
                    hook.finish(self)

        if self.stop_signal is not None:
            raise Interrupted(self.stop_signal, f" after step {self.done}")
        if self.stop_requested:
            log.warning("stopped after step %d; the same command resumes there", self.done)
        return not self.stop_requested

    def _start_hooks(
        self, hooks: Sequence[Hook], evaluator: Evaluator | None, average: WeightAverage | None
    ) -> dict[str, Hook]:
        """Start the given hooks, then the standard hooks, and return all of them by name."""
        records = WriteRecords(self._read_bad_samples())
        saver = SaveCheckpoints()
        # docs: hooks
        standard: list[Hook] = [PrefetchShards(), WatchHealth(), ShowProgress(), records, saver]
        if evaluator is not None and evaluator.measures:
            standard.append(EvaluateModel(evaluator, saver, average))
        standard.append(CollectGarbage())
        # docs: end
        # standard hooks are named first, so that a user's hook of the same class name never gets their state
        names = hook_names([*standard, *hooks])
        named_hooks = dict(zip(names[len(standard) :], hooks, strict=True))
        named_hooks.update(zip(names[: len(standard)], standard, strict=True))
        for name, hook in named_hooks.items():
            state = self._hook_states.get(name)
            if state is not None:
                hook.load_state(state)
        # after `load_state`, because an error in it must not delete records; before `start`, which may write records
        self._open_records()
        compiled_now = self.context.compilation
        if compiled_now != self._compiled_before:
            message = (
                f"The run resumes with model.compile={compiled_now} instead of {self._compiled_before}: rounding and "
                "dropout masks can differ from those of an uninterrupted run."
            )
            self.events.add(self.done + 1, "compilation_changed", message, level=logging.INFO, shared=True)
        for hook in named_hooks.values():
            hook.start(self)
            self.resources.push(partial(self._close, hook))
        return named_hooks

    def _read_bad_samples(self) -> BadSampleLog:
        """Return the log of bad samples; raise `UserError` on all ranks if an earlier launch's file is unreadable."""
        communicator = self.context.communicator
        max_bad_fraction = self.context.config.data.max_bad_fraction

        def read() -> BadSampleLog:
            with explain_disk(self.folder):
                return BadSampleLog(self.folder, max_bad_fraction, writes=communicator.rank == 0)

        return communicator.on_every_rank(read)

    def _open_records(self) -> None:
        """Open the metrics and events, which only rank 0 writes, and drop those of steps after the current step.

        Sets `metrics` on rank 0 until the loop ends. Raises `UserError` on all ranks if a file cannot be opened.
        """
        communicator = self.context.communicator

        def open_files() -> MetricsLog | None:
            with explain_disk(self.folder):
                self.events.resume(self.done)
                return MetricsLog(self.folder, self.done or None) if communicator.rank == 0 else None

        metrics = communicator.on_every_rank(open_files)
        if metrics is not None:
            self.metrics = self.resources.enter_context(metrics)
            self.resources.callback(self._forget_metrics)

    def _forget_metrics(self) -> None:
        self.metrics = None

    def _close(
        self,
        hook: Hook,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close a hook; the stack of resources calls this with the exception that ended the loop, if any."""
        hook.close(self, error)

    def _train_step(self, batch: DeviceBatch, start_time: float, throughput: Throughput) -> StepResult:
        """Run one step, and return its result for the hooks.

        Args:
            batch: this rank's part of the batch.
            start_time: when the step began to wait for the batch, in seconds of `time.perf_counter`.
            throughput: the throughput of the last steps, to which this step is added.
        """
        position = self._position()
        outcome = train_step(self.context.engine, self.loss, self._batches, batch, position)
        samples_per_second = throughput.end_step()
        return StepResult(
            **vars(outcome),
            step=self.done + 1,
            is_partial_batch=is_partial_batch(self.order, self.done),
            batch=batch.host,
            lr=position.lr,
            skipped=self.context.engine.skipped_steps,
            waited=batch.waited,
            seconds=time.perf_counter() - start_time,
            samples_per_second=samples_per_second,
            metric_tensors=self.loss.metric_tensors,
        )

    def _position(self) -> Position:
        """Return the position of the next step in the run."""
        return Position(
            step=self.done,
            epoch=self._epoch_offset + self.done // self.order.steps_per_epoch,
            progress=self.done / self.total,
            lr=learning_rate(self.done, self.total, self._config.optimizer),
            peak_lr=self.context.config.optimizer.lr,
        )


def _build_loss(context: RunContext, config: Config, steps_per_epoch: int) -> ContrastiveLoss:
    """Build the loss of a loop; it uses the run's communicator, and does not check its arguments."""
    comm_dtype = str(context.comm_dtype).removeprefix("torch.")
    return ContrastiveLoss(
        config.objective.model_copy(update={"comm_dtype": comm_dtype}),
        dim=context.embed_dim,
        samples=context.data.manifest.n,
        epochs=config.epochs,
        steps_per_epoch=steps_per_epoch,
        lr=config.optimizer.lr,
        betas=config.optimizer.betas,
        adam_eps=config.optimizer.eps,
        communicator=context.communicator,
        undo=True,
        validate=False,
        spare_row=False,
        encoder_temperature=context.logits.temperature,
        encoder_bias=context.logits.bias,
    )
