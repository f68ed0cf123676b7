"""Run one training step: features out of the engine, feature gradients back into it.

The engine does not know the objective. It back-propagates K times a scalar whose gradient the objective has computed
in closed form; the factor K cancels DeepSpeed's mean over ranks.

A batch larger than the micro-batch takes two passes. The first keeps features only. After the objective has seen the
whole batch, the second runs each micro-batch again and back-propagates its rows of the feature gradients. Both passes
draw the same dropout, and batch-norm statistics change in the second only, so the result is that of one large pass.
"""

import math
from typing import Any

import torch
from torch import Tensor

from neuclip_ds.data.dataset import Batch
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.ranges import phase_range
from neuclip_ds.errors import TrainingDiverged
from neuclip_ds.loss.autograd import with_gradients
from neuclip_ds.loss.two_pass import kept_statistics
from neuclip_ds.objectives.base import FeatureGradients, Objective, Step
from neuclip_ds.objectives.gather import FeatureGather, Features


class TrainStep:
    """Run batches through engine, objective and optimizers."""

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
        self._micro_batch, self._seed = micro_batch, seed

    def __call__(self, batch: Batch, step: Step) -> FeatureGradients:
        """Update encoders, temperature and normaliser by one global batch.

        Raises `TrainingDiverged` where loss or gradient is not finite; weights are left as they were.
        """
        if not self._engine.module.training:  # train() visits every module
            self._engine.train()
        for group in self._engine.optimizer.param_groups:
            group["lr"] = step.lr
        device = self._communicator.device
        image = batch.image.to(device, non_blocking=True)
        tokens = batch.tokens.to(device, non_blocking=True)
        index, valid = batch.index.to(device), batch.valid.to(device)
        gather = self._objective.begin_gather(index, valid)
        rows = [slice(low, low + self._micro_batch) for low in range(0, len(index), self._micro_batch)]
        if len(rows) == 1:
            self._fix_dropout(step, 0)
            features = self._forward(image, tokens, gather)
            collected = features[0].detach(), features[1].detach()
        else:
            collected = self._first_pass(image, tokens, rows, step, gather)
        with phase_range("objective"):
            gradients = self._objective(Features(*collected, index, valid, gather), step)
        for number, part in enumerate(rows):
            if len(rows) > 1:
                self._fix_dropout(step, number)
                features = self._forward(image[part], tokens[part])
            self._backward(features, gradients, part, last=part is rows[-1])
        # after the backward pass is launched: reading a number makes the host wait for the GPU
        self._check_finite(gradients, batch, step)
        with phase_range("optimizer"):
            self._engine.step()
        return gradients

    def _forward(self, image: Tensor, tokens: Tensor, gather: FeatureGather | None = None) -> tuple[Tensor, Tensor]:
        """Return (b, d) image and text features; `gather` receives each as soon as it is computed."""
        with phase_range("forward"):
            text_ready = gather.add_text if gather is not None else None
            features: tuple[Tensor, Tensor] = self._engine(image, tokens, text_ready)
            if gather is not None:
                gather.add_image(features[0])
        return features

    def _first_pass(
        self, image: Tensor, tokens: Tensor, rows: list[slice], step: Step, gather: FeatureGather | None
    ) -> tuple[Tensor, Tensor]:
        """Return (b, d) image and text features of the whole batch, without a graph."""
        features = []
        with torch.no_grad(), kept_statistics(self._engine.module):
            for number, part in enumerate(rows):
                self._fix_dropout(step, number)
                features.append(self._forward(image[part], tokens[part], gather))
        images, texts = zip(*features, strict=True)
        return torch.cat(images), torch.cat(texts)

    def _backward(self, features: tuple[Tensor, Tensor], gradients: FeatureGradients, rows: slice, last: bool) -> None:
        loss = with_gradients(gradients.loss, features, (gradients.image[rows], gradients.text[rows]))
        self._engine.set_gradient_accumulation_boundary(last)
        with phase_range("backward"):
            self._engine.backward(loss * self._communicator.world_size)

    def _fix_dropout(self, step: Step, micro: int) -> None:
        """Seed dropout by (seed, step, rank, micro-batch): equal in both passes and after a resume."""
        place = step.number * self._communicator.world_size + self._communicator.rank
        seed = ((self._seed * 1_000_003 + place) * 65_537 + micro) % 2**63
        # torch.manual_seed seeds every kind of device, which takes 0.3 ms even without one
        torch.default_generator.manual_seed(seed)
        if self._communicator.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _check_finite(self, gradients: FeatureGradients, batch: Batch, step: Step) -> None:
        loss, norm = float(gradients.loss), float(gradients.metrics["feature_grad_norm"])
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise TrainingDiverged(
                f"step {step.number + 1}: loss {loss} and feature-gradient norm {norm} are not finite at temperature "
                f"{float(gradients.metrics['tau']):.4g}, learning rate {step.lr:.4g}; the weights are "
                f"unchanged by this step. The first samples of rank {self._communicator.rank} are "
                f"{batch.index[:8].tolist()}; events.jsonl lists all. Lower optimizer.lr, or objective.npn.lr if "
                "the log warned of the NPN, and resume from the checkpoint."
            )
