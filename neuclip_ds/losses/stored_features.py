"""Features that a reference model and teachers computed once, before training.

DRRho-CLIP subtracts the reference model's similarities (pairs.py); distillation teaches the model the teachers' softmax
(distillation.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from neuclip_ds.losses.checks import StoredForm, problem_with_stored, problem_with_stored_shape

if TYPE_CHECKING:
    from neuclip_ds.losses.options import ObjectiveConfig

StoredRows = tuple[Tensor, Tensor]
"""Stored features of images and of texts: two normalized (b, D) tensors; D may differ from the features' width d."""

Teachers = StoredRows | list[StoredRows]
"""Stored features of a teacher, or a list with the features of each teacher of an ensemble."""

REFERENCE = "reference"
TEACHER = "teacher"


def stored_folders(config: ObjectiveConfig) -> dict[str, str]:
    """Return the folders of stored features in the options, keyed by `reference`, `teacher`, `teacher 2` and so on."""
    folders: dict[str, str] = {}
    if config.reference_model is not None:
        folders[REFERENCE] = config.reference_model
    for number, folder in enumerate(config.distill.folders, start=1):
        name = TEACHER if number == 1 else f"{TEACHER} {number}"
        folders[name] = folder
    return folders


def minus_reference(features: StoredRows, reference: StoredRows) -> StoredRows:
    """Return image and text features whose similarities are s_ij - r_ij: (e1_i, -r1_i) and (e2_j, r2_j).

    Args:
        features: (b, d) features e1 of images and e2 of texts.
        reference: (b, D) features r1 and r2 of the reference model, of the same dtype and on the same device.

    Returns:
        (b, d + D) features of both models, side by side.
    """
    image, text = features
    reference_image, reference_text = reference
    return torch.cat([image, -reference_image], dim=1), torch.cat([text, reference_text], dim=1)


@dataclass(frozen=True, kw_only=True)
class GatheredStored:
    """Features of the B rows of a `GatheredFeatures`: stored features, or prefixes of the features (prefixes.py)."""

    image: Tensor
    """(B, D) image features"""
    text: Tensor
    """(B, D) text features"""
    comm_dtype: torch.dtype
    """Dtype in which the rows are exactly representable; for stored features, the dtype in which they were sent."""


@dataclass(frozen=True, kw_only=True)
class StoredBatch:
    """Stored features of this rank's rows, as passed to a call of the loss."""

    reference: StoredRows | None
    teachers: list[StoredRows]

    @classmethod
    def of(cls, reference: StoredRows | None, teacher: Teachers | None) -> StoredBatch:
        """Return the features that the arguments of a call contain."""
        teachers: list[StoredRows] = []
        if isinstance(teacher, list) and not any(isinstance(rows, Tensor) for rows in teacher):
            teachers = teacher
        elif teacher is not None:  # a pair, which a DataLoader's default collation turns into a list
            teachers = [cast(StoredRows, teacher)]
        return cls(reference=reference, teachers=teachers)

    @classmethod
    def concatenated(cls, batches: Sequence[StoredBatch]) -> StoredBatch:
        """Return the rows of all micro-batches; raise `RuntimeError` if they differ in number, widths or dtypes."""
        forms = batches[0].forms()
        if any(batch.forms() != forms for batch in batches):
            raise RuntimeError(
                "accumulate(): pass features of the same reference model and teachers, in the same dtype, with every "
                "micro-batch, or with none."
            )
        references = [batch.reference for batch in batches if batch.reference is not None]
        reference = _concatenated(references) if references else None
        teachers: list[StoredRows] = []
        for number in range(len(batches[0].teachers)):
            teachers.append(_concatenated([batch.teachers[number] for batch in batches]))
        return cls(reference=reference, teachers=teachers)

    def __iter__(self) -> Iterator[tuple[str, StoredRows]]:
        """Yield the name and the rows of each model, in the order in which they are sent."""
        if self.reference is not None:
            yield REFERENCE, self.reference
        for rows in self.teachers:
            yield TEACHER, rows

    def problem(self, rows: int, valid: Tensor | None) -> str | None:
        """Return a message about the first stored features that a batch of `rows` rows cannot use, or None."""
        for name, pair in self:
            problem = problem_with_stored(name, pair, rows, valid)
            if problem is not None:
                return problem
        return None

    def problem_with_shape(self, rows: int) -> str | None:
        """Like `problem`, but check only the number, shapes and dtypes of the tensors."""
        for name, pair in self:
            problem = problem_with_stored_shape(name, pair, rows)
            if problem is not None:
                return problem
        return None

    def forms(self) -> list[StoredForm]:
        """Return the forms of the features of the reference (of width 0 if there is none) and of each teacher."""
        reference_form = (0, torch.float32, torch.float32) if self.reference is None else _form(self.reference)
        return [reference_form, *map(_form, self.teachers)]

    def padded(self, rows: int) -> StoredBatch:
        """Return the same features with `rows` invalid rows added."""
        reference = None if self.reference is None else _padded(self.reference, rows)
        return StoredBatch(reference=reference, teachers=[_padded(teacher, rows) for teacher in self.teachers])


def _form(pair: StoredRows) -> StoredForm:
    image, text = pair
    return image.shape[1], image.dtype, text.dtype


def _concatenated(pairs: Sequence[StoredRows]) -> StoredRows:
    images = [image for image, _ in pairs]
    texts = [text for _, text in pairs]
    return torch.cat(images), torch.cat(texts)


def _padded(pair: StoredRows, rows: int) -> StoredRows:
    image, text = pair
    return pad(image, (0, 0, 0, rows)), pad(text, (0, 0, 0, rows))
