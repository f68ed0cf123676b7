"""The global contrastive loss, composed of a pair loss, estimated normalizers, a temperature and a scale.

All methods but SigLIP share the feature gradient of

    L = scale/B sum_i [ w1_i g1_i + w2_i g2_i ],   g1_i = 1/(B-1) sum_{j != i} exp(l(s_ij - s_ii)/tau),   g2_i with s_ji

with w and the scale held constant (pairs.py); an estimator may add another term to this gradient
(`NormalizerOutput.feature_grad`). The weights w_i are the inverses of the normalizers. The methods differ in the
estimator of the normalizers, in the rule for tau, in the scale and in the pair loss l. Each estimator is in the file of
its method or paper.

`objective.temperature.rule` selects one of two rules by which `neuclip` and `neuclip_queue` learn their single
temperature. The rules also differ in eps and in the scale of the loss (`GlobalTemperatureRule`).

`robust` is RGCL-g (FastCLIP eq. 10, NeuCLIP eq. 12): tau is learned by minimizing (tau times the loss) + 2 rho tau.

`learned` does not use rho. With eps = 1/(n-1), and with g_i as the mean over the n-1 negatives in the dataset,

    (n-1) (eps + g_i) = 1 + sum_{j != i} exp((s_ij - s_ii)/tau),
    L = 1/2 1/n sum_i [ log(eps + g1_i) + log(eps + g2_i) ] + log(n-1)

so L is OpenCLIP's cross-entropy with the dataset as the batch. The positive's term keeps L bounded below as tau
decreases, so log(1/tau) can follow the gradient of L, as in OpenCLIP. With NeuCLIP's alpha_i and r_i (neuclip.py),

    dL/dlog(1/tau) = 1/2 1/B sum_i [ mean logit_i - r_i tau dalpha_i/dtau ]         (both directions)

where mean logit_i is exp(-alpha_i)/(B-1) sum_{j != i} exp(x_ij) x_ij, with x_ij = (s_ij - s_ii)/tau.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.profiler import record_function

from neuclip_ds.distributed.communicator import PHASE, Pending
from neuclip_ds.errors import UserError
from neuclip_ds.losses.base import (
    LossContext,
    LossFunction,
    LossOutput,
    Position,
    Stateful,
    entries_under,
    sum_over_ranks,
    with_prefix,
)
from neuclip_ds.losses.distillation import Distillation, combined, distill
from neuclip_ds.losses.gather import GatheredFeatures
from neuclip_ds.losses.options import ObjectiveConfig
from neuclip_ds.losses.pairs import CACHED_BYTES, PairGradient, PairGrid, PairLoss, pair_similarities
from neuclip_ds.losses.stored_features import REFERENCE, TEACHER
from neuclip_ds.losses.temperature import (
    DistillationSignal,
    LogTemperature,
    RobustTemperature,
    Temperature,
    TemperatureSignal,
)

Scale = Callable[[Tensor], Tensor]
"""Leading factor of the loss, as a function of tau."""

_METRICS = "metrics."  # prefix of the estimator's local metrics among the sums over ranks


def scale_half(tau: Tensor) -> Tensor:
    """Return 1/2: OpenCLIP's mean over the two directions."""
    return torch.full_like(tau, 0.5)


def scale_one(tau: Tensor) -> Tensor:
    """Return 1: the loss without a leading tau."""
    return torch.ones_like(tau)


def scale_tau(tau: Tensor) -> Tensor:
    """Return tau."""
    return tau


