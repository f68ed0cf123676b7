"""Evaluate the model of a run: held-out retrieval, zero-shot accuracy, evaluation sets, the normalisers' error."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from neuclip_ds.config import Config
from neuclip_ds.data.dataset import Batch
from neuclip_ds.data.decoders import find_decoder
from neuclip_ds.data.loader import eval_jobs, pair_dataset, train_jobs
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.data.rank_batch import part_count
from neuclip_ds.data.transforms import EvalTransform
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.evaluation import Encode, chance
from neuclip_ds.evaluation.encoding import BatchEncoder, encoder_of
from neuclip_ds.evaluation.loading import EvaluationLoader
from neuclip_ds.evaluation.nearest_captions import nearest_pairs, read_pairs, records
from neuclip_ds.evaluation.normalizer_error import normalizer_error
from neuclip_ds.evaluation.results import averages
from neuclip_ds.evaluation.retrieval import EncodedPairs, encode_pairs, retrieval
from neuclip_ds.evaluation.suite import Suite
from neuclip_ds.evaluation.tasks import load_tasks
from neuclip_ds.evaluation.zero_shot import zero_shot
from neuclip_ds.models.pretrained.base import Preprocessing
from neuclip_ds.objectives.base import Objective
from neuclip_ds.objectives.composed import ContrastiveObjective
from neuclip_ds.objectives.gather import Features
from neuclip_ds.reporting.gallery import write_gallery
from neuclip_ds.reporting.scores import CHANCE
from neuclip_ds.training.checks import open_held_out
from neuclip_ds.training.data import TrainingData, loader_options

_ANCHOR_SEED = 2_718_281  # the same anchors for every method and seed, independent of the run's order
_GALLERY = 12, 5  # images, and captions of each
_VAL, _TRAIN, _ANCHORS = "val", "train", "anchors"  # sources of pairs


class Evaluator:
    """Evaluate on the held-out sets of a run, which are opened before the first step.

    The first evaluation starts loader processes, as many as training has; they wait for the next one. `close` stops
    them. Images are decoded as in training, but always at full size.
    """

    def __init__(
        self,
        config: Config,
        data: TrainingData,
        preprocessing: Preprocessing,
        communicator: Communicator,
        folder: Path,
    ) -> None:
        self._config, self._communicator = config, communicator
        self._folder = config.run.folder / str(config.run.name)
        self._manifest, self._tokenizer, self._interleave = data.manifest, data.tokenizer, data.order.interleave
        decode = find_decoder(config.data.decoder)
        self._transform = EvalTransform(preprocessing.size, preprocessing.squash, decode)
        self._rank_batch = config.rank_batch(communicator.world_size)
        micro = config.micro_batch(communicator.world_size)
        self._rows = -(-micro // part_count(micro, preprocessing.size))  # that are loaded and encoded at once
        self._val, self._zero_shot, self._on_disk = open_held_out(config, communicator, folder, data.manifest)
        self._loader = self._start_loader()

    def check(self, objective: Objective) -> None:
        """Raise `UserError` where the normalisers' error is requested for a method without normalisers."""
        if self._config.run.normalizer_anchors and not isinstance(objective, ContrastiveObjective):
            raise UserError(
                f"run.normalizer_anchors={self._config.run.normalizer_anchors} measures normalisers, but "
                f"objective.method={self._config.objective.method} has none. Set it to 0."
            )

    def __call__(self, engine: Any, objective: Objective) -> dict[str, float]:
        """Return results by name, equal on all ranks, and as `chance/NAME` what a random choice scores.

        Also writes the gallery of the held-out pairs, where there are any.
        """
        results: dict[str, float] = {}
        encode = encoder_of(engine, self._communicator.device)
        encoder = BatchEncoder(encode, self._tokenizer, self._communicator, self._rows)
        if self._val is not None:
            pairs = encode_pairs(encode, self._every_sample(_VAL, self._val))
            results.update(retrieval(pairs, self._communicator))
            results.update(_chance(results, int(results["retrieval_pairs"])))
            self._write_gallery(pairs)
        if self._zero_shot is not None:
            found = zero_shot(encoder, self._zero_shot, self._transform, self._loader)
            results.update({**found, **_chance(found, len(self._zero_shot.class_names))})
        if self._on_disk:
            results.update(self._scores(Suite(encoder, self._transform, self._loader)))
        if isinstance(objective, ContrastiveObjective) and self._config.run.normalizer_anchors:
            results.update(self._normalizer_error(encode, objective))
        return results

    def close(self) -> None:
        """Stop the loader processes."""
        self._loader.close()

    def _scores(self, suite: Suite) -> dict[str, float]:
        """Return `task/KEY` of every evaluation set, `average/NAME` where none of its tasks is missing, and chance."""
        metrics = {task.key: suite.measure(task, place) for task, place in self._on_disk}
        random = {key: {"main_metric": found["chance"]} for key, found in metrics.items()}
        scores: dict[str, float | None] = {}
        for prefix, measured in (("", metrics), (CHANCE, random)):
            scores |= {f"{prefix}task/{key}": found["main_metric"] for key, found in measured.items()}
            means = averages(load_tasks(), measured)
            scores |= {f"{prefix}average/{name}": found.value for name, found in means.items()}
        return {name: score for name, score in scores.items() if score is not None}

    def _write_gallery(self, pairs: EncodedPairs) -> None:
        """Keep the captions that are nearest to the first held-out images, for the report."""
        found = nearest_pairs(pairs, self._communicator, *_GALLERY)

        def write() -> None:
            images = read_pairs(found, lambda samples: self._loader.originals(_VAL, samples))
            write_gallery(self._folder, records(images))

        self._communicator.on_rank_zero(write)

    def _normalizer_error(self, encode: Encode, objective: ContrastiveObjective) -> dict[str, float]:
        """Compare the normalisers of a fixed sample of anchors with those over the whole training set."""
        data, manifest = self._config.data, self._manifest
        order = GlobalOrder(manifest.starts, manifest.sizes, data.batch_size, _ANCHOR_SEED, self._interleave)
        anchors = min(self._config.run.normalizer_anchors, manifest.n_used)
        steps = -(-anchors // data.batch_size)
        parts, ranks = -(-self._rank_batch // self._rows), self._ranks
        anchor_batches = self._loader.batches(_ANCHORS, train_jobs(order, *ranks, 0, 0, steps=steps, parts=parts))
        return normalizer_error(
            encode,
            lambda *rows: objective.log_normalizers(Features(*rows)),
            objective.pair_loss,
            anchor_batches,
            self._every_sample(_TRAIN, manifest),
            self._communicator,
            anchors,
            parts=parts,
        )

    def _every_sample(self, source: str, manifest: Manifest) -> Iterator[Batch]:
        return self._loader.batches(source, eval_jobs(manifest, *self._ranks, self._rows))

    @property
    def _ranks(self) -> tuple[int, int]:
        """This rank, and the number of ranks."""
        return self._communicator.rank, self._communicator.world_size

    def _start_loader(self) -> EvaluationLoader:
        sources: dict[str, tuple[Manifest, int]] = {}  # with the seeds of their captions
        if self._val is not None:
            sources[_VAL] = self._val, 0
        if self._config.run.normalizer_anchors:
            sources |= {_TRAIN: (self._manifest, 0), _ANCHORS: (self._manifest, _ANCHOR_SEED)}
        options = loader_options(self._config.data, self._manifest, self._communicator)
        pairs = {}
        for name, (manifest, seed) in sources.items():
            own = loader_options(self._config.data, manifest, self._communicator)
            pairs[name] = pair_dataset(manifest, self._transform, self._tokenizer, seed, own)
            options = own if own.cache is not None else options  # which the wait for remote shards needs
        return EvaluationLoader(options, pairs)


def _chance(results: Mapping[str, float], candidates: int) -> dict[str, float]:
    """Return the chance of the scores whose names end in k, the length of a list of so many candidates."""
    lengths = {name: re.search(r"(?:@|top)(\d+)$", name) for name in results}
    return {f"{CHANCE}{name}": chance.recall(int(k[1]), candidates) for name, k in lengths.items() if k}
