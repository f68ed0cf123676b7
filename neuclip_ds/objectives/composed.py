"""A contrastive objective: pair loss x normaliser x temperature rule x scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from neuclip_ds.objectives.base import Context, FeatureGradients, Normalizer, Step
from neuclip_ds.objectives.contrastive import PairSimilarities
from neuclip_ds.objectives.gather import FeatureGather, Features, GatheredFeatures
from neuclip_ds.objectives.pair_grid import PairGrid
from neuclip_ds.objectives.pair_loss import PairLoss
from neuclip_ds.objectives.temperature import Temperature, TemperatureSignal
from neuclip_ds.state.partition import RowTable

if TYPE_CHECKING:
    from neuclip_ds.objectives.config import ObjectiveConfig

Scale = Callable[[Tensor], Tensor]
"""The loss's leading factor, as a function of tau."""


def scale_half(tau: Tensor) -> Tensor:
    """Scale of OpenCLIP's loss: the mean of its two directions."""
    return torch.full_like(tau, 0.5)


def scale_one(tau: Tensor) -> Tensor:
    """Scale of FastCLIP-v0, whose loss has no leading tau."""
    return torch.ones_like(tau)


def scale_tau(tau: Tensor) -> Tensor:
    """Scale of the global contrastive losses: tau itself."""
    return tau


class ContrastiveObjective:
    """Feature gradient, normaliser update and temperature step of one batch."""

    def __init__(
        self,
        config: ObjectiveConfig,
        context: Context,
        pair_loss: PairLoss,
        normalizer: Normalizer,
        temperature: Temperature,
        scale: Scale,
    ) -> None:
        self._pair_loss = pair_loss
        self._normalizer = normalizer
        self._temperature = temperature
        self._scale = scale
        self._config = config
        self._communicator = context.communicator
        self.comm_dtype = context.comm_dtype

    def begin_gather(self, index: Tensor, valid: Tensor) -> FeatureGather:
        return FeatureGather(index, valid, self._communicator, self.comm_dtype, self._prefetch)

    def _prefetch(self, padded_index: Tensor) -> None:
        self._temperature.prefetch(padded_index)
        self._normalizer.prefetch(padded_index)

    @torch.no_grad()
    def __call__(self, features: Features, step: Step) -> FeatureGradients:
        """Return the gradient of the global loss for this rank's features; updates normaliser and temperature.

        Raises:
            UserError: fewer than two rows of the batch count, so that no anchor has a negative.
        """
        batch = GatheredFeatures(features, self._communicator, self.comm_dtype, self._prefetch)
        batch.require_pairs(step.number)
        tau = self._temperature.of(batch)
        scale = self._scale(tau)
        grid = PairGrid(batch, self._config.chunk, self._config.similarity_budget_mb * 1e6)
        pairs = PairSimilarities(grid, self._pair_loss, tau)
        log_g = pairs.log_mean_exp()
        estimate = self._normalizer(batch, log_g, tau, step)
        gradient = pairs.gradient(estimate.log_weight + scale.log())
        image, text = gradient.image, gradient.text
        if estimate.feature_grad is not None:
            image = image.add(estimate.feature_grad[0] * scale)
            text = text.add(estimate.feature_grad[1] * scale)
        local_tau, local_scale = (x if x.ndim == 0 else x[:, batch.local] for x in (tau, scale))
        local_mean_logit = gradient.mean_logit / local_scale
        sums = torch.stack(
            [
                (local_scale * estimate.value + self._temperature.rho(step) * local_tau).sum(),
                # OpenCLIP's loss of the same batch and tau, comparable between methods
                torch.logaddexp(log_g + math.log(pairs.divisor), torch.zeros_like(log_g)).sum() / 2,
                local_mean_logit.sum(),
                estimate.tau_term.sum(),
                gradient.mean_logit.sum(),
                *(values.sum() for values in estimate.local_metrics.values()),
                image.square().sum() + text.square().sum(),
            ]
        )
        *totals, square = self._communicator.all_reduce(sums, "scalars").unbind()
        loss, batch_loss, mean_logit, tau_term, grad_log_scale, *means = (total / batch.size for total in totals)
        signal = TemperatureSignal(mean_logit, tau_term, grad_log_scale, local_mean_logit, estimate.tau_term)
        if step.learn:
            self._temperature.update(batch, signal, step)
        metrics = {
            "tau": tau.mean(),
            **({"batch_loss": batch_loss} if self._pair_loss.is_identity else {}),
            "feature_grad_norm": square.sqrt(),
            **estimate.metrics,
            **{name: mean / 2 for name, mean in zip(estimate.local_metrics, means, strict=True)},
        }
        return FeatureGradients(batch.expand(image), batch.expand(text), loss, metrics)

    @property
    def pair_loss(self) -> PairLoss:
        return self._pair_loss

    @torch.no_grad()
    def log_normalizers(self, features: Features) -> tuple[Tensor, Tensor]:
        """Return the method's current estimates of the normalisers of a batch's anchors; changes no state.

        Features travel in their own precision, so that the error is that of the estimate alone.

        Returns:
            For this rank's valid rows (2, local) log of the estimated g, -inf where there is none, and (2, local) tau.
        """
        batch = GatheredFeatures(features, self._communicator, features.image.dtype, self._prefetch)
        tau = self._temperature.of(batch)
        local_tau = tau.expand(2, batch.size)[:, batch.local]
        if batch.size < 2:  # no anchor has a negative
            return torch.full_like(local_tau, -math.inf), local_tau
        pairs = PairSimilarities(PairGrid(batch, self._config.chunk, budget=0), self._pair_loss, tau)
        return self._normalizer.log_estimate(batch, pairs.log_mean_exp(), tau), local_tau

    def replicated_state(self) -> dict[str, Tensor]:
        parts = {"normalizer": self._normalizer, "temperature": self._temperature}
        return {
            f"{name}.{key}": value for name, part in parts.items() for key, value in part.replicated_state().items()
        }

    def load_replicated_state(self, state: Mapping[str, Tensor]) -> None:
        for name, part in (("normalizer", self._normalizer), ("temperature", self._temperature)):
            prefix = f"{name}."
            part.load_replicated_state({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})

    def row_tables(self) -> dict[str, RowTable]:
        return {**self._normalizer.row_tables(), **self._temperature.row_tables()}

    def parameters(self) -> dict[str, Parameter]:
        return {**self._normalizer.parameters(), **self._temperature.parameters()}
