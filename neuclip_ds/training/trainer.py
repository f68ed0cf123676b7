"""A training run from its config to its last line."""

import logging
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from neuclip_ds.checkpoint.checkpoints import Checkpoints, Fingerprint
from neuclip_ds.checkpoint.integrity import read_meta
from neuclip_ds.config import Config, ModelConfig
from neuclip_ds.data.disk import explain_disk
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.environment import RankEnvironment
from neuclip_ds.distributed.launch import connected
from neuclip_ds.distributed.stop_signals import raising_interrupted
from neuclip_ds.engine.average import WeightAverage
from neuclip_ds.engine.config import load_engine_config
from neuclip_ds.engine.deterministic import deterministic_algorithms
from neuclip_ds.engine.precision import require_precision, resolve_comm_dtype, set_matmul_precision
from neuclip_ds.engine.start import start_engine
from neuclip_ds.models.pretrained.base import LogitParameters
from neuclip_ds.models.source import ModelSource, locate_model, model_source
from neuclip_ds.models.tokenizer import ModelTokenizer
from neuclip_ds.models.trained_parts import TOWERS, Trainable
from neuclip_ds.objectives import build_objective
from neuclip_ds.objectives.base import Context, Objective
from neuclip_ds.recipe import dump
from neuclip_ds.reporting.environment import record_environment
from neuclip_ds.reporting.log import configure_logging
from neuclip_ds.reporting.panels import AVERAGED
from neuclip_ds.reporting.scores import CHANCE
from neuclip_ds.training.checks import check_config, likely_slips
from neuclip_ds.training.data import open_training_data
from neuclip_ds.training.data_order import SavedOrder, order_facts, with_order
from neuclip_ds.training.data_position import DataPosition
from neuclip_ds.training.data_sources import facts_of
from neuclip_ds.training.decoder import with_decoder
from neuclip_ds.training.evaluator import Evaluator
from neuclip_ds.training.hooks import Hook
from neuclip_ds.training.hooks.average import AverageWeights
from neuclip_ds.training.loop import Loop, RunContext
from neuclip_ds.training.phases import model_for_phases, plan_phases
from neuclip_ds.training.recovery import FOLDER as RECOVERY
from neuclip_ds.training.recovery import (
    epochs_behind,
    find_reused,
    is_asked_for,
    recover,
    recovery_loop,
    take_over,
)
from neuclip_ds.training.remote import complete_copy, restore
from neuclip_ds.training.report import report_run
from neuclip_ds.training.run_folder import MODEL, read_complete, staging, take_in, trained_with, write_complete

log = logging.getLogger(__name__)

# options that may change between starts, and what the fingerprint lists by itself
_NOT_ARCHITECTURE: Any = {
    "vision": {"pretrained", "patch_drop", "train", "lora"},
    "text": {"pretrained", "tokenizer", "train", "lora"},
}


def train(config: Config, environment: RankEnvironment, hooks: Sequence[Hook] = ()) -> None:
    """Train, evaluate and leave everything in runs/NAME.

    Raises:
        UserError: anything in config or data that cannot work, before the first step where possible.
        TrainingDiverged: a loss or gradient is not finite.
        Interrupted: a signal stopped the run, during training after a checkpoint.
    """
    check_config(config, environment.world_size)  # a mistake in the config is reported before ranks connect
    folder = config.run.folder / str(config.run.name)
    max_outage = config.data.max_outage
    with (
        raising_interrupted(),
        connected(dump(config), config.run.folder, max_outage) as communicator,
        deterministic_algorithms(config.run.deterministic),
    ):
        configure_logging(communicator.rank)
        with staging(config, folder, communicator) as staged:
            restore(config, communicator, folder, *([RECOVERY] if is_asked_for(config.recovery) else []))
            trainer = build(config, communicator, folder, staged)
            if trainer.is_complete():
                log.info("%s is complete after %d steps; for more, raise budget.*", folder, trainer.loop.done)
                if communicator.rank == 0:
                    complete_copy(config, folder)
                return
            communicator.on_rank_zero(lambda: take_in(staged, folder, trainer.loop.context.config))
        record_environment(folder, communicator)
        configure_logging(communicator.rank, folder / "log.txt")
        trainer.run(hooks)


