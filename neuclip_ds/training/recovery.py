"""Recover optimizer statistics, TuneCLIP's first stage: moments and u for a checkpoint that came without them.

The weights are frozen (learning rate 0, which also switches decoupled weight decay off) while u of every sample and
the optimizer's moments accumulate (TuneCLIP Algorithm 1). A method without u recovers the moments of its own loss. The
last checkpoint of this loop holds them; fine-tuning reads them from there, as can other runs from the same weights and
data (`recovery.reuse`).
"""

import logging
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from neuclip_ds.checkpoint.checkpoints import complete_checkpoints, verify_together
from neuclip_ds.checkpoint.engine_state import load_moments
from neuclip_ds.checkpoint.integrity import is_complete, read_meta
from neuclip_ds.config import BudgetConfig, Config, RecoveryConfig
from neuclip_ds.errors import UserError
from neuclip_ds.loss.two_pass import kept_statistics
from neuclip_ds.objectives import build_objective, find_method
from neuclip_ds.objectives.base import Objective, Step
from neuclip_ds.objectives.config import ObjectiveConfig
from neuclip_ds.objectives.gather import Features
from neuclip_ds.objectives.sogclr_family import MovingAverageConfig
from neuclip_ds.state.partition import load_rows
from neuclip_ds.training.data_position import check_data
from neuclip_ds.training.device_batches import DeviceBatches
from neuclip_ds.training.loop import Loop, RunContext
from neuclip_ds.training.phases import plan_phases

log = logging.getLogger(__name__)

FOLDER = "recovery"
_METHODS = {"gcl": "gcl", "hgcl": "tuneclip"}  # recovery.loss -> method
_END_OF_SCHEDULE = {"gamma": "constant"}  # large blocks have filled u, which gamma = 1 would throw away
_TABLE = "samples"  # u
_TAU = "temperature.tau"  # of methods with a constant temperature


def is_asked_for(recovery: RecoveryConfig) -> bool:
    """Return whether the run recovers statistics, or reuses another run's."""
    return recovery.mode != "none" or recovery.reuse is not None


def recovery_budget(recovery: RecoveryConfig) -> BudgetConfig:
    """Return how long the recovery runs."""
    return BudgetConfig(epochs=recovery.epochs, steps=recovery.cached_steps if recovery.mode == "cached" else None)


def keeps_u(method: str) -> bool:
    """Return whether a method keeps u of each sample; without it, only the optimizer's moments are recovered."""
    return MovingAverageConfig in find_method(method).sections.values()


def recovered_objective(config: Config) -> ObjectiveConfig:
    """Return the objective whose gradients the recovery averages: that of `recovery.loss`, at a fixed temperature."""
    objective, loss = config.objective, config.recovery.loss
    if loss is None:
        loss = "gcl" if keeps_u(objective.method) else "method"
    cached = _END_OF_SCHEDULE if config.recovery.mode == "cached" else {}
    chosen: dict[str, Any] = {"moving_average": objective.section(MovingAverageConfig).model_copy(update=cached)}
    if loss == "method":  # with the encoders' rate, which is 0, tau stands still too
        chosen["temperature"] = objective.temperature.model_copy(update={"schedule": "encoder"})
    else:
        chosen["method"] = _METHODS[loss]
    return objective.model_copy(update=chosen)


def recovery_loop(context: RunContext, checkpoint: Path | None) -> Loop:
    """Return the loop of the recovery, from the weights in the engine or from its checkpoint."""
    recovery = context.config.recovery
    config = context.config.model_copy(update={"objective": recovered_objective(context.config)})
    at_rest = config.optimizer.model_copy(update={"lr": 0.0, "min_lr": 0.0})
    frozen = config.model_copy(update={"optimizer": at_rest, "phases": []})
    objective = build_objective(config, context.objective_context, context.comm_dtype)
    fingerprint = {**context.fingerprint, "method": config.objective.method, "mode": recovery.mode}
    folder = context.folder / FOLDER
    loop = Loop(context, objective, folder, recovery_budget(recovery), partial(plan_phases, frozen), fingerprint)
    if checkpoint is not None:
        loop.resume(checkpoint)
    return loop


def recover(loop: Loop) -> Path | None:
    """Run the recovery, or the rest of it.

    Returns the checkpoint that holds what was recovered; None if the recovery was stopped early.
    """
    context, recovery = loop.context, loop.context.config.recovery
    context.communicator.on_rank_zero(lambda: loop.folder.mkdir(exist_ok=True))
    with kept_statistics(context.engine.module):
        if recovery.mode == "cached" and loop.done == 0 and _TABLE in loop.objective.row_tables():
            _fill_in_blocks(context, loop.objective, recovery.cached_block)
        return loop.checkpoints.newest() if loop.run() else None


