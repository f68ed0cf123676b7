"""Evaluate the model of a run: held-out retrieval, zero-shot accuracy, evaluation sets, the normalisers' error."""

from pathlib import Path
from typing import Any

from neuclip_ds.config import Config
from neuclip_ds.data.loader import eval_loader, train_loader
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.data.rank_batch import part_count
from neuclip_ds.data.transforms import EvalTransform
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.evaluation import Encode
from neuclip_ds.evaluation.encoding import BatchEncoder, encoder_of
from neuclip_ds.evaluation.normalizer_error import normalizer_error
from neuclip_ds.evaluation.results import averages
from neuclip_ds.evaluation.retrieval import retrieval
from neuclip_ds.evaluation.suite import Suite
from neuclip_ds.evaluation.tasks import load_tasks
from neuclip_ds.evaluation.zero_shot import zero_shot
from neuclip_ds.models.pretrained.base import Preprocessing
from neuclip_ds.objectives.base import Objective
from neuclip_ds.objectives.composed import ContrastiveObjective
from neuclip_ds.objectives.gather import Features
from neuclip_ds.training.checks import open_held_out
from neuclip_ds.training.data import TrainingData, loader_options

_ANCHOR_SEED = 2_718_281  # the same anchors for every method and seed, independent of the run's order


class Evaluator:
    """Evaluate on the held-out sets of a run, which are opened before the first step."""

    def __init__(
        self,
        config: Config,
        data: TrainingData,
        preprocessing: Preprocessing,
        communicator: Communicator,
        folder: Path,
    ) -> None:
        self._config, self._communicator = config, communicator
        self._manifest, self._tokenizer, self._interleave = data.manifest, data.tokenizer, data.order.interleave
        self._transform = EvalTransform(preprocessing.size, preprocessing.squash)
        self._rank_batch = config.rank_batch(communicator.world_size)
        micro = config.micro_batch(communicator.world_size)
        self._rows = -(-micro // part_count(micro, preprocessing.size))  # that are loaded and encoded at once
        self._val, self._zero_shot, self._on_disk = open_held_out(config, communicator, folder, data.manifest)

    def check(self, objective: Objective) -> None:
        """Raise `UserError` where the normalisers' error is requested for a method without normalisers."""
        if self._config.run.normalizer_anchors and not isinstance(objective, ContrastiveObjective):
            raise UserError(
                f"run.normalizer_anchors={self._config.run.normalizer_anchors} measures normalisers, but "
                f"objective.method={self._config.objective.method} has none. Set it to 0."
            )

    def __call__(self, engine: Any, objective: Objective) -> dict[str, float]:
        """Return results by name, equal on all ranks."""
        results: dict[str, float] = {}
        encode = encoder_of(engine, self._communicator.device)
        encoder = BatchEncoder(encode, self._tokenizer, self._communicator, self._rows)
        workers = self._config.data.workers
        if self._val is not None:
            results.update(retrieval(encode, self._every_sample(self._val), self._communicator))
        if self._zero_shot is not None:
            results.update(zero_shot(encoder, self._zero_shot, self._transform, workers))
        if self._on_disk:
            results.update(self._scores(Suite(encoder, self._transform, workers)))
        if isinstance(objective, ContrastiveObjective) and self._config.run.normalizer_anchors:
            results.update(self._normalizer_error(encode, objective))
        return results

    def _scores(self, suite: Suite) -> dict[str, float]:
        """Return `task/KEY` of every evaluation set, and `average/NAME` where none of its tasks is missing."""
        metrics = {task.key: suite.measure(task, place) for task, place in self._on_disk}
        scores = {f"task/{key}": found["main_metric"] for key, found in metrics.items()}
        scores.update({f"average/{name}": found.value for name, found in averages(load_tasks(), metrics).items()})
        return {name: score for name, score in scores.items() if score is not None}

    def _normalizer_error(self, encode: Encode, objective: ContrastiveObjective) -> dict[str, float]:
        """Compare the normalisers of a fixed sample of anchors with those over the whole training set."""
        data, manifest = self._config.data, self._manifest
        order = GlobalOrder(manifest.starts, manifest.sizes, data.batch_size, _ANCHOR_SEED, self._interleave)
        anchors = min(self._config.run.normalizer_anchors, manifest.n_used)
        steps = -(-anchors // data.batch_size)
        parts = -(-self._rank_batch // self._rows)
        anchor_batches = train_loader(
            manifest, order, self._transform, self._tokenizer, steps=steps, parts=parts, **self._share(manifest)
        )
        return normalizer_error(
            encode,
            lambda *rows: objective.log_normalizers(Features(*rows)),
            objective.pair_loss,
            anchor_batches,
            self._every_sample(manifest),
            self._communicator,
            anchors,
            parts=parts,
        )

    def _every_sample(self, manifest: Manifest) -> Any:
        share = self._share(manifest)
        return eval_loader(manifest, self._transform, self._tokenizer, batch_size=self._rows, **share)

    def _share(self, manifest: Manifest) -> dict[str, Any]:
        """Return the arguments of a loader that are this rank's."""
        communicator = self._communicator
        options = loader_options(self._config.data, manifest, communicator)
        return {"rank": communicator.rank, "world_size": communicator.world_size, "options": options}
