"""Build the loss of a run without a trainer, for programs that run steps or losses on random pairs."""

from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from neuclip_ds.config import Config
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.losses.base import Position
from neuclip_ds.losses.contrastive_loss import ContrastiveLoss


class StepLoss(Protocol):
    """The part of `ContrastiveLoss` that a training step uses; a baseline for comparison has the same interface."""

    metric_tensors: dict[str, Tensor]
    feature_gradient_norm: Tensor | None

    def begin(self, index: Tensor, valid: Tensor | None = None, position: Position | None = None) -> Any:
        """Begin a step before the towers run."""

    def __call__(self, image_features: Tensor, text_features: Tensor, *, pending: Any) -> Any:
        """Return the loss, through which the gradient reaches the features."""

    def undo(self) -> None:
        """Revert the updates of the last step."""


class LossBuilder(Protocol):
    """Function that builds the loss of a run, such as `build_loss`."""

    def __call__(
        self, config: Config, dim: int, samples: int, communicator: Communicator, comm_dtype: torch.dtype
    ) -> StepLoss:
        """Build the loss; the arguments are those of `build_loss`."""


def build_loss(
    config: Config,
    dim: int,
    samples: int,
    communicator: Communicator,
    comm_dtype: torch.dtype,
    *,
    undo: bool = True,
    reduction: Literal["ddp_mean", "sum"] = "ddp_mean",
) -> ContrastiveLoss:
    """Build the loss of a run as the trainer does.

    Args:
        config: the config of the run.
        dim: width of the features.
        samples: size of the training set.
        communicator: communicator between the run's ranks.
        comm_dtype: dtype in which features are sent between ranks.
        undo: whether a step can be reverted, as in the trainer; this copies the replicated state in every step.
        reduction: `sum` for gradients that are not multiplied by the number of ranks.
    """
    comm_dtype_name = str(comm_dtype).removeprefix("torch.")
    return ContrastiveLoss(
        config.objective.model_copy(update={"comm_dtype": comm_dtype_name}),
        dim=dim,
        samples=samples,
        steps_per_epoch=1,  # without effect, because the callers pass the position of every step
        lr=config.optimizer.lr,
        betas=config.optimizer.betas,
        adam_eps=config.optimizer.eps,
        reduction=reduction,
        communicator=communicator,
        undo=undo,
        validate=False,
        spare_row=False,
    )
