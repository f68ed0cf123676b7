"""Run one training step: features out of the engine, feature gradients back into it.

The engine does not know the objective. It back-propagates K times a scalar whose gradient the objective has computed
in closed form; the factor K cancels DeepSpeed's mean over ranks.

A batch larger than the micro-batch takes two passes. The first keeps features only. After the objective has seen the
whole batch, the second runs each micro-batch again and back-propagates its rows of the feature gradients; a frozen
tower runs in the first only, except under ZeRO 3. Both passes draw the same dropout, and batch-norm statistics change
in the second only, so the result is that of one large pass. The device holds the pixels of two micro-batches at a time
(device_batches.py).

A step whose loss or gradient is not finite is skipped. No rank reads a number to find out: a loss or a norm that is not
finite makes the gradient NaN, and the optimizer refuses such a gradient on all ranks alike. The objective has learned
by then, so its state, and the statistics of batch norm, are restored.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from neuclip_ds.data.dataset import Batch
from neuclip_ds.data.rank_batch import RankBatch
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.ranges import phase_range
from neuclip_ds.engine.optimizers import set_learning_rate
from neuclip_ds.engine.update import update_weights
from neuclip_ds.engine.zero import fetches_weights
from neuclip_ds.loss.autograd import with_gradients
from neuclip_ds.loss.two_pass import kept_statistics, running_statistics
from neuclip_ds.models.trained_parts import TOWERS
from neuclip_ds.objectives.base import FeatureGradients, Objective, Step
from neuclip_ds.objectives.gather import FeatureGather, Features
from neuclip_ds.state.host_copy import HostCopy
from neuclip_ds.training.device_batches import DeviceBatch, DeviceBatches


class StepOutcome(NamedTuple):
    """What one global batch gave; equal on all ranks but for the gradients."""

    gradients: FeatureGradients
    loss: float  # of the global batch
    tau: float  # the mean where samples have their own
    grad_norm: float  # of the encoders; not finite where the step was skipped
    applied: bool  # False where the step was skipped: all state is as before it
    not_finite: list[int]  # of a skipped step: indices of the samples whose features are not finite, over all ranks


class TrainStep:
    """Run batches through engine, objective and optimizers.

    Attributes:
        copies: brings batches to the device, before their step where it is given the batches to come.
    """

    def __init__(
        self, engine: Any, objective: Objective, communicator: Communicator, micro_batch: int, seed: int
    ) -> None:
        """
        Args:
            engine: DeepSpeed's engine around a `DualEncoder`, with gradient_accumulation_steps 1.
            objective, communicator: what turns features into their gradients, and its ranks.
            micro_batch: rows that go through the towers at once; divides the rank's batch.
            seed: of dropout.
        """
        self._engine, self._objective, self._communicator = engine, objective, communicator
        self.copies, self._seed = DeviceBatches(communicator.device, micro_batch), seed
        self._statistics = running_statistics(engine.module)
        every = fetches_weights(engine.module)
        towers = (getattr(engine.module, name, engine.module) for name in TOWERS)
        self._runs_twice = [every or any(weight.requires_grad for weight in tower.parameters()) for tower in towers]

    def __call__(self, batch: Batch | DeviceBatch, step: Step) -> StepOutcome:
        """Update encoders, temperature and normaliser by one global batch, or skip it where it is not finite."""
        if isinstance(batch, Batch):
            batch = self.copies.begin(RankBatch([batch]))
        if not self._engine.module.training:  # train() visits every module
            self._engine.train()
        set_learning_rate(self._engine.optimizer, step.lr)
        restore = self._restore_point()
        index, valid = batch.host.index, batch.host.valid
        gather = self._objective.begin_gather(index, valid)
        rows = batch.rows
        micro_batches = batch.micro_batches(passes=1 if len(rows) == 1 else 2)
        features: tuple[Tensor | None, Tensor | None]
        if len(rows) == 1:
            self._fix_dropout(step, 0)
            features = image, text = self._forward(*next(micro_batches), gather)
            collected = image.detach(), text.detach()
        else:
            collected = self._first_pass(micro_batches, len(rows), step, gather)
        with phase_range("objective"):
            gradients = self._objective(Features(*collected, index, valid, gather), step)
        scalars = HostCopy(torch.stack([gradients.loss, gradients.metrics["tau"]]))  # arrive during the backward pass
        one_or_nan = 1 + 0 * (gradients.loss + gradients.metrics["feature_grad_norm"])
        for number, part in enumerate(rows):
            if len(rows) > 1:
                self._fix_dropout(step, number)
                features = self._second_pass(*next(micro_batches))
            self._backward(features, gradients, part, one_or_nan, last=part is rows[-1])
        with phase_range("optimizer"):
            norm, applied = update_weights(self._engine)
        loss, tau = scalars.wait().tolist()
        if applied:
            return StepOutcome(gradients, loss, tau, norm, applied, [])
        restore()
        return StepOutcome(gradients, loss, tau, norm, applied, self._not_finite(collected, batch.host))

    def _restore_point(self) -> Callable[[], None]:
        """Return what undoes a skipped step in the objective and in batch norm."""
        restore_objective = self._objective.restore_point()
        before = [statistic.clone() for statistic in self._statistics]

        def restore() -> None:
            restore_objective()
            for statistic, value in zip(self._statistics, before, strict=True):
                statistic.copy_(value)

        return restore

    def _forward(self, image: Tensor, tokens: Tensor, gather: FeatureGather | None = None) -> tuple[Tensor, Tensor]:
        """Return (b, d) image and text features; `gather` receives each as soon as it is computed."""
        with phase_range("forward"):
            text_ready = gather.add_text if gather is not None else None
            features: tuple[Tensor, Tensor] = self._engine(image, tokens, text_ready)
            if gather is not None:
                gather.add_image(features[0])
        return features

    def _first_pass(
        self, micro_batches: Iterator[tuple[Tensor, Tensor]], count: int, step: Step, gather: FeatureGather | None
    ) -> tuple[Tensor, Tensor]:
        """Return (b, d) image and text features of `count` micro-batches, the whole batch, without a graph."""
        features = []
        with torch.no_grad(), kept_statistics(self._engine.module):
            for number in range(count):
                self._fix_dropout(step, number)
                features.append(self._forward(*next(micro_batches), gather))
        images, texts = zip(*features, strict=True)
        return torch.cat(images), torch.cat(texts)

    def _second_pass(self, image: Tensor, tokens: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return features with a graph; None of a frozen tower that need not run again."""
        inputs = [x if again else None for x, again in zip((image, tokens), self._runs_twice, strict=True)]
        with phase_range("forward"):
            features: tuple[Tensor | None, Tensor | None] = self._engine(*inputs, None)
        return features

    def _backward(
        self,
        features: tuple[Tensor | None, Tensor | None],
        gradients: FeatureGradients,
        rows: slice,
        factor: Tensor,
        last: bool,
    ) -> None:
        sides = zip(features, (gradients.image, gradients.text), strict=True)
        learning = [(x, gradient[rows]) for x, gradient in sides if x is not None and x.requires_grad]
        loss = with_gradients(gradients.loss, *zip(*learning, strict=True))
        self._engine.set_gradient_accumulation_boundary(last)
        with phase_range("backward"):
            self._engine.backward(loss * (self._communicator.world_size * factor))

    def _fix_dropout(self, step: Step, micro: int) -> None:
        """Seed dropout by (seed, step, rank, micro-batch): equal in both passes and after a resume."""
        place = step.number * self._communicator.world_size + self._communicator.rank
        seed = ((self._seed * 1_000_003 + place) * 65_537 + micro) % 2**63
        # torch.manual_seed seeds every kind of device, which takes 0.3 ms even without one
        torch.default_generator.manual_seed(seed)
        if self._communicator.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    @torch.no_grad()
    def _not_finite(self, features: tuple[Tensor, Tensor], batch: RankBatch) -> list[int]:
        """Return the indices of samples with (b, d) features that are not finite, over all ranks."""
        finite = torch.stack([side.isfinite().all(dim=1) for side in features]).all(dim=0).cpu()
        found = self._communicator.gather_objects(batch.index[batch.valid & ~finite].tolist())
        return [index for of_rank in found for index in of_rank]