class Trainer(NamedTuple):
    """A run that has been built, and has read the checkpoint that it resumes from."""

    loop: Loop
    evaluator: Evaluator
    recovery: Loop | None  # that comes first

    def is_complete(self) -> bool:
        """Return whether an earlier start has done everything, up to the report."""
        context = self.loop.context

        def find() -> bool:
            reported = not context.config.run.report or (context.folder / "report.html").is_file()
            return reported and read_complete(context.folder) == self.loop.done == self.loop.total

        return context.communicator.on_rank_zero(find)

    def run(self, hooks: Sequence[Hook] = ()) -> None:
        """Train to the end, after the recovery of statistics if the config asks for it."""
        context, objective = self.loop.context, self.loop.objective
        if self.recovery is not None:
            recovered = recover(self.recovery)
            if recovered is None:  # stopped before its end
                return
            take_over(recovered, context, objective)
        ema = context.config.ema
        average = WeightAverage(context.engine, ema.decay) if ema.decay else None
        with closing(self.evaluator):
            averaging = [AverageWeights(average)] if average is not None else []
            complete = self.loop.run(lambda: self._evaluate(average), [*averaging, *hooks])
        if context.config.run.report:
            context.communicator.on_rank_zero(lambda: report_run(context.folder, objective))
        if complete:
            context.communicator.on_rank_zero(lambda: write_complete(context.folder, self.loop.done))
            log.info("everything is in %s", context.folder)
        if context.communicator.rank == 0:  # the other ranks need not wait
            complete_copy(context.config, context.folder)

    def _evaluate(self, average: WeightAverage | None) -> dict[str, float]:
        """Evaluate the weights, their average as `ema/NAME`, or both, as `ema.evaluate` says."""
        engine, which = self.loop.context.engine, self.loop.context.config.ema.evaluate
        results = {} if average is not None and which == "average" else self.evaluator(engine, self.loop.objective)
        if average is not None and which != "weights":
            with average.in_use():
                found = self.evaluator(engine, self.loop.objective)
            results |= {name if name.startswith(CHANCE) else AVERAGED + name: value for name, value in found.items()}
        return results


def build(config: Config, communicator: Communicator, folder: Path, staged: Path) -> Trainer:
    """Build a run, phase by phase, and resume it; all ranks build it together.

    Writes nothing into the run's folder: what is new goes to `staged`. Raises `UserError` for anything in config, data
    or checkpoints that cannot work.
    """
    config = config.with_scaled_rates()
    engine_config = load_engine_config(config, communicator.world_size)
    newest = newest_checkpoints(config, communicator, folder)
    source = model_source(model_for_phases(config), communicator.on_rank_zero(lambda: locate_model(config.model)))
    config = with_decoder(config, newest.order)
    data = open_training_data(config, source, communicator, folder, staged, newest.any, newest.order)
    config = with_order(config, data.order.interleave)
    start = DataPosition.start(data.order, data.manifest)
    phases = plan_phases(config, start, start.end(config.budget))
    for slip in likely_slips(config, phases) if communicator.rank == 0 else ():
        log.warning("%s", slip)
    evaluator = Evaluator(config, data, source.preprocessing, communicator, staged)
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
        {**fingerprint(config, parameters), **order_facts(data.order.interleave)},
        trained_with(staged, folder, config) if communicator.rank == 0 else {},
    )
    objective = build_objective(config, context.objective_context, context.comm_dtype)
    evaluator.check(objective)
    return resumed_trainer(context, objective, evaluator, newest)


class NewestCheckpoints(NamedTuple):
    """The newest intact checkpoints of a run."""

    training: Path | None
    recovery: Path | None  # only where training has none, and begins with a recovery
    order: SavedOrder | None  # of that which the run resumes from

    @property
    def any(self) -> Path | None:
        """The checkpoint that the run resumes from."""
        return self.training or self.recovery


