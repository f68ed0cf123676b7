"""Check the arguments of a loss on all ranks at once, so that none waits for a rank that has failed."""

import torch
from torch import Tensor

from neuclip_ds.distributed.communicator import Communicator

_TOLERANCE = 2e-2  # of a norm: rows may have been rounded to bfloat16


def problem_with(
    image: Tensor, text: Tensor, index: Tensor | None, valid: Tensor | None, dim: int, samples: int
) -> str | None:
    """Return what is wrong with this rank's arguments, or None.

    Args:
        image, text: features, which must be floating (b, dim) with unit rows where `valid`.
        index: (b,) integers in [0, samples) in host memory, or None.
        valid: (b,) bool in host memory, or None where all rows count.
        dim: width d.
        samples: size n of the data set.
    """
    rows, features = len(image), {"image_features": image, "text_features": text}
    given: list[tuple[str, Tensor, tuple[int, ...], bool, str]]
    given = [(name, x, (rows, dim), x.is_floating_point(), "floating") for name, x in features.items()]
    if index is not None:
        whole = not index.is_floating_point() and index.dtype != torch.bool
        given.append(("index", index, (rows,), whole, "one integer per row:"))
    if valid is not None:
        given.append(("valid", valid, (rows,), valid.dtype == torch.bool, "one bool per row:"))
    for name, x, shape, fits, kind in given:
        if x.shape != shape or not fits:
            return f"{name} is {x.dtype} {tuple(x.shape)}, but must be {kind} {shape}."
    counts = torch.ones(rows, dtype=torch.bool) if valid is None else valid
    for name, x in features.items():
        error = (torch.linalg.vector_norm(x.float(), dim=1) - 1).abs().cpu()[counts]
        if not bool((error <= _TOLERANCE).all()):  # NaN fails as well
            return f"{name} must have rows of norm 1: apply torch.nn.functional.normalize({name}, dim=-1)."
    outside = None if index is None else index[counts & ((index < 0) | (index >= samples))]
    if outside is not None and len(outside):
        return f"index {int(outside[0])} is outside [0, {samples}), the places in a training set of `samples` samples."
    return None


def agree_on_rows(rows: int, problem: str | None, communicator: Communicator) -> int:
    """Return the largest number of rows of any rank; raise `ValueError` on all ranks if any rank has a problem."""
    state = torch.tensor([[rows, int(problem is not None)]])
    rows_of, failed = communicator.begin_host_gather(state, "control").wait().T
    if problem is not None:
        raise ValueError(problem)
    if bool(failed.any()):
        raise ValueError(f"rank {int(failed.argmax())} was given arguments that cannot be used; see its error.")
    return int(rows_of.max())
