"""Evaluate a run's model: held-out retrieval, zero-shot accuracy, evaluation sets, and normalizer estimation error."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from neuclip_ds.config import Config
from neuclip_ds.data.dataset import Batch, PairDataset, SampleReader, caption_numbers
from neuclip_ds.data.decoders import Captions
from neuclip_ds.data.feature_table import FeatureTable
from neuclip_ds.data.images import DECODERS, EvalTransform
from neuclip_ds.data.loader import Loader, eval_jobs, part_count, train_jobs
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.manifest_file import check_separate
from neuclip_ds.data.open_data import loader_options, open_data, resolve
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.data.training_data import TrainingData
from neuclip_ds.data.training_set import find_split, find_validation
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.encoding import BatchEncoder, Encode, encode_batch, encoder_of
from neuclip_ds.evaluation.metrics import chance_recall
from neuclip_ds.evaluation.normalizer_error import normalizer_error
from neuclip_ds.evaluation.results import averages
from neuclip_ds.evaluation.retrieval import example_retrievals, recalls_of_pairs
from neuclip_ds.evaluation.sets import EvaluationSet, open_labeled
from neuclip_ds.evaluation.suite import Metrics, measure, open_task_set
from neuclip_ds.evaluation.tasks import Task, load_tasks
from neuclip_ds.evaluation.zero_shot import zero_shot
from neuclip_ds.losses.contrastive_loss import ContrastiveLoss
from neuclip_ds.losses.global_contrastive import GlobalContrastiveLoss
from neuclip_ds.losses.options import PREFIX
from neuclip_ds.losses.stored_features import REFERENCE
from neuclip_ds.models.pretrained.base import Preprocessing
from neuclip_ds.reporting.contact_sheet import thumbnail
from neuclip_ds.reporting.metrics import AVERAGED, CHANCE, NORMALIZER, scores_among
from neuclip_ds.reporting.retrieved import Retrieved, write_retrieved

# seed of the anchors, which are the same for every method and `run.seed`, given the same data and interleave
_ANCHOR_SEED = 2_718_281

_VAL_SEED = 0  # seed of the choice among a held-out pair's captions
_EXAMPLE_QUERIES = 6  # captions whose top-ranked images are kept for the report
_EXAMPLE_IMAGES = 6  # images that are kept for each caption

# the loader's sources of pairs
_VAL = "val"
_TRAIN = "train"
_ANCHORS = "anchors"


class Evaluator:
    """Evaluates a model on the held-out sets of a run, which are opened before the first step.

    The first evaluation starts as many loader processes as training uses. The processes stay alive between evaluations
    until `close` stops them. Images are decoded as in training, but never at a reduced size.
    """

    def __init__(
        self,
        config: Config,
        data: TrainingData,
        preprocessing: Preprocessing,
        communicator: Communicator,
        folder: Path,
    ) -> None:
        """Open the held-out sets.

        Raises:
            UserError: a set or the shard cache is unusable, or `run.best_metric` is set for a run that has nothing to
                evaluate on.
        """
        self._config = config
        self._communicator = communicator
        self._train_manifest = data.manifest
        # only the reference model's table: the estimates of the normalizers do not depend on teachers
        self._tables = {name: table for name, table in data.tables.items() if name == REFERENCE}
        self._tokenizer = data.tokenizer
        self._interleave = data.order.interleave
        self._transform = EvalTransform.of(preprocessing, DECODERS[config.data.decoder])
        self._rank_batch_size = config.rank_batch(communicator.world_size)
        micro_batch_size = config.micro_batch(communicator.world_size)
        parts_per_micro_batch = part_count(micro_batch_size, preprocessing.size)
        self._rows_per_call = -(-micro_batch_size // parts_per_micro_batch)  # rows that are loaded and encoded at once

        self._held_out = open_held_out(config, communicator, folder, data.manifest)
        self.describe = self._held_out.describe
        self.measures = config.run.normalizer_anchors > 0 or not self._held_out.is_empty()
        check_evaluates(config, self._held_out)
        self._retrieved: list[Retrieved] = []  # examples of the last evaluation
        sources = self._sources()
        manifests = [source.manifest for source in sources.values()]
        self._loading = loader_options(config.data, communicator, *manifests)
        self._loader = self._open_loader(sources)

    def __call__(self, engine: Any, loss: ContrastiveLoss) -> dict[str, float]:
        """Evaluate the model; return results by name, and their known chance levels as `chance/NAME`, on all ranks.

        Raises UserError if no held-out pair can be read, if a sample of another set cannot be used or, with
        `run.normalizer_anchors`, if fewer than two training pairs can be read.
        """
        encode = encoder_of(engine, self._communicator.device)
        encoder = BatchEncoder(
            encode=encode,
            tokenize=self._tokenizer,
            communicator=self._communicator,
            batch_size=self._rows_per_call,
            transform=self._transform,
            loader=self._loader,
            prefixes=tuple(self._config.objective.prefixes),
        )
        results: dict[str, float] = {}
        if self._held_out.pairs is not None:
            batches = self._all_samples(_VAL, self._held_out.pairs)
            encoded = [encode_batch(encode, batch) for batch in batches]
            results.update(recalls_of_pairs(encoded, self._communicator, prefixes=encoder.prefixes))
            self._retrieved = example_retrievals(encoded, self._communicator, _EXAMPLE_QUERIES, _EXAMPLE_IMAGES)
            results.update(_chance_levels(results, candidates=int(results["retrieval_pairs"])))
        if self._held_out.zero_shot is not None:
            accuracies = zero_shot(encoder, self._held_out.zero_shot)
            results.update(accuracies)
            results.update(_chance_levels(accuracies, candidates=len(self._held_out.zero_shot.class_names)))
        if self._held_out.task_sets:
            results.update(self._task_scores(encoder))
        if self._config.run.normalizer_anchors:
            results.update(self._normalizer_error(encode, loss))
        return results

    def write_examples(self, folder: Path, step: int) -> None:
        """Write the top-ranked images of some captions in the last evaluation to retrieved.json; call on one rank.

        The file is in `folder`. It is not written if there are no held-out pairs, or before the first evaluation. A
        sample that cannot be read is listed without its caption and picture.
        """
        pairs = self._held_out.pairs
        if pairs is None or not self._retrieved:
            return
        captions = Captions(self._config.data.captions)
        reader = SampleReader(pairs, captions.extensions, self._loading.cache)

        def caption_of(index: int) -> str:
            raw = reader.read(index, with_image=False)
            drawn = None
            if not isinstance(raw, str):
                (number,) = caption_numbers(_VAL_SEED, [0], [index]).tolist()
                drawn = captions.draw(raw.texts, number)
            return "" if drawn is None else drawn.text

        def picture_of(index: int) -> str:
            raw = reader.read(index)
            return "" if isinstance(raw, str) or raw.image is None else thumbnail(raw.image)

        write_retrieved(folder, step, self._retrieved, caption_of, picture_of)

    def close(self) -> None:
        """Stop the loader processes."""
        self._loader.close()

    def _task_scores(self, encoder: BatchEncoder) -> dict[str, float]:
        """Return task scores as `task/KEY`, averages as `average/NAME` if no task is missing, and chance levels."""
        metrics: dict[str, Metrics] = {}
        chance_metrics: dict[str, Metrics] = {}  # the metrics of random predictions
        for task, path in self._held_out.task_sets:
            metrics[task.key] = measure(task, path, encoder)
            chance_metrics[task.key] = {"main_metric": metrics[task.key]["chance"]}
        return {**_scores_and_averages("", metrics), **_scores_and_averages(CHANCE, chance_metrics)}

    def _normalizer_error(self, encode: Encode, loss: ContrastiveLoss) -> dict[str, float]:
        """Compare the estimated normalizers of a fixed sample of anchors with exact values over the training set."""
        manifest = self._train_manifest
        batch_size = self._config.data.batch_size
        order = GlobalOrder(manifest.starts, manifest.sizes, batch_size, _ANCHOR_SEED, self._interleave)
        anchors = min(self._config.run.normalizer_anchors, manifest.n_used)
        steps = -(-anchors // batch_size)
        parts_per_batch = -(-self._rank_batch_size // self._rows_per_call)
        rank = self._communicator.rank
        world_size = self._communicator.world_size
        anchor_jobs = train_jobs(order, rank, world_size, epoch=0, step=0, steps=steps, parts=parts_per_batch)
        function = loss.whole_function
        assert isinstance(function, GlobalContrastiveLoss)  # the only losses with `estimates_normalizers`
        return normalizer_error(
            encode,
            loss.estimate_normalizers,
            function.pair_loss,
            anchor_batches=self._loader.batches(_ANCHORS, anchor_jobs),
            all_batches=self._all_samples(_TRAIN, manifest),
            communicator=self._communicator,
            anchors=anchors,
            parts_per_batch=parts_per_batch,
        )

    def _all_samples(self, source: str, manifest: Manifest) -> Iterator[Batch]:
        """Yield this rank's share of all samples of a source."""
        jobs = eval_jobs(manifest, self._communicator.rank, self._communicator.world_size, self._rows_per_call)
        return self._loader.batches(source, jobs)

    def _sources(self) -> "dict[str, _Source]":
        """Return the sources of pairs that evaluations read, by name."""
        sources: dict[str, _Source] = {}
        if self._held_out.pairs is not None:
            sources[_VAL] = _Source(self._held_out.pairs, caption_seed=_VAL_SEED, tables={})
        if self._config.run.normalizer_anchors:
            sources[_TRAIN] = _Source(self._train_manifest, caption_seed=0, tables=self._tables)
            sources[_ANCHORS] = _Source(self._train_manifest, caption_seed=_ANCHOR_SEED, tables=self._tables)
        return sources

    def _open_loader(self, sources: "Mapping[str, _Source]") -> Loader:
        """Return a loader of the sources, whose processes start with the first evaluation."""
        pairs = {}
        for name, source in sources.items():
            pairs[name] = PairDataset(
                source.manifest,
                self._transform,
                self._tokenizer,
                seed=source.caption_seed,
                captions=self._loading.captions,
                cache=self._loading.cache,
                tables=source.tables,
            )
        return Loader(self._loading, pairs)


