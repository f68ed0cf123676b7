"""Normalizers amortized by a small network: AmorLIP (arXiv 2505.18983).

With L = 1/tau and c the weight of the positive, an anchor's partition function over the global batch is

    C_i = 1/(B-1) [sum_{j != i} exp(L s_ij) + c exp(L s_ii)]          (the released code omits the 1/(B-1))

Stage I fits the online net's log lambda_i to log Z_i, Z_i = (1 - beta_t) C_i + beta_t lambda'_i, where lambda' is the
target net at the end of the previous epoch. The target net is a moving average of the online net; both restart each
epoch. Stage II gives encoders and temperature the gradient, with lambda and the leading tau constant, of

    tau (-2 L mean s_ii + mean C1_i/lambda1_i + mean C2_i/lambda2_i) + rho tau                  (eq. 6, rescaled)

with lambda the target net's or, as in the released code, Z itself. With `amortizes=negatives` (Table 3) the nets are
fitted to the sum over j != i alone, and lambda is their output plus the anchor's own term c exp(L s_ii)/(B-1).

An anchor's negatives weigh exp(L s_ij)/lambda_i, so log w_i = L s_ii - log lambda_i in the common gradient. That weight
depends on s_ii, but the common gradient holds it constant; the rest is C_i/lambda_i - 1 for each direction, along the
partner. A step updates the online net, then the target net, and then runs stage II.

Ranks. Every rank holds bit-identical copies of both nets. It fits them either to all rows of the batch, after an
all-gather of log Z and log C, or to its own rows, and sums the gradient of each update over ranks (4 MB at d = 512).
`fits_all_rows` decides: the former repeats the same work on every rank, the latter sends more than OpenCLIP does unless
the batch is large. With `gather=fits` (section 3.3) the steps without a fit contrast each rank's own rows; their C has
the mean over b - 1 negatives, and the share of the positive that the global batch has.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import pad, softplus

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.objectives.base import Context, Normalizer, NormalizerOutput, Step, adam_state, load_adam_state
from neuclip_ds.objectives.gather import GatheredFeatures
from neuclip_ds.objectives.normalizers.amortization_mlp import AmortizationMlp
from neuclip_ds.objectives.normalizers.prediction import partner_gradient, representable
from neuclip_ds.objectives.options import AmortizedConfig, ObjectiveConfig
from neuclip_ds.objectives.pair_arithmetic import lowest_exponent

# The derivative of a divergence by log lambda_i is C_i/lambda_i times this function of log lambda_i - log Z_i. With
# P = exp(L s)/lambda and Q = exp(L s)/Z, not normalized, P/Q is the same for all pairs of an anchor, so that no pair
# is needed:
#   kl  C/lambda (log Z - log lambda)
#   js  1/2 [C/lambda log(P/M) + C/Z log(Q/M)],  M = (P + Q)/2,  P/M = 2/(1 + lambda/Z),  Q/M = 2/(1 + Z/lambda)
_DIVERGENCE_L2 = 0.1  # weight of the squared error in addition to a divergence
_DIVERGENCE_SLOPES: dict[str, Callable[[Tensor], Tensor]] = {
    "kl": lambda gap: gap - 1,
    "js": lambda gap: (softplus(gap) - math.log(2)) / 2,
}


def previous_weight(epoch: int, config: AmortizedConfig) -> float:
    """Return beta_t, which rises from 0 to its largest value on a half cosine over `previous_epochs` epochs."""
    if epoch >= config.previous_epochs:
        return config.previous_weight
    return config.previous_weight / 2 * (1 - math.cos(math.pi * epoch / config.previous_epochs))


def fit_gradient(
    log_lambda: Tensor, log_target: Tensor, log_total: Tensor, size: int, loss: str, released: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the derivative of the amortization loss (AmorLIP eq. 8-10), summed over both directions, by log lambda.

    Args:
        log_lambda, log_target, log_total: (2, rows) log of lambda, Z and C; there may be no rows.
        size: B.
        loss: value of `objective.amortized.loss`.
        released: whether the losses have the released code's scale: divergences are divided by B^2 instead of B, and
            the squared error has no factor 1/2.

    Returns:
        x (2, rows) and p (0-dim, at least 0): the derivative is exp(p) x, which need not be representable.
    """
    gap = log_lambda - log_target
    squared = gap * ((2 if released else 1) / size)
    slope = _DIVERGENCE_SLOPES.get(loss)
    if slope is None:
        return squared, gap.new_zeros(())
    log_ratio = log_total - log_lambda
    peak = pad(log_ratio.flatten(), (0, 1)).max()
    divergence = _bounded_exp(log_ratio - peak) * slope(gap) / (size**2 if released else size)
    return divergence + _DIVERGENCE_L2 * _bounded_exp(-peak) * squared, peak


def _bounded_exp(x: Tensor) -> Tensor:
    """Return exp(x) for x <= 0; never subnormal."""
    return x.clamp(min=lowest_exponent(x.dtype)).exp()


