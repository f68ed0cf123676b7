"""Zero-shot classification: an image belongs to the class whose prompts, averaged, lie nearest (CLIP, sec. 3.1).

Sets are read in the webdataset layout of CLIP_benchmark, which DataComp's evaluation sets share. Ties between
classes, such as two classes of one name, count by expectation, as in `neuclip_ds.evaluation.retrieval`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from neuclip_ds.errors import UserError
from neuclip_ds.evaluation import Communicator, Encode
from neuclip_ds.evaluation.accumulators import ClassCounts, GroupCounts
from neuclip_ds.evaluation.batches import BatchEncoder
from neuclip_ds.evaluation.folder import LAYOUT, EvaluationFolder, Sample, read_lines
from neuclip_ds.evaluation.metrics import ratio
from neuclip_ds.evaluation.retrieval import score_matrix
from neuclip_ds.evaluation.sharded_batches import decode, rounds

PLACEHOLDER = "{c}"


@dataclass(frozen=True)
class ZeroShotSet:
    """A labelled image set with the words for its classes.

    Attributes:
        class_names: label -> name.
        templates: prompts with `{c}` where the class name goes.
        folder: images (jpg, jpeg, png or webp) and labels (cls).
    """

    class_names: tuple[str, ...]
    templates: tuple[str, ...]
    folder: EvaluationFolder

    @classmethod
    def read(cls, path: Path) -> ZeroShotSet:
        """Reads the words and finds the shards of a set.

        Raises:
            UserError: a file is missing, empty or not in CLIP_benchmark's form.
        """
        templates_file = path / "zeroshot_classification_templates.txt"
        templates = read_lines(templates_file)
        for template in templates:
            if PLACEHOLDER not in template:
                raise UserError(f"{templates_file}: the template '{template}' lacks {PLACEHOLDER}, the class's place.")
        folder = EvaluationFolder.read(path)
        if folder.kind != "classification":
            raise UserError(f"{path} is a {folder.kind} set by its dataset_type.txt, and no zero-shot set.")
        return cls(read_lines(path / "classnames.txt"), templates, folder)

    def prompt(self, index: int) -> str:
        """Prompt `index` of len(class_names) * len(templates); prompts of a class are neighbours."""
        label, template = divmod(index, len(self.templates))
        return self.templates[template].replace(PLACEHOLDER, self.class_names[label])

    def label(self, sample: Sample) -> int:
        """
        Raises:
            UserError: the sample has none, or it names no class.
        """
        label = sample.text("cls")
        if not label.isdecimal() or int(label) >= len(self.class_names):
            last = len(self.class_names) - 1
            raise UserError(f"{sample.name} has label '{label}', but classnames.txt names classes 0 to {last}.")
        return int(label)


class GroupBy(NamedTuple):
    """A division of the samples: by a column of their .npy member, as DataComp's WILDS and fairness sets have it."""

    column: int
    top: int = 1  # a sample is recognised when its class is the first, or (5) among the first five


class Counted(NamedTuple):
    """A whole set's counts, equal on all ranks."""

    classes: ClassCounts
    groups: dict[str, GroupCounts]


@torch.no_grad()
def classify(
    encoder: BatchEncoder,
    image_set: ZeroShotSet,
    transform: Callable[[bytes], Tensor],
    communicator: Communicator,
    groups: Mapping[str, GroupBy] = {},
    workers: int = 1,
) -> Counted:
    """Classifies every image of a set once.

    Args:
        encoder: the model.
        image_set: images, labels and words.
        transform: encoded image -> (3, H, W) uint8.
        communicator: the ranks.
        groups: divisions of the samples, by name.
        workers: threads that decode.

    Raises:
        UserError: on all ranks; the set is empty, or one of its samples is unreadable.
    """
    classes = class_embeddings(encoder, image_set, communicator)
    counts = ClassCounts(len(classes), classes.device)
    by_group = {name: GroupCounts(classes.device) for name in groups}
    columns = [group.column for group in groups.values()]

    def prepare(sample: Sample) -> _Labelled:
        return _Labelled(decode(sample, transform), [image_set.label(sample), *_metadata(sample, columns)])

    for own in rounds(image_set.folder, prepare, communicator, encoder.size, workers):
        scores = score_matrix(encoder.images([row.pixels for row in own.rows]), classes)[: own.used]
        numbers = torch.tensor([row.numbers for row in own.rows[: own.used]], dtype=torch.int64, device=scores.device)
        labels, *members = numbers.reshape(own.used, 1 + len(groups)).unbind(dim=1)
        top = dict(zip((1, 5), counts.add(scores, labels), strict=True))
        for name, member in zip(groups, members, strict=True):
            by_group[name].add(top[groups[name].top], member)
    counts.join(communicator)
    for group_counts in by_group.values():
        group_counts.join(communicator)
    if not counts.support.sum():
        raise UserError(f"The zero-shot set {image_set.folder.path} has no image; {LAYOUT}.")
    return Counted(counts, by_group)


