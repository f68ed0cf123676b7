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
        # gradients of the mean of the ranks' losses
        image = image / ranks
        text = text / ranks
        squared_norm = image.square().sum() + text.square().sum()
        sums = torch.stack([loss.detach() / ranks, grad_theta / ranks, squared_norm])
        mean_loss, grad_theta, squared_norm = self._communicator.all_reduce(sums, "scalars")
        self._temperature.descend(step, theta=grad_theta)
        metrics = {"tau": tau, "batch_loss": mean_loss, "feature_grad_norm": squared_norm.sqrt()}
        return FeatureGradients(image, text, mean_loss, metrics)

    def _local_loss(self, image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
        """Return the loss of this rank's (b, d) image and text features against the features of all ranks."""
        all_images = self._gather(image)
        all_texts = self._gather(text)
        labels = self._communicator.rank * len(image) + torch.arange(len(image), device=scale.device)
        image_loss = cross_entropy(scale * image @ all_texts.T, labels)
        text_loss = cross_entropy(scale * text @ all_images.T, labels)
        return torch.stack([image_loss, text_loss]).mean()

    def _gather(self, features: Tensor) -> Tensor:
        gathered: Tensor = _GatherWithGradient.apply(features.to(self.comm_dtype), self._communicator)
        return gathered.to(features.dtype)


REFERENCES: dict[str, Callable[[Config, Context, torch.dtype], Objective]] = {"openclip_reference": OpenClipReference}
"""Reference objectives for comparison in profiles, by name."""