def newest_checkpoints(config: Config, communicator: Communicator, folder: Path) -> NewestCheckpoints:
    """Find where a run resumes; raise `UserError` where the config has other facts, before anything is built."""
    training = Checkpoints(folder / "checkpoints", communicator, 1)
    newest = training.newest()
    if newest is not None:
        training.read(newest, fingerprint(config))
        return NewestCheckpoints(newest, None, _read_order(newest, communicator))
    recovers = is_asked_for(config.recovery) and config.recovery.reuse is None
    recovery = Checkpoints(folder / RECOVERY / "checkpoints", communicator, 1)
    newest = recovery.newest() if recovers else None
    return NewestCheckpoints(None, newest, _read_order(newest, communicator) if newest is not None else None)


def _read_order(checkpoint: Path, communicator: Communicator) -> SavedOrder:
    meta = communicator.on_rank_zero(lambda: read_meta(checkpoint))
    return SavedOrder(meta["facts"], meta["data"]["shards"])


def resumed_trainer(
    context: RunContext, objective: Objective, evaluator: Evaluator, newest: NewestCheckpoints
) -> Trainer:
    """Fill a fresh run from its newest checkpoint, or from the recovered statistics that it reuses."""
    config, recovery = context.config, None
    loop = Loop(
        context,
        objective,
        context.folder,
        config.budget,
        partial(plan_phases, config),
        context.fingerprint,
        epochs_behind(config),
    )
    if newest.training is not None:
        loop.resume(newest.training)
    elif config.recovery.reuse is not None:
        take_over(find_reused(context), context, objective)
    elif is_asked_for(config.recovery):
        recovery = recovery_loop(context, newest.recovery)
    return Trainer(loop, evaluator, recovery)


def start_encoders(
    config: Config,
    engine_config: dict[str, Any],
    source: ModelSource,
    tokenizer: ModelTokenizer,
    communicator: Communicator,
    folder: Path,
) -> tuple[Any, LogitParameters, int]:
    """Build or load the encoders, keep what reopens them in a folder, and start DeepSpeed's engine.

    Returns the engine, temperature and bias that they bring, and their number of parameters.
    """
    torch.manual_seed(config.run.seed)  # the same weights on every rank
    model, logits = source.load(tokenizer)
    communicator.on_rank_zero(lambda: _save_source(source, folder / MODEL, logits))
    parameters = Trainable.of(model)  # before ZeRO 3 partitions them
    if parameters.frozen:
        log.info("%d of %d parameters train", parameters.trained, parameters.total)
    if config.model.compile:
        model.compile_towers()
    return start_engine(model, config.optimizer, engine_config, communicator), logits, parameters.total


def _save_source(source: ModelSource, folder: Path, logits: LogitParameters) -> None:
    with explain_disk(folder):
        source.save(folder, logits)


def fingerprint(config: Config, parameters: int | None = None) -> Fingerprint:
    """Return what a resumed run must share with the one that wrote the checkpoint, of the config alone or the model."""
    data = config.data
    chosen = {name: getattr(data, name) for name in ("shard_streams", "shuffle_block", "decoder")}
    facts = {
        "batch_size": data.batch_size,
        **{name: value for name, value in chosen.items() if value is not None},
        **facts_of(data),
        "tail": data.last_batch,
        "seed": config.run.seed,
        "method": config.objective.method,
        "optimizer": config.optimizer.name,
        **_architecture(config.model),
    }
    return facts if parameters is None else {**facts, "parameters": parameters}


def _architecture(model: ModelConfig) -> Fingerprint:
    """Return what trains, adapters, and the options of a model built from the config; names of files may change."""
    trains = {f"model.{name}.train": getattr(model, name).trained for name in TOWERS}
    adapters = {name: getattr(model, name).lora for name in TOWERS}
    trains |= {f"model.{name}.lora": lora.model_dump() for name, lora in adapters.items() if lora.rank}
    if model.pretrained:
        return trains
    tree = model.model_dump(mode="json", include={"vision", "text", "embed_dim"}, exclude=_NOT_ARCHITECTURE)
    tree["vision"] |= dict(zip(("mean", "std"), map(list, model.vision.statistics()), strict=True))
    options = {f"{part}.{key}": value for part in ("vision", "text") for key, value in tree.pop(part).items()}
    return {f"model.{name}": value for name, value in {**options, **tree}.items()} | trains
