"""How far two recoveries of the same weights are from each other: in u, and in the optimizer's moments."""

import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from neuclip_ds.checkpoint.sharded_state import WEIGHT, StateFiles
from neuclip_ds.errors import UserError


def recovery_difference(first: Path, second: Path) -> dict[str, float]:
    """Return how the second of two recoveries over the same data, given by checkpoints, differs from the first.

    Returns:
        `log_u_mean` and `log_u_rms` of the differences of log u, over samples and directions, `log_u_correlation`, and
        for each kind of moment, over all parameters as one vector, `KIND cosine` and `KIND norm_ratio`.

    Raises:
        UserError: they are of other data or another optimizer.
    """
    logs = [_log_u(first), _log_u(second)]
    if logs[0].shape != logs[1].shape:
        raise UserError(
            f"{first} and {second} were recovered on other data: {len(logs[0])} and {len(logs[1])} samples."
        )
    seen = torch.isfinite(logs[0]) & torch.isfinite(logs[1])
    one, other = (values[seen].double() for values in logs)
    change = other - one
    found = {"log_u_mean": float(change.mean()), "log_u_rms": float(change.square().mean().sqrt())}
    found["log_u_correlation"] = float(torch.corrcoef(torch.stack([one, other]))[0, 1])
    files, others = StateFiles(first / "engine"), StateFiles(second / "engine")
    kinds, other_kinds = _kinds(files), _kinds(others)
    if kinds != other_kinds:
        raise UserError(f"{first} and {second} were recovered with other optimizers: {kinds} and {other_kinds}.")
    for kind in kinds:
        found[f"{kind} cosine"], found[f"{kind} norm_ratio"] = _compare(files, others, kind)
    return found


def _kinds(files: StateFiles) -> list[str]:
    return sorted({kind for name in files.names() for kind in files.kinds(name)} - {WEIGHT})


def _compare(first: StateFiles, second: StateFiles, kind: str) -> tuple[float, float]:
    """Return the cosine of two moments, and the ratio of the second's norm to the first's."""
    products = torch.zeros(3, dtype=torch.float64)
    for name in first.names():
        if kind in first.kinds(name):
            one, other = (files.read(name, kind).double() for files in (first, second))
            products += torch.stack([one @ other, one @ one, other @ other])
    cross, one_square, other_square = products.tolist()
    return cross / math.sqrt(one_square * other_square), math.sqrt(other_square / one_square)


def _log_u(checkpoint: Path) -> Tensor:
    """(n, 2), joined from what each rank wrote."""
    parts = [load_file(path) for path in sorted(checkpoint.glob("samples.*.safetensors"))]
    if not parts:
        raise UserError(
            f"{checkpoint} holds no u; name the checkpoint of a recovery (RUN/recovery/checkpoints/step_...)."
        )
    return torch.cat([table for part in parts for table in part.values()])
