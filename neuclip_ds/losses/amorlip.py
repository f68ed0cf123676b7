"""AmorLIP: normalizers amortized by a small network (arXiv 2505.18983).

The function `amorlip` builds the method. Its options are in amorlip_options.py, and its networks are in
amortization_mlp.py.

With L = 1/tau and with c as the weight of the positive, the partition function of anchor i over the global batch is

    C_i = 1/(B-1) [sum_{j != i} exp(L s_ij) + c exp(L s_ii)]          (the released code omits the 1/(B-1))

Stage I fits the online net's log lambda_i to log Z_i, where Z_i = (1 - beta_t) C_i + beta_t lambda'_i and lambda' is
the output of the previous epoch's final target net. The target net is a moving average of the online net. Both nets are
reinitialized at the start of each epoch. Stage II trains the encoders and the temperature with the gradient of

    tau (-2 L mean s_ii + mean C1_i/lambda1_i + mean C2_i/lambda2_i) + rho tau                  (eq. 6, rescaled)

where lambda and the leading tau are held constant; lambda is the target net's output or, as in the released code, Z.
With `amortizes=negatives` (Table 3), the nets fit only the sum over j != i; the positive's term is then added.

Negative j of anchor i has the weight exp(L s_ij)/lambda_i, so log w_i = L s_ii - log lambda_i in the gradient that all
methods but SigLIP share. In that gradient, w_i is constant; the remaining derivative with respect to s_ii,
L (C_i/lambda_i - 1) in each direction, is added. A step first updates the online net and then the target net, if their
updates are due (`online_every`, `target_every`), and then runs stage II.

All ranks have bit-identical copies of both nets. `fits_all_rows` selects one of two ways to fit the nets: every rank
fits them to all rows of the batch, after an all-gather of log Z and log C (so all ranks do the same work), or each rank
fits them to its local rows, and the gradient of each update is summed over ranks (4 MB at d = 512). The second way is
used only for large batches, for which it sends no more data than the gather of the features. With `gather=fits`
(section 3.3), steps that do not fit the nets contrast local rows only: C_i then averages over b - 1 negatives, but the
positive's term keeps the factor 1/(B-1).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import pad, softplus

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.losses.amortization_mlp import AmortizationMlp
from neuclip_ds.losses.arithmetic import lowest_exponent
from neuclip_ds.losses.base import LossContext, Position, adam_state, load_adam_state
from neuclip_ds.losses.gather import GatheredFeatures
from neuclip_ds.losses.global_contrastive import (
    GlobalContrastiveLoss,
    NormalizerEstimator,
    NormalizerOutput,
    scale_tau,
)
from neuclip_ds.losses.options import AmortizedConfig, ObjectiveConfig
from neuclip_ds.losses.prediction import partner_gradient, representable
from neuclip_ds.losses.temperature import RobustTemperature

# The derivative of a divergence with respect to log lambda_i is C_i/lambda_i times the function below of the gap
# log lambda_i - log Z_i. The divergence compares P = exp(L s)/lambda and Q = exp(L s)/Z without normalizing them. P/Q
# is the same for all pairs of an anchor, so no sum over pairs is needed:
#   kl  C/lambda (log Z - log lambda)
#   js  1/2 [C/lambda log(P/M) + C/Z log(Q/M)],  M = (P + Q)/2,  P/M = 2/(1 + lambda/Z),  Q/M = 2/(1 + Z/lambda)
_DIVERGENCE_L2 = 0.1  # weight of the squared error that is added to a divergence
_DIVERGENCE_SLOPES: dict[str, Callable[[Tensor], Tensor]] = {
    "kl": lambda gap: gap - 1,
    "js": lambda gap: (softplus(gap) - math.log(2)) / 2,
}


def amorlip(config: ObjectiveConfig, context: LossContext) -> GlobalContrastiveLoss:
    """Build AmorLIP's loss (eq. 6, rescaled by tau).

    tau (-2 mean s_ii/tau + mean C1_i/lambda1_i + mean C2_i/lambda2_i) + rho tau

    tau follows the derivative of this loss with lambda and the leading tau held constant.
    """
    return GlobalContrastiveLoss(
        config,
        context,
        estimator=AmortizedEstimator(config, context),
        temperature=RobustTemperature(config, context, rho_weight=0.5),
        scale=scale_tau,
    )


def previous_weight(epoch: int, config: AmortizedConfig) -> float:
    """Return beta_t, the weight of the previous epoch's net in Z.

    It rises from 0 to the option `previous_weight` along a half cosine over `previous_epochs` epochs.
    """
    if epoch >= config.previous_epochs:
        return config.previous_weight
    return config.previous_weight / 2 * (1 - math.cos(math.pi * epoch / config.previous_epochs))


def fit_gradient(
    log_lambda: Tensor, log_target: Tensor, log_fitted: Tensor, size: int, loss: str, is_released: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the derivative of the amortization loss (AmorLIP eq. 8-10) with respect to log lambda, in both directions.

    Args:
        log_lambda, log_target: (2, rows) logarithms of lambda and Z; `rows` may be 0.
        log_fitted: (2, rows) logarithm of C, or of C's sum over negatives if the nets amortize only that sum.
        size: number of rows in the global batch, B.
        loss: value of `objective.amortized.loss`.
        is_released: whether to scale the losses as in the released code, which divides divergences by B^2 instead of B
            and omits the factor 1/2 of the squared error.

    Returns:
        x, of shape (2, rows), and a 0-dim p >= 0. The derivative is exp(p) x; this product may overflow the dtype.
    """
    gap = log_lambda - log_target
    squared_error_slope = gap * ((2 if is_released else 1) / size)
    slope = _DIVERGENCE_SLOPES.get(loss)
    if slope is None:
        return squared_error_slope, gap.new_zeros(())
    log_ratio = log_fitted - log_lambda
    peak = pad(log_ratio.flatten(), (0, 1)).max()
    divisor = size**2 if is_released else size
    divergence_slope = _bounded_exp(log_ratio - peak) * slope(gap) / divisor
    return divergence_slope + _DIVERGENCE_L2 * _bounded_exp(-peak) * squared_error_slope, peak


