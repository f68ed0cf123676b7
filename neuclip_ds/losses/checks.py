"""Check the arguments of a loss on all ranks at once, so that no rank waits for a rank that has failed."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from neuclip_ds.distributed.communicator import Communicator

_TOLERANCE = 2e-2  # on a row's norm, since rows may have been rounded to bfloat16
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

StoredForm = tuple[int, torch.dtype, torch.dtype]
"""Width of stored features, and the dtypes of the image and text features."""


def problem_with_features(image: Any, text: Any, dim: int) -> str | None:
    """Return a message if the features are not floating-point (b, dim) tensors, else None."""
    for name, features in (("image_features", image), ("text_features", text)):
        if not isinstance(features, Tensor):
            return _not_a_tensor(name, features)
        given = f"dtype {features.dtype} and shape {tuple(features.shape)}"
        if features.ndim != 2:
            return f"{name} has {given}, but must be a floating-point matrix with rows of length {dim}."
        shape = (len(image), dim)
        if features.shape != shape or features.dtype not in _DTYPES:
            return f"{name} has {given}, but must be a floating-point tensor of shape {shape}."
    return None


def problem_with_norms(image: Tensor, text: Tensor, valid: Tensor | None, not_finite: bool) -> str | None:
    """Return a message if a valid row is not finite or its norm differs from 1 by more than 0.02, else None.

    Args:
        image, text: (b, d) features.
        valid: (b,) bool in host memory, or None if all rows are valid.
        not_finite: whether to accept rows with NaN or infinite values.
    """
    norms = torch.stack([torch.linalg.vector_norm(features.float(), dim=1) for features in (image, text)])
    errors = norms.sub_(1).abs_().cpu()
    if valid is not None:
        errors = errors[:, valid]
    if not_finite:
        errors = errors.nan_to_num(0.0, posinf=0.0)
    for name, direction_errors in zip(("image_features", "text_features"), errors, strict=True):
        if not bool(direction_errors.isfinite().all()):
            return (
                f"{name} contains NaN or infinite values: lower the learning rate, or exclude such rows with the "
                "argument valid. If you use a GradScaler, pass it to ContrastiveLoss as scaler=...; the loss then "
                "accepts such values."
            )
        if not bool((direction_errors <= _TOLERANCE).all()):
            return f"{name} must have rows of norm 1: apply torch.nn.functional.normalize({name}, dim=-1)."
    return None


def problem_with_rows(index: Any, valid: Any, rows: int, samples: int) -> str | None:
    """Return a message if `index` or `valid` cannot be used for a batch of `rows` rows, else None.

    Args:
        index: (rows,) integers in host memory, for valid rows in [0, samples), or at least 0 if `samples` is 0; or
            None.
        valid: (rows,) bool in host memory, or None if all rows are valid.
        rows: number of rows of the batch.
        samples: size n of the training set, or 0 if it is unknown because the loss does not need the index.
    """
    if index is not None:
        if not isinstance(index, Tensor):
            return _not_a_tensor("index", index)
        is_integer = not index.is_floating_point() and index.dtype != torch.bool
        if index.shape != (rows,) or not is_integer:
            given = f"dtype {index.dtype} and shape {tuple(index.shape)}"
            return f"index has {given}, but must be an integer tensor of shape ({rows},)."
    if valid is not None:
        if not isinstance(valid, Tensor):
            return _not_a_tensor("valid", valid)
        if valid.shape != (rows,) or valid.dtype != torch.bool:
            given = f"dtype {valid.dtype} and shape {tuple(valid.shape)}"
            return f"valid has {given}, but must be a bool tensor of shape ({rows},)."
    if index is None:
        return None
    used = index.long() if valid is None else index.long()[valid]
    if not len(used):
        return None
    lowest = int(used.min())
    highest = int(used.max())
    if not samples:
        return f"index {lowest} is negative: pass positions in the training set." if lowest < 0 else None
    for extreme in (lowest, highest):
        if not 0 <= extreme < samples:
            fix = f"pass positions in the training set, whose size is samples={samples}."
            return f"index {extreme} is outside [0, {samples}): {fix}"
    return None


def _not_a_tensor(name: str, value: Any) -> str:
    return f"{name} has type {type(value).__name__}, but must be a tensor: pass torch.as_tensor({name})."


def problem_with_stored(name: str, pair: Any, rows: int, valid: Tensor | None) -> str | None:
    """Return a message if stored features are not a pair of normalized floating-point (rows, D) tensors, else None.

    Args:
        name: argument that contains the features, `reference` or `teacher`.
        pair: the features of images and of texts.
        rows: number of rows of the batch.
        valid: (rows,) bool in host memory, or None if all rows are valid.
    """
    problem = problem_with_stored_shape(name, pair, rows)
    if problem is not None:
        return problem
    image, text = pair
    if problem_with_norms(image, text, valid, not_finite=False) is not None:
        return f"{name} must have finite rows of norm 1: normalize them, or exclude rows with the argument valid."
    return None


def problem_with_stored_shape(name: str, pair: Any, rows: int) -> str | None:
    """Return a message if stored features are not a pair of floating-point (rows, D) tensors, else None.

    The arguments are those of `problem_with_stored`.
    """
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        given = f"{len(pair)} elements" if isinstance(pair, tuple | list) else f"type {type(pair).__name__}"
        return f"{name} has {given}, but must be two floating-point tensors of the same shape ({rows}, D)."
    image, _ = pair
    for features in pair:
        if not isinstance(features, Tensor):
            return (
                f"{name} contains an object of type {type(features).__name__}, but must be two floating-point tensors "
                f"of the same shape ({rows}, D)."
            )
        is_matrix = features.ndim == 2 and len(features) == rows
        if not is_matrix or features.shape != image.shape or features.dtype not in _DTYPES:
            shape = tuple(features.shape)
            return (
                f"{name} contains a tensor of dtype {features.dtype} and shape {shape}, but must be two floating-point "
                f"tensors of the same shape ({rows}, D)."
            )
    return None


def raise_if_ranks_disagree(
    rows: int,
    problem: str | None,
    training: bool,
    dtypes: Sequence[torch.dtype],
    communicator: Communicator,
    stored_forms: Sequence[StoredForm] = (),
) -> int:
    """Check that a call to the loss is consistent across ranks, and return the largest number of rows on any rank.

    Args:
        rows: number of rows of this rank's call.
        problem: message about an invalid argument of this rank's call, or None.
        training: whether this rank's call is in training mode.
        dtypes: dtypes of this rank's image and text features.
        communicator: communicator between the ranks.
        stored_forms: widths and dtypes of this rank's stored features, as from `StoredBatch.forms`.

    Raises:
        ValueError: on all ranks, if any rank has a problem, or if ranks differ in training mode, in the dtypes of the
            features, or in the number, widths or dtypes of stored features.
    """
    if communicator.world_size > 1:
        numbers: list[int] = []
        for width, image_dtype, text_dtype in stored_forms:
            numbers += [width, _number_of(image_dtype), _number_of(text_dtype)]
        call = _Call(
            rows=rows,
            failed=problem is not None,
            training=training,
            image_dtype=_number_of(dtypes[0]),
            text_dtype=_number_of(dtypes[1]),
            stored=hash(tuple(numbers)),
        )
        table = communicator.begin_host_gather(torch.tensor([call], device="cpu"), "control").wait()
        calls = [_Call(*row) for row in table.tolist()]
        rows = max(call.rows for call in calls)
        if problem is None:
            problem = _disagreement(calls)
    if problem is not None:
        raise ValueError(problem)
    return rows


class _Call(NamedTuple):
    """Description of a rank's call, which the ranks exchange; all fields are sent as integers."""

    rows: int
    failed: bool
    """Whether the arguments cannot be used; the other fields are then ignored."""
    training: bool
    image_dtype: int
    """Number of the image features' dtype, from `_number_of`; `text_dtype` is that of the text features."""
    text_dtype: int
    stored: int
    """Hash of the number, widths and dtypes of stored features; a hash of integers is the same in all processes."""


