"""A run from its config to its last line: build, loop, checkpoint, evaluate."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

from neuclip_ds.config import Config
from neuclip_ds.data.bad_samples import BadSampleLog
from neuclip_ds.data.loader import Batch, iter_captions, train_loader
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.data.transforms import train_transform
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.environment import RankEnvironment, complete_environment
from neuclip_ds.errors import UserError
from neuclip_ds.models.dual_encoder import parameter_count
from neuclip_ds.models.source import locate_model, open_source
from neuclip_ds.models.tokenizer import CaptionTokenizer, train_bpe
from neuclip_ds.objectives import build_objective, find_method
from neuclip_ds.objectives.base import Context, FeatureGradients, Step
from neuclip_ds.recipe import dump
from neuclip_ds.reporting.log import configure_logging
from neuclip_ds.reporting.metrics import MetricsLog
from neuclip_ds.reporting.progress import Progress, SlidingRate
from neuclip_ds.training.checkpoint import Checkpoints
from neuclip_ds.training.engine import start_engine
from neuclip_ds.training.engine_config import is_bf16, load_engine_config, zero_stage
from neuclip_ds.training.evaluator import Evaluator
from neuclip_ds.training.schedules import warmup_cosine
from neuclip_ds.training.sources import naming_rank, open_data
from neuclip_ds.training.step import TrainStep

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
    find_method(config.objective.method)
    communicator = _connect()
    try:
        folder = config.run.folder / str(config.run.name)
        communicator.on_rank_zero(lambda: _prepare(folder, config))
        configure_logging(communicator.rank, folder / "log.txt")
        Run(config, engine_config, micro_batch, communicator, folder).train()
    finally:
        communicator.close()


def _connect() -> Communicator:
    """Joins the process group, through DeepSpeed's discovery where MPI started the ranks."""
    complete_environment()
    accelerator = get_accelerator()
    deepspeed.init_distributed(accelerator.communication_backend_name(), timeout=timedelta(minutes=30), verbose=False)
    device = torch.device(accelerator.current_device_name())
    return Communicator("cpu" if device.type == "cpu" else device)


