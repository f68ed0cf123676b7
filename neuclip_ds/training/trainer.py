"""A run from its config to its last line: build, loop, checkpoint, evaluate."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from neuclip_ds.config import Config
from neuclip_ds.data.decoders import find_decoder
from neuclip_ds.data.loader import LoaderOptions, iter_captions
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.transforms import train_transform
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.environment import RankEnvironment
from neuclip_ds.distributed.launch import check_shared, connected
from neuclip_ds.engine.config import load_engine_config
from neuclip_ds.engine.precision import resolve_comm_dtype
from neuclip_ds.engine.start import start_engine
from neuclip_ds.errors import UserError
from neuclip_ds.models.dual_encoder import parameter_count
from neuclip_ds.models.source import locate_model, open_source
from neuclip_ds.models.tokenizer import CaptionTokenizer, train_bpe
from neuclip_ds.objectives import build_objective
from neuclip_ds.objectives.base import Context
from neuclip_ds.recipe import dump
from neuclip_ds.reporting.environment import record_environment
from neuclip_ds.reporting.log import configure_logging
from neuclip_ds.reporting.weights_and_biases import require_wandb
from neuclip_ds.training.evaluator import Evaluator
from neuclip_ds.training.recovery import check_recovery, epochs_behind, find_reused, is_asked_for, recover, take_over
from neuclip_ds.training.report import report_run
from neuclip_ds.training.schedules import warmup_cosine
from neuclip_ds.training.sources import loader_options, open_data, open_order
from neuclip_ds.training.stage import RunContext, Stage

log = logging.getLogger(__name__)

_TOKENIZER_CAPTIONS = 200_000  # enough for a vocabulary of CLIP's size; more only takes longer


def train(config: Config, environment: RankEnvironment) -> None:
    """Trains, evaluates and leaves everything in runs/NAME.

    Raises:
        UserError: anything in config or data that cannot work, before the first step where possible.
        TrainingDiverged: a loss or gradient is not finite.
    """
    engine_config = load_engine_config(config, environment.world_size)
    micro_batch = config.micro_batch(environment.world_size)
    with connected(dump(config)) as communicator:
        folder = config.run.folder / str(config.run.name)
        communicator.on_rank_zero(lambda: _prepare(folder, config))
        check_shared(folder, communicator)
        record_environment(folder, communicator)
        configure_logging(communicator.rank, folder / "log.txt")
        Run(config, engine_config, micro_batch, communicator, folder).train()


def _prepare(folder: Path, config: Config) -> None:
    if config.run.resume == "never" and any((folder / "checkpoints").glob("step_*")):
        raise UserError(f"{folder} holds checkpoints and run.resume=never: choose another --run.name, or delete it.")
    if config.run.wandb is not None:
        require_wandb()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump(config), encoding="utf-8")


class Run:
    """The parts of one training run, on one rank."""

    def __init__(
        self,
        config: Config,
        engine_config: dict[str, Any],
        micro_batch: int,
        communicator: Communicator,
        folder: Path,
    ) -> None:
        self._config, self._communicator, self._folder = config, communicator, folder
        data = config.data
        if not data.train:
            raise UserError("Name the training data: --data.train=FOLDER_OF_TARS (or demo:train).")
        manifest = open_data(data.train, data, communicator, folder)
        loading = loader_options(data, manifest, communicator)
        order = open_order(config, manifest)
        source = open_source(config.model, communicator.on_rank_zero(lambda: locate_model(config.model)))
        pixels = source.pixels
        transform = train_transform(pixels.size, data.crop_scale, find_decoder(data.decoder), pixels.squash)
        tokenizer = source.tokenizer(lambda: self._train_tokenizer(manifest, loading))
        self._evaluator = Evaluator(config, manifest, tokenizer, pixels, communicator, folder)

        torch.manual_seed(config.run.seed)  # the same weights on every rank
        model, logits = source.load(tokenizer)
        communicator.on_rank_zero(lambda: source.save(folder / "model", logits))
        parameters = parameter_count(model)  # before ZeRO 3 takes them apart
        if config.model.compile:
            model.compile_towers()
        engine = start_engine(model, config.optimizer, engine_config, communicator)
        self._comm_dtype = resolve_comm_dtype(config, engine_config)
        self._context = Context(
            source.embed_dim, manifest.n, communicator, temperature=logits.temperature, bias=logits.bias
        )
        self._objective = build_objective(config, self._context, self._comm_dtype)
        self._evaluator.check(self._objective)
        self._parts = RunContext(
            config, communicator, manifest, order, transform, tokenizer, loading, engine, micro_batch
        )
        self._facts = {
            "batch_size": data.batch_size,
            "slots": data.shard_streams,
            "shuffle_block": data.shuffle_block,
            "tail": data.last_batch,
            "seed": config.run.seed,
            "method": config.objective.method,
            "parameters": parameters,
            "optimizer": config.optimizer.name,
        }
        check_recovery(config, self._objective)

    def train(self) -> None:
        """Goes on from the newest checkpoint, or starts, with the recovery of statistics if asked for."""
        config = self._config
        training = Stage(
            self._parts,
            self._objective,
            self._folder,
            config.budget,
            lambda number, total: warmup_cosine(number, total, config.optimizer),
            self._facts,
            lambda: self._evaluator(self._parts.engine, self._objective),
            epochs_behind(config.recovery),
        )
        if training.newest() is None and is_asked_for(config.recovery):
            recovered = self._recovered()
            if recovered is None:
                return
            take_over(recovered, self._parts, self._objective)
        complete = training.run()
        if config.run.report:
            self._communicator.on_rank_zero(lambda: report_run(self._folder, self._objective))
        if complete:
            log.info("everything is in %s", self._folder)

    def _recovered(self) -> Path | None:
        """The checkpoint with recovered statistics; None when a signal has ended their recovery early."""
        if self._config.recovery.reuse is not None:
            return find_reused(self._config.recovery.reuse, self._communicator)
        return recover(self._parts, self._context, self._comm_dtype, self._folder, self._facts)

    def _train_tokenizer(self, manifest: Manifest, loading: LoaderOptions) -> CaptionTokenizer:
        """A tokenizer trained on the captions by rank 0 and kept with the run."""
        text = self._config.model.text
        folder = self._folder / "tokenizer"

        def make() -> None:
            if not folder.is_dir():
                captions = iter_captions(manifest, _TOKENIZER_CAPTIONS, loading.captions, loading.cache)
                train_bpe(captions, text.vocab_size, text.context_length).save(folder)

        self._communicator.on_rank_zero(make)
        return CaptionTokenizer.load(folder, text.context_length)
