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
from torch import Tensor

from neuclip_ds.config import Config
from neuclip_ds.data.bad_samples import BadSampleLog
from neuclip_ds.data.demo import demo_split
from neuclip_ds.data.loader import Batch, eval_loader, iter_captions, train_loader
from neuclip_ds.data.manifest import Manifest, open_manifest
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.data.transforms import ImageTransform, eval_transform, train_transform
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.environment import RankEnvironment, complete_environment
from neuclip_ds.errors import RankError, UserError
from neuclip_ds.evaluation.normalizer_error import normalizer_error
from neuclip_ds.evaluation.retrieval import retrieval
from neuclip_ds.evaluation.zero_shot import ZeroShotSet, zero_shot
from neuclip_ds.models.dual_encoder import build_dual_encoder, parameter_count
from neuclip_ds.models.tokenizer import CaptionTokenizer, train_bpe
from neuclip_ds.objectives import build_objective, find_method
from neuclip_ds.objectives.base import Context, FeatureGradients, Step
from neuclip_ds.objectives.composed import ContrastiveObjective
from neuclip_ds.objectives.gather import Features
from neuclip_ds.recipe import dump
from neuclip_ds.reporting.log import configure_logging
from neuclip_ds.reporting.metrics import MetricsLog
from neuclip_ds.reporting.progress import Progress, SlidingRate
from neuclip_ds.training.checkpoint import Checkpoints
from neuclip_ds.training.engine import start_engine
from neuclip_ds.training.engine_config import is_bf16, load_engine_config, zero_stage
from neuclip_ds.training.schedules import warmup_cosine
from neuclip_ds.training.step import TrainStep

log = logging.getLogger(__name__)

CACHE = Path(".cache")
_TOKENIZER_CAPTIONS = 200_000  # enough for a vocabulary of CLIP's size; more only takes longer
_ANCHOR_SEED = 2_718_281  # of an order that is no run's: the same anchors whatever method and seed, seen at any time


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


def find_split(source: str, name: str, train: str) -> str:
    """Where a held-out set lies: as named, or for `auto` the folder `name` beside the training data if there is one."""
    if source != "auto":
        return source
    if train.startswith("demo:"):
        return f"demo:{name}"
    beside = Path(train).parent / name
    return str(beside) if beside.is_dir() else ""


