"""Contrastive objectives, composed of a pair loss, a normalizer, a temperature rule and a scale."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import record_function

from neuclip_ds.distributed.communicator import PHASE
from neuclip_ds.objectives.base import Context, FeatureGradients, Normalizer, Objective, Step
from neuclip_ds.objectives.gather import FeatureGather, Features, GatheredFeatures
from neuclip_ds.objectives.options import ObjectiveConfig
from neuclip_ds.objectives.pair_arithmetic import products_exact_for
from neuclip_ds.objectives.pair_gradient import pair_similarities
from neuclip_ds.objectives.pair_grid import KEPT_BYTES, PairGrid
from neuclip_ds.objectives.pair_loss import PairLoss
from neuclip_ds.objectives.temperature import Temperature, TemperatureSignal

Scale = Callable[[Tensor], Tensor]
"""Leading factor of the loss, as a function of tau."""
SCALES: dict[str, Scale] = {
    "half": lambda tau: torch.full_like(tau, 0.5),  # OpenCLIP's mean over the two directions
    "one": torch.ones_like,
    "tau": lambda tau: tau,
}


class ContrastiveObjective(Objective):
    """Contrastive objective that computes a batch's feature gradient and updates the normalizer and the temperature."""

    def __init__(
        self,
        config: ObjectiveConfig,
        context: Context,
        pair_loss: PairLoss,
        normalizer: Normalizer,
        temperature: Temperature,
        scale: Scale,
        constant: float = 0.0,
    ) -> None:
        """
        Args:
            constant: number to add to the reported loss.
        """
        super().__init__(context, {"normalizer.": normalizer, "temperature.": temperature})
        self.pair_loss, self._normalizer, self._temperature = pair_loss, normalizer, temperature
        self._scale, self._config, self._constant = scale, config, constant

    @torch.no_grad()
    @products_exact_for(torch.float32)
    def __call__(self, features: Features, step: Step) -> FeatureGradients:
        batch = self._batch(features, step)
        batch.require_pairs(step.number)
        tau = self._temperature.of(batch)
        scale = self._scale(tau)
        grid = PairGrid(batch, self._config.chunk_size, KEPT_BYTES)
        pairs = pair_similarities(grid, self.pair_loss, tau)
        log_g = pairs.log_mean_exp()
        with record_function(f"{PHASE}normalizer"):
            estimate = self._normalizer(batch, log_g, tau, self._in_epoch(step))
        gradient = pairs.gradient(estimate.log_weight + scale.log())
        image, text = gradient.image, gradient.text
        if estimate.feature_grad is not None:
            image = image.add(estimate.feature_grad[0] * scale)
            text = text.add(estimate.feature_grad[1] * scale)
        if batch.total != batch.size:  # turn the mean over local anchors into a share of the global mean
            image, text = (grad * (batch.size / batch.total) for grad in (image, text))
        log_divisor = math.log(batch.total - self.pair_loss.excluded)
        local_tau, local_scale = (x if x.ndim == 0 else x[:, batch.local] for x in (tau, scale))
        local_mean_logit = gradient.mean_logit / local_scale
        grad_log_scale = gradient.mean_logit.sum()
        if estimate.tau_term is not estimate.value:  # the normalizer's estimate depends on tau
            grad_log_scale = grad_log_scale - (local_scale * (estimate.tau_term - estimate.value)).sum()
        sums = torch.stack(
            [
                (local_scale * estimate.value + self._temperature.rho(step) * local_tau).sum(),
                # OpenCLIP's loss for the same batch and tau, comparable across methods
                torch.logaddexp(log_g + log_divisor, torch.zeros_like(log_g)).sum() / 2,
                local_mean_logit.sum(),
                estimate.tau_term.sum(),
                grad_log_scale,
                *(values.sum() for values in estimate.local_metrics.values()),
                image.square().sum() + text.square().sum(),
            ]
        )
        totals = self._communicator.all_reduce(sums, "scalars")
        loss, batch_loss, mean_logit, tau_term, grad_log_scale, *means, _ = (totals / batch.total).unbind()
        if self._constant:
            loss = loss + self._constant
        signal = TemperatureSignal(mean_logit, tau_term, grad_log_scale, local_mean_logit, estimate.tau_term)
        if step.learn:
            self._temperature.update(batch, signal, step)
        metrics = {
            "tau": tau.mean(),
            **({"batch_loss": batch_loss} if self.pair_loss.is_identity else {}),
            "feature_grad_norm": totals[-1].sqrt(),
            **estimate.metrics,
            **{name: mean / 2 for name, mean in zip(estimate.local_metrics, means, strict=True)},
        }
        return FeatureGradients(batch.expand(image), batch.expand(text), loss, metrics)

    def begin_gather(self, index: Tensor, valid: Tensor) -> FeatureGather | None:
        return super().begin_gather(index, valid) if self._normalizer.always_gathers else None

    def _in_epoch(self, step: Step) -> Step:
        """Return the step; if `epoch_steps` is set, set the epoch to the step number // `epoch_steps`."""
        length = self._config.epoch_steps
        return step if length is None else step._replace(epoch=step.number // length)

    def _batch(self, features: Features, step: Step) -> GatheredFeatures:
        """Gather the features of all ranks, or use only this rank's features if those suffice for the step.

        All ranks gather if any rank has fewer than two valid rows, because that rank would have no negatives.
        """
        if not self._normalizer.gathers(self._in_epoch(step)):
            count = features.valid.sum().view(1)
            counts = self._communicator.begin_host_gather(count, "features").wait()
            if int(counts.min()) > 1:
                own = GatheredFeatures(features, self._communicator.single_rank(), self.comm_dtype)
                own.total = int(counts.sum())
                return own
        return GatheredFeatures(features, self._communicator, self.comm_dtype, self.prefetch)

    @torch.no_grad()
    @products_exact_for(torch.float32)
    def log_normalizers(self, features: Features) -> tuple[Tensor, Tensor]:
        """Return the current estimates of the normalizers of a batch's anchors, without changing any state.

        Features are sent in their original dtype, so that rounding adds no error to the estimates.

        Returns:
            For this rank's valid rows: (2, local) log of the estimated g, or -inf if there is none, and (2, local) tau.
        """
        batch = GatheredFeatures(features, self._communicator, features.image.dtype, self.prefetch)
        tau = self._temperature.of(batch)
        local_tau = tau.expand(2, batch.size)[:, batch.local]
        if batch.size < 2:  # no anchor has a negative
            return torch.full_like(local_tau, -math.inf), local_tau
        grid = PairGrid(batch, self._config.chunk_size, budget=0)
        pairs = pair_similarities(grid, self.pair_loss, tau)
        return self._normalizer.log_estimate(batch, pairs.log_mean_exp(), tau), local_tau
