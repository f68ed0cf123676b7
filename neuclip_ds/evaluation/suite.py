"""Score a model on a task; metrics have the names used in DataComp's evaluation (eval_utils/, eval_results.jsonl)."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from neuclip_ds.data.dataset import Batch
from neuclip_ds.evaluation.encoding import BatchEncoder
from neuclip_ds.evaluation.metrics import (
    ClassAccumulator,
    GroupAccumulator,
    chance_macro_f1,
    chance_recall,
    macro_f1,
    mean_recall,
    ratio,
    worst_group,
)
from neuclip_ds.evaluation.retrieval import caption_retrieval, retrieval
from neuclip_ds.evaluation.sets import open_captioned, open_labeled, open_shards
from neuclip_ds.evaluation.tasks import GroupRule, Task
from neuclip_ds.evaluation.winogavil import winogavil
from neuclip_ds.evaluation.zero_shot import classify

Metrics = dict[str, float | None]


def measure(task: Task, folder: Path, encoder: BatchEncoder) -> Metrics:
    """Return a task's metrics on the set in `folder`, equal on all ranks.

    `main_metric` is the task's score, and `chance` is the score of random choices, if known. Raises UserError on all
    ranks if the data is incomplete or broken.
    """
    openers = {"classification": open_labeled, "retrieval": open_captioned, "winogavil": open_shards}
    data = encoder.communicator.on_every_rank(lambda: openers[task.kind](folder))
    metrics: Metrics
    if task.kind == "classification":
        metrics = _classification(task, *classify(encoder, data, task.groups))
    elif task.kind == "retrieval":
        metrics = {**caption_retrieval(encoder, data)}
    else:
        metrics = winogavil(encoder, data)
    return {**metrics, "main_metric": metrics[task.metric]}


def measure_pairs(batches: Iterable[Batch], encoder: BatchEncoder) -> Metrics:
    """Return retrieval metrics for all ranks' pairs, named as for a set on disk and equal on all ranks.

    Raises UserError if no pair can be read.
    """
    found = retrieval(encoder.encode, batches, encoder.communicator)
    metrics: Metrics = {"chance": chance_recall(1, int(found.pop("retrieval_pairs")))}
    for ours, theirs in (("image_to_text", "text_retrieval"), ("text_to_image", "image_retrieval")):
        metrics |= {name.replace(ours, theirs): value for name, value in found.items() if name.startswith(ours)}
    mean = (found["image_to_text_recall@1"] + found["text_to_image_recall@1"]) / 2
    return {**metrics, "mean_recall@1": mean, "main_metric": mean}


def _classification(task: Task, counts: ClassAccumulator, by_group: Sequence[GroupAccumulator]) -> Metrics:
    top = next((rule.top for rule in task.groups if task.metric == rule.worst), 1)
    metrics: Metrics = {
        "chance": chance_recall(top, len(counts.support)),
        "acc1": ratio(counts.top1, counts.support),
        "acc5": ratio(counts.top5, counts.support) if len(counts.support) >= 5 else None,
        "mean_per_class_recall": mean_recall(counts.top1, counts.support),
    }
    if task.f1:
        metrics["acc_avg"] = metrics["acc1"]
        metrics["recall-macro_all"] = metrics["mean_per_class_recall"]
        metrics["F1-macro_all"] = macro_f1(counts.top1, counts.predicted, counts.support)
        metrics["chance"] = chance_macro_f1(counts.support)
    for rule, groups in zip(task.groups, by_group, strict=True):
        metrics.update(_group_accuracies(rule, groups))
    return metrics


def _group_accuracies(rule: GroupRule, groups: GroupAccumulator) -> Metrics:
    """Return the accuracy and size of every group that occurs, and the average and worst accuracy.

    WILDS omits FMoW's region "Other" by name. DataComp's sets lack group names, so its scores and ours include it.
    """
    metrics: Metrics = {f"{rule.accuracy}_avg": ratio(groups.hits, groups.counts)}
    for number, (hits, count) in enumerate(zip(groups.hits.tolist(), groups.counts.tolist(), strict=True)):
        if count:
            metrics[f"{rule.accuracy}_{rule.field}:{number}"] = hits / count
            metrics[f"count_{rule.field}:{number}"] = count
    return {**metrics, rule.worst: worst_group(groups.hits, groups.counts)}
