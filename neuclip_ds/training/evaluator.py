"""What a run measures of its model: held-out retrieval, zero-shot accuracy, the normalisers' error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from neuclip_ds.config import Config
from neuclip_ds.data.loader import eval_loader, train_loader
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.data.transforms import eval_transform
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.evaluation import Encode
from neuclip_ds.evaluation.batches import BatchEncoder
from neuclip_ds.evaluation.encoding import encoder_of
from neuclip_ds.evaluation.normalizer_error import normalizer_error
from neuclip_ds.evaluation.results import averages
from neuclip_ds.evaluation.retrieval import retrieval
from neuclip_ds.evaluation.sharded_batches import run_on_all_ranks
from neuclip_ds.evaluation.suite import Suite
from neuclip_ds.evaluation.tasks import load_tasks
from neuclip_ds.evaluation.zero_shot import ZeroShotSet, zero_shot
from neuclip_ds.models.pretrained.base import Pixels
from neuclip_ds.models.tokenizer import Tokenize
from neuclip_ds.objectives.base import Objective
from neuclip_ds.objectives.composed import ContrastiveObjective
from neuclip_ds.objectives.gather import Features
from neuclip_ds.training.sources import find_split, loader_options, open_data, resolve

_ANCHOR_SEED = 2_718_281  # of an order that is no run's: the same anchors whatever method and seed, seen at any time


class Evaluator:
    """Opens the held-out sets of a run: a mistake in them is met before the first step."""

    def __init__(
        self,
        config: Config,
        manifest: Manifest,
        tokenizer: Tokenize,
        pixels: Pixels,
        communicator: Communicator,
        folder: Path,
    ) -> None:
        """
        Args:
            config: the run's.
            manifest: its training data.
            tokenizer: its tokenizer.
            pixels: what becomes of an image for its model.
            communicator: the ranks, who evaluate together.
            folder: of the run.
        """
        self._config, self._manifest, self._tokenizer = config, manifest, tokenizer
        self._communicator = communicator
        self._transform = eval_transform(pixels.size, pixels.squash)
        self._rank_batch = config.rank_batch(communicator.world_size)
        data = config.data
        val, images = (
            find_split(x, name, data.train) for x, name in ((data.val, "val"), (data.zero_shot, "zero_shot"))
        )
        self._val = open_data(val, data, communicator, folder) if val else None
        self._zero_shot = None
        if images:
            folder_of_images = Path(communicator.on_rank_zero(lambda: resolve(images)))
            self._zero_shot = run_on_all_ranks(communicator, lambda: ZeroShotSet.read(folder_of_images))
        self._on_disk = []
        if data.evaluation_sets is not None:
            root, self._tasks = data.evaluation_sets, load_tasks()
            self._on_disk = communicator.on_rank_zero(lambda: self._tasks.on_disk(root, data.evaluation_tasks))

    def check(self, objective: Objective) -> None:
        """
        Raises:
            UserError: the normalisers' error is asked of a method that has none.
        """
        if self._config.run.normalizer_anchors and not isinstance(objective, ContrastiveObjective):
            raise UserError(
                f"run.normalizer_anchors={self._config.run.normalizer_anchors} measures normalisers, of which "
                f"objective.method={self._config.objective.method} has none; leave it at 0."
            )

    def __call__(self, engine: Any, objective: Objective) -> dict[str, float]:
        """Results by name, of the sets that there are, equal on all ranks."""
        results: dict[str, float] = {}
        encode = encoder_of(engine, self._communicator.device)
        communicator = self._communicator
        if self._val is not None:
            batches = self._every_sample(self._val)
            results.update(retrieval(encode, batches, communicator))
        if self._zero_shot is not None:
            results.update(
                zero_shot(
                    encode,
                    self._tokenizer,
                    self._zero_shot,
                    self._transform,
                    communicator,
                    self._rank_batch,
                    self._config.data.workers,
                )
            )
        if self._on_disk:
            results.update(self._scores(encode))
        if isinstance(objective, ContrastiveObjective) and self._config.run.normalizer_anchors:
            results.update(self._normalizer_error(encode, objective))
        return results

    def _scores(self, encode: Encode) -> dict[str, float]:
        """`task/KEY` of every evaluation set, and `average/NAME` where none of its tasks is missing."""
        encoder = BatchEncoder(encode, self._tokenizer, self._communicator, self._rank_batch)
        suite = Suite(encoder, self._transform, self._communicator, self._config.data.workers)
        metrics = {task.key: suite.measure(task, place) for task, place in self._on_disk}
        scores = {f"task/{key}": found["main_metric"] for key, found in metrics.items()}
        scores.update({f"average/{name}": found.value for name, found in averages(self._tasks, metrics).items()})
        return {name: score for name, score in scores.items() if score is not None}

    def _normalizer_error(self, encode: Encode, objective: ContrastiveObjective) -> dict[str, float]:
        """The normalisers of a fixed sample of anchors against those over the whole training set."""
        data, manifest = self._config.data, self._manifest
        order = GlobalOrder(
            manifest.starts, manifest.sizes, data.batch_size, _ANCHOR_SEED, shuffle_block=data.shuffle_block
        )
        anchors = min(self._config.run.normalizer_anchors, manifest.n_used)
        steps = -(-anchors // data.batch_size)
        anchor_batches = train_loader(
            manifest, order, self._transform, self._tokenizer, steps=steps, **self._share(manifest)
        )
        return normalizer_error(
            encode,
            lambda *rows: objective.log_normalizers(Features(*rows)),
            objective.pair_loss,
            anchor_batches,
            self._every_sample(manifest),
            self._communicator,
            anchors,
        )

    def _every_sample(self, manifest: Manifest) -> Any:
        share = self._share(manifest)
        return eval_loader(manifest, self._transform, self._tokenizer, batch_size=self._rank_batch, **share)

    def _share(self, manifest: Manifest) -> dict[str, Any]:
        """What a loader of this rank is told."""
        communicator = self._communicator
        options = loader_options(self._config.data, manifest, communicator)
        return {"rank": communicator.rank, "world_size": communicator.world_size, "options": options}
