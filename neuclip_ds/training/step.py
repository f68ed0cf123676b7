"""Run one training step: take the features from the engine, and pass the loss back to the engine.

The engine does not know the objective: it backpropagates a scalar whose gradients the objective has computed in closed
form. The scalar is multiplied by the number of ranks, because DeepSpeed averages the gradients over ranks.

A step whose loss or gradient is not finite is skipped without an extra copy to the host: a non-finite loss or norm
makes the gradient NaN, which the optimizer rejects on all ranks. By then the objective and batch norm have updated
their state, so both are restored.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import record_function

from neuclip_ds.data.dataset import Batch
from neuclip_ds.data.loader import RankBatch
from neuclip_ds.distributed.communicator import PHASE, Communicator, HostCopy
from neuclip_ds.engine.device_batches import DeviceBatch, DeviceBatches
from neuclip_ds.engine.engine import Engine
from neuclip_ds.loss.two_pass import with_gradients
from neuclip_ds.objectives.base import FeatureGradients, Objective, Step
from neuclip_ds.objectives.gather import FeatureGather, Features


@dataclass(frozen=True)
class StepOutcome:
    """Result of one global batch; equal on all ranks except for the gradients."""

    gradients: FeatureGradients
    loss: float  # loss of the global batch
    tau: float  # the mean if samples have individual temperatures
    grad_norm: float  # norm of the encoders' gradient; not finite if the step was skipped
    applied: bool  # False if the step was skipped and left all state unchanged
    not_finite: list[int]  # indices of samples on all ranks with non-finite features, if the step was skipped


class TrainStep:
    """Runs batches through the engine, the objective and the optimizers.

    Attributes:
        batches: copies batches to the device; each step prefetches the next batch.
    """

    def __init__(self, engine: Engine, objective: Objective, communicator: Communicator, micro_batch: int) -> None:
        """
        Args:
            engine: engine of the encoders.
            objective, communicator: the objective, which computes feature gradients, and the objective's communicator.
            micro_batch: number of rows that go through the towers at once; must divide the rank's batch size.
        """
        self._engine = engine
        self._objective = objective
        self._communicator = communicator
        self.batches = DeviceBatches(communicator.device, micro_batch)

    def __call__(self, batch: Batch | DeviceBatch, step: Step) -> StepOutcome:
        """Update the encoders, temperature and normalizers, unless the batch's loss or gradient is not finite."""
        if isinstance(batch, Batch):
            self.batches.start(iter([RankBatch([batch])]))
            batch = next(self.batches)
        index = batch.host.index
        valid = batch.host.valid
        restore_objective = self._objective.restore_point()
        gather = self._objective.begin_gather(index, valid)
        image, text = self._engine.encode(batch, _PendingGather(gather), step.number)
        with record_function(f"{PHASE}objective"):
            features = Features(image.detach(), text.detach(), index, valid, gather)
            gradients = self._objective(features, step)
        scalars = HostCopy(torch.stack([gradients.loss, gradients.metrics["tau"]]))  # copied during the backward pass
        one_or_nan = 1 + 0 * (gradients.loss + gradients.metrics["feature_grad_norm"])
        value = with_gradients(gradients.loss, [image, text], [gradients.image, gradients.text])
        self._engine.backward(value * (self._communicator.world_size * one_or_nan))
        self.batches.prefetch()  # before the host waits for the gradient's norm
        norm, applied = self._engine.step(step.lr)
        loss, tau = scalars.wait().tolist()
        not_finite: list[int] = []
        if not applied:
            restore_objective()
            not_finite = self._not_finite(features, batch.host)
        return StepOutcome(gradients, loss, tau, norm, applied, not_finite)

    @torch.no_grad()
    def _not_finite(self, features: Features, batch: RankBatch) -> list[int]:
        """Return the indices, from all ranks, of samples with non-finite features."""
        finite_rows = [side.isfinite().all(dim=1) for side in (features.image, features.text)]
        finite = torch.stack(finite_rows).all(dim=0).cpu()
        rank_indices = self._communicator.gather_objects(batch.index[batch.valid & ~finite].tolist())
        return [index for indices in rank_indices for index in indices]


class _PendingGather:
    """The gather of an objective, which starts reads of per-sample state by itself, or none."""

    def __init__(self, gather: FeatureGather | None) -> None:
        self._gather = gather

    def add_text(self, rows: Tensor) -> None:
        if self._gather is not None:
            self._gather.add_text(rows)

    def add_image(self, rows: Tensor) -> None:
        if self._gather is not None:
            self._gather.add_image(rows)

    def begin_reads(self) -> None:
        pass