def _bounded_exp(x: Tensor) -> Tensor:
    """Return exp(x) for x <= 0, with x clamped so that the result is never subnormal."""
    return x.clamp(min=lowest_exponent(x.dtype)).exp()


def fits_all_rows(config: AmortizedConfig, dim: int, rows: int, comm_dtype: torch.dtype) -> bool:
    """Return whether each rank fits the nets to all `rows` rows of the global batch, not only to the rank's rows.

    This is the case if all-reducing the float32 gradients of a fit sends more bytes than gathering a batch's features.
    """
    # an all-reduce sends each gradient twice, and the features of both images and texts are gathered: the factors
    # cancel
    gradient_bytes = config.inner_steps * _mlp(config, dim).size * torch.float32.itemsize
    feature_bytes = rows * dim * comm_dtype.itemsize
    return gradient_bytes > feature_bytes


def _mlp(config: AmortizedConfig, dim: int) -> AmortizationMlp:
    return AmortizationMlp(dim, max(1, int(config.width * dim)))


@dataclass(frozen=True, kw_only=True)
class _FitRows:
    """The anchors that a rank fits the nets to."""

    features: Tensor
    """(2, rows, d): image and text features"""
    log_target: Tensor
    """(2, rows): log Z"""
    log_fitted: Tensor
    """(2, rows): log of C, or of its sum over negatives if the nets amortize only that sum"""
    size: int
    """Number of rows in the global batch, B"""
    ranks: Communicator
    """Communicator between the ranks to sum over: all ranks, or only this rank if it has all rows"""


@dataclass(frozen=True, kw_only=True)
class _Logarithms:
    """Logarithms, for each of this rank's anchors, from which the normalizers are computed."""

    positive: Tensor
    """(local,): L s_ii"""
    own_pair: Tensor
    """(local,): log of the positive's term in C"""
    total: Tensor
    """(2, local): log C"""
    fitted: Tensor
    """(2, local): log of the part of C that the nets amortize"""


