"""Losses from outside the package: a function of gathered features, differentiated by autograd."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from neuclip_ds.losses.arithmetic import leaf_of
from neuclip_ds.losses.base import LossContext, LossFunction, LossOutput, Position
from neuclip_ds.losses.gather import GatheredFeatures
from neuclip_ds.losses.method import LossBuilder
from neuclip_ds.losses.options import ObjectiveConfig

FeatureLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function (image features (B, d), text features (B, d), sample indices (B,) in host memory) -> 0-dim loss.

The rows are those of the global batch, in the same order on all ranks; row i of both tensors is a pair.
"""


def autograd_loss(function: FeatureLoss) -> LossBuilder:
    """Return a builder of a loss without state, for `ContrastiveLoss` and `register_loss`.

    The builder ignores its arguments. To use options, call `autograd_loss` inside your own builder
    (docs/how-to/custom_loss.md). Computing the loss raises `TypeError` if the function does not return a scalar tensor
    that depends on the features.

    Args:
        function: the loss as a function of the (B, d) image features, the (B, d) text features and the (B,) sample
            indices of the global batch. Row i of both tensors is a pair. The features are on the device of the training
            batch, and the indices are in host memory. In calls without `index`, each index is the size of the training
            set (`samples`, 0 by default). The function returns a 0-dim tensor. Every rank calls it with the same
            arguments.

    Returns:
        A builder to pass to `ContrastiveLoss` or `register_loss`; it is called with the options and sizes of the loss
        when the loss is built.

    Example:
        import torch
        from neuclip_ds import ContrastiveLoss, autograd_loss


        def mean_distance(image, text, index):
            return (image - text).square().sum(dim=1).mean()


        loss_fn = ContrastiveLoss(autograd_loss(mean_distance), dim=64)
        image, text = torch.nn.functional.normalize(torch.randn(2, 8, 64), dim=2).requires_grad_()
        loss_fn(image, text).backward()
    """

    return partial(_build, function)


def _build(function: FeatureLoss, config: ObjectiveConfig, context: LossContext) -> LossFunction:
    return AutogradLoss(function)


class AutogradLoss(LossFunction):
    """A loss that autograd differentiates with respect to the features of the global batch.

    Every rank computes the loss of the whole batch and keeps its rows of the gradient. The result is therefore exact on
    any number of ranks, but each rank does the work of all ranks.

    Args:
        function: the loss as a function of the features.
    """

    def __init__(self, function: FeatureLoss) -> None:
        super().__init__({})
        self._function = function

    def __call__(self, batch: GatheredFeatures, position: Position, training: bool) -> LossOutput:
        with torch.inference_mode(False), torch.enable_grad():
            image = leaf_of(batch.image)
            text = leaf_of(batch.text)
            loss = self._function(image, text, batch.index)
        if not isinstance(loss, Tensor):
            raise TypeError(f"The loss must be a 0-dim tensor, but the function returned {type(loss).__name__}.")
        if loss.ndim:
            raise TypeError(
                f"The loss must be a scalar, but the function returned a tensor of shape {tuple(loss.shape)}."
            )
        if not loss.requires_grad:
            raise TypeError(
                "The loss must depend on the features, but the function's result does not require a gradient: compute "
                "it from the features, without detach() or torch.no_grad()."
            )
        image_gradient, text_gradient = torch.autograd.grad(
            loss, (image, text), allow_unused=True, materialize_grads=True
        )
        gradient_norm = (image_gradient.square().sum() + text_gradient.square().sum()).sqrt()
        return LossOutput(
            loss=loss.detach(),
            image_gradient=image_gradient[batch.local],
            text_gradient=text_gradient[batch.local],
            gradient_norm=gradient_norm,
            metrics={"feature_grad_norm": gradient_norm},
        )