def _prepare(folder: Path, config: Config) -> None:
    if config.run.resume == "never" and any((folder / "checkpoints").glob("step_*")):
        raise UserError(f"{folder} holds checkpoints and run.resume=never: choose another --run.name, or delete it.")
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
        self._config = config
        self._communicator = communicator
        self._folder = folder
        self._stop_asked = False
        data = config.data
        if not data.train:
            raise UserError("Name the training data: --data.train=FOLDER_OF_TARS (or demo:train).")
        self._manifest = open_data(data.train, communicator, folder)
        self._order = GlobalOrder(
            self._manifest.starts,
            self._manifest.sizes,
            data.batch_size,
            config.run.seed,
            slots=data.slots,
            shuffle_block=data.shuffle_block,
            tail=data.tail,
        )
        self._total = config.budget.steps or max(1, round(config.budget.epochs * self._order.steps_per_epoch))
        source = open_source(config.model, communicator.on_rank_zero(lambda: locate_model(config.model)))
        self._pixels = source.pixels
        self._tokenizer = source.tokenizer(self._train_tokenizer)
        self._evaluator = Evaluator(config, self._manifest, self._tokenizer, source.pixels, communicator, folder)

        torch.manual_seed(config.run.seed)  # the same weights on every rank
        model, logits = source.load(self._tokenizer)
        communicator.on_rank_zero(lambda: source.save(folder / "model", logits))
        self._parameters = parameter_count(model)
        self._engine = start_engine(model, config.optimizer, engine_config, communicator)
        towers = torch.bfloat16 if is_bf16(engine_config) else torch.float32
        wire = {"auto": towers, "bfloat16": torch.bfloat16, "float32": torch.float32}[config.objective.wire]
        context = Context(
            source.embed_dim, self._manifest.n, communicator, temperature=logits.temperature, bias=logits.bias
        )
        self._objective = build_objective(config, context, wire)
        self._evaluator.check(self._objective)
        self._step = TrainStep(self._engine, self._objective, communicator, micro_batch, config.run.seed)
        self._checkpoints = Checkpoints(folder / "checkpoints", communicator, config.run.keep_checkpoints)
        self._facts = {
            "data": self._manifest.content_hash,
            "batch_size": data.batch_size,
            "slots": self._order.slots,
            "seed": config.run.seed,
            "method": config.objective.method,
            "parameters": self._parameters,
            "bf16": is_bf16(engine_config),
            "zero_stage": zero_stage(engine_config),
            "world_size": communicator.world_size,
        }

    def train(self) -> None:
        """Goes on from the newest checkpoint, or starts; then evaluates."""
        newest = self._checkpoints.newest()
        done = 0 if newest is None else self._checkpoints.load(newest, self._engine, self._objective, self._facts)
        self._announce(done)
        first_rank = self._communicator.rank == 0
        opened = MetricsLog(self._folder, done) if first_rank else nullcontext()
        with opened as metrics, _signals(self._ask_to_stop):
            if done < self._total and not self._loop(done, metrics):
                return
            results = self._evaluator(self._engine, self._objective)
            if metrics is not None and results:
                metrics.write(self._total, results)
        for name, value in results.items():
            log.info("%s: %.4g", name, value)
        log.info("everything is in %s", self._folder)

    def _loop(self, done: int, metrics: MetricsLog | None) -> bool:
        """Steps from `done` to the end; False when a signal ended it early, after a checkpoint."""
        config, run = self._config, self._config.run
        bad_samples = BadSampleLog(self._folder, config.data.max_bad_fraction, self._communicator.rank)
        rate = SlidingRate()
        waited = 0.0
        with Progress(self._total, done, enabled=metrics is not None) as progress:
            batches = self._batches(done)
            for number in range(done, self._total):
                began = time.perf_counter()
                batch = next(batches)
                waited += time.perf_counter() - began
                bad_samples.record(batch)
                gradients = self._step(batch, self._place(number))
                speed = rate.update((number + 1) * config.data.batch_size)
                loss, tau = float(gradients.loss), float(gradients.metrics["tau"])
                progress.update(number + 1, loss=loss, tau=tau, samples_per_second=speed)
                last = number + 1 == self._total
                if (number + 1) % run.log_every == 0 or last:
                    self._check_together(bad_samples)
                    if metrics is not None:
                        share = waited / max(1e-9, time.perf_counter() - began + waited)
                        record = self._record(gradients, number)
                        metrics.write(number + 1, {**record, "samples_per_second": speed, "data_wait_share": share})
                    waited = 0.0
                    if self._stop_together():
                        self._save(number + 1)
                        log.warning(
                            "stopped by a signal after step %d; the same command goes on from there", number + 1
                        )
                        return False
                if (number + 1) % run.checkpoint_every == 0 or last:
                    self._save(number + 1)
                if run.evaluate_every and (number + 1) % run.evaluate_every == 0 and not last:
                    results = self._evaluator(self._engine, self._objective)
                    if metrics is not None:
                        metrics.write(number + 1, results)
        return True

    def _batches(self, done: int) -> Iterator[Batch]:
        data = self._config.data
        epoch, step = divmod(done, self._order.steps_per_epoch)
        batches = train_loader(
            self._manifest,
            self._order,
            train_transform(self._pixels.size, data.crop_scale, self._pixels.squash),
            self._tokenizer,
            rank=self._communicator.rank,
            world_size=self._communicator.world_size,
            epoch=epoch,
            step=step,
            total_steps=self._total,
            workers=data.workers,
            prefetch=data.prefetch,
            timeout=data.timeout,
            reader=data.reader,
            pin_memory=self._communicator.device.type == "cuda",
        )
        return naming_rank(batches, self._communicator)

    def _place(self, number: int) -> Step:
        optimizer = self._config.optimizer
        lr = warmup_cosine(number, self._total, optimizer)
        epoch = number // self._order.steps_per_epoch
        return Step(number, epoch, lr, optimizer.lr, progress=number / self._total)

    def _record(self, gradients: FeatureGradients, number: int) -> dict[str, float]:
        record = {"loss": float(gradients.loss), "lr": self._place(number).lr}
        record.update({name: float(value) for name, value in gradients.metrics.items()})
        norm = self._engine.get_global_grad_norm()
        return record if norm is None else {**record, "grad_norm": float(norm)}

    def _check_together(self, bad_samples: BadSampleLog) -> None:
        """Stops all ranks where the samples of all together are too bad."""
        counts = torch.tensor([bad_samples.seen, bad_samples.bad], device=self._communicator.device)
        seen, bad = self._communicator.all_reduce(counts, "control").tolist()
        bad_samples.check(seen, bad)

    def _stop_together(self) -> bool:
        """Whether any rank has been asked to stop."""
        asked = torch.tensor(int(self._stop_asked), device=self._communicator.device).reshape(1)
        return bool(self._communicator.all_reduce(asked, "control").item())

    def _ask_to_stop(self) -> None:
        self._stop_asked = True

    def _save(self, step: int) -> None:
        self._checkpoints.save(step, self._engine, self._objective, self._facts)

    def _train_tokenizer(self) -> CaptionTokenizer:
        """A tokenizer trained on the captions by rank 0 and kept with the run."""
        text = self._config.model.text
        folder = self._folder / "tokenizer"

        def make() -> None:
            if not folder.is_dir():
                captions = iter_captions(self._manifest, _TOKENIZER_CAPTIONS)
                train_bpe(captions, text.vocab_size, text.context_length).save(folder)

        self._communicator.on_rank_zero(make)
        return CaptionTokenizer.load(folder, text.context_length)

    def _announce(self, done: int) -> None:
        manifest, config = self._manifest, self._config
        log.info(
            "%s: %d pairs in %d shards, %d parameters, %d ranks, batch %d, %d steps of which %d are done",
            config.objective.method, manifest.n, manifest.n_shards, self._parameters,
            self._communicator.world_size, config.data.batch_size, self._total, done,
        )  # fmt: skip


@contextmanager
def _signals(handler: Callable[[], None]) -> Iterator[None]:
    """SIGTERM (launchers, schedulers) and SIGUSR1 (SLURM's warning) ask for a checkpoint and a clean end."""
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.signal(number, lambda *_: handler()) for number in numbers]
    try:
        yield
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)