def zero_shot(
    encode: Encode,
    tokenize: Callable[[list[str]], Tensor],
    image_set: ZeroShotSet,
    transform: Callable[[bytes], Tensor],
    communicator: Communicator,
    batch_size: int,
    workers: int = 1,
) -> dict[str, float]:
    """Top-1 and top-5 accuracy over the whole set, each image counted once.

    Args:
        encode: gives the features of a batch; see `Encode`.
        tokenize: n prompts -> (n, T) tokens.
        transform: encoded image -> (3, H, W) uint8.
        batch_size: rows a rank encodes at once; every call has exactly as many.
        workers: threads that decode.

    Returns:
        `zero_shot_top1`, `zero_shot_top5` in [0, 1] and `zero_shot_images`, equal on all ranks.

    Raises:
        UserError: the set is empty or one of its samples is unreadable.
    """
    encoder = BatchEncoder(encode, tokenize, communicator, batch_size)
    counts, _ = classify(encoder, image_set, transform, communicator, workers=workers)
    return {
        "zero_shot_top1": ratio(counts.top1, counts.support),
        "zero_shot_top5": ratio(counts.top5, counts.support),
        "zero_shot_images": float(counts.support.sum()),
    }


@torch.no_grad()
def class_embeddings(encoder: BatchEncoder, image_set: ZeroShotSet, communicator: Communicator) -> Tensor:
    """(C, d) float32: of each class the normalised mean of its prompts' normalised features.

    Prompts are dealt out to ranks; sums are float64, so that ranks do not show.
    """
    classes, templates = len(image_set.class_names), len(image_set.templates)
    rank, world_size, size = communicator.rank, communicator.world_size, encoder.size
    sums: Tensor | None = None
    for start in range(0, classes * templates, world_size * size):
        own = range(start + rank, min(start + world_size * size, classes * templates), world_size)
        features = encoder.texts([image_set.prompt(index) for index in own or [0]])[: len(own)]
        if sums is None:
            sums = features.new_zeros((classes, features.shape[1]), dtype=torch.float64)
        labels = torch.tensor(own, dtype=torch.int64, device=features.device) // templates
        sums.index_add_(0, labels, features.double())
    assert sums is not None  # `read` refuses sets without classes or templates
    return functional.normalize(communicator.all_reduce(sums, "evaluation"), dim=1).float()


class _Labelled(NamedTuple):
    """A sample ready for the model."""

    pixels: Tensor  # (3, H, W) uint8
    numbers: list[int]  # its label, and its group in every division


def _metadata(sample: Sample, columns: list[int]) -> list[int]:
    """The groups of a sample, from the row of numbers in its .npy member."""
    if not columns:
        return []
    try:
        row = np.load(io.BytesIO(sample.read("npy")), allow_pickle=False).ravel()
        groups = [int(row[column]) for column in columns]
    except (ValueError, IndexError, EOFError) as error:
        raise UserError(
            f"{sample.name}: its npy member holds no metadata ({error}); download the set again."
        ) from error
    if min(groups) < 0:
        raise UserError(f"{sample.name}: its npy member has the group {min(groups)}; groups are counted from 0.")
    return groups
