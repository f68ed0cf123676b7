"""Zero-shot classification: predict the class whose mean prompt feature is nearest the image feature (CLIP, sec. 3.1).

Ties between classes, for example two classes with the same name, are resolved in expectation, as in retrieval.
"""

import io
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from neuclip_ds.errors import UserError, explained
from neuclip_ds.evaluation.encoding import BatchEncoder
from neuclip_ds.evaluation.metrics import ClassAccumulator, GroupAccumulator, ratio
from neuclip_ds.evaluation.retrieval import score_matrix
from neuclip_ds.evaluation.sets import LAYOUT, EvaluationSet, Sample
from neuclip_ds.evaluation.sharded_batches import decode, sharded_batches
from neuclip_ds.evaluation.tasks import GroupRule


@torch.no_grad()
def classify(
    encoder: BatchEncoder, image_set: EvaluationSet, rules: Sequence[GroupRule] = ()
) -> tuple[ClassAccumulator, list[GroupAccumulator]]:
    """Classify every image of a set once.

    Returns counts over the whole set, by class and, for each rule, by group, as in DataComp's WILDS and fairness sets.
    Raises UserError on all ranks if the set is empty or differs between nodes, or if one of its samples is unusable.
    """
    classes = class_embeddings(encoder, image_set)
    counts = ClassAccumulator(len(classes), classes.device)
    counts_by_group = [GroupAccumulator(classes.device) for _ in rules]
    columns = [rule.column for rule in rules]
    prepare = partial(_prepare, classes=len(classes), transform=encoder.transform, columns=columns)
    for batch in sharded_batches(image_set, prepare, encoder.communicator, encoder.batch_size, encoder.loader):
        pixels = [row_pixels for row_pixels, _ in batch.rows]
        scores = score_matrix(encoder.encode_images(pixels), classes)[: batch.n_valid]

        # a column of labels, and a column of groups for each rule
        valid_numbers = [numbers for _, numbers in batch.rows[: batch.n_valid]]
        table = torch.tensor(valid_numbers, dtype=torch.int64).reshape(batch.n_valid, 1 + len(rules))
        labels, *groups_of_rules = table.unbind(dim=1)

        top1, top5 = counts.add(scores, labels.to(scores.device, non_blocking=True))
        for rule, group_counts, groups in zip(rules, counts_by_group, groups_of_rules, strict=True):
            group_counts.add(top1 if rule.top == 1 else top5, groups)
    counts.all_reduce(encoder.communicator)
    for group_counts in counts_by_group:
        group_counts.all_reduce(encoder.communicator)
    if not counts.support.sum():
        raise UserError(f"The zero-shot set {image_set.path} contains no images; {LAYOUT}.")
    return counts, counts_by_group


def zero_shot(encoder: BatchEncoder, image_set: EvaluationSet) -> dict[str, float]:
    """Return the top-1 and top-5 accuracy over the whole set, and its number of images; all ranks get equal values.

    Raises UserError as in `classify`.
    """
    counts, _ = classify(encoder, image_set)
    return {
        "zero_shot_top1": ratio(counts.top1, counts.support),
        "zero_shot_top5": ratio(counts.top5, counts.support),
        "zero_shot_images": float(counts.support.sum()),
    }


@torch.no_grad()
def class_embeddings(encoder: BatchEncoder, image_set: EvaluationSet) -> Tensor:
    """Return the (C, d) float32 class embeddings: the normalized mean of each class's normalized prompt features.

    Prompts are sharded over ranks. Features are summed in float64, so that the number of ranks hardly affects the
    result.
    """
    classes = len(image_set.class_names)
    templates = len(image_set.templates)
    prompts = classes * templates
    rank = encoder.communicator.rank
    world_size = encoder.communicator.world_size
    global_batch_size = world_size * encoder.batch_size
    sums: Tensor | None = None  # (C, d) sums of prompt features
    for start in range(0, prompts, global_batch_size):
        local_prompts = range(start + rank, min(start + global_batch_size, prompts), world_size)
        # a rank without a prompt encodes prompt 0, because all ranks call the model equally often
        texts = [image_set.prompt(index) for index in local_prompts or [0]]
        features = encoder.encode_texts(texts)[: len(local_prompts)]
        if sums is None:
            sums = features.new_zeros((classes, features.shape[1]), dtype=torch.float64)
        labels = torch.tensor(local_prompts, dtype=torch.int64) // templates
        sums.index_add_(0, labels.to(features.device, non_blocking=True), features.double())
    assert sums is not None  # every set has classes and templates
    return functional.normalize(encoder.communicator.all_reduce(sums, "evaluation"), dim=1).float()


def _prepare(
    sample: Sample, classes: int, transform: Callable[[bytes], Tensor], columns: list[int]
) -> tuple[Tensor, list[int]]:
    """Return a sample's pixels, and a list: its label, followed by its groups from `columns` of the .npy member."""
    pixels = decode(sample, transform)
    label = sample.text("cls")
    if not label.isdecimal() or int(label) >= classes:
        raise UserError(
            f"{sample.name} has label '{label}', but the classes are 0 to {classes - 1}; correct the label, or add the "
            "missing class names."
        )
    if not columns:
        return pixels, [int(label)]
    with explained(f"{sample.name} lacks metadata in its npy member", "download the set again"):
        row = np.load(io.BytesIO(sample.read("npy")), allow_pickle=False).ravel()
        groups = [int(row[column]) for column in columns]
    if min(groups) < 0:
        raise UserError(
            f"{sample.name} contains the negative group {min(groups)} in its npy member; download the set again."
        )
    return pixels, [int(label), *groups]
