"""Run one training step: take the features from the engine, and pass their gradients back to the engine.

The engine does not know the objective: it backpropagates a scalar whose gradients the objective has computed in closed
form. The scalar is multiplied by the number of ranks, because DeepSpeed averages the gradients over ranks.

If a rank's batch is larger than the micro-batch, the towers run twice (loss/two_pass.py), with the objective between
the two passes. Dropout is seeded by (seed, step, rank, micro-batch). A frozen tower runs only in the first pass, except
under ZeRO 3. The device stores the pixels of at most two micro-batches (batches.py).

A step whose loss or gradient is not finite is skipped without an extra copy to the host: a non-finite loss or norm
makes the gradient NaN, which the optimizer rejects on all ranks. By then the objective and batch norm have updated
their state, so both are restored.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from neuclip_ds.data.dataset import Batch
from neuclip_ds.data.loader import RankBatch
from neuclip_ds.distributed.communicator import PHASE, Communicator, HostCopy
from neuclip_ds.engine.update import set_learning_rate, update_weights
from neuclip_ds.engine.zero import fetches_weights
from neuclip_ds.loss.two_pass import MicroBatches, with_gradients
from neuclip_ds.losses.batch_norm import batch_norms
from neuclip_ds.models.trained_parts import TOWERS
from neuclip_ds.objectives.base import FeatureGradients, Objective, Step
from neuclip_ds.objectives.gather import FeatureGather, Features
from neuclip_ds.training.batches import DeviceBatch, DeviceBatches


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

    def __init__(
        self, engine: Any, objective: Objective, communicator: Communicator, micro_batch: int, seed: int
    ) -> None:
        """
        Args:
            engine: DeepSpeed engine that wraps a `DualEncoder`; gradient_accumulation_steps must be 1.
            objective, communicator: the objective, which computes feature gradients, and the objective's communicator.
            micro_batch: number of rows that go through the towers at once; must divide the rank's batch size.
            seed: seed for dropout.
        """
        self._engine, self._objective, self._communicator = engine, objective, communicator
        self.batches, self._seed = DeviceBatches(communicator.device, micro_batch), seed
        self._batch_norms = batch_norms(engine.module)
        self._statistics = [buffer for layer in self._batch_norms for buffer in layer.buffers()]
        every = fetches_weights(engine.module)
        towers = (getattr(engine.module, name, engine.module) for name in TOWERS)
        self._runs_twice = [every or any(weight.requires_grad for weight in tower.parameters()) for tower in towers]

    def __call__(self, batch: Batch | DeviceBatch, step: Step) -> StepOutcome:
        """Update the encoders, temperature and normalizers, unless the batch's loss or gradient is not finite."""
        if isinstance(batch, Batch):
            self.batches.start(iter([RankBatch([batch])]))
            batch = next(self.batches)
        if not self._engine.module.training:  # train() visits every module
            self._engine.train()
        set_learning_rate(self._engine.optimizer, step.lr)
        restore = self._restore_point()
        index, valid = batch.host.index, batch.host.valid
        gather = self._objective.begin_gather(index, valid)
        rows = batch.rows
        micro_batches = batch.micro_batches(passes=1 if len(rows) == 1 else 2)
        passes = MicroBatches(self._batch_norms)
        for number in range(len(rows)):
            self._fix_dropout(step, number)
            with passes.features() if len(rows) > 1 else nullcontext():
                features = self._forward(*next(micro_batches), gather)
            passes.add(*features)
        collected = passes.whole()
        with record_function(f"{PHASE}objective"):
            gradients = self._objective(Features(*collected, index, valid, gather), step)
        passes.differentiated(gradients.image, gradients.text)
        scalars = HostCopy(torch.stack([gradients.loss, gradients.metrics["tau"]]))  # copied during the backward pass
        one_or_nan = 1 + 0 * (gradients.loss + gradients.metrics["feature_grad_norm"])
        if len(rows) == 1:
            self._backward(gradients.loss, passes.learning(*features), one_or_nan, last=True)
        else:
            for _ in rows:
                with passes.gradients():
                    learning = passes.learning(*self._second_pass(*next(micro_batches)))
                    self._backward(gradients.loss, learning, one_or_nan, passes.is_last)
        self.batches.prefetch()  # before the host waits for the gradient's norm
        with record_function(f"{PHASE}optimizer"):
            norm, applied = update_weights(self._engine)
        loss, tau = scalars.wait().tolist()
        if applied:
            return StepOutcome(gradients, loss, tau, norm, applied, [])
        restore()
        return StepOutcome(gradients, loss, tau, norm, applied, self._not_finite(collected, batch.host))

    def _restore_point(self) -> Callable[[], None]:
        """Return a function that restores the state of the objective and of batch norm after a skipped step."""
        restore_objective = self._objective.restore_point()
        before = [statistic.clone() for statistic in self._statistics]

        def restore() -> None:
            restore_objective()
            for statistic, value in zip(self._statistics, before, strict=True):
                statistic.copy_(value)

        return restore

    def _forward(self, image: Tensor, tokens: Tensor, gather: FeatureGather | None = None) -> tuple[Tensor, Tensor]:
        """Return the (b, d) features of images and texts; `gather` receives each tensor as soon as it is computed."""
        with record_function(f"{PHASE}forward"):
            text_ready = gather.add_text if gather is not None else None
            features: tuple[Tensor, Tensor] = self._engine(image, tokens, text_ready)
            if gather is not None:
                gather.add_image(features[0])
        return features

    def _second_pass(self, image: Tensor, tokens: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the features with their autograd graph, or None for a frozen tower that need not run again."""
        inputs = [x if again else None for x, again in zip((image, tokens), self._runs_twice, strict=True)]
        with record_function(f"{PHASE}forward"):
            features: tuple[Tensor | None, Tensor | None] = self._engine(*inputs, None)
        return features

    def _backward(self, loss: Tensor, learning: tuple[list[Tensor], list[Tensor]], factor: Tensor, last: bool) -> None:
        """Backpropagate the feature gradients, multiplied by a factor; `last` marks the last call of a step."""
        scalar = with_gradients(loss, *learning)
        self._engine.set_gradient_accumulation_boundary(last)
        with record_function(f"{PHASE}backward"):
            self._engine.backward(scalar * (self._communicator.world_size * factor))

    def _fix_dropout(self, step: Step, micro: int) -> None:
        """Seed dropout with (seed, step, rank, micro-batch), so both passes and a resumed run draw the same masks."""
        place = step.number * self._communicator.world_size + self._communicator.rank
        seed = ((self._seed * 1_000_003 + place) * 65_537 + micro) % 2**63
        # torch.manual_seed seeds every kind of device, which takes 0.3 ms even without a GPU
        torch.default_generator.manual_seed(seed)
        if self._communicator.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    @torch.no_grad()
    def _not_finite(self, features: tuple[Tensor, Tensor], batch: RankBatch) -> list[int]:
        """Return the indices, from all ranks, of samples with non-finite features; `features` holds (b, d) tensors."""
        finite = torch.stack([side.isfinite().all(dim=1) for side in features]).all(dim=0).cpu()
        found = self._communicator.gather_objects(batch.index[batch.valid & ~finite].tolist())
        return [index for of_rank in found for index in of_rank]
