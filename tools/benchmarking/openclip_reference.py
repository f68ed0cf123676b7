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

from neuclip_ds.config import Config
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.losses.base import Context, FeatureGradients, Objective, Step
from neuclip_ds.losses.gather import Features
from neuclip_ds.losses.options import AdamSettings
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


class OpenClipReference(Objective):
    """Objective whose feature gradients come from autograd through the gather, with the loss of each rank's rows."""

    def __init__(self, config: Config, context: Context, comm_dtype: torch.dtype) -> None:
        adam = AdamSettings(config.optimizer.betas, config.optimizer.eps)
        self._temperature = LearnableTemperature(config.objective, context._replace(adam=adam))
        super().__init__(context, {"": self._temperature})
        self.comm_dtype = comm_dtype

    def begin_gather(self, index: Tensor, valid: Tensor) -> None:
        """Do nothing: autograd must record the gather, so features are sent once all of them are computed."""

    def __call__(self, features: Features, step: Step) -> FeatureGradients:
        """Return the gradient of the global loss; update the temperature.

        Raises:
            ValueError: the batch has an invalid row, which this scheme cannot skip.
        """
        if not bool(features.valid.all()):
            raise ValueError(
                "OpenCLIP's scheme cannot skip invalid samples: give it batches whose samples are all valid."
            )
        tau = self._temperature.tau
        with torch.enable_grad():
            image, text = (x.detach().requires_grad_() for x in (features.image, features.text))
            theta = tau.log().neg().requires_grad_()
            loss = self._local_loss(image, text, scale=theta.exp())
        image, text, grad_theta = torch.autograd.grad(loss, [image, text, theta])
        ranks = self._communicator.world_size
        image, text = image / ranks, text / ranks  # gradients of the mean of the ranks' losses
        square = image.square().sum() + text.square().sum()
        sums = torch.stack([loss.detach() / ranks, grad_theta / ranks, square])
        mean_loss, grad_theta, square = self._communicator.all_reduce(sums, "scalars")
        self._temperature.descend(step, theta=grad_theta)
        metrics = {"tau": tau, "batch_loss": mean_loss, "feature_grad_norm": square.sqrt()}
        return FeatureGradients(image, text, mean_loss, metrics)

    def _local_loss(self, *features: Tensor, scale: Tensor) -> Tensor:
        """Return the loss of this rank's (b, d) image and text features against the features of all ranks."""
        sent = (_GatherWithGradient.apply(x.to(self.comm_dtype), self._communicator) for x in features)
        columns = [x.to(features[0].dtype) for x in sent]
        labels = self._communicator.rank * len(features[0]) + torch.arange(len(features[0]), device=scale.device)
        logits = (scale * rows @ x.T for rows, x in zip(features, reversed(columns), strict=True))
        return torch.stack([cross_entropy(x, labels) for x in logits]).mean()


REFERENCES: dict[str, Callable[[Config, Context, torch.dtype], Objective]] = {"openclip_reference": OpenClipReference}
"""Reference objectives for comparison in profiles, by name."""
