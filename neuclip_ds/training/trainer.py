"""Build and run a training job from a config.

The trainer takes a list of hooks and a function that opens the evaluation. Optional features, such as the report or
remote copies, are hooks that the caller passes (training/hooks/optional.py).
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from neuclip_ds.checkpoint.checkpoints import Checkpoints
from neuclip_ds.checkpoint.integrity import read_meta
from neuclip_ds.config import Config, dump
from neuclip_ds.data.training_data import TrainingData, open_training_data
from neuclip_ds.data.training_set import find_validation, interleave_settings
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.environment import RankEnvironment
from neuclip_ds.distributed.launch import leave, process_group
from neuclip_ds.distributed.stop_signals import raising_interrupted
from neuclip_ds.engine.average import WeightAverage
from neuclip_ds.engine.config import load_engine_config
from neuclip_ds.engine.engine import Engine
from neuclip_ds.engine.precision import (
    deterministic_algorithms,
    fix_library_algorithms,
    require_precision,
    resolve_comm_dtype,
    set_matmul_precision,
)
from neuclip_ds.engine.start import start_engine
from neuclip_ds.files import explain_disk
from neuclip_ds.models.pretrained.base import LogitParameters, Preprocessing
from neuclip_ds.models.source import ModelSource, locate_on_rank_zero, model_source
from neuclip_ds.models.tokenizer import ModelTokenizer
from neuclip_ds.models.trained_parts import Parameters
from neuclip_ds.objectives import build_objective
from neuclip_ds.objectives.base import Context, Objective
from neuclip_ds.reporting.log import configure_logging
from neuclip_ds.reporting.metrics import AVERAGED, CHANCE
from neuclip_ds.training.checks import check_config, config_warnings, fingerprint
from neuclip_ds.training.hooks import Hook
from neuclip_ds.training.loop import Loop, RunContext
from neuclip_ds.training.recovery import (
    RECOVERY,
    find_reused,
    gamma_epoch_offset,
    load_recovered_state,
    recover,
    recovered_objective,
    recovery_loop,
)
from neuclip_ds.training.run_folder import (
    MODEL,
    move_staged_files,
    read_complete,
    record_environment,
    staging,
    trained_with,
    write_complete,
)
from neuclip_ds.training.run_lock import locked
from neuclip_ds.training.schedule import run_length

log = logging.getLogger(__name__)


class Evaluation(Protocol):
    """An evaluation of a run's model."""

    measures: bool  # whether there is anything to measure

    def __call__(self, engine: Engine, objective: Objective) -> dict[str, float]:
        """Return the results by name, equal on all ranks; all ranks call this together."""

    def describe(self) -> str:
        """Return a description of the evaluation sets for the log."""
        ...

    def close(self) -> None: ...


OpenEvaluation = Callable[[Config, TrainingData, Preprocessing, Communicator, Path], Evaluation]
"""Function that opens the data of an evaluation before the engine starts, and writes new files to the folder."""


def train(
    config: Config,
    environment: RankEnvironment,
    hooks: Sequence[Hook] = (),
    open_evaluation: OpenEvaluation | None = None,
) -> None:
    """Train and evaluate a model, and write all results to the run's folder.

    Args:
        config, environment: the config of the run, and the environment of this rank.
        hooks: hooks in addition to the standard hooks of every run.
        open_evaluation: opens the evaluation of the run; by default, nothing is evaluated.

    Raises:
        UserError: the config or the data is invalid; raised before the first step where possible.
        TrainingDiverged: the loss or gradient is not finite even after a rollback, or replicated state differs.
        Interrupted: a signal stopped the run; if the run was training, it has saved a checkpoint.
    """
    check_config(config, environment.world_size)  # a mistake in the config is reported before ranks connect
    folder = config.run.output_dir / str(config.run.name)
    if config.run.deterministic:
        fix_library_algorithms()
    with (
        raising_interrupted(),
        process_group(dump(config), config.data.max_outage) as communicator,
        deterministic_algorithms(config.run.deterministic),
        locked(folder, communicator),
    ):
        configure_logging(communicator.rank)
        with staging(config, folder, communicator) as staged:
            for hook in hooks:
                hook.before_run(config, communicator, folder)
            trainer = build(config, communicator, folder, staged, open_evaluation)
            ended = trainer.is_complete()
            if ended:
                steps = trainer.loop.done
                log.info("%s is complete after %d steps; for more, raise epochs or max_steps", folder, steps)
            else:
                communicator.on_rank_zero(lambda: move_staged_files(staged, folder, trainer.loop.context.config))
        if not ended:
            record_environment(folder, communicator)
            configure_logging(communicator.rank, folder / "log.txt")
            ended = trainer.run(hooks)
        if ended:
            leave()  # the other ranks do not wait while rank 0 writes the report and copies the run
            for hook in reversed(hooks):
                hook.after_run(trainer.loop)


