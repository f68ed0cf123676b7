"""Optimizer statistics recovery, TuneCLIP's first stage: moments and u of a checkpoint that came without them.

The weights stand still (learning rate 0, which also switches decoupled weight decay off) while u of every sample and
the optimizer's moments accumulate (TuneCLIP Algorithm 1). The stage's last checkpoint holds them; fine-tuning takes
them from there, as can other runs from the same weights and data (`recovery.reuse`).
"""

from __future__ import annotations

import logging
import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from neuclip_ds.checkpoint.checkpoints import Facts, complete_checkpoints, is_complete, read_meta
from neuclip_ds.checkpoint.engine_state import load_moments
from neuclip_ds.config import BudgetConfig, Config, RecoveryConfig
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.objectives import build_objective
from neuclip_ds.objectives.base import Context, Objective, Step
from neuclip_ds.objectives.gather import Features
from neuclip_ds.objectives.sogclr_family import MovingAverageConfig
from neuclip_ds.state.partition import load_rows
from neuclip_ds.training.data_position import check_data
from neuclip_ds.training.stage import RunContext, Stage
from neuclip_ds.training.step import kept_statistics

log = logging.getLogger(__name__)

FOLDER = "recovery"
_METHODS = {"gcl": "gcl", "hgcl": "tuneclip"}  # of the stage's loss
_END_OF_SCHEDULE = {"gamma": "constant"}  # large blocks have filled u, which gamma = 1 would throw away
_TABLE = "samples"  # u
_TAU = "temperature.tau"  # of methods whose temperature stands still


def is_asked_for(recovery: RecoveryConfig) -> bool:
    """Whether the run has this stage, or takes over another run's."""
    return recovery.mode != "none" or recovery.reuse is not None


def recovery_budget(recovery: RecoveryConfig) -> BudgetConfig:
    """How long the stage steps."""
    return BudgetConfig(epochs=recovery.epochs, steps=recovery.cached_steps if recovery.mode == "cached" else None)


def check_recovery(config: Config, objective: Objective) -> None:
    """
    Raises:
        UserError: recovery is asked for, but the method keeps no u.
    """
    if is_asked_for(config.recovery) and _TABLE not in objective.row_tables():
        raise UserError(
            f"recovery.* recovers u, which objective.method={config.objective.method} does not keep; "
            "use tuneclip or gcl, or set recovery.mode=none."
        )


def recover(parts: RunContext, context: Context, comm_dtype: torch.dtype, folder: Path, facts: Facts) -> Path | None:
    """Runs the stage, or what is left of it.

    Args:
        parts: of the run, with the weights to start from.
        context, comm_dtype: of its objective.
        folder: of the run; the stage's is in it.
        facts: of the run.

    Returns:
        The checkpoint that holds what was recovered; None when a signal has ended the stage early.
    """
    recovery, cached = parts.config.recovery, parts.config.recovery.mode == "cached"
    method, average = _METHODS[recovery.loss], parts.config.objective.section(MovingAverageConfig)
    chosen = {"method": method, "moving_average": average.model_copy(update=_END_OF_SCHEDULE if cached else {})}
    config = parts.config.model_copy(update={"objective": parts.config.objective.model_copy(update=chosen)})
    objective = build_objective(config, context, comm_dtype)
    own = {**facts, "method": method, "mode": recovery.mode}
    parts.communicator.on_rank_zero(lambda: (folder / FOLDER).mkdir(exist_ok=True))
    stage = Stage(parts, objective, folder / FOLDER, recovery_budget(recovery), lambda number, total: 0.0, own)
    with kept_statistics(parts.engine.module):
        if cached and stage.newest() is None:
            _fill_in_blocks(parts, objective, recovery.cached_block)
        return stage.newest() if stage.run() else None


@torch.no_grad()
def _fill_in_blocks(parts: RunContext, objective: Objective, block: int) -> None:
    """One pass over the data without gradients: u of every sample from `block` pairs instead of a batch.

    The weights do not change, so features of many batches may contrast with each other.
    """
    batches_a_block = max(1, block // parts.config.data.batch_size)
    steps = parts.order.steps_per_epoch
    log.info("u is filled from %d batches at a time, %d batches in all", batches_a_block, steps)
    parts.engine.eval()
    held: list[tuple[Tensor, ...]] = []
    for number, batch in enumerate(parts.batches(0, 0, steps)):
        image, text = _features(parts, batch.image, batch.tokens)
        device = parts.communicator.device
        held.append((image, text, batch.index.to(device), batch.valid.to(device)))
        if len(held) == batches_a_block or number + 1 == steps:
            image, text, index, valid = (torch.cat(column) for column in zip(*held, strict=True))
            objective(Features(image, text, index, valid), Step(number, 0, 0.0, 0.0))
            held.clear()


def _features(parts: RunContext, image: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(b, d) float32 features of a rank's batch, by micro-batches."""
    device, size = parts.communicator.device, parts.micro_batch
    found = [
        parts.engine(image[low : low + size].to(device), tokens[low : low + size].to(device))
        for low in range(0, len(image), size)
    ]
    images, texts = zip(*found, strict=True)
    return torch.cat(images), torch.cat(texts)


def take_over(checkpoint: Path, parts: RunContext, objective: Objective) -> None:
    """Fills a fresh engine and objective with what was recovered, as far as `recovery.transfer` says.

    Raises:
        UserError: it was recovered with other weights, another optimizer, or (for u) other data.
    """
    recovery = parts.config.recovery
    meta = read_meta(checkpoint)
    wanted = parts.config.optimizer.name
    if "moments" in recovery.transfer:
        if meta["facts"]["optimizer"] != wanted:
            raise UserError(
                f"{checkpoint} holds moments of optimizer.name={meta['facts']['optimizer']}, this run has {wanted}: "
                "set it back, or give --recovery.transfer='[\"statistics\"]'."
            )
        load_moments(checkpoint / "engine", parts.engine, parts.communicator)
    if "statistics" in recovery.transfer:
        check_data(meta["data"], parts.manifest)
        _check_temperature(checkpoint, objective)
        load_rows(checkpoint, _TABLE, objective.row_tables()[_TABLE])
    log.info("%s are taken over from %s", " and ".join(recovery.transfer) or "no statistics", checkpoint)


def _check_temperature(checkpoint: Path, objective: Objective) -> None:
    states = load_file(checkpoint / "objective.safetensors"), objective.replicated_state()
    found, wanted = (float(state.get(_TAU, torch.nan)) for state in states)
    if found != wanted and not math.isnan(wanted):
        raise UserError(
            f"{checkpoint} holds u at the temperature {found:.6g}, this run has {wanted:.6g}: set "
            "objective.temperature.initial back, or recover anew."
        )


def epochs_behind(recovery: RecoveryConfig) -> int:
    """Epochs of gamma's schedule that training need not repeat."""
    continues = recovery.gamma == "continue" and "statistics" in recovery.transfer
    return int(recovery.epochs) if is_asked_for(recovery) and continues else 0


def find_reused(path: Path, communicator: Communicator) -> Path:
    """The newest checkpoint in a recovery's folder, or the checkpoint that `path` itself is.

    Raises:
        UserError: there is none.
    """

    def find() -> Path:
        own = [path] if is_complete(path) else []
        found = [*own, *(x for at in (path / FOLDER, path) for x in complete_checkpoints(at / "checkpoints"))]
        if not found:
            raise UserError(
                f"recovery.reuse={path} holds no recovered statistics; name a run whose recovery is complete."
            )
        return max(found)

    return communicator.on_rank_zero(find)
