"""Recover the optimizer's moments and each sample's moving average u if a checkpoint lacks them (TuneCLIP stage 1).

The weights are frozen (by a learning rate of 0, which also disables decoupled weight decay) while every sample's u and
the moments accumulate (TuneCLIP Algorithm 1). For a method without u, only the moments are recovered, by default with
the method's own loss. Fine-tuning reads the recovered state from the last checkpoint of this loop. Other runs with the
same initial weights and data can also read it (`recovery.reuse`).
"""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from neuclip_ds.checkpoint.checkpoints import complete_checkpoints, verify_together
from neuclip_ds.checkpoint.engine_state import load_moments
from neuclip_ds.checkpoint.integrity import is_complete, read_meta
from neuclip_ds.checkpoint.sharded_state import OBJECTIVE, STATE, StateFiles
from neuclip_ds.config import Config
from neuclip_ds.errors import UserError
from neuclip_ds.losses.batch_norm import batch_norms, kept_statistics
from neuclip_ds.objectives import build_objective, find_method
from neuclip_ds.objectives.base import Objective
from neuclip_ds.objectives.options import ObjectiveConfig
from neuclip_ds.training.checks import check_data
from neuclip_ds.training.hooks import Hook
from neuclip_ds.training.loop import Loop, RunContext
from neuclip_ds.training.run_folder import RECOVERY

log = logging.getLogger(__name__)

_METHODS = {"gcl": "gcl", "hgcl": "tuneclip"}  # recovery.loss -> method
_TABLE = "samples"  # the table that contains u
_TAU = "temperature.tau"  # key of tau in methods with a constant temperature


def keeps_u(method: str) -> bool:
    """Return whether a method keeps u for each sample; without u, only the optimizer's moments are recovered."""
    return "moving_average" in find_method(method).sections


def recovered_objective(config: Config) -> ObjectiveConfig:
    """Return the config of the objective that the recovery uses: `recovery.loss` at a fixed temperature."""
    objective, loss = config.objective, config.recovery.loss
    if loss is None:
        loss = "gcl" if keeps_u(objective.method) else "method"
    chosen: dict[str, Any] = {}
    if loss == "method":  # tau has the encoders' learning rate, which is 0
        chosen["temperature"] = objective.temperature.model_copy(update={"schedule": "encoder"})
    else:
        chosen["method"] = _METHODS[loss]
    return objective.model_copy(update=chosen)


def recovery_loop(context: RunContext, checkpoint: Path | None) -> Loop:
    """Return the recovery loop, which starts from the engine's weights or resumes from `checkpoint`."""
    at_rest = context.config.optimizer.model_copy(update={"lr": 0.0, "min_lr": 0.0})
    length: dict[str, Any] = {"epochs": context.config.recovery.epochs, "max_steps": None}
    chosen = {"objective": recovered_objective(context.config), "optimizer": at_rest, **length}
    config = context.config.model_copy(update=chosen)
    objective = build_objective(config, context.objective_context, context.comm_dtype)
    fingerprint = {**context.fingerprint, "method": config.objective.method}
    loop = Loop(context, config, objective, context.folder / RECOVERY, fingerprint)
    if checkpoint is not None:
        loop.resume(checkpoint)
    return loop


def recover(loop: Loop, hooks: Sequence[Hook] = ()) -> Path | None:
    """Run or resume the recovery loop, and call `hooks` around its steps.

    Returns the checkpoint with the recovered state, or None if the recovery was stopped early.
    """
    context = loop.context
    context.communicator.on_rank_zero(lambda: loop.folder.mkdir(exist_ok=True))
    with kept_statistics(batch_norms(context.engine.module)):
        return loop.checkpoints.newest() if loop.run(hooks=hooks) else None


def load_recovered_state(checkpoint: Path, context: RunContext, objective: Objective) -> None:
    """Load the recovered state selected by `recovery.restore` into a new engine and objective.

    Raises `UserError` if the recovery had different weights, a different optimizer or, if u is loaded, different data.
    """
    recovery = context.config.recovery
    meta = read_meta(checkpoint)
    wanted = context.config.optimizer.name
    if "moments" in recovery.restore:
        if meta["facts"]["optimizer"] != wanted:
            raise UserError(
                f"{checkpoint} contains moments of optimizer.name={meta['facts']['optimizer']}, "
                f"but this run has {wanted}: set it back, or pass --recovery.restore='[\"statistics\"]'."
            )
        load_moments(checkpoint / STATE, context.engine, context.communicator)
    transferred = [kind for kind in recovery.restore if kind == "moments" or _TABLE in objective.row_tables()]
    if "statistics" in transferred:
        if not keeps_u(meta["facts"]["method"]):
            raise UserError(
                f"{checkpoint} was recovered with the loss of {meta['facts']['method']}, which does not keep u: pass "
                "--recovery.restore='[\"moments\"]', or recover with --recovery.loss=gcl."
            )
        check_data(meta["data"], context.data.manifest)
        files = StateFiles(checkpoint / STATE, verified=True)
        states = files.replicated(OBJECTIVE), objective.replicated_state()
        found, here = (float(state.get(_TAU, torch.nan)) for state in states)
        if found != here and not math.isnan(here):
            raise UserError(
                f"{checkpoint} contains u at the temperature {found:.6g}, but this run has {here:.6g}: set "
                "objective.temperature.initial back, or recover again."
            )
        files.fill({_TABLE: objective.row_tables()[_TABLE]})
    log.info("%s are taken from %s", " and ".join(transferred) or "no statistics", checkpoint)


def gamma_epoch_offset(config: Config) -> int:
    """Return how many epochs of gamma's schedule to skip: gamma's initial value, 1, would overwrite the recovered u."""
    recovery = config.recovery
    continues = "statistics" in recovery.restore and keeps_u(config.objective.method)
    return int(recovery.epochs) if continues else 0


def find_reused(context: RunContext) -> Path:
    """Return the checkpoint named by `recovery.reuse`, or the newest in the named run (recovery checkpoints first)."""
    path = context.config.recovery.reuse
    assert path is not None

    def find() -> str:
        itself = [path] if is_complete(path) else []
        found = [*itself, *(x for at in (path / RECOVERY, path) for x in complete_checkpoints(at / "checkpoints"))]
        if not found:
            raise UserError(
                f"recovery.reuse={path} contains no recovered statistics. Name a run whose recovery is complete."
            )
        return str(max(found))

    checkpoint = Path(context.communicator.on_rank_zero(find))
    verify_together(checkpoint, context.communicator)
    return checkpoint