class Trainer(NamedTuple):
    """A run that is ready to train, resumed from its checkpoint if it has one."""

    loop: Loop
    evaluation: Evaluation | None
    recovery: Loop | None  # runs before training

    def is_complete(self) -> bool:
        """Return whether an earlier launch has completed training and evaluation."""
        loop = self.loop
        return loop.context.communicator.on_rank_zero(
            lambda: read_complete(loop.context.folder) == loop.done == loop.total
        )

    def run(self, hooks: Sequence[Hook] = ()) -> bool:
        """Run the recovery if the config enables it, then train; return False if the recovery was stopped early."""
        context, objective = self.loop.context, self.loop.objective
        if self.recovery is not None:
            recovered = recover(self.recovery, [hook for hook in hooks if hook.in_recovery])
            if recovered is None:  # stopped early
                return False
            load_recovered_state(recovered, context, objective)
        ema = context.config.ema
        average = WeightAverage(context.engine, ema.decay) if ema.decay else None
        with closing(self.evaluation) if self.evaluation is not None else nullcontext():
            evaluate = None
            if self.evaluation is not None:
                log.info("evaluations are on %s", self.evaluation.describe())
                evaluate = partial(self._evaluate, self.evaluation, average) if self.evaluation.measures else None
            complete = self.loop.run(evaluate, hooks, average)
        if complete:
            context.communicator.on_rank_zero(lambda: write_complete(context.folder, self.loop.done))
            log.info("all results are in %s", context.folder)
        return True

    def _evaluate(self, evaluation: Evaluation, average: WeightAverage | None) -> dict[str, float]:
        """Evaluate the weights and, if enabled, their moving average, whose results are named `ema/NAME`."""
        engine, objective = self.loop.context.engine, self.loop.objective
        results = evaluation(engine, objective)
        if average is not None:
            with average.in_use():
                found = evaluation(engine, objective)
            results |= {name if name.startswith(CHANCE) else AVERAGED + name: value for name, value in found.items()}
        return results


def build(
    config: Config,
    communicator: Communicator,
    folder: Path,
    staged: Path,
    open_evaluation: OpenEvaluation | None = None,
) -> Trainer:
    """Build a run and resume it from its newest checkpoint, if any; all ranks call this together.

    Writes new files to `staged` instead of the run's folder. Raises `UserError` if the config, the data or a checkpoint
    is invalid.
    """
    engine_config = load_engine_config(config, communicator.world_size)
    resumed = newest_checkpoint(config, communicator, folder)
    source = model_source(config.model, locate_on_rank_zero(config.model, communicator))
    meta = communicator.on_rank_zero(lambda: read_meta(resumed)) if resumed is not None else None
    data = open_training_data(config, source, communicator, staged, resumed, meta)
    chosen = {**interleave_settings(data.order.interleave), "val": find_validation(config.data, data.manifest)}
    config = config.model_copy(update={"data": config.data.model_copy(update=chosen)})
    steps = run_length(data.order, config.epochs, config.max_steps)
    for slip in config_warnings(config, steps) if communicator.rank == 0 else ():
        log.warning("%s", slip)
    evaluation = open_evaluation(config, data, source.preprocessing, communicator, staged) if open_evaluation else None
    require_precision(engine_config, config.deepspeed)
    set_matmul_precision(config, engine_config, communicator.device)
    engine, logits, parameters = start_encoders(config, engine_config, source, data.tokenizer, communicator, staged)
    context = RunContext(
        config,
        communicator,
        folder,
        data,
        engine,
        Context(source.embed_dim, data.manifest.n, communicator, temperature=logits.temperature, bias=logits.bias),
        resolve_comm_dtype(config, engine_config),
        {**fingerprint(config), "parameters": parameters},
        trained_with(staged, folder, config) if communicator.rank == 0 else {},
    )
    objective = build_objective(config, context.objective_context, context.comm_dtype)
    loop = Loop(context, config, objective, folder, context.fingerprint, gamma_epoch_offset(config))
    recovery = None
    if resumed is not None and RECOVERY not in resumed.relative_to(folder).parts:
        loop.resume(resumed)
    elif config.recovery.reuse is not None:
        load_recovered_state(find_reused(context), context, objective)
    elif config.recovery.epochs:
        recovery = recovery_loop(context, resumed)
    return Trainer(loop, evaluation, recovery)


def newest_checkpoint(config: Config, communicator: Communicator, folder: Path) -> Path | None:
    """Return the newest intact checkpoint of a run's training, else of its recovery, else None.

    Raises `UserError`, before anything is built, if the checkpoint does not match the config.
    """
    training = Checkpoints(folder / "checkpoints", communicator, 1)
    newest = training.newest()
    if newest is not None:
        training.read(newest, fingerprint(config))
    elif config.recovery.epochs and config.recovery.reuse is None:
        recovery = Checkpoints(folder / RECOVERY / "checkpoints", communicator, 1)
        newest = recovery.newest()
        if newest is not None:
            recovery.read(newest, {**fingerprint(config), "method": recovered_objective(config).method})
    return newest


def start_encoders(
    config: Config,
    engine_config: dict[str, Any],
    source: ModelSource,
    tokenizer: ModelTokenizer,
    communicator: Communicator,
    folder: Path,
) -> tuple[Engine, LogitParameters, int]:
    """Build or load the encoders, write a description of them to `folder`, and start DeepSpeed's engine.

    Returns the engine, the encoders' temperature and bias, and the number of parameters.
    """
    torch.manual_seed(config.run.seed)  # the same weights on every rank
    model, logits = source.load(tokenizer)

    def save() -> None:
        with explain_disk(folder / MODEL):
            source.save(folder / MODEL, logits)

    communicator.on_rank_zero(save)
    parameters = Parameters.of(model)  # before ZeRO 3 partitions them
    if parameters.frozen:
        log.info("%d of %d parameters are trained", parameters.trained, parameters.total)
    if config.model.compile:
        model.compile_towers()
    engine = start_engine(model, config.optimizer, engine_config, communicator, config.run.seed)
    return engine, logits, parameters.total