class AmortizedEstimator(NormalizerEstimator):
    """AmorLIP's estimator: w_i = exp(s_ii/tau)/lambda_i, where a net predicts lambda_i; AmorLIP's loss has no eps."""

    def __init__(self, config: ObjectiveConfig, context: LossContext) -> None:
        self._config = config.amortized
        self._is_released = config.reference == "released_code"
        self._communicator = context.communicator
        self._dim = context.dim
        positive_weight = self._config.positive_weight
        self._log_positive_weight = math.log(positive_weight) if positive_weight else -math.inf
        self._mlp = _mlp(self._config, context.dim)
        blank = torch.zeros(self._mlp.size, dtype=context.dtype, device=context.communicator.device)
        self._online = Parameter(blank)
        self._target = blank.clone()
        self._previous: Tensor | None = None  # the target net at the end of the previous epoch
        self._adam = self._new_adam()
        self._epoch = -1  # epoch in which the nets were initialized; -1 before the first
        self._steps = 0  # training steps since the nets were initialized

    def __call__(
        self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor, position: Position, training: bool
    ) -> NormalizerOutput:
        """Fit the nets in training steps, and compute w_i.

        Z replaces the net's lambda before the first fit and with `encoder_normalizer=combined`.
        """
        features = batch.anchors()
        logs = self._logarithms(batch, log_g, tau)
        if training:
            log_target = self._learn(position, batch, features, logs.fitted)
        else:
            log_target = self._log_target(logs.fitted, features, self._epoch)
        is_initialized = self._epoch >= 0
        predicted = self._mlp(self._target, features) if is_initialized else log_target
        uses_prediction = is_initialized and self._config.encoder_normalizer == "ema"
        log_lambda = predicted if uses_prediction else log_target
        if not self._amortizes_positives:
            log_lambda = torch.logaddexp(log_lambda, logs.own_pair.expand_as(log_lambda))
        log_lambda = representable(log_lambda, logs.total)
        ratio = (logs.total - log_lambda).exp()  # C/lambda
        error = (predicted - log_target).square()
        log_weight = batch.gather(logs.positive - log_lambda, "normalizer")
        return NormalizerOutput(
            log_weight=log_weight,
            value=ratio - logs.positive,
            # tau's data term has logits L (s_ij - s_ii); this loss has logits L s_ij instead, and the term -2 L s_ii
            tau_term=logs.positive * (1 - ratio),
            feature_grad=partner_gradient(batch, 1 - ratio, tau),
            local_metrics={"amortization_ratio": ratio, "amortization_error": error, "log_lambda": log_lambda},
        )

    def log_estimate(self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor) -> Tensor:
        """Return log(lambda_i - c exp(L s_ii)/(B-1)) - L s_ii, without the c term if lambda excludes the positive.

        The result is -inf before the first fit, and where lambda_i does not exceed the c term.
        """
        if self._epoch < 0:
            return torch.full_like(log_g, -math.inf)
        features = batch.anchors()
        logs = self._logarithms(batch, log_g, tau)
        if self._config.encoder_normalizer == "ema":
            log_lambda = self._mlp(self._target, features)
        else:
            log_lambda = self._log_target(logs.fitted, features, self._epoch)
        if self._amortizes_positives:  # log(lambda - own pair), or -inf where lambda <= own pair
            log_lambda = log_lambda + torch.log1p(-(logs.own_pair - log_lambda).clamp(max=0).exp())
        return log_lambda - logs.positive

    def gathers(self, position: Position) -> bool:
        if self._config.gather == "every_step":
            return True
        return position.epoch != self._epoch or self._is_fit_due

    @property
    def _is_fit_due(self) -> bool:
        return self._steps % self._config.online_every == 0

    @property
    def _amortizes_positives(self) -> bool:
        return self._config.amortizes == "partition"

    def _logarithms(self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor) -> _Logarithms:
        positive = batch.positive[batch.local] / tau
        own_pair = positive + self._log_positive_weight - math.log(batch.total - 1)
        total = torch.logaddexp(log_g + positive, own_pair.expand_as(log_g))
        fitted = total if self._amortizes_positives else log_g + positive
        return _Logarithms(positive=positive, own_pair=own_pair, total=total, fitted=fitted)

    def _log_target(self, log_fitted: Tensor, features: Tensor, epoch: int) -> Tensor:
        """Return the (2, local) log Z that the nets are fitted to."""
        if self._previous is None:
            return log_fitted
        weight = previous_weight(epoch, self._config)
        if not weight:
            return log_fitted
        log_previous = self._mlp(self._previous, features)
        return torch.logaddexp(log_fitted + math.log1p(-weight), log_previous + math.log(weight))

    def _learn(self, position: Position, batch: GatheredFeatures, features: Tensor, log_fitted: Tensor) -> Tensor:
        """Initialize the nets at the start of an epoch, update each net when it is due, and return (2, local) log Z."""
        starts_epoch = position.epoch != self._epoch
        if starts_epoch and self._epoch >= 0:
            self._previous = self._target.clone()
        log_target = self._log_target(log_fitted, features, position.epoch)
        if starts_epoch or self._is_fit_due:
            rows = self._fit_rows(batch, features, log_target, log_fitted)
            if starts_epoch:
                self._draw(position.epoch, rows)
            self._fit(rows)
        if self._steps % self._config.target_every == 0:
            self._target.lerp_(self._online.detach(), 1 - self._config.ema)
        self._steps += 1
        return log_target

    def _fit_rows(self, batch: GatheredFeatures, features: Tensor, log_target: Tensor, log_fitted: Tensor) -> _FitRows:
        """Return the anchors to fit the nets to: all ranks' anchors if `fits_all_rows`, else this rank's anchors."""
        ranks = self._communicator
        rows = len(batch.padded_index)
        if ranks.world_size == 1 or not fits_all_rows(self._config, self._dim, rows, batch.comm_dtype):
            return _FitRows(
                features=features, log_target=log_target, log_fitted=log_fitted, size=batch.size, ranks=ranks
            )
        values = batch.gather(torch.cat([log_target, log_fitted]), "normalizer")
        return _FitRows(
            features=torch.stack([batch.image, batch.text]),
            log_target=values[:2],
            log_fitted=values[2:],
            size=batch.size,
            ranks=ranks.single_rank(),
        )

    def _draw(self, epoch: int, rows: _FitRows) -> None:
        """Initialize Adam and the nets, with `epoch` as the seed.

        If `reference=paper`, shift each net's output so that its mean over the batch is the mean of log Z.
        """
        self._target.copy_(self._mlp.draw(epoch))
        if not self._is_released:
            gap = (rows.log_target - self._mlp(self._target, rows.features)).sum(dim=1)
            self._mlp.raise_level(self._target, rows.ranks.all_reduce(gap, "normalizer") / rows.size)
        self._online.data.copy_(self._target)
        self._adam = self._new_adam()
        self._epoch = epoch
        self._steps = 0

    def _new_adam(self) -> torch.optim.Adam:
        return torch.optim.Adam([self._online], lr=self._config.lr, fused=True)

    def _fit(self, rows: _FitRows) -> None:
        for _ in range(self._config.inner_steps):
            with torch.enable_grad():
                log_lambda = self._mlp(self._online, rows.features)
            output_gradient, peak = fit_gradient(
                log_lambda.detach(),
                rows.log_target,
                rows.log_fitted,
                rows.size,
                self._config.loss,
                self._is_released,
            )
            (gradient,) = torch.autograd.grad(log_lambda, self._online, output_gradient)
            gradient, peak = self._sum_over_ranks(gradient, peak, rows.ranks)
            self._online.grad = gradient * self._log_scale(gradient, peak).exp()
            self._adam.step()

    def _sum_over_ranks(self, gradient: Tensor, peak: Tensor, ranks: Communicator) -> tuple[Tensor, Tensor]:
        """Return the sum over ranks of exp(peak) * `gradient`, divided by exp(maximum peak), and the maximum peak."""
        if self._config.loss in _DIVERGENCE_SLOPES:
            highest = ranks.all_gather(peak.view(1), "network gradients").max()
            gradient = gradient * _bounded_exp(peak - highest)
            peak = highest
        return ranks.all_reduce(gradient, "network gradients"), peak

    def _log_scale(self, gradient: Tensor, peak: Tensor) -> Tensor:
        """Return the log of the factor that undoes a gradient's division by exp(peak) and, if needed, clips the norm.

        Just after initialization, the gradient of a divergence may overflow float32, but the clipped gradient does not.
        """
        if not self._config.max_grad_norm:
            return peak
        return torch.minimum(peak, math.log(self._config.max_grad_norm) - gradient.norm().log())

    def replicated_state(self) -> dict[str, Tensor]:
        state = {
            "epoch": torch.tensor(self._epoch, device="cpu"),
            "steps": torch.tensor(self._steps, device="cpu"),
            "online": self._online.detach(),
            "target": self._target,
        }
        if self._previous is not None:
            state["previous"] = self._previous
        return state | adam_state(self._adam, self._online)

    def load_replicated_state(self, state: Mapping[str, Tensor]) -> None:
        self._epoch = int(state["epoch"])
        self._steps = int(state["steps"])
        self._online.data.copy_(state["online"])
        self._target.copy_(state["target"])
        previous = state.get("previous")
        self._previous = None if previous is None else previous.clone().to(self._target)
        self._adam = self._new_adam()
        load_adam_state(self._adam, self._online, state)
