"""A run from its config to its last line: build, loop, checkpoint, evaluate."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

from neuclip_ds.config import Config
from neuclip_ds.data.bad_samples import BadSampleLog
from neuclip_ds.data.decoders import find_decoder
from neuclip_ds.data.loader import Batch, iter_captions, train_loader
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
from neuclip_ds.reporting.sample_log import SampleLog, drop_samples_beyond
from neuclip_ds.training.checkpoint import Checkpoints
from neuclip_ds.training.data_position import DataPosition, resume
from neuclip_ds.training.engine import start_engine
from neuclip_ds.training.engine_config import is_bf16, load_engine_config
from neuclip_ds.training.evaluator import Evaluator
from neuclip_ds.training.schedules import warmup_cosine
from neuclip_ds.training.sources import loader_options, naming_rank, open_data, open_order, prefetching
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
    communicator = connect()
    try:
        folder = config.run.folder / str(config.run.name)
        communicator.on_rank_zero(lambda: _prepare(folder, config))
        configure_logging(communicator.rank, folder / "log.txt")
        Run(config, engine_config, micro_batch, communicator, folder, environment.local_rank).train()
    finally:
        communicator.close()


def connect() -> Communicator:
    """Joins the process group, through DeepSpeed's discovery where MPI started the ranks."""
    complete_environment()
    # a kernel of tensor-parallel inference, which DeepSpeed would spend the first run's first minute compiling
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
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
        local_rank: int,
    ) -> None:
        self._config = config
        self._local_rank = local_rank
        self._communicator = communicator
        self._folder = folder
        self._stop_asked = False
        data = config.data
        if not data.train:
            raise UserError("Name the training data: --data.train=FOLDER_OF_TARS (or demo:train).")
        self._manifest = open_data(data.train, data, communicator, folder)
        self._loading = loader_options(data, self._manifest, communicator)
        self._order = open_order(config, self._manifest)
        self._position = DataPosition(0, 0, self._order.steps_per_epoch)
        self._total = self._position.end(config.budget)
        source = open_source(config.model, communicator.on_rank_zero(lambda: locate_model(config.model)))
        pixels = source.pixels
        self._transform = train_transform(pixels.size, data.crop_scale, find_decoder(data.decoder), pixels.squash)
        self._tokenizer = source.tokenizer(self._train_tokenizer)
        self._evaluator = Evaluator(config, self._manifest, self._tokenizer, pixels, communicator, folder)

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
            "batch_size": data.batch_size,
            "slots": data.slots,
            "shuffle_block": data.shuffle_block,
            "tail": data.tail,
            "seed": config.run.seed,
            "method": config.objective.method,
            "parameters": self._parameters,
            "optimizer": config.optimizer.name,
        }

    def train(self) -> None:
        """Goes on from the newest checkpoint, or starts; then evaluates."""
        done = self._resume()
        self._total = self._position.end(self._config.budget)
        self._announce(done)
        first_rank = self._communicator.rank == 0
        opened = MetricsLog(self._folder, done) if first_rank else nullcontext()
        with opened as metrics, self._sample_log(done) as samples, _signals(self._ask_to_stop):
            if done < self._total and not self._loop(done, metrics, samples):
                return
            results = self._evaluator(self._engine, self._objective)
            if metrics is not None and results:
                metrics.write(self._total, results)
        for name, value in results.items():
            log.info("%s: %.4g", name, value)
        log.info("everything is in %s", self._folder)

    def _resume(self) -> int:
        """Fills everything from the newest checkpoint, if there is one; the number of steps done."""
        newest = self._checkpoints.newest()
        if newest is None:
            return 0
        done, saved = self._checkpoints.read(newest, self._facts)
        self._position = resume(saved, done, self._manifest, self._order.steps_per_epoch)
        self._checkpoints.load(newest, self._engine, self._objective)
        return done

    def _loop(self, done: int, metrics: MetricsLog | None, samples: SampleLog | None) -> bool:
        """Steps from `done` to the end; False when a signal ended it early, after a checkpoint."""
        config, run = self._config, self._config.run
        gather = self._communicator.gather_objects
        bad_samples = BadSampleLog(self._folder, config.data.max_bad_fraction, writes=metrics is not None)
        rate = SlidingRate()
        waited = 0.0
        with (
            Progress(self._total, done, enabled=metrics is not None) as progress,
            self._prefetching(done) as advance,
        ):
            batches = self._batches(done)
            for number in range(done, self._total):
                began = time.perf_counter()
                advance(number)
                batch = next(batches)
                waited += time.perf_counter() - began
                bad_samples.record(batch)
                if samples is not None:
                    samples.write(number + 1, batch.index.tolist())
                gradients = self._step(batch, self._place(number))
                speed = rate.update((number + 1) * config.data.batch_size)
                loss, tau = float(gradients.loss), float(gradients.metrics["tau"])
                progress.update(number + 1, loss=loss, tau=tau, samples_per_second=speed)
                last = number + 1 == self._total
                logs, saves = (last or (number + 1) % every == 0 for every in (run.log_every, run.checkpoint_every))
                if logs or saves:
                    bad_samples.settle(gather)
                if logs:
                    if metrics is not None:
                        share = waited / max(1e-9, time.perf_counter() - began + waited)
                        record = self._record(gradients, number)
                        record.update({f"bad_samples/{cause}": count for cause, count in bad_samples.causes.items()})
                        metrics.write(number + 1, {**record, "samples_per_second": speed, "data_wait_share": share})
                    waited = 0.0
                    if self._stop_together():
                        self._save(number + 1)
                        log.warning(
                            "stopped by a signal after step %d; the same command goes on from there", number + 1
                        )
                        return False
                if saves:
                    self._save(number + 1)
                if run.evaluate_every and (number + 1) % run.evaluate_every == 0 and not last:
                    results = self._evaluator(self._engine, self._objective)
                    if metrics is not None:
                        metrics.write(number + 1, results)
        return True

    def _sample_log(self, done: int) -> AbstractContextManager[SampleLog | None]:
        """This rank's, where the config asks for one; an earlier start's lines beyond `done` go, on all ranks."""
        if not self._config.run.sample_log:
            return nullcontext()
        folder = self._folder / "samples"
        self._communicator.on_rank_zero(lambda: drop_samples_beyond(folder, done))
        return SampleLog(folder, self._communicator.rank)

    def _prefetching(self, done: int) -> AbstractContextManager[Callable[[int], None]]:
        """Fetches remote shards ahead while training goes on; it is told of every step."""
        share = self._config.data.batch_size // self._communicator.world_size
        firsts = self._communicator.gather_objects(self._communicator.rank - self._local_rank)  # of each rank's node
        first = firsts[self._communicator.rank]
        rows = slice(first * share, (first + firsts.count(first)) * share)
        if self._loading.cache is None or self._local_rank > 0:
            return nullcontext(lambda number: None)
        return prefetching(self._loading.cache, self._manifest, self._order, self._position, rows, done, self._total)

    def _batches(self, done: int) -> Iterator[Batch]:
        epoch, step = self._position.at(done)
        batches = train_loader(
            self._manifest,
            self._order,
            self._transform,
            self._tokenizer,
            rank=self._communicator.rank,
            world_size=self._communicator.world_size,
            epoch=epoch,
            step=step,
            steps=self._total - done,
            options=self._loading,
        )
        return naming_rank(batches, self._communicator)

    def _place(self, number: int) -> Step:
        optimizer = self._config.optimizer
        lr = warmup_cosine(number, self._total, optimizer)
        epoch, _ = self._position.at(number)
        return Step(number, epoch, lr, optimizer.lr, progress=number / self._total)

    def _record(self, gradients: FeatureGradients, number: int) -> dict[str, float]:
        record = {"loss": float(gradients.loss), "lr": self._place(number).lr}
        record.update({name: float(value) for name, value in gradients.metrics.items()})
        norm = self._engine.get_global_grad_norm()
        return record if norm is None else {**record, "grad_norm": float(norm)}

    def _stop_together(self) -> bool:
        """Whether any rank has been asked to stop."""
        asked = torch.tensor(int(self._stop_asked), device=self._communicator.device).reshape(1)
        return bool(self._communicator.all_reduce(asked, "control").item())

    def _ask_to_stop(self) -> None:
        self._stop_asked = True

    def _save(self, step: int) -> None:
        data = self._position.record(self._manifest)
        self._checkpoints.save(step, self._engine, self._objective, self._facts, data)

    def _train_tokenizer(self) -> CaptionTokenizer:
        """A tokenizer trained on the captions by rank 0 and kept with the run."""
        text = self._config.model.text
        folder = self._folder / "tokenizer"

        def make() -> None:
            if not folder.is_dir():
                loading = self._loading
                captions = iter_captions(self._manifest, _TOKENIZER_CAPTIONS, loading.captions, loading.cache)
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
