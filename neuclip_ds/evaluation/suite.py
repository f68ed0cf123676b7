"""Measurement of a task, whose metrics are named as in DataComp's evaluation (eval_utils/, eval_results.jsonl)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.accumulators import ClassAccumulator, GroupAccumulator
from neuclip_ds.evaluation.batches import BatchEncoder
from neuclip_ds.evaluation.caption_retrieval import caption_retrieval
from neuclip_ds.evaluation.folder import EvaluationFolder
from neuclip_ds.evaluation.metrics import macro_f1, mean_recall, ratio, worst_group
from neuclip_ds.evaluation.sharded_batches import run_on_all_ranks
from neuclip_ds.evaluation.tasks import GroupRule, Task
from neuclip_ds.evaluation.winogavil import winogavil
from neuclip_ds.evaluation.zero_shot import GroupBy, ZeroShotSet, classify

Metrics = dict[str, float | None]


@dataclass(frozen=True)
class Suite:
    """Model with the transform and the ranks that measure it.

    Attributes:
        encoder: the model.
        transform: encoded image -> (3, H, W) uint8.
        communicator: the ranks.
        workers: threads that decode.
    """

    encoder: BatchEncoder
    transform: Callable[[bytes], Tensor]
    communicator: Communicator
    workers: int = 1

    def measure(self, task: Task, folder: Path) -> Metrics:
        """Return the metrics of a task, equal on all ranks; `main_metric` is its score.

        Args:
            task: what to measure.
            folder: of its data.

        Raises:
            UserError: on all ranks; the data are incomplete or broken.
        """
        kinds = {"classification": self._classification, "retrieval": self._retrieval, "winogavil": self._winogavil}
        metrics = kinds[task.kind](task, folder)
        return {**metrics, "main_metric": metrics[task.metric]}

    def _classification(self, task: Task, folder: Path) -> Metrics:
        groups = {rule.field: GroupBy(rule.column, rule.top) for rule in task.groups}
        image_set = run_on_all_ranks(self.communicator, lambda: ZeroShotSet.read(folder))
        counts, by_group = classify(self.encoder, image_set, self.transform, self.communicator, groups, self.workers)
        metrics = _accuracies(counts)
        if task.f1:
            metrics["acc_avg"] = metrics["acc1"]
            metrics["recall-macro_all"] = metrics["mean_per_class_recall"]
            metrics["F1-macro_all"] = macro_f1(counts.top1, counts.predicted, counts.support)
        for rule in task.groups:
            metrics.update(_group_accuracies(rule, by_group[rule.field]))
        return metrics

    def _retrieval(self, task: Task, folder: Path) -> Metrics:
        captioned = run_on_all_ranks(self.communicator, lambda: EvaluationFolder.read(folder))
        if captioned.kind != "retrieval":
            raise UserError(
                f"{folder} is a {captioned.kind} set, not a retrieval set; write retrieval to its dataset_type.txt."
            )
        return {**caption_retrieval(self.encoder, captioned, self.transform, self.communicator, workers=self.workers)}

    def _winogavil(self, task: Task, folder: Path) -> Metrics:
        instances = run_on_all_ranks(self.communicator, lambda: EvaluationFolder.read(folder))
        return winogavil(self.encoder, instances, self.transform, self.communicator, self.workers)


def _accuracies(counts: ClassAccumulator) -> Metrics:
    return {
        "acc1": ratio(counts.top1, counts.support),
        "acc5": ratio(counts.top5, counts.support) if len(counts.support) >= 5 else None,
        "mean_per_class_recall": mean_recall(counts.top1, counts.support),
    }


def _group_accuracies(rule: GroupRule, groups: GroupAccumulator) -> Metrics:
    """Return the accuracy of every group that occurs.

    WILDS omits FMoW's region "Other" by its name. DataComp's sets have no names, so published scores count it, as here.
    """
    metrics: Metrics = {f"{rule.accuracy}_avg": ratio(groups.hits, groups.counts)}
    for number, (hits, count) in enumerate(zip(groups.hits.tolist(), groups.counts.tolist(), strict=True)):
        if count:
            metrics[f"{rule.accuracy}_{rule.field}:{number}"] = hits / count
            metrics[f"count_{rule.field}:{number}"] = count
    return {**metrics, rule.worst: worst_group(groups.hits, groups.counts)}
