"""A training run from its config to its last line."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from neuclip_ds.checkpoint.checkpoints import Fingerprint
from neuclip_ds.config import Config
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.environment import RankEnvironment
from neuclip_ds.distributed.launch import check_shared, connected
from neuclip_ds.engine.config import load_engine_config
from neuclip_ds.engine.precision import resolve_comm_dtype
from neuclip_ds.engine.start import start_engine
from neuclip_ds.errors import UserError
from neuclip_ds.models.dual_encoder import parameter_count
from neuclip_ds.models.pretrained.base import LogitParameters
from neuclip_ds.models.source import ModelSource, locate_model, model_source
from neuclip_ds.models.tokenizer import ModelTokenizer
from neuclip_ds.objectives import build_objective
from neuclip_ds.objectives.base import Context, Objective
from neuclip_ds.recipe import dump
from neuclip_ds.reporting.environment import record_environment
from neuclip_ds.reporting.log import configure_logging
from neuclip_ds.reporting.weights_and_biases import require_wandb
from neuclip_ds.training.data import open_training_data
from neuclip_ds.training.evaluator import Evaluator
from neuclip_ds.training.hooks import Hook
from neuclip_ds.training.loop import Loop, RunContext
from neuclip_ds.training.recovery import check_recovery, epochs_behind, find_reused, is_asked_for, recover, take_over
from neuclip_ds.training.report import report_run
from neuclip_ds.training.schedules import warmup_cosine

log = logging.getLogger(__name__)


def train(config: Config, environment: RankEnvironment, hooks: Sequence[Hook] = ()) -> None:
    """Train, evaluate and leave everything in runs/NAME.

    Raises:
        UserError: anything in config or data that cannot work, before the first step where possible.
        TrainingDiverged: a loss or gradient is not finite.
    """
    load_engine_config(config, environment.world_size)  # a mistake in the config is reported before ranks connect
    config.micro_batch(environment.world_size)
    with connected(dump(config)) as communicator:
        build(config, communicator, open_folder(config, communicator)).run(hooks)


def open_folder(config: Config, communicator: Communicator) -> Path:
    """Make runs/NAME and start its log and records; return it."""
    folder = config.run.folder / str(config.run.name)

    def prepare() -> None:
        if config.run.resume == "never" and any((folder / "checkpoints").glob("step_*")):
            raise UserError(
                f"{folder} holds checkpoints and run.resume=never. Choose another --run.name, or delete it."
            )
        if config.run.wandb is not None:
            require_wandb()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(dump(config), encoding="utf-8")

    communicator.on_rank_zero(prepare)
    check_shared(folder, communicator)
    record_environment(folder, communicator)
    configure_logging(communicator.rank, folder / "log.txt")
    return folder


class Trainer(NamedTuple):
    """A run that has been built."""

    context: RunContext
    objective: Objective
    evaluator: Evaluator

    def run(self, hooks: Sequence[Hook] = ()) -> None:
        """Resume from the newest checkpoint, or start, with the recovery of statistics if the config asks for it."""
        context, objective, config = self.context, self.objective, self.context.config
        loop = Loop(
            context,
            objective,
            context.folder,
            config.budget,
            lambda step, total: warmup_cosine(step, total, config.optimizer),
            context.fingerprint,
            epochs_behind(config.recovery),
        )
        if loop.checkpoints.newest() is None and is_asked_for(config.recovery):
            recovered = find_reused(context) if config.recovery.reuse is not None else recover(context)
            if recovered is None:  # stopped before its end
                return
            take_over(recovered, context, objective)
        complete = loop.run(lambda: self.evaluator(context.engine, objective), hooks)
        if config.run.report:
            context.communicator.on_rank_zero(lambda: report_run(context.folder, objective))
        if complete:
            log.info("everything is in %s", context.folder)


def build(config: Config, communicator: Communicator, folder: Path) -> Trainer:
    """Build a run in a folder from `open_folder`, phase by phase; all ranks build it together.

    Raises `UserError` for anything in config or data that cannot work.
    """
    engine_config = load_engine_config(config, communicator.world_size)
    source = model_source(config.model, communicator.on_rank_zero(lambda: locate_model(config.model)))
    data = open_training_data(config, source, communicator, folder)
    evaluator = Evaluator(config, data, source.preprocessing, communicator, folder)
    engine, logits, parameters = start_encoders(config, engine_config, source, data.tokenizer, communicator, folder)
    context = RunContext(
        config,
        communicator,
        folder,
        data,
        engine,
        Context(source.embed_dim, data.manifest.n, communicator, temperature=logits.temperature, bias=logits.bias),
        resolve_comm_dtype(config, engine_config),
        fingerprint(config, parameters),
    )
    objective = build_objective(config, context.objective_context, context.comm_dtype)
    evaluator.check(objective)
    check_recovery(config, objective)
    return Trainer(context, objective, evaluator)


def start_encoders(
    config: Config,
    engine_config: dict[str, Any],
    source: ModelSource,
    tokenizer: ModelTokenizer,
    communicator: Communicator,
    folder: Path,
) -> tuple[Any, LogitParameters, int]:
    """Build or load the encoders, keep what reopens them in the run's folder, and start DeepSpeed's engine.

    Returns the engine, temperature and bias that they bring, and their number of parameters.
    """
    torch.manual_seed(config.run.seed)  # the same weights on every rank
    model, logits = source.load(tokenizer)
    communicator.on_rank_zero(lambda: source.save(folder / "model", logits))
    parameters = parameter_count(model)  # before ZeRO 3 partitions them
    if config.model.compile:
        model.compile_towers()
    return start_engine(model, config.optimizer, engine_config, communicator), logits, parameters


def fingerprint(config: Config, parameters: int) -> Fingerprint:
    """Return what a resumed run must share with the one that wrote the checkpoint."""
    data = config.data
    return {
        "batch_size": data.batch_size,
        "shard_streams": data.shard_streams,
        "shuffle_block": data.shuffle_block,
        "tail": data.last_batch,
        "seed": config.run.seed,
        "method": config.objective.method,
        "parameters": parameters,
        "optimizer": config.optimizer.name,
    }