def _number_of(dtype: torch.dtype) -> int:
    """Return the position of a dtype in `_DTYPES`, or `len(_DTYPES)` for a dtype that cannot be used."""
    return _DTYPES.index(dtype) if dtype in _DTYPES else len(_DTYPES)


def _disagreement(calls: Sequence[_Call]) -> str | None:
    """Return a message about ranks that failed or differ, else None; `calls` are in rank order."""
    failed = [call.failed for call in calls]
    if any(failed):
        return f"rank {failed.index(True)} was given arguments that cannot be used; see the error of that rank."
    training = [call.training for call in calls]
    if len(set(training)) > 1:
        return (
            f"rank {training.index(True)} trains while rank {training.index(False)} evaluates: use the same train(), "
            "eval() and torch.no_grad() on all ranks."
        )
    for kind, numbers in (
        ("image", [call.image_dtype for call in calls]),
        ("text", [call.text_dtype for call in calls]),
    ):
        if len(set(numbers)) > 1:
            names = ", ".join(str(_DTYPES[number]) for number in numbers)
            return f"the dtypes of the {kind} features differ between ranks: {names}. Use one dtype."
    if len({call.stored for call in calls}) > 1:
        return (
            "the features of the reference or of the teachers differ in number, width or dtype between ranks: pass "
            "features of the same models, in the same dtype, on all ranks."
        )
    return None
