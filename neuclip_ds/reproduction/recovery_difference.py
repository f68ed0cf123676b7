"""How far two recoveries of the same weights are from each other: in u, and in the optimizer's moments."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from neuclip_ds.checkpoint.sharded_state import WEIGHT, StateFiles
from neuclip_ds.errors import UserError


class MomentDifference(NamedTuple):
    """Of one kind of moment, over all parameters as one vector."""

    cosine: float
    norm_ratio: float  # of the second to the first


class RecoveryDifference(NamedTuple):
    """Of the second checkpoint from the first."""

    log_u_mean: float  # mean of the differences of log u, over samples and directions
    log_u_rms: float
    log_u_correlation: float
    moments: dict[str, MomentDifference]  # by kind: exp_avg, exp_avg_sq


def recovery_difference(first: Path, second: Path) -> RecoveryDifference:
    """
    Args:
        first, second: checkpoints of recoveries over the same data.

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
    correlation = torch.corrcoef(torch.stack([one, other]))[0, 1]
    files, others = StateFiles(first / "engine"), StateFiles(second / "engine")
    kinds, other_kinds = _kinds(files), _kinds(others)
    if kinds != other_kinds:
        raise UserError(f"{first} and {second} were recovered with other optimizers: {kinds} and {other_kinds}.")
    moments = {kind: _compare(files, others, kind) for kind in kinds}
    return RecoveryDifference(float(change.mean()), float(change.square().mean().sqrt()), float(correlation), moments)


def _kinds(files: StateFiles) -> list[str]:
    return sorted({kind for name in files.names() for kind in files.kinds(name)} - {WEIGHT})


def _compare(first: StateFiles, second: StateFiles, kind: str) -> MomentDifference:
    products = torch.zeros(3, dtype=torch.float64)
    for name in first.names():
        if kind in first.kinds(name):
            one, other = (files.read(name, kind).double() for files in (first, second))
            products += torch.stack([one @ other, one @ one, other @ other])
    cross, one_square, other_square = products.tolist()
    return MomentDifference(cross / math.sqrt(one_square * other_square), math.sqrt(other_square / one_square))


def _log_u(checkpoint: Path) -> Tensor:
    """(n, 2), joined from what each rank wrote."""
    parts = [load_file(path) for path in sorted(checkpoint.glob("samples.*.safetensors"))]
    if not parts:
        raise UserError(
            f"{checkpoint} holds no u; name the checkpoint of a recovery (RUN/recovery/checkpoints/step_...)."
        )
    return torch.cat([table for part in parts for table in part.values()])
