"""Evaluate a run's model: held-out retrieval, zero-shot accuracy, evaluation sets, and normalizer estimation error."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from neuclip_ds.config import Config
from neuclip_ds.data.dataset import Batch, PairDataset
from neuclip_ds.data.images import DECODERS, EvalTransform
from neuclip_ds.data.loader import Loader, eval_jobs, part_count, train_jobs
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.manifest_file import check_separate
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.encoding import BatchEncoder, Encode, encoder_of
from neuclip_ds.evaluation.metrics import chance_recall
from neuclip_ds.evaluation.normalizer_error import normalizer_error
from neuclip_ds.evaluation.results import averages
from neuclip_ds.evaluation.retrieval import retrieval
from neuclip_ds.evaluation.sets import EvaluationSet, open_labeled
from neuclip_ds.evaluation.suite import measure
from neuclip_ds.evaluation.tasks import Task, load_tasks
from neuclip_ds.evaluation.zero_shot import zero_shot
from neuclip_ds.models.pretrained.base import Preprocessing
from neuclip_ds.objectives import find_method
from neuclip_ds.objectives.base import Objective
from neuclip_ds.objectives.contrastive import ContrastiveObjective
from neuclip_ds.objectives.gather import Features
from neuclip_ds.reporting.metrics import CHANCE
from neuclip_ds.training.batches import TrainingData
from neuclip_ds.training.data import loader_options, open_data, resolve
from neuclip_ds.training.data_order import find_split, find_validation

_ANCHOR_SEED = 2_718_281  # the same anchors for every method and seed, independent of the run's order
_VAL, _TRAIN, _ANCHORS = "val", "train", "anchors"  # the loader's sources of pairs


class Evaluator:
    """Evaluates a model on the held-out sets of a run, which are opened before the first step.

    The first evaluation starts as many loader processes as training uses. The processes stay alive between evaluations
    until `close` stops them. Images are decoded as in training, but always at full size.
    """

    def __init__(
        self,
        config: Config,
        data: TrainingData,
        preprocessing: Preprocessing,
        communicator: Communicator,
        folder: Path,
    ) -> None:
        """Raise `UserError` for unusable sets, or for `run.normalizer_anchors` if the method has no normalizers."""
        anchors, method = config.run.normalizer_anchors, config.objective.method
        if anchors and find_method(method).normalizer is None:
            raise UserError(
                f"run.normalizer_anchors={anchors} measures normalizers, but objective.method={method} has none. "
                "Set run.normalizer_anchors=0."
            )
        self._config, self._communicator = config, communicator
        self._manifest, self._tokenizer, self._interleave = data.manifest, data.tokenizer, data.order.interleave
        decode = DECODERS[config.data.decoder]
        self._transform = EvalTransform(preprocessing.size, preprocessing.squash, decode)
        self._rank_batch = config.rank_batch(communicator.world_size)
        micro = config.micro_batch(communicator.world_size)
        self._rows = -(-micro // part_count(micro, preprocessing.size))  # rows that are loaded and encoded at once
        held_out = open_held_out(config, communicator, folder, data.manifest)
        self._val, self._zero_shot, self._on_disk = held_out.pairs, held_out.zero_shot, held_out.on_disk
        self.describe = held_out.describe
        self.measures = bool(anchors or held_out.pairs or held_out.zero_shot or held_out.on_disk)
        if config.run.best_metric and not self.measures:
            raise UserError(
                f"run.best_metric={config.run.best_metric} needs an evaluation: set data.val or data.zero_shot."
            )
        self._loader = self._start_loader()

    def __call__(self, engine: Any, objective: Objective) -> dict[str, float]:
        """Return the results by name, equal on all ranks, and their chance levels as `chance/NAME`."""
        results: dict[str, float] = {}
        encode = encoder_of(engine, self._communicator.device)
        encoder = BatchEncoder(encode, self._tokenizer, self._communicator, self._rows, self._transform, self._loader)
        if self._val is not None:
            results.update(retrieval(encode, self._every_sample(_VAL, self._val), self._communicator))
            results.update(_chance(results, int(results["retrieval_pairs"])))
        if self._zero_shot is not None:
            found = zero_shot(encoder, self._zero_shot)
            results.update({**found, **_chance(found, len(self._zero_shot.class_names))})
        if self._on_disk:
            results.update(self._scores(encoder))
        if isinstance(objective, ContrastiveObjective) and self._config.run.normalizer_anchors:
            results.update(self._normalizer_error(encode, objective))
        return results

    def close(self) -> None:
        """Stop the loader processes."""
        self._loader.close()

    def _scores(self, encoder: BatchEncoder) -> dict[str, float]:
        """Return task scores as `task/KEY`, averages as `average/NAME` if no task is missing, and chance levels."""
        metrics = {task.key: measure(task, place, encoder) for task, place in self._on_disk}
        random = {key: {"main_metric": found["chance"]} for key, found in metrics.items()}
        scores: dict[str, float | None] = {}
        for prefix, measured in (("", metrics), (CHANCE, random)):
            scores |= {f"{prefix}task/{key}": found["main_metric"] for key, found in measured.items()}
            means = averages(load_tasks(), measured)
            scores |= {f"{prefix}average/{name}": found.value for name, found in means.items()}
        return {name: score for name, score in scores.items() if score is not None}

    def _normalizer_error(self, encode: Encode, objective: ContrastiveObjective) -> dict[str, float]:
        """Compare the estimated normalizers of a fixed sample of anchors with exact values over the training set."""
        data, manifest = self._config.data, self._manifest
        order = GlobalOrder(manifest.starts, manifest.sizes, data.batch_size, _ANCHOR_SEED, self._interleave)
        anchors = min(self._config.run.normalizer_anchors, manifest.n_used)
        steps = -(-anchors // data.batch_size)
        parts, ranks = -(-self._rank_batch // self._rows), self._communicator
        jobs = train_jobs(order, ranks.rank, ranks.world_size, 0, 0, steps=steps, parts=parts)
        return normalizer_error(
            encode,
            lambda *rows: objective.log_normalizers(Features(*rows)),
            objective.pair_loss,
            self._loader.batches(_ANCHORS, jobs),
            self._every_sample(_TRAIN, manifest),
            self._communicator,
            anchors,
            parts=parts,
        )

    def _every_sample(self, source: str, manifest: Manifest) -> Iterator[Batch]:
        ranks = self._communicator
        return self._loader.batches(source, eval_jobs(manifest, ranks.rank, ranks.world_size, self._rows))

    def _start_loader(self) -> Loader:
        sources: dict[str, tuple[Manifest, int]] = {}  # each with the seed that draws its captions
        if self._val is not None:
            sources[_VAL] = self._val, 0
        if self._config.run.normalizer_anchors:
            sources |= {_TRAIN: (self._manifest, 0), _ANCHORS: (self._manifest, _ANCHOR_SEED)}
        options = loader_options(self._config.data, self._communicator, *(manifest for manifest, _ in sources.values()))
        pairs = {
            name: PairDataset(manifest, self._transform, self._tokenizer, seed, options.captions, options.cache)
            for name, (manifest, seed) in sources.items()
        }
        return Loader(options, pairs)


def _chance(results: Mapping[str, float], candidates: int) -> dict[str, float]:
    """Return the chance levels of the scores whose names end in @k or topk, given the number of candidates."""
    lengths = {name: re.search(r"(?:@|top)(\d+)$", name) for name in results}
    return {f"{CHANCE}{name}": chance_recall(int(k[1]), candidates) for name, k in lengths.items() if k}


class HeldOut(NamedTuple):
    """The held-out sets of a run."""

    pairs: Manifest | None
    origin: str  # where the pairs come from
    zero_shot: EvaluationSet | None
    on_disk: list[tuple[Task, Path]]

    def describe(self) -> str:
        """Return a description of the held-out sets for the log."""
        parts = [f"{self.pairs.n_used:,} pairs {self.origin}" if self.pairs is not None else "no pairs"]
        if self.zero_shot is not None:
            parts.append(f"zero-shot images in {self.zero_shot.path}")
        return ", ".join([*parts, *(task.name for task, _ in self.on_disk)])


def open_held_out(config: Config, communicator: Communicator, folder: Path, train: Manifest | None) -> HeldOut:
    """Open the held-out sets of a run on all ranks: validation pairs, zero-shot images, and evaluation sets on disk.

    Raises `UserError` if a named set does not exist, or if the validation pairs are in shards of the training data.
    """
    options = config.data
    val = find_validation(options, train)
    images = find_split(options.zero_shot, "zero_shot", options.train_paths)
    pairs, origin = None, "held out of data.train"
    if train is not None and isinstance(val, int):
        pairs = train.validation()
    elif isinstance(val, str) and val:
        pairs, origin = (found := open_data(val, options, communicator, folder)), f"of {val}"
        if train is not None:
            communicator.on_rank_zero(lambda: check_separate(train, found))
    zero_shot, on_disk = None, []
    if images:
        folder_of_images = Path(communicator.on_rank_zero(lambda: resolve(images)))
        zero_shot = communicator.on_every_rank(lambda: open_labeled(folder_of_images))
    if options.evaluation_sets is not None:
        on_disk = load_tasks().on_disk_of_all([options.evaluation_sets], options.evaluation_tasks, communicator)
    return HeldOut(pairs, origin, zero_shot, on_disk)