class _Source(NamedTuple):
    """Pairs that the loader reads."""

    manifest: Manifest
    caption_seed: int  # seed of the choice among a sample's captions
    tables: Mapping[str, FeatureTable]


def _chance_levels(results: Mapping[str, float], candidates: int) -> dict[str, float]:
    """Return the chance levels of the scores whose names end in @k or topk, given the number of candidates."""
    levels = {}
    for name in results:
        match = re.search(r"(?:@|top)(\d+)$", name)
        if match:
            levels[f"{CHANCE}{name}"] = chance_recall(int(match[1]), candidates)
    return levels


def _scores_and_averages(prefix: str, metrics: Mapping[str, Metrics]) -> dict[str, float]:
    """Return the known main metrics as PREFIXtask/KEY, and the averages without missing tasks as PREFIXaverage/NAME."""
    scores = {}
    for key, metrics_of_task in metrics.items():
        score = metrics_of_task["main_metric"]
        if score is not None:
            scores[f"{prefix}task/{key}"] = score
    for name, average in averages(load_tasks(), metrics).items():
        if average.value is not None:
            scores[f"{prefix}average/{name}"] = average.value
    return scores


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The held-out sets of a run."""

    pairs: Manifest | None
    origin_of_pairs: str  # a description, such as "held out of data.train"
    zero_shot: EvaluationSet | None
    task_sets: list[tuple[Task, Path]]  # evaluation sets on disk

    def is_empty(self) -> bool:
        """Return whether there is nothing to evaluate on."""
        return not self.pairs and not self.zero_shot and not self.task_sets

    def describe(self) -> str:
        """Return a description of the held-out sets for the log."""
        descriptions = ["no pairs"]
        if self.pairs is not None:
            descriptions = [f"{self.pairs.n_used:,} pairs {self.origin_of_pairs}"]
        if self.zero_shot is not None:
            descriptions.append(f"zero-shot images in {self.zero_shot.path}")
        descriptions += [task.name for task, _ in self.task_sets]
        return ", ".join(descriptions)


def open_held_out(config: Config, communicator: Communicator, folder: Path, train: Manifest | None) -> HeldOut:
    """Open the held-out sets of a run on all ranks: validation pairs, zero-shot images, and evaluation sets on disk.

    If `train` is None, no pairs are held out of the training data. Raises `UserError` if a set or a task in
    `data.evaluation_tasks` does not exist, if a set is damaged, or if the validation pairs are in shards of `train`.
    """
    options = config.data
    validation = find_validation(options, train)  # a path or a number of training pairs
    zero_shot_path = find_split(options.zero_shot, "zero_shot", options.train_paths)

    pairs = None
    origin_of_pairs = "held out of data.train"
    if isinstance(validation, int):
        if train is not None:
            pairs = train.validation()
    elif validation:
        pairs = open_data(validation, options, communicator, folder)
        origin_of_pairs = f"of {validation}"
        if train is not None:
            communicator.on_rank_zero(partial(check_separate, train, pairs))

    zero_shot_set = None
    if zero_shot_path:
        zero_shot_folder = Path(communicator.on_rank_zero(lambda: resolve(zero_shot_path)))
        zero_shot_set = communicator.on_every_rank(lambda: open_labeled(zero_shot_folder))

    task_sets: list[tuple[Task, Path]] = []
    if options.evaluation_sets is not None:
        task_sets = load_tasks().on_disk_of_all([options.evaluation_sets], options.evaluation_tasks, communicator)
    for task, path in task_sets:
        communicator.on_every_rank(partial(open_task_set, task, path))
    communicator.on_rank_zero(partial(_read_sets, zero_shot_set, task_sets))
    return HeldOut(pairs=pairs, origin_of_pairs=origin_of_pairs, zero_shot=zero_shot_set, task_sets=task_sets)


def metric_names(config: Config, held_out: HeldOut) -> list[str]:
    """Return the names of the results of a run's evaluations, except chance levels.

    An evaluation lacks the score of a task, and the averages over this task, if the task's main metric is undefined for
    its set.
    """
    names: list[str] = []
    if held_out.pairs is not None:
        recalls = [f"{direction}_recall@{k}" for direction in ("image_to_text", "text_to_image") for k in (1, 5, 10)]
        for prefix in ("", *(f"{PREFIX}{length}/" for length in config.objective.prefixes)):
            names += [prefix + recall for recall in recalls]
        names.append("retrieval_pairs")
    if held_out.zero_shot is not None:
        names += ["zero_shot_top1", "zero_shot_top5", "zero_shot_images"]
    keys = [task.key for task, _ in held_out.task_sets]
    names += [f"task/{key}" for key in keys]
    task_list = load_tasks()
    for average in task_list.averages:
        if all(task.key in keys for task in task_list.in_average(average)):
            names.append(f"average/{average}")
    if config.run.normalizer_anchors:
        names += [NORMALIZER + name for name in ("mse", "mse_image", "mse_text", "bias", "anchors", "unseen")]
    if config.ema.decay:
        names += [AVERAGED + name for name in names]
    return names


def check_evaluates(config: Config, held_out: HeldOut) -> None:
    """Raise `UserError` if `run.best_metric` is set for a run that has nothing to evaluate on."""
    best_metric = config.run.best_metric
    if best_metric and not metric_names(config, held_out):
        raise UserError(
            f"run.best_metric={best_metric} needs an evaluation: set data.val, data.zero_shot or "
            "data.evaluation_sets, or omit run.best_metric."
        )


def check_measured(best_metric: str, names: Iterable[str]) -> None:
    """Raise `UserError` if `run.best_metric` is not among the names of an evaluation's results."""
    names = list(names)
    if best_metric not in names:
        suggested = scores_among(names) or names
        raise UserError(
            f"run.best_metric={best_metric} is not a metric of this run's evaluation; set it to one of "
            f"{', '.join(suggested)}."
        )


def _read_sets(zero_shot_set: EvaluationSet | None, task_sets: Sequence[tuple[Task, Path]]) -> None:
    """Read all tables and all headers of shards, so that a run with a damaged set fails before its first step."""
    evaluation_sets = [open_task_set(task, path) for task, path in task_sets]
    if zero_shot_set is not None:
        evaluation_sets.append(zero_shot_set)
    for evaluation_set in evaluation_sets:
        for _ in evaluation_set.samples():
            pass
