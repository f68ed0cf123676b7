"""Recover the optimizer's moments and each sample's moving average u, which pretrained models lack (TuneCLIP stage I).

A separate loop runs before training. Its weights are frozen (by a learning rate of 0, which also disables decoupled
weight decay) while every sample's u and the moments accumulate (TuneCLIP Algorithm 1). For a method without u, only the
moments are recovered, by default with the method's own loss. Training then reads the recovered state from the last
checkpoint of the recovery loop. Other runs with the same initial weights and data can also read it (`recovery.reuse`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from neuclip_ds.checkpoint.checkpoints import complete_checkpoints, verify_together
from neuclip_ds.checkpoint.engine_state import load_moments
from neuclip_ds.checkpoint.integrity import is_complete, read_meta
from neuclip_ds.checkpoint.sharded_state import OBJECTIVE, STATE, StateFiles
from neuclip_ds.config import Config
from neuclip_ds.engine.engine import Engine
from neuclip_ds.errors import UserError
from neuclip_ds.losses.batch_norm import batch_norms, kept_statistics
from neuclip_ds.losses.contrastive_loss import ContrastiveLoss
from neuclip_ds.losses.methods import find_method
from neuclip_ds.losses.options import ObjectiveConfig
from neuclip_ds.losses.stored_features import REFERENCE
from neuclip_ds.losses.temperature import trained_temperature
from neuclip_ds.training.checks import check_data
from neuclip_ds.training.run_folder import RECOVERY

if TYPE_CHECKING:
    from neuclip_ds.training.trainer import RunContext

log = logging.getLogger(__name__)

_METHODS = {"gcl": "gcl", "hgcl": "tuneclip"}  # recovery.loss -> method
_TABLE = "samples"  # the table that contains u
_TAU = "temperature.tau"  # key of tau in methods with a constant temperature


def recovered_objective(config: Config) -> ObjectiveConfig:
    """Return the options of the recovery's loss: `recovery.loss`, or its default, at a fixed temperature."""
    objective = config.objective
    loss = config.recovery.loss
    if loss is None:
        loss = "gcl" if find_method(objective.method).keeps_u else "method"
    if loss == "method":  # tau has the encoders' learning rate, which is 0
        temperature = objective.temperature.model_copy(update={"schedule": "encoder"})
        return objective.model_copy(update={"temperature": temperature})
    return objective.model_copy(update={"method": _METHODS[loss]})


def recovery_config(config: Config) -> Config:
    """Return the config of the recovery loop, whose learning rate of 0 keeps the encoders' weights unchanged."""
    changes: dict[str, Any] = {
        "objective": recovered_objective(config),
        "optimizer": config.optimizer.model_copy(update={"lr": 0.0, "min_lr": 0.0}),
        "epochs": config.recovery.epochs,
        "max_steps": None,
    }
    return config.model_copy(update=changes)


@contextmanager
def without_batch_norm_updates(engine: Engine) -> Iterator[None]:
    """Keep batch norm's statistics unchanged during the `with` block, in which the recovery loop runs."""
    with kept_statistics(batch_norms(engine.module)):
        yield


def load_recovered_state(checkpoint: Path, context: RunContext, loss: ContrastiveLoss) -> None:
    """Load the recovered state selected by `recovery.restore` into an engine and a new loss.

    The engine may be new or have run the recovery loop. Its optimizer state is cleared first, so without `moments` in
    `recovery.restore`, training starts without moments.

    Raises `UserError` if moments are loaded and the recovery had a different model, different weights or a different
    optimizer, or if u is loaded and the recovery had different data, a different temperature or reference model, or a
    loss without u, or has not ended.
    """
    restore = context.config.recovery.restore
    optimizer = context.config.optimizer.name
    meta = read_meta(checkpoint)
    method = meta["facts"]["method"]
    restored: list[str] = []

    context.engine.clear_optimizer_state()
    if "moments" in restore:
        recovered_optimizer = meta["facts"]["optimizer"]
        if recovered_optimizer != optimizer:
            raise UserError(
                f"{checkpoint} contains moments of optimizer.name={recovered_optimizer}, "
                f"but this run uses {optimizer}: set optimizer.name={recovered_optimizer}, or set "
                "recovery.restore=[statistics]."
            )
        load_moments(checkpoint / STATE, context.engine, context.communicator)
        restored.append("moments")

    tables = loss.function.row_tables()
    if "statistics" in restore and _TABLE in tables:
        if not find_method(method).keeps_u:
            raise UserError(
                f"{checkpoint} was recovered with the loss of {method}, which does not keep u: set "
                "recovery.restore=[moments], or recover with recovery.loss=gcl."
            )
        check_data(meta["data"], context.data.manifest, f"The recovered state in {checkpoint}", "recover again")
        _check_reference(checkpoint, meta["data"], context.data.record())
        _check_length(checkpoint, meta, context.data.manifest.n_used, context.config.recovery.epochs)
        files = StateFiles(checkpoint / STATE, verified=True)
        tau = loss.function.replicated_state().get(_TAU)
        if tau is not None:
            check_temperature(checkpoint, trained_temperature(files.replicated(OBJECTIVE)), float(tau))
        files.fill({_TABLE: tables[_TABLE]})
        restored.append("statistics")
    log.info("loaded %s from the recovery in %s (recovery.restore)", " and ".join(restored) or "nothing", checkpoint)


