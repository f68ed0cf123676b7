"""OpenCLIP's loss with OpenCLIP's communication scheme: a baseline for the closed form, not a method for training.

Features are gathered with gradients (`--gather-with-grad`), so that autograd runs a reduce-scatter of (B, d) for images
and one for texts. With a local loss (`--local-loss`), a rank contrasts its local rows with all columns. The gradients
and the temperature equal those of the method `openclip`.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn.functional import cross_entropy

from benchmarking.run_loss import LossBuilder
from neuclip_ds.config import Config
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.losses.accumulate import with_gradients
from neuclip_ds.losses.base import AdamSettings, LossContext, Position
from neuclip_ds.losses.gather import PendingBatch
from neuclip_ds.losses.temperature import LearnableTemperature


class _GatherWithGradient(torch.autograd.Function):
    """All-gather (b, d) to (K b, d); the gradient of a rank's rows is summed over the copies on all ranks."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, communicator: Communicator) -> Tensor:
        ctx.communicator = communicator  # type: ignore[attr-defined]
        return communicator.all_gather(x, "features")

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        communicator: Communicator = ctx.communicator  # type: ignore[attr-defined]
        return communicator.reduce_scatter(gradient, "feature gradients"), None


class OpenClipReference:
    """Loss whose feature gradients come from autograd, which differentiates each rank's local loss through the gather.

    It implements the part of the interface of `ContrastiveLoss` that a training step uses. The feature gradients are
    scaled so that the mean over ranks of the weights' gradients is the gradient of the global loss, as with
    `reduction="ddp_mean"`.
    """

    def __init__(
        self,
        config: Config,
        dim: int,
        samples: int,
        communicator: Communicator,
        comm_dtype: torch.dtype,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Build the loss; `dtype` is the temperature's dtype, and the other arguments are those of `build_loss`."""
        context = LossContext(
            dim=dim,
            samples=samples,
            communicator=communicator,
            dtype=dtype,
            adam=AdamSettings(config.optimizer.betas, config.optimizer.eps),
        )
        self._communicator = communicator
        self._comm_dtype = comm_dtype
        self._temperature = LearnableTemperature(config.objective, context)
        self._restore: Callable[[], None] | None = None  # reverts the last step
        self.metric_tensors: dict[str, Tensor] = {}
        self.feature_gradient_norm: Tensor | None = None

    def begin(self, index: Tensor, valid: Tensor | None = None, position: Position | None = None) -> PendingBatch:
        """Return a batch that sends nothing: autograd must record the gather, once all features are computed.

        Raises:
            ValueError: the batch has an invalid row, which this scheme cannot skip.
        """
        if valid is None:
            valid = torch.ones(len(index), dtype=torch.bool)
        if not bool(valid.all()):
            raise ValueError(
                "OpenCLIP's scheme cannot skip invalid samples: give it batches whose samples are all valid."
            )
        assert position is not None, "the learning rate of the temperature depends on the position"
        self._restore = self._temperature.restore_point()
        return PendingBatch(
            index=index,
            valid=valid,
            position=position,
            communicator=self._communicator.single_rank(),
            comm_dtype=None,
            begin_reads=None,
        )

    def __call__(self, image_features: Tensor, text_features: Tensor, *, pending: PendingBatch) -> Tensor:
        """Return the loss of the global batch, the same on all ranks; update the temperature."""
        loss, image_gradient, text_gradient = self._forward(image_features, text_features, pending.position)
        return with_gradients(loss, (image_features, text_features), (image_gradient, text_gradient))

    def undo(self) -> None:
        """Revert the last step's update of the temperature."""
        assert self._restore is not None, "there is no step to revert"
        self._restore()
        self._restore = None

    @torch.no_grad()
    def _forward(self, image_features: Tensor, text_features: Tensor, position: Position) -> list[Tensor]:
        """Update tau; return the global loss and the local loss's gradients with respect to image and text."""
        tau = self._temperature.tau
        with torch.enable_grad():
            image = image_features.detach().requires_grad_()
            text = text_features.detach().requires_grad_()
            theta = tau.log().neg().requires_grad_()
            local_loss = self._local_loss(image, text, scale=theta.exp())
        image_gradient, text_gradient, grad_theta = torch.autograd.grad(local_loss, [image, text, theta])

        # the global loss is the mean of the ranks' losses
        ranks = self._communicator.world_size
        square = (image_gradient / ranks).square().sum() + (text_gradient / ranks).square().sum()
        sums = torch.stack([local_loss.detach() / ranks, grad_theta / ranks, square])
        loss, grad_theta, square = self._communicator.all_reduce(sums, "scalars")
        self._temperature.descend(position, theta=grad_theta)
        self.feature_gradient_norm = square.sqrt()
        self.metric_tensors = {"tau": tau, "batch_loss": loss, "feature_grad_norm": self.feature_gradient_norm}
        return [loss, image_gradient, text_gradient]

    def _local_loss(self, image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
        """Return the loss of this rank's (b, d) image and text features against the features of all ranks."""
        all_images = self._gather(image)
        all_texts = self._gather(text)
        first = self._communicator.rank * len(image)
        labels = torch.arange(first, first + len(image), device=scale.device)
        image_loss = cross_entropy(scale * image @ all_texts.T, labels)
        text_loss = cross_entropy(scale * text @ all_images.T, labels)
        return torch.stack([image_loss, text_loss]).mean()

    def _gather(self, features: Tensor) -> Tensor:
        sent = features.to(self._comm_dtype)
        gathered: Tensor = _GatherWithGradient.apply(sent, self._communicator)
        return gathered.to(features.dtype)


REFERENCES: dict[str, LossBuilder] = {"openclip_reference": OpenClipReference}
"""Baselines for comparison in profiles, by name."""
