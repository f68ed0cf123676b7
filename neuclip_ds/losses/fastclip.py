"""SogCLR, iSogCLR and FastCLIP: normalizers from per-sample moving averages (Wei et al. 2024, arXiv 2407.01445).

All these methods estimate the normalizer of an anchor by u_i, a moving average of g_i over the batches that contain
sample i:

    u_i <- (1 - gamma) u_i + gamma g_i,   w_i = 1/(eps + u_i)                             (FastCLIP eq. 1)

The first batch that contains sample i sets u_i to g_i. The functions below build the methods, and their docstrings give
the losses. The methods differ in the temperature and in the schedule of gamma; the options are in fastclip_options.py.

With `reference=released_code`, the methods follow FastCLIP's code in three respects. Losses with a constant or
individual temperature have no leading tau. Individual temperatures use a modified Adam (`IndividualTemperature`). The
data term of a learned global tau's gradient counts twice relative to the features' gradient, because the code's loss is
the sum of two halves: both have the gradient with respect to tau, but each has only one part of the features' gradient.
"""

import math

import torch
from torch import Tensor

from neuclip_ds.distributed.communicator import Pending
from neuclip_ds.errors import UserError
from neuclip_ds.losses.arithmetic import log_eps_plus
from neuclip_ds.losses.base import LossContext, Position
from neuclip_ds.losses.gather import GatheredFeatures
from neuclip_ds.losses.global_contrastive import (
    GlobalContrastiveLoss,
    NormalizerEstimator,
    NormalizerOutput,
    scale_one,
    scale_tau,
)
from neuclip_ds.losses.options import MovingAverageConfig, ObjectiveConfig
from neuclip_ds.losses.pairs import PairLoss
from neuclip_ds.losses.sample_store import SampleStore
from neuclip_ds.losses.temperature import (
    ConstantTemperature,
    LogTemperature,
    RobustTemperature,
    Temperature,
    TemperatureSignal,
    initial_temperature,
)
from neuclip_ds.state.partition import RowTable

_STATISTICS = "samples"  # name of the table and of the read of log u
_TEMPERATURES = "temperatures"  # name of the table and of the read of individual temperatures
_RELEASED_CLAMP = 5.0  # bound on the gradient of an individual temperature in the released code


def sogclr(config: ObjectiveConfig, context: LossContext) -> GlobalContrastiveLoss:
    """Build SogCLR's loss (Yuan et al. 2022; FastCLIP eq. 1), with a constant temperature and a constant gamma.

    tau/n sum_i [ log(eps + g1_i) + log(eps + g2_i) ]   over the dataset
    """
    return constant_temperature_loss(config, context)


def fastclip_v1(config: ObjectiveConfig, context: LossContext) -> GlobalContrastiveLoss:
    """Build FastCLIP-v1 (eq. 1-2): SogCLR's loss with gamma on a cosine schedule."""
    return constant_temperature_loss(config, context)


def isogclr(config: ObjectiveConfig, context: LossContext) -> GlobalContrastiveLoss:
    """Build iSogCLR's loss (Qiu et al. 2023; FastCLIP eq. 6-7, 9): a temperature for each sample and direction.

    1/n sum_i [ tau1_i (log(eps + g1_i) + rho) + tau2_i (log(eps + g2_i) + rho) ]

    where g1_i is computed with tau1_i, and g2_i with tau2_i.
    """
    is_released = config.reference == "released_code"
    return GlobalContrastiveLoss(
        config,
        context,
        estimator=MovingAverageEstimator(config, context),
        temperature=IndividualTemperature(config, context),
        scale=scale_one if is_released else scale_tau,
    )


def fastclip_v2(config: ObjectiveConfig, context: LossContext) -> GlobalContrastiveLoss:
    """Build FastCLIP-v2 (eq. 2 and 9): iSogCLR's loss with gamma on a cosine schedule."""
    return isogclr(config, context)


def fastclip_v0(config: ObjectiveConfig, context: LossContext) -> GlobalContrastiveLoss:
    """Build FastCLIP-v0 (eq. 8): the global contrastive loss without the leading tau; its gradient trains log(1/tau).

    1/n sum_i [ log(eps + g1_i) + log(eps + g2_i) ]
    """
    is_released = config.reference == "released_code"
    return GlobalContrastiveLoss(
        config,
        context,
        estimator=MovingAverageEstimator(config, context),
        temperature=LogTemperature(config, context, gradient_factor=2.0 if is_released else 1.0),
        scale=scale_one,
    )


