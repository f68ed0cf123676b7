"""One training step, from the batch to the updated weights."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from neuclip_ds.data.loader import RankBatch
from neuclip_ds.distributed.communicator import PHASE, HostCopy
from neuclip_ds.engine.device_batches import DeviceBatch, DeviceBatches
from neuclip_ds.engine.engine import Engine, nan_unless_finite
from neuclip_ds.losses.base import Position
from neuclip_ds.losses.contrastive_loss import ContrastiveLoss
from neuclip_ds.losses.stored_features import REFERENCE


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """Result of training on one global batch; equal on all ranks."""

    loss: float
    """Loss of the global batch."""
    tau: float | None
    """Temperature; the mean if samples have individual temperatures, and None if the loss has no temperature."""
    grad_norm: float
    """Norm of the encoders' gradient; not finite if the step was skipped."""
    applied: bool
    """False if the step was skipped and left all state unchanged."""
    not_finite: list[int]
    """Indices of the samples with non-finite features, on any rank; empty if the step was applied."""


def train_step(
    engine: Engine, loss: ContrastiveLoss, batches: DeviceBatches, batch: DeviceBatch, position: Position
) -> StepOutcome:
    """Train on one batch: update the weights, the temperature and the estimators, or skip the step on all ranks.

    A step whose loss or gradient is not finite is skipped without an extra copy to the host: the gradients become NaN
    on all ranks, and the optimizer rejects them. By then, the loss and batch norm have updated their state, so both are
    restored.

    Args:
        engine: the towers and their optimizer.
        loss: the loss, built with `undo=True`.
        batches: the source of `batch`; the step prefetches the next batch from it.
        batch: this rank's part of the global batch.
        position: position of the step in the run.
    """
    # forward: the features of one tower are sent while the other tower runs
    # docs: step
    pending = loss.begin(batch.host.index, batch.host.valid, position, **_stored_rows(batch.host))
    image, text = engine.encode(batch, pending, position.step)
    with record_function(f"{PHASE}objective"):
        value = loss(image, text, pending=pending)
    # docs: end
    tau = loss.metric_tensors.get("tau")
    scalars = [value.detach()] if tau is None else [value.detach(), tau]
    host_scalars = HostCopy(torch.stack(scalars))  # copied during the backward pass

    # backward: a gradient that is not finite on any rank makes the gradients of all ranks NaN
    assert loss.feature_gradient_norm is not None
    # docs: step
    engine.backward(nan_unless_finite(value, loss.feature_gradient_norm))
    batches.prefetch()  # before the host waits for the norm of the gradient

    # update
    update = engine.step(position.lr)
    # docs: end
    loss_value, *tau_values = host_scalars.wait().tolist()
    not_finite: list[int] = []
    # docs: step
    if not update.applied:
        loss.undo()
        # docs: end
        not_finite = _indices_of_not_finite(image, text, batch.host, engine)
    return StepOutcome(
        loss=loss_value,
        tau=tau_values[0] if tau_values else None,
        grad_norm=update.gradient_norm,
        applied=update.applied,
        not_finite=not_finite,
    )


def _stored_rows(batch: RankBatch) -> dict[str, Any]:
    """Return the stored features of a batch, if it has any, as arguments of `ContrastiveLoss.begin`."""
    rows = {name: features.pair() for name, features in batch.stored.items()}
    if not rows:
        return {}
    reference = rows.pop(REFERENCE, None)
    return {"reference": reference, "teacher": list(rows.values())}


@torch.no_grad()
def _indices_of_not_finite(image: Tensor, text: Tensor, batch: RankBatch, engine: Engine) -> list[int]:
    """Return the indices, from all ranks, of the samples with non-finite values in their (b, d) features."""
    finite = image.isfinite().all(dim=1) & text.isfinite().all(dim=1)
    indices = batch.index[batch.valid & ~finite.cpu()].tolist()
    all_indices: list[int] = []
    for indices_of_rank in engine.communicator.gather_objects(indices):
        all_indices.extend(indices_of_rank)
    return all_indices
