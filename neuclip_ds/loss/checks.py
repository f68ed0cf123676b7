"""Check the arguments of a loss on all ranks at once, so that no rank waits for a rank that has failed."""

from typing import Any

import torch
from torch import Tensor

from neuclip_ds.distributed.communicator import Communicator

_TOLERANCE = 2e-2  # on a row's norm, since rows may have been rounded to bfloat16
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def problem_with(image: Any, text: Any, index: Any, valid: Any, dim: int, samples: int, not_finite: bool) -> str | None:
    """Return a message about the first invalid argument on this rank, or None if all are valid.

    Args:
        image, text: floating-point (b, dim) features, whose valid rows must have norm 1.
        index: (b,) integers in [0, samples) in host memory, or None.
        valid: (b,) bool in host memory, or None if all rows are valid.
        dim: required width of the features.
        samples: size n of the dataset.
        not_finite: whether to accept rows with NaN or infinite values.
    """
    given = {"image_features": image, "text_features": text, "index": index, "valid": valid}
    given = {name: x for name, x in given.items() if x is not None or name.endswith("features")}
    kinds = {"index": "one integer per row:", "valid": "one bool per row:"}
    for name, x in given.items():
        if not isinstance(x, Tensor):
            return f"{name} is a {type(x).__name__}, but must be a tensor: pass torch.as_tensor({name})."
        whole = not x.is_floating_point() and x.dtype != torch.bool
        fits = {"index": whole, "valid": x.dtype == torch.bool}.get(name, x.dtype in _DTYPES)
        shape = (len(image),) if name in kinds else (len(image), dim)
        if x.shape != shape or not fits:
            return f"{name} is {x.dtype} {tuple(x.shape)}, but must be {kinds.get(name, 'floating')} {shape}."
    errors = torch.stack([torch.linalg.vector_norm(x.float(), dim=1) for x in (image, text)]).sub_(1).abs_().cpu()
    errors = errors if valid is None else errors[:, valid]
    if not_finite:
        errors = errors.nan_to_num(0.0, posinf=0.0)
    if not bool((errors <= _TOLERANCE).all()):  # NaN fails as well
        name = "text_features" if bool((errors[0] <= _TOLERANCE).all()) else "image_features"
        return f"{name} must have rows of norm 1: apply torch.nn.functional.normalize({name}, dim=-1)."
    if index is not None:
        index = index if valid is None else index[valid]
        for extreme in map(int, index.aminmax() if len(index) else ()):
            if not 0 <= extreme < samples:
                where = "the positions in a training set of `samples` samples."
                return f"index {extreme} is outside [0, {samples}), {where}"
    return None


def agree_on_call(rows: int, problem: str | None, learns: bool, dtype: torch.dtype, communicator: Communicator) -> int:
    """Check that a call to the loss is consistent across ranks, and return the largest number of rows on any rank.

    Raises:
        ValueError: on all ranks, if any rank has a problem, or if ranks differ in training mode or feature dtype.
    """
    if communicator.world_size > 1:
        own = [rows, problem is not None, learns, [*_DTYPES, dtype].index(dtype)]
        state = communicator.begin_host_gather(torch.tensor([[int(x) for x in own]]), "control").wait()
        rows_of, failed, learning, dtypes = state.T.tolist()
        trains, evaluates = (learning.index(x) if x in learning else None for x in (1, 0))
        if problem is not None:
            pass
        elif any(failed):
            problem = f"rank {failed.index(1)} was given arguments that cannot be used; see its error."
        elif trains is not None and evaluates is not None:
            modes = "use the same train(), eval() and torch.no_grad() on all ranks."
            problem = f"rank {trains} trains while rank {evaluates} evaluates: {modes}"
        elif len(set(dtypes)) > 1:
            names = ", ".join(str(_DTYPES[number]) for number in dtypes)
            problem = f"the features' dtypes differ between ranks: {names}. Use one dtype."
        rows = max(rows_of)
    if problem is not None:
        raise ValueError(problem)
    return rows