def fastclip_v3(config: ObjectiveConfig, context: LossContext) -> GlobalContrastiveLoss:
    """Build FastCLIP-v3 (RGCL-g, eq. 10): the robust global contrastive loss with one learned temperature.

    tau/n sum_i [ log(eps + g1_i) + log(eps + g2_i) ] + 2 rho tau

    By default, Adam learns log(1/tau) at a constant learning rate, which is divided by 3 while tau < 0.03, and gamma
    falls from 1 to gamma_min along a cosine. The best rho depends on the dataset, so recipes set it; its default is 0.
    """
    is_released = config.reference == "released_code"
    return GlobalContrastiveLoss(
        config,
        context,
        estimator=MovingAverageEstimator(config, context),
        temperature=RobustTemperature(config, context, data_term_factor=2.0 if is_released else 1.0),
        scale=scale_tau,
    )


def constant_temperature_loss(
    config: ObjectiveConfig, context: LossContext, pair_loss: PairLoss | None = None
) -> GlobalContrastiveLoss:
    """Build a loss with moving-average normalizers, a constant temperature and a pair loss, by default the identity."""
    is_released = config.reference == "released_code"
    return GlobalContrastiveLoss(
        config,
        context,
        estimator=MovingAverageEstimator(config, context),
        temperature=ConstantTemperature(config, context),
        scale=scale_one if is_released else scale_tau,
        pair_loss=pair_loss,
    )


def gamma_of(position: Position, config: MovingAverageConfig) -> float:
    """Return gamma at a step: constant gamma_min, or a half cosine from 1 to gamma_min (FastCLIP eq. 2).

    Before epoch E = gamma_epochs, the cosine is gamma = 1/2 (1 + cos(pi epoch/E)) (1 - gamma_min) + gamma_min.
    """
    if config.gamma == "constant" or position.epoch >= config.gamma_epochs:
        return config.gamma_min
    half_cosine = 0.5 * (1 + math.cos(math.pi * position.epoch / config.gamma_epochs))
    return half_cosine * (1 - config.gamma_min) + config.gamma_min


def moving_average(log_u: Tensor, log_g: Tensor, gamma: float) -> Tensor:
    """Return log((1 - gamma) u + gamma g), or log g where log u is -inf because the sample has not been seen."""
    log_retained = math.log1p(-gamma) if gamma < 1 else -math.inf
    updated = torch.logaddexp(log_u + log_retained, log_g + math.log(gamma))
    return torch.where(torch.isneginf(log_u), log_g, updated)


class MovingAverageEstimator(NormalizerEstimator):
    """Moving-average estimator, w_i = 1/(eps + u_i); a per-sample store, partitioned over ranks, contains log u."""

    needs_index = True
    allows_reference = True

    def __init__(self, config: ObjectiveConfig, context: LossContext) -> None:
        self._config = config.moving_average
        self._eps = config.eps
        fields = {"log_u_image": -math.inf, "log_u_text": -math.inf}
        rows = context.samples + context.spare_rows
        self._store = SampleStore(rows, fields, context.communicator, context.dtype)
        self.stores = (self._store,)

    def begin_reads(self, padded_index: Tensor) -> dict[str, Pending]:
        return {_STATISTICS: self._store.begin_read(padded_index)}

    def __call__(
        self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor, position: Position, training: bool
    ) -> NormalizerOutput:
        # docs: estimate
        gamma = gamma_of(position, self._config)
        log_u = moving_average(self._local_log_u(batch), log_g, gamma)
        gathered_log_u = batch.gather(log_u, "normalizer")
        if training:
            self._store.write(batch.index, gathered_log_u.T)
        value = log_eps_plus(log_u, self._eps)
        return NormalizerOutput(
            log_weight=-log_eps_plus(gathered_log_u, self._eps),
            # docs: end
            value=value,
            metrics={"gamma": log_g.new_full((), gamma), "log_u": gathered_log_u.mean()},
        )

    def log_estimate(self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor) -> Tensor:
        return self._local_log_u(batch)

    def _local_log_u(self, batch: GatheredFeatures) -> Tensor:
        """Return the (2, local) log u of this rank's anchors."""
        return batch.compact(batch.statistics[_STATISTICS].wait()).T

    def row_tables(self) -> dict[str, RowTable]:
        return {_STATISTICS: self._store.rows()}


