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
        image, text: features, which must be (b, dim) with unit rows where `valid`.
        index: (b,) integers in [0, samples) in host memory, or None.
        valid: (b,) bool in host memory, or None where all rows count.
        dim: width d.
        samples: size n of the data set.
    """
    rows = len(image)
    for name, x in (("image_features", image), ("text_features", text)):
        if x.shape != (rows, dim) or not x.is_floating_point():
            return f"{name} is {x.dtype} {tuple(x.shape)}, but must be floating ({rows}, {dim}): (rows, dim)."
    for name, vector in (("index", index), ("valid", valid)):
        if vector is not None and vector.shape != (rows,):
            return f"{name} has shape {tuple(vector.shape)}, but must have one entry per row: ({rows},)."
    if valid is not None and valid.dtype != torch.bool:
        return f"valid is {valid.dtype}, but must be bool: True where a row counts."
    if index is not None and (index.is_floating_point() or index.dtype == torch.bool):
        return f"index is {index.dtype}, but must be integers: the samples' places in the data set."
    counts = torch.ones(rows, dtype=torch.bool) if valid is None else valid
    return _norms(image, text, counts) or _range(index, counts, samples)


def _norms(image: Tensor, text: Tensor, counts: Tensor) -> str | None:
    for name, x in (("image_features", image), ("text_features", text)):
        error = (torch.linalg.vector_norm(x.float(), dim=1) - 1).abs().cpu()[counts]
        if not bool((error <= _TOLERANCE).all()):  # NaN fails as well
            worst = float(error.nan_to_num(nan=float("inf")).max())
            return (
                f"{name} must have rows of norm 1, but a norm differs by {worst:.3g}. Apply "
                f"torch.nn.functional.normalize({name}, dim=-1) to finite features."
            )
    return None


def _range(index: Tensor | None, counts: Tensor, samples: int) -> str | None:
    if index is None:
        return None
    outside = counts & ((index < 0) | (index >= samples))
    if bool(outside.any()):
        return (
            f"index {int(index[outside][0])} is outside [0, {samples}): it must be the sample's place in the training "
            "set of `samples` samples."
        )
    return None


def agree_on_rows(rows: int, problem: str | None, communicator: Communicator) -> int:
    """Return the largest number of rows of any rank.

    Raises:
        ValueError: on all ranks, if any rank has a problem.
    """
    if communicator.world_size == 1:
        found, failed = [rows], [problem is not None]
    else:
        state = torch.tensor([[rows, int(problem is not None)]])
        gathered = communicator.begin_host_gather(state, "control").wait()
        found, failed = gathered[:, 0].tolist(), [bool(x) for x in gathered[:, 1].tolist()]
    if problem is not None:
        raise ValueError(problem)
    if any(failed):
        raise ValueError(f"rank {failed.index(True)} was given arguments that cannot be used; see its error.")
    return int(max(found))