def resolve(source: str) -> str:
    """A path; the demo's splits are rendered where they are absent."""
    return str(demo_split(source, CACHE)) if source.startswith("demo:") else source


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
        self._manifest = self._open(data.train)
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
        self._tokenizer = self._make_tokenizer()
        # held-out data are opened before the first step: a mistake there must not cost a training run
        val = find_split(data.val, "val", data.train)
        self._val = self._open(val) if val else None
        images = find_split(data.zero_shot, "zero_shot", data.train)
        self._zero_shot = ZeroShotSet.read(Path(self._resolve(images))) if images else None

        torch.manual_seed(config.run.seed)  # the same weights on every rank
        model = build_dual_encoder(config.model, self._tokenizer)
        self._parameters = parameter_count(model)
        self._engine = start_engine(model, config.optimizer, engine_config, communicator)
        towers = torch.bfloat16 if is_bf16(engine_config) else torch.float32
        wire = {"auto": towers, "bfloat16": torch.bfloat16, "float32": torch.float32}[config.objective.wire]
        context = Context(config.model.embed_dim, self._manifest.n, communicator)
        self._objective = build_objective(config, context, wire)
        if config.run.normalizer_anchors and not isinstance(self._objective, ContrastiveObjective):
            raise UserError(
                f"run.normalizer_anchors={config.run.normalizer_anchors} measures normalisers, of which "
                f"objective.method={config.objective.method} has none; leave it at 0."
            )
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
            results = self.evaluate()
            if metrics is not None and results:
                metrics.write(self._total, results)
        for name, value in results.items():
            log.info("%s: %.4g", name, value)
        log.info("everything is in %s", self._folder)

    def evaluate(self) -> dict[str, float]:
        """Held-out retrieval and zero-shot accuracy, of the sets that there are."""
        results: dict[str, float] = {}
        transform = eval_transform(self._config.model.vision.image_size)
        rank_batch = self._config.data.batch_size // self._communicator.world_size
        if self._val is not None:
            batches = eval_loader(
                self._val,
                transform,
                self._tokenizer,
                rank=self._communicator.rank,
                world_size=self._communicator.world_size,
                batch_size=rank_batch,
                workers=self._config.data.workers,
            )
            results.update(retrieval(self._encode, _naming_rank(batches, self._communicator), self._communicator))
        if self._zero_shot is not None:
            results.update(
                zero_shot(self._encode, self._tokenizer, self._zero_shot, transform, self._communicator, rank_batch)
            )
        if isinstance(self._objective, ContrastiveObjective) and self._config.run.normalizer_anchors:
            results.update(self._normalizer_error(self._objective, transform, rank_batch))
        return results

    def _normalizer_error(
        self, objective: ContrastiveObjective, transform: ImageTransform, rank_batch: int
    ) -> dict[str, float]:
        """The normalisers of a fixed sample of anchors against those over the whole training set."""
        data, manifest, communicator = self._config.data, self._manifest, self._communicator
        order = GlobalOrder(
            manifest.starts, manifest.sizes, data.batch_size, _ANCHOR_SEED, shuffle_block=data.shuffle_block
        )
        anchors = min(self._config.run.normalizer_anchors, manifest.n)
        share: dict[str, Any] = {"rank": communicator.rank, "world_size": communicator.world_size}
        share |= {"workers": data.workers, "timeout": data.timeout, "reader": data.reader}
        steps = -(-anchors // data.batch_size)
        anchor_batches = train_loader(manifest, order, transform, self._tokenizer, total_steps=steps, **share)
        all_batches = eval_loader(manifest, transform, self._tokenizer, batch_size=rank_batch, **share)
        return normalizer_error(
            self._encode,
            lambda *rows: objective.log_normalizers(Features(*rows)),
            objective.pair_loss,
            _naming_rank(anchor_batches, communicator),
            _naming_rank(all_batches, communicator),
            communicator,
            anchors,
        )

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
                    results = self.evaluate()
                    if metrics is not None:
                        metrics.write(number + 1, results)
        return True

    def _batches(self, done: int) -> Iterator[Batch]:
        data = self._config.data
        epoch, step = divmod(done, self._order.steps_per_epoch)
        batches = train_loader(
            self._manifest,
            self._order,
            train_transform(self._config.model.vision.image_size, data.crop_scale),
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
        return _naming_rank(batches, self._communicator)

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

    def _encode(self, image: Tensor | None, tokens: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        device = self._communicator.device
        self._engine.eval()
        with torch.no_grad():
            return self._engine(
                None if image is None else image.to(device), None if tokens is None else tokens.to(device)
            )

    def _resolve(self, source: str) -> str:
        return self._communicator.on_rank_zero(lambda: resolve(source))

    def _open(self, source: str) -> Manifest:
        """The manifest of a data set; rank 0 builds it where there is none."""
        path = self._resolve(source)
        return self._communicator.on_rank_zero(lambda: open_manifest(path, self._folder / "manifests"))

    def _make_tokenizer(self) -> CaptionTokenizer:
        """The named tokenizer, or one trained on the captions by rank 0 and kept with the run."""
        text = self._config.model.text
        if text.tokenizer is not None:
            return CaptionTokenizer.load(text.tokenizer, text.context_length)
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


def _naming_rank(batches: Iterator[Batch], communicator: Communicator) -> Iterator[Batch]:
    """Ranks read different samples, so one may meet a mistake that the others do not; its message says which."""
    try:
        yield from batches
    except UserError as error:
        raise RankError(f"rank {communicator.rank}: {error}") from error


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