class IndividualTemperature(Temperature):
    """One temperature in [minimum, maximum] for each sample and direction, learned with Adam (FastCLIP eq. 6-7, 9).

    The temperatures tau_{1,i} and tau_{2,i} and their Adam moments are in a per-sample store, partitioned over ranks.
    Each time a sample is seen, Adam updates its temperatures with the gradient

        G_i = log(eps + u_i) + rho - mean logit of anchor i     (without the factor 1/n: Adam is scale-invariant)

    With `reference=released_code`, Adam differs from the textbook, as in FastCLIP's code: G is clamped to [-5, 5], bias
    correction uses the epoch instead of the number of visits, and beta_1 = beta_2 = 0 in epoch 0, so that each step in
    this epoch follows the sign of G.

    Raises `UserError` if the options set a schedule or an optimizer that only a global temperature supports, or if the
    initial temperature is unknown or out of bounds.
    """

    needs_index = True

    def __init__(self, config: ObjectiveConfig, context: LossContext) -> None:
        super().__init__(config, rho_weight=1.0)
        if self._config.schedule == "third_below_0.03":
            raise UserError(
                "objective.temperature.schedule=third_below_0.03 applies only to a global temperature; "
                "for individual temperatures, set this option to constant or encoder."
            )
        if self._config.optimizer != "adam":
            raise UserError(
                f"objective.temperature.optimizer={self._config.optimizer} applies only to a global temperature; for "
                "individual temperatures, set this option to adam."
            )
        self._is_released = config.reference == "released_code"
        self._adam = context.adam
        tau = initial_temperature(self._config, context)
        fields = {
            "tau_image": tau,
            "tau_text": tau,
            "moment_image": 0.0,
            "moment_text": 0.0,
            "square_image": 0.0,
            "square_text": 0.0,
            "visits": 0.0,
        }
        rows = context.samples + context.spare_rows
        self._store = SampleStore(rows, fields, context.communicator, context.dtype)
        self.stores = (self._store,)

    def begin_reads(self, padded_index: Tensor) -> dict[str, Pending]:
        return {_TEMPERATURES: self._store.begin_read_all(padded_index, count=2)}  # tau_image and tau_text

    def of(self, batch: GatheredFeatures) -> Tensor:
        return batch.compact_all(batch.statistics[_TEMPERATURES].wait()).T.contiguous()

    def update(self, batch: GatheredFeatures, signal: TemperatureSignal, position: Position) -> None:
        """Take an Adam step on the ranks that store the samples' temperatures, so that only gradients are sent."""
        local_gradient = signal.local_tau_term + self.rho(position) - signal.local_mean_logit
        distillation = signal.distillation
        if distillation is not None and distillation.local_grad_tau is not None:
            local_gradient = distillation.contrastive_weight * local_gradient + distillation.local_grad_tau
        gradient = batch.gather(local_gradient, "temperature")
        tau, moment, square, visits = self._store.local_rows(batch.index).T.split((2, 2, 2, 1))
        visits = visits + 1
        if self._is_released:
            gradient = gradient.clamp(-_RELEASED_CLAMP, _RELEASED_CLAMP)
        if self._is_released and position.epoch == 0:  # both betas are 0
            moment = gradient
            square = gradient.square()
            change = moment / (square.sqrt() + self._adam.eps)
        else:
            # the bias correction counts the steps with the sample or, in the released code, the epochs
            times = torch.full_like(visits, position.epoch + 1) if self._is_released else visits
            beta1, beta2 = self._adam.betas
            moment = torch.lerp(gradient, moment, beta1)
            square = torch.lerp(gradient.square(), square, beta2)
            change = (moment / (1 - beta1**times)) / ((square / (1 - beta2**times)).sqrt() + self._adam.eps)
        tau = (tau - self._lr(position) * change).clamp(self._config.minimum, self._config.maximum)
        self._store.write(batch.index, torch.cat([tau, moment, square, visits]).T)

    def row_tables(self) -> dict[str, RowTable]:
        return {_TEMPERATURES: self._store.rows()}