@dataclass(frozen=True, kw_only=True)
class NormalizerOutput:
    """Estimated normalizers of one batch.

    The feature gradient is the gradient of `1/B sum_i exp(log_weight_i) g_i`, summed over both directions with the
    weights held constant. If the estimate itself depends on the features, `feature_grad` is added to this gradient.
    """

    log_weight: Tensor
    """(2, B): log w of every anchor of the global batch."""
    value: Tensor
    """(2, local): per-anchor loss, without the method's scale."""
    tau_term: Tensor | None = None
    """(2, local): per-anchor derivative d(tau loss)/dtau without the data term (see `TemperatureSignal`); None if it
    equals `value`, as for an estimate that does not depend on tau."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> 0-dim value, equal on all ranks."""
    feature_grad: tuple[Tensor, Tensor] | None = None
    """Additional (local, d) gradients for images and for texts, without the method's scale; None if there are none."""
    local_metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> (2, local) values; their mean over all anchors is logged."""


class NormalizerEstimator(Stateful):
    """Base class of normalizer estimators."""

    allows_reference = False
    """Whether the estimate stays correct when a reference model's similarities are subtracted. It does if the estimator
    uses the features only through `log_g`, or if it can use a batch whose features include the reference's features
    (`GatheredFeatures.minus_reference`), as the queue of `neuclip_queue` can."""

    def gathers(self, position: Position) -> bool:
        """Return whether a training step needs the features of all ranks; the result is the same on all ranks."""
        return True

    def __call__(
        self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor, position: Position, training: bool
    ) -> NormalizerOutput:
        """Estimate the normalizers of a batch and, if `training`, update the estimator.

        Args:
            batch: the gathered features.
            log_g: (2, local) log of g, the mean over the batch's negatives, for this rank's anchors.
            tau: temperature, 0-dim if shared by all anchors, else (2, B).
            position: position in the run.
            training: whether to update the estimator.
        """
        raise NotImplementedError

    def log_estimate(self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor) -> Tensor:
        """Return the (2, local) log of the current estimate of g for this rank's anchors, or -inf where there is none.

        g is the mean over negatives alone. Terms that a method adds, such as eps or the positive's term, are removed,
        so that methods are comparable. The arguments are those of `__call__`; the state is not changed.
        """
        raise NotImplementedError


class GlobalContrastiveLoss(LossFunction):
    """Contrastive loss that computes a batch's feature gradient and updates the estimator and the temperature.

    Args:
        config: the options of the loss.
        context: sizes and settings of the run.
        estimator: estimator of the normalizers.
        temperature: the temperature and its update rule.
        scale: leading factor of the loss.
        pair_loss: the pair loss l, by default the identity.
        constant: number to add to the reported loss.
    """

    def __init__(
        self,
        config: ObjectiveConfig,
        context: LossContext,
        *,
        estimator: NormalizerEstimator,
        temperature: Temperature,
        scale: Scale,
        pair_loss: PairLoss | None = None,
        constant: float = 0.0,
    ) -> None:
        super().__init__({"normalizer.": estimator, "temperature.": temperature})
        self.pair_loss = PairLoss() if pair_loss is None else pair_loss
        self._config = config
        self._communicator = context.communicator
        self._estimator = estimator
        self._temperature = temperature
        self._scale = scale
        self._constant = constant
        stored = {TEACHER}
        if estimator.allows_reference and self.pair_loss.is_identity:
            stored.add(REFERENCE)
        self.uses_stored = frozenset(stored)

    def gathers(self, position: Position) -> bool:
        return self._estimator.gathers(self._in_epoch(position))

    def begin_reads(self, padded_index: Tensor) -> dict[str, Pending]:
        reads = self._temperature.begin_reads(padded_index)  # first, because `__call__` needs the temperature first
        return reads | self._estimator.begin_reads(padded_index)

    def __call__(self, batch: GatheredFeatures, position: Position, training: bool) -> LossOutput:
        compared = batch.minus_reference()  # the same rows; with a reference model, its similarities are subtracted

        # the similarities of all pairs, the estimated normalizers, and the gradient of the loss, which depends on both
        # docs: loss
        tau = self._temperature.of(compared)
        scale = self._scale(tau)
        grid = PairGrid(compared, self._config.chunk_size, CACHED_BYTES)
        similarities = pair_similarities(grid, self.pair_loss, tau)
        log_g = similarities.log_mean_exp()
        with record_function(f"{PHASE}normalizer"):
            estimate = self._estimator(compared, log_g, tau, self._in_epoch(position), training)
        gradient = similarities.gradient(estimate.log_weight + scale.log())
        # docs: end
        distillation: Distillation | None = None
        if batch.teachers:  # their similarities are compared with the features', before the reference is subtracted
            distillation = distill(batch, tau, self._config.distill, self._config.chunk_size)
        image, text = self._feature_gradients(batch, gradient, estimate, scale, distillation)

        # this rank's sums over its anchors, and the means over the global batch
        local_tau = _of_local_anchors(tau, batch)
        local_scale = _of_local_anchors(scale, batch)
        local_mean_logit = gradient.weighted_logits / local_scale
        local_tau_term = estimate.value
        grad_theta = gradient.weighted_logits.sum()
        if estimate.tau_term is not None:  # the normalizer's estimate depends on tau
            local_tau_term = estimate.tau_term
            grad_theta = grad_theta - (local_scale * (local_tau_term - estimate.value)).sum()
        sums = {
            "loss": (local_scale * estimate.value + self._temperature.rho(position) * local_tau).sum(),
            "batch_loss": self._infonce(log_g, batch).sum() / 2,
            "mean_logit": local_mean_logit.sum(),
            "tau_term": local_tau_term.sum(),
            "grad_theta": grad_theta,
        }
        sums |= with_prefix(_METRICS, {name: values.sum() for name, values in estimate.local_metrics.items()})
        if distillation is not None:
            sums["distill_loss"] = distillation.loss
            sums["distill_grad_theta"] = distillation.grad_theta
        sums["squared_norm"] = image.square().sum() + text.square().sum()
        totals = sum_over_ranks(self._communicator, sums)
        gradient_norm = totals.pop("squared_norm").sqrt()
        means = {name: total / batch.total for name, total in totals.items()}

        # the temperature's update
        if training:
            signal = TemperatureSignal(
                mean_logit=means["mean_logit"],
                tau_term=means["tau_term"],
                grad_theta=means["grad_theta"],
                local_mean_logit=local_mean_logit,
                local_tau_term=local_tau_term,
                distillation=self._distillation_signal(distillation, means),
            )
            self._temperature.update(compared, signal, position)

        # the loss and the metrics
        loss = means["loss"]
        if self._constant:
            loss = loss + self._constant
        metrics = {"tau": tau.mean()}
        if self.pair_loss.is_identity:
            metrics["batch_loss"] = means["batch_loss"]
        if distillation is not None:
            loss = combined(self._config.distill, loss, means["distill_loss"])
            metrics["distill_loss"] = means["distill_loss"]
        metrics["feature_grad_norm"] = gradient_norm
        metrics.update(estimate.metrics)
        for name, mean in entries_under(_METRICS, means).items():
            metrics[name] = mean / 2  # over both directions
        return LossOutput(
            loss=loss, image_gradient=image, text_gradient=text, gradient_norm=gradient_norm, metrics=metrics
        )

    def _feature_gradients(
        self,
        batch: GatheredFeatures,
        gradient: PairGradient,
        estimate: NormalizerOutput,
        scale: Tensor,
        distillation: Distillation | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the (local, d) gradients of the total loss with respect to this rank's image and text features."""
        image = gradient.image
        text = gradient.text
        if estimate.feature_grad is not None:
            image_grad, text_grad = estimate.feature_grad
            image = image.add(image_grad * scale)
            text = text.add(text_grad * scale)
        if distillation is not None:
            image = combined(self._config.distill, image, distillation.image_gradient)
            text = combined(self._config.distill, text, distillation.text_gradient)
        if batch.total != batch.size:  # turn the mean over local anchors into a share of the global mean
            share = batch.size / batch.total
            image = image * share
            text = text * share
        return image, text

    def _infonce(self, log_g: Tensor, batch: GatheredFeatures) -> Tensor:
        """Return OpenCLIP's (2, local) losses of this rank's anchors at the current tau, for comparison of methods.

        Their mean is logged only if the pair loss is the identity.
        """
        log_divisor = math.log(batch.total - self.pair_loss.divisor_offset)
        return torch.logaddexp(log_g + log_divisor, torch.zeros_like(log_g))

    def log_normalizers(self, batch: GatheredFeatures) -> tuple[Tensor, Tensor]:
        """Return the current estimates of log g and the temperatures of a batch's anchors, without changing any state.

        Returns:
            Two (2, local) tensors: log of the estimated g (-inf where there is no estimate), and tau.
        """
        batch = batch.minus_reference()
        tau = self._temperature.of(batch)
        local_tau = tau.expand(2, batch.size)[:, batch.local]
        if batch.size < 2:  # no anchor has a negative
            return torch.full_like(local_tau, -math.inf), local_tau
        grid = PairGrid(batch, self._config.chunk_size, budget=0)
        log_g = pair_similarities(grid, self.pair_loss, tau).log_mean_exp()
        return self._estimator.log_estimate(batch, log_g, tau), local_tau

    def _distillation_signal(
        self, distillation: Distillation | None, means: Mapping[str, Tensor]
    ) -> DistillationSignal | None:
        """Return the signal of the distillation, if any, for the temperature; `means` are over the global batch."""
        if distillation is None:
            return None
        options = self._config.distill
        local_grad_tau = distillation.local_grad_tau
        return DistillationSignal(
            contrastive_weight=options.contrastive_weight,
            grad_theta=options.weight * means["distill_grad_theta"],
            local_grad_tau=None if local_grad_tau is None else options.weight * local_grad_tau,
        )

    def _in_epoch(self, position: Position) -> Position:
        """Return the position, with its epoch counted in units of `epoch_steps` steps if that option is set."""
        if self._config.epoch_steps is None:
            return position
        return replace(position, epoch=position.step // self._config.epoch_steps)


def _of_local_anchors(values: Tensor, batch: GatheredFeatures) -> Tensor:
    """Select this rank's anchors from (2, B) values; return 0-dim values, which all anchors share, as they are."""
    return values if values.ndim == 0 else values[:, batch.local]


@dataclass(frozen=True, kw_only=True)
class GlobalTemperatureRule:
    """Settings that `objective.temperature.rule` selects (see the module's docstring)."""

    temperature: Temperature
    scale: Scale
    eps: float
    constant: float

    @classmethod
    def of(cls, config: ObjectiveConfig, context: LossContext) -> "GlobalTemperatureRule":
        """Return the settings of the configured rule.

        Raises `UserError` if the rule needs n, and n is unknown, or if tau at step 0 is unknown or out of bounds.
        """
        if config.temperature.rule == "learned":
            if not context.samples:
                raise UserError(
                    "temperature.rule=learned sets eps to 1/(n-1), where n is the number of training "
                    "samples, which is unknown: pass samples=n to ContrastiveLoss or, with neuclip, use rule=robust."
                )
            others = max(1, context.samples - 1)
            return cls(
                temperature=LogTemperature(config, context),
                scale=scale_half,
                eps=1 / others,
                constant=math.log(others),
            )
        data_term_factor = 2.0 if config.reference == "released_code" else 1.0
        return cls(
            temperature=RobustTemperature(config, context, data_term_factor=data_term_factor),
            scale=scale_tau,
            eps=config.eps,
            constant=0.0,
        )
