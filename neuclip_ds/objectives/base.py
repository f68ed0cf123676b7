"""Inputs and outputs of an objective, and the protocols that its parts implement.

Shapes: b rows on this rank, K ranks, B valid rows over all ranks, d features. Direction 0 means image anchors
(contrasted with texts), direction 1 text anchors (contrasted with images); `(2, B)` tensors hold one row for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.objectives.gather import FeatureGather, Features, GatheredFeatures
from neuclip_ds.objectives.temperature_config import AdamSettings
from neuclip_ds.state.partition import RowTable


class Step(NamedTuple):
    """Position of a call in the run."""

    number: int  # 0-based
    epoch: int
    lr: float  # the encoders' learning rate of this step
    peak_lr: float  # and its largest value
    progress: float = 0.0  # share of the run that is done, in [0, 1)
    learn: bool = True  # False reports the loss, and leaves normaliser and temperature as they are


class FeatureGradients(NamedTuple):
    """Gradient of the global-batch loss with respect to this rank's features, and what to log."""

    image: Tensor  # (b, d)
    text: Tensor  # (b, d)
    loss: Tensor  # 0-dim, of the global batch, equal on all ranks
    metrics: dict[str, Tensor]  # name -> 0-dim, equal on all ranks


class Context(NamedTuple):
    """Sizes, ranks and settings that the parts of an objective are built with, besides their own options."""

    dim: int  # d
    samples: int  # n of the data set
    communicator: Communicator
    dtype: torch.dtype = torch.float32
    temperature: float | None = 0.07  # of the encoders; None if their checkpoint has none
    bias: float | None = -10.0  # of SigLIP's logits, likewise
    comm_dtype: torch.dtype = torch.float32  # precision in which features travel
    adam: AdamSettings = AdamSettings()  # of the temperature
    own_optimizers: bool = True  # False leaves gradients in `.grad` of `parameters()` for the caller's optimizer


class Stateful(Protocol):
    """State that a checkpoint saves: equal on all ranks, or partitioned by rows; and what of it is trained."""

    def replicated_state(self) -> dict[str, Tensor]: ...

    def load_replicated_state(self, state: Mapping[str, Tensor]) -> None: ...

    def row_tables(self) -> dict[str, RowTable]: ...

    def parameters(self) -> dict[str, Parameter]: ...


class PerSample(Protocol):
    """State by sample index, which is read while the encoders still run."""

    def prefetch(self, padded_index: Tensor) -> None:
        """Start to read what the next call needs; (K b,) indices of the batch, -1 for rows that do not count."""
        ...


class NoState:
    """No state; a part that has some kinds of state overrides their methods."""

    def prefetch(self, padded_index: Tensor) -> None:
        """Read nothing: there is no state by sample."""

    def replicated_state(self) -> dict[str, Tensor]:
        return {}

    def load_replicated_state(self, state: Mapping[str, Tensor]) -> None:
        """Load nothing: there is no replicated state."""

    def row_tables(self) -> dict[str, RowTable]:
        return {}

    def parameters(self) -> dict[str, Parameter]:
        return {}


class NormalizerOutput(NamedTuple):
    """Estimates of a normaliser for one batch.

    The feature gradient is that of `1/B sum_i exp(log_weight_i) g_i` over both directions with the weights held
    constant, plus `feature_grad` where the estimate itself moves with the features.
    """

    log_weight: Tensor  # (2, B): log w of every anchor of the global batch
    value: Tensor  # (2, local): per-anchor loss, whose mean over anchors the method reports
    tau_term: Tensor  # (2, local): per-anchor part of d loss / d tau that is not the data term
    metrics: dict[str, Tensor]  # name -> 0-dim, equal on all ranks
    feature_grad: tuple[Tensor, Tensor] | None = None  # (local, d) image, (local, d) text; before the method's scale
    local_metrics: Mapping[str, Tensor] = {}  # name -> (2, local): logged as their mean over all anchors


class Normalizer(Stateful, PerSample, Protocol):
    """Estimator of the anchors' normalisers; each has a file in `objectives/normalizers/`."""

    def __call__(self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor, step: Step) -> NormalizerOutput:
        """Estimate the normalisers of a batch, and update the estimator.

        Args:
            batch: the gathered features.
            log_g: (2, local), log of the batch's mean over negatives for this rank's anchors.
            tau: temperature, 0-dim if shared by all anchors, else (2, B).
            step: where in the run.
        """
        ...

    def log_estimate(self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor) -> Tensor:
        """Return the current estimate of g for this rank's anchors without changing state; arguments as in the call.

        Returns:
            (2, local): its logarithm, -inf where there is no estimate yet.
        """
        ...


class Objective(Stateful, Protocol):
    """Function from this rank's features to the gradient of the global loss with respect to them.

    Its own parameters (temperature, NPN) live outside the DeepSpeed engine and are updated in the call.

    Attributes:
        comm_dtype: precision in which features travel between ranks.
    """

    comm_dtype: torch.dtype

    def begin_gather(self, index: Tensor, valid: Tensor) -> FeatureGather | None:
        """Return what gathers the features of these rows ((b,) int64, (b,) bool) piece by piece, for `Features.gather`;
        None if the objective gathers by itself."""
        ...

    def __call__(self, features: Features, step: Step) -> FeatureGradients: ...