def fits_all_rows(config: AmortizedConfig, dim: int, rows: int, comm_dtype: torch.dtype) -> bool:
    """Whether each rank fits the nets to all `rows` of the global batch instead of its own.

    It does if the float32 gradients of a batch's updates are larger than the features in `comm_dtype`.
    """
    gradients = config.inner_steps * _mlp(config, dim).size * torch.float32.itemsize  # an all-reduce sends them twice
    return gradients > rows * dim * comm_dtype.itemsize  # images' features; the texts' are as large


def _mlp(config: AmortizedConfig, dim: int) -> AmortizationMlp:
    return AmortizationMlp(dim, max(1, int(config.width * dim)))


class _FitRows(NamedTuple):
    """The anchors that a rank fits the nets to."""

    features: Tensor  # (2, rows, d)
    log_target: Tensor  # (2, rows): log Z
    log_total: Tensor  # (2, rows): log C, or its negatives if the nets amortize only these
    size: int  # B
    ranks: Communicator  # ranks to sum over: all, or this one if it has all rows


class AmortizedNormalizer(Normalizer):
    """AmorLIP's normalizer: w_i = exp(L s_ii) / lambda_i, where a net predicts lambda_i."""

    def __init__(self, config: ObjectiveConfig, eps: float, context: Context) -> None:
        """Create the nets; `eps` is ignored, because AmorLIP's loss has none."""
        self._config = own = config.amortized
        self._released = config.reference == "released_code"
        self._communicator, self._dim = context.communicator, context.dim
        self.always_gathers = own.gather == "every_step"
        self._log_positive_weight = math.log(own.positive_weight) if own.positive_weight else -math.inf
        self._mlp = _mlp(own, context.dim)
        blank = torch.zeros(self._mlp.size, dtype=context.dtype, device=context.communicator.device)
        self._online = Parameter(blank)
        self._target = blank.clone()
        self._previous: Tensor | None = None  # the target net at the end of the previous epoch
        self._adam = self._new_adam()
        self._epoch = -1  # in which the nets were drawn; -1 before the first
        self._steps = 0  # since the nets were drawn

    def __call__(self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor, step: Step) -> NormalizerOutput:
        """Fit the nets if the step learns, then estimate from them, or from the batch if none are drawn yet."""
        features, positive, own_pair, log_total, log_fitted = self._inputs(batch, log_g, tau)
        if step.learn:
            log_target = self._learn(step, batch, features, log_fitted)
        else:
            log_target = self._log_target(log_fitted, features, self._epoch)
        drawn = self._epoch >= 0
        predicted = self._mlp(self._target, features) if drawn else log_target
        log_lambda = predicted if drawn and self._config.encoder_normalizer == "ema" else log_target
        if not self._amortizes_positives:
            log_lambda = torch.logaddexp(log_lambda, own_pair.expand_as(log_lambda))
        log_lambda = representable(log_lambda, log_total)
        ratio = (log_total - log_lambda).exp()  # C/lambda
        error = (predicted - log_target).square()
        metrics = {"amortization_ratio": ratio, "amortization_error": error, "log_lambda": log_lambda}
        feature_grad = partner_gradient(batch, 1 - ratio, tau)
        # the data term of d/dtau has the logits L (s_ij - s_ii); this loss has L s_ij, and -2 L s_ii
        tau_term = positive * (1 - ratio)
        log_weight = batch.gather(positive - log_lambda, "normalizer")
        return NormalizerOutput(log_weight, ratio - positive, tau_term, {}, feature_grad, metrics)

    def log_estimate(self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor) -> Tensor:
        """log (lambda_i - c exp(L s_ii)/(B-1)) - L s_ii; only if lambda includes the positive is it subtracted."""
        if self._epoch < 0:
            return torch.full_like(log_g, -math.inf)
        features, positive, own_pair, _, log_fitted = self._inputs(batch, log_g, tau)
        if self._config.encoder_normalizer == "ema":
            log_lambda = self._mlp(self._target, features)
        else:
            log_lambda = self._log_target(log_fitted, features, self._epoch)
        if self._amortizes_positives:  # log(lambda - own pair), or -inf where that is not larger
            log_lambda = log_lambda + torch.log1p(-(own_pair - log_lambda).clamp(max=0).exp())
        return log_lambda - positive

    def gathers(self, step: Step) -> bool:
        if self.always_gathers or not step.learn:
            return True
        return step.epoch != self._epoch or self._steps % self._config.online_every == 0

    @property
    def _amortizes_positives(self) -> bool:
        return self._config.amortizes == "partition"

    def _inputs(self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor) -> tuple[Tensor, ...]:
        """Return features and logarithms of this rank's anchors.

        Returns:
            (2, local, d) features; (local,) L s_ii and log of the anchor's own term in C; (2, local) log C, and the
            part of it that the nets amortize.
        """
        positive = batch.positive[batch.local] / tau
        own_pair = positive + self._log_positive_weight - math.log(batch.total - 1)
        log_total = torch.logaddexp(log_g + positive, own_pair.expand_as(log_g))
        log_fitted = log_total if self._amortizes_positives else log_g + positive
        return batch.anchors(), positive, own_pair, log_total, log_fitted

    def _log_target(self, log_total: Tensor, features: Tensor, epoch: int) -> Tensor:
        """(2, local) log Z."""
        if self._previous is None or not (weight := previous_weight(epoch, self._config)):
            return log_total
        log_previous = self._mlp(self._previous, features)
        return torch.logaddexp(log_total + math.log1p(-weight), log_previous + math.log(weight))

    def _learn(self, step: Step, batch: GatheredFeatures, features: Tensor, log_total: Tensor) -> Tensor:
        """Draw the nets of a new epoch, fit them to the batch, and return (2, local) log Z."""
        epoch = step.epoch
        starts = epoch != self._epoch
        if starts and self._epoch >= 0:
            self._previous = self._target.clone()
        log_target = self._log_target(log_total, features, epoch)
        if starts or self._steps % self._config.online_every == 0:
            rows = self._fit_rows(batch, features, log_target, log_total)
            if starts:
                self._draw(epoch, rows)
            self._fit(rows)
        if self._steps % self._config.target_every == 0:
            self._target.lerp_(self._online.detach(), 1 - self._config.ema)
        self._steps += 1
        return log_target

    def _fit_rows(self, batch: GatheredFeatures, features: Tensor, log_target: Tensor, log_total: Tensor) -> _FitRows:
        """Return the anchors to fit the nets to: those of all ranks if `fits_all_rows`, else this rank's."""
        ranks, size = self._communicator, len(batch.padded_index)
        if ranks.world_size == 1 or not fits_all_rows(self._config, self._dim, size, batch.comm_dtype):
            return _FitRows(features, log_target, log_total, batch.size, ranks)
        values = batch.gather(torch.cat([log_target, log_total]), "normalizer")
        return _FitRows(torch.stack([batch.image, batch.text]), values[:2], values[2:], batch.size, ranks.alone())

    def _draw(self, epoch: int, rows: _FitRows) -> None:
        """Draw new nets, which depend only on the epoch except for their level, and create a new Adam optimizer."""
        self._target.copy_(self._mlp.draw(epoch))
        if not self._released:
            gap = (rows.log_target - self._mlp(self._target, rows.features)).sum(dim=1)
            self._mlp.raise_level(self._target, rows.ranks.all_reduce(gap, "normalizer") / rows.size)
        self._online.data.copy_(self._target)
        self._adam = self._new_adam()
        self._epoch, self._steps = epoch, 0

    def _new_adam(self) -> torch.optim.Adam:
        return torch.optim.Adam([self._online], lr=self._config.lr, fused=True)

    def _fit(self, rows: _FitRows) -> None:
        for _ in range(self._config.inner_steps):
            with torch.enable_grad():
                log_lambda = self._mlp(self._online, rows.features)
            by_output, peak = fit_gradient(log_lambda.detach(), *rows[1:4], self._config.loss, self._released)
            (gradient,) = torch.autograd.grad(log_lambda, self._online, by_output)
            gradient, peak = self._sum_over_ranks(gradient, peak, rows.ranks)
            self._online.grad = gradient * self._log_scale(gradient, peak).exp()
            self._adam.step()

    def _sum_over_ranks(self, gradient: Tensor, peak: Tensor, ranks: Communicator) -> tuple[Tensor, Tensor]:
        """Sum gradients that each rank has divided by exp(peak) of its local rows; return the sum and its peak."""
        if self._config.loss in _DIVERGENCE_SLOPES:
            highest = ranks.all_gather(peak.view(1), "network gradients").max()
            gradient, peak = gradient * _bounded_exp(peak - highest), highest
        return ranks.all_reduce(gradient, "network gradients"), peak

    def _log_scale(self, gradient: Tensor, peak: Tensor) -> Tensor:
        """Return the log of the factor on a gradient that was divided by exp(peak): peak, or less if it is clipped.

        The gradient of a new net's divergence may overflow float32; its clipped gradient does not.
        """
        if not self._config.max_grad_norm:
            return peak
        return torch.minimum(peak, math.log(self._config.max_grad_norm) - gradient.norm().log())

    def replicated_state(self) -> dict[str, Tensor]:
        state = {"epoch": torch.tensor(self._epoch), "steps": torch.tensor(self._steps)}
        state |= {"online": self._online.detach(), "target": self._target}
        if self._previous is not None:
            state["previous"] = self._previous
        return state | adam_state(self._adam, self._online)

    def load_replicated_state(self, state: Mapping[str, Tensor]) -> None:
        self._epoch, self._steps = int(state["epoch"]), int(state["steps"])
        self._online.data.copy_(state["online"])
        self._target.copy_(state["target"])
        self._previous = state["previous"].clone().to(self._target) if "previous" in state else None
        self._adam = self._new_adam()
        load_adam_state(self._adam, self._online, state)


build = AmortizedNormalizer
