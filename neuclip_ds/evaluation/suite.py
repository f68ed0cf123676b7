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
from neuclip_ds.evaluation.sets import EvaluationSet, open_captioned, open_labeled, open_shards
from neuclip_ds.evaluation.tasks import GroupRule, Task
from neuclip_ds.evaluation.winogavil import winogavil
from neuclip_ds.evaluation.zero_shot import classify

Metrics = dict[str, float | None]


def open_task_set(task: Task, path: Path) -> EvaluationSet:
    """Open the set of a task, with its prompts, if any.

    Raises UserError if a file is missing or malformed, or if a set for classification or retrieval is of another kind.
    """
    openers = {"classification": open_labeled, "retrieval": open_captioned, "winogavil": open_shards}
    return openers[task.kind](path)


def measure(task: Task, folder: Path, encoder: BatchEncoder) -> Metrics:
    """Return a task's metrics on the set in `folder`, equal on all ranks.

    `main_metric` is the task's score, and `chance` is the expected score of random choices. Both are None for a
    WinoGAViL set without instances of 10 to 12 images. Raises UserError on all ranks if the data is incomplete or
    broken.
    """
    evaluation_set = encoder.communicator.on_every_rank(lambda: open_task_set(task, folder))
    metrics: Metrics
    if task.kind == "classification":
        classes, groups = classify(encoder, evaluation_set, task.groups)
        metrics = _classification_metrics(task, classes, groups)
    elif task.kind == "retrieval":
        metrics = {**caption_retrieval(encoder, evaluation_set)}
    else:
        metrics = winogavil(encoder, evaluation_set)
    return {**metrics, "main_metric": metrics[task.metric]}


def measure_pairs(batches: Iterable[Batch], encoder: BatchEncoder) -> Metrics:
    """Return retrieval metrics for all ranks' pairs, named as for a set on disk and equal on all ranks.

    Raises UserError if no pair can be read.
    """
    recalls = retrieval(encoder.encode, batches, encoder.communicator, prefixes=encoder.prefixes)
    pairs = int(recalls.pop("retrieval_pairs"))
    metrics: Metrics = {"chance": chance_recall(1, pairs)}
    for name, recall in recalls.items():
        datacomp_name = name.replace("image_to_text", "text_retrieval").replace("text_to_image", "image_retrieval")
        metrics[datacomp_name] = recall
    mean = (recalls["image_to_text_recall@1"] + recalls["text_to_image_recall@1"]) / 2
    return {**metrics, "mean_recall@1": mean, "main_metric": mean}


def _classification_metrics(
    task: Task, counts: ClassAccumulator, counts_by_group: Sequence[GroupAccumulator]
) -> Metrics:
    classes = len(counts.support)
    top = 1  # the main metric counts an image as correct if its class is among the first `top` predictions
    for rule in task.groups:
        if task.metric == rule.worst:
            top = rule.top
            break
    metrics: Metrics = {
        "chance": chance_recall(top, classes),
        "acc1": ratio(counts.top1, counts.support),
        "acc5": ratio(counts.top5, counts.support) if classes >= 5 else None,
        "mean_per_class_recall": mean_recall(counts.top1, counts.support),
    }
    if task.f1:
        metrics["acc_avg"] = metrics["acc1"]
        metrics["recall-macro_all"] = metrics["mean_per_class_recall"]
        metrics["F1-macro_all"] = macro_f1(counts.top1, counts.predicted, counts.support)
        metrics["chance"] = chance_macro_f1(counts.support)
    for rule, groups in zip(task.groups, counts_by_group, strict=True):
        metrics.update(_group_accuracies(rule, groups))
    return metrics


def _group_accuracies(rule: GroupRule, groups: GroupAccumulator) -> Metrics:
    """Return the accuracy and size of every group that occurs, the accuracy over all samples, and the worst accuracy.

    WILDS omits FMoW's region "Other" by name. DataComp's sets lack group names, so its scores and ours include it.
    """
    metrics: Metrics = {f"{rule.accuracy}_avg": ratio(groups.hits, groups.counts)}
    hits_and_counts = zip(groups.hits.tolist(), groups.counts.tolist(), strict=True)
    for group, (hits, count) in enumerate(hits_and_counts):
        if count:
            metrics[f"{rule.accuracy}_{rule.field}:{group}"] = hits / count
            metrics[f"count_{rule.field}:{group}"] = count
    return {**metrics, rule.worst: worst_group(groups.hits, groups.counts)}