@torch.no_grad()
def _fill_in_blocks(context: RunContext, objective: Objective, block: int) -> None:
    """Fill u of every sample in one pass without gradients, from `block` pairs at a time instead of a batch.

    The weights do not change, so features of many batches may contrast with each other.
    """
    batches_a_block = max(1, block // context.config.data.batch_size)
    order = context.data.order
    steps = order.steps_per_epoch
    log.info("filling u from %d batches at a time, %d batches in all", batches_a_block, steps)
    context.engine.eval()
    copies = DeviceBatches(context.communicator.device, context.micro_batch)
    kept: list[tuple[Tensor, ...]] = []
    loaded = context.data.batches(context.communicator, order, 0, 0, steps)
    for number, batch in enumerate(copies.ahead(loaded)):
        features = [context.engine(*micro_batch) for micro_batch in batch.micro_batches(passes=1)]
        images, texts = zip(*features, strict=True)
        kept.append((torch.cat(images), torch.cat(texts), batch.host.index, batch.host.valid))
        if len(kept) == batches_a_block or number + 1 == steps:
            image, text, index, valid = (torch.cat(column) for column in zip(*kept, strict=True))
            objective(Features(image, text, index, valid), Step(number, 0, 0.0, 0.0))
            kept.clear()


def take_over(checkpoint: Path, context: RunContext, objective: Objective) -> None:
    """Fill a fresh engine and objective with what was recovered, as far as `recovery.transfer` says.

    Raises `UserError` if it was recovered with other weights, another optimizer, or (for u) other data.
    """
    recovery = context.config.recovery
    meta = read_meta(checkpoint)
    wanted = context.config.optimizer.name
    if "moments" in recovery.transfer:
        if meta["facts"]["optimizer"] != wanted:
            raise UserError(
                f"{checkpoint} holds moments of optimizer.name={meta['facts']['optimizer']}, this run has {wanted}: "
                "set it back, or give --recovery.transfer='[\"statistics\"]'."
            )
        load_moments(checkpoint / "engine", context.engine, context.communicator)
    transferred = [kind for kind in recovery.transfer if kind == "moments" or _TABLE in objective.row_tables()]
    if "statistics" in transferred:
        if not keeps_u(meta["facts"]["method"]):
            raise UserError(
                f"{checkpoint} was recovered with the loss of {meta['facts']['method']}, which keeps no u: give "
                "--recovery.transfer='[\"moments\"]', or recover with --recovery.loss=gcl."
            )
        check_data(meta["data"], context.data.manifest)
        _check_temperature(checkpoint, objective)
        load_rows(checkpoint, _TABLE, objective.row_tables()[_TABLE])
    log.info("%s are taken from %s", " and ".join(transferred) or "no statistics", checkpoint)


def _check_temperature(checkpoint: Path, objective: Objective) -> None:
    states = load_file(checkpoint / "objective.safetensors"), objective.replicated_state()
    found, wanted = (float(state.get(_TAU, torch.nan)) for state in states)
    if found != wanted and not math.isnan(wanted):
        raise UserError(
            f"{checkpoint} holds u at the temperature {found:.6g}, this run has {wanted:.6g}: set "
            "objective.temperature.initial back, or recover anew."
        )


def epochs_behind(config: Config) -> int:
    """Return the epochs of gamma's schedule that training need not repeat."""
    recovery = config.recovery
    continues = recovery.gamma == "continue" and "statistics" in recovery.transfer and keeps_u(config.objective.method)
    return int(recovery.epochs) if is_asked_for(recovery) and continues else 0


def find_reused(context: RunContext) -> Path:
    """Return the newest checkpoint of the recovery that `recovery.reuse` names, or the checkpoint that it names."""
    path = context.config.recovery.reuse
    assert path is not None

    def find() -> Path:
        itself = [path] if is_complete(path) else []
        found = [*itself, *(x for at in (path / FOLDER, path) for x in complete_checkpoints(at / "checkpoints"))]
        if not found:
            raise UserError(
                f"recovery.reuse={path} holds no recovered statistics. Name a run whose recovery is complete."
            )
        return max(found)

    checkpoint = context.communicator.on_rank_zero(find)
    verify_together(checkpoint, context.communicator)
    return checkpoint