def check_temperature(checkpoint: Path, recovered_tau: Tensor | None, tau: float) -> None:
    """Raise `UserError` if u was recovered at a temperature other than `tau`, or at individual temperatures (None)."""
    if recovered_tau is None:
        raise UserError(
            f"{checkpoint} contains u at individual temperatures of the samples, but this run starts at the "
            f"temperature {np.float32(tau)!s}: recover again with recovery.loss=gcl."
        )
    if not math.isclose(float(recovered_tau), tau, rel_tol=1e-6):  # exp(log(tau)) is rounded
        shown = str(np.float32(float(recovered_tau)))  # enough digits to set the same float32 number
        raise UserError(
            f"{checkpoint} contains u at the temperature {shown}, but this run starts at {np.float32(tau)!s}: "
            f"set objective.temperature.initial={shown}, or recover again."
        )


def _check_length(checkpoint: Path, meta: Mapping[str, Any], n: int, epochs: float) -> None:
    """Raise `UserError` if a checkpoint of a recovery with n pairs was saved before the end of `epochs` epochs."""
    if checkpoint.resolve().parents[1].name != RECOVERY:
        return
    facts = meta["facts"]
    has_whole_batches = facts["drop_last"] or "sources" in facts  # mixtures omit an incomplete last batch
    batches = n / facts["batch_size"]
    steps_per_epoch = max(1, math.floor(batches)) if has_whole_batches else math.ceil(batches)
    expected_steps = math.floor(epochs * steps_per_epoch)
    if meta["step"] < expected_steps:
        raise UserError(
            f"The recovery in {checkpoint} ended after {meta['step']:,} steps, but recovery.epochs={epochs:g} is "
            f"{expected_steps:,} steps: finish this recovery (repeat the command of its run), or "
            "set recovery.epochs to its value in that run."
        )


def _check_reference(checkpoint: Path, recovered: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    """Raise `UserError` if u was recovered with a different reference model, or if only one of the runs has one."""
    recovered_job = recovered.get("features", {}).get(REFERENCE)
    job = data.get("features", {}).get(REFERENCE)
    if recovered_job != job:
        raise UserError(
            f"The objective.reference_model of the recovery in {checkpoint} differs from this run's, or only one of "
            "them has a reference model: use the recovery's reference model (or none) in this run, or recover again."
        )


def gamma_epoch_offset(config: Config) -> int:
    """Return how many epochs of gamma's schedule to skip: gamma's initial value, 1, would overwrite the recovered u."""
    return max(1, int(config.recovery.epochs)) if config.recovers_u() else 0


def find_reused(context: RunContext) -> Path:
    """Return the checkpoint that `recovery.reuse` names or, if it names a run, the newest one of the run's recovery.

    If the run has no recovery checkpoints, its newest training checkpoint is returned. All ranks call this together.
    Raises `UserError` if there is no checkpoint, or if it is damaged.
    """
    path = context.config.recovery.reuse
    assert path is not None
    checkpoint = Path(context.communicator.on_rank_zero(lambda: str(newest_of_recovery(path))))
    verify_together(checkpoint, context.communicator)
    return checkpoint


def newest_of_recovery(path: Path) -> Path:
    """Return the checkpoint that `find_reused` finds for `recovery.reuse=PATH`, without verifying its files.

    Raises `UserError` if there is no checkpoint.
    """
    checkpoints = [path] if is_complete(path) else []
    for folder in (path / RECOVERY, path):
        checkpoints.extend(complete_checkpoints(folder / "checkpoints"))
    if not checkpoints:
        raise UserError(
            f"recovery.reuse={path} contains no complete checkpoint. Pass the folder of a run with a complete recovery."
        )
    return max(checkpoints)
