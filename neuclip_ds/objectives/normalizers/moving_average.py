"""A moving average of each sample's normalizer over the times it is seen: SogCLR, FastCLIP (FastCLIP eq. 1).

u_i <- (1 - gamma) u_i + gamma g_i, kept as log u in the per-sample store; u_i starts as g_i.

Between two visits of a sample, g_i changes with the features, mostly by a factor common to all samples, and u_i lags
behind by an epoch. The drift correction (ours, `drift_rate`) keeps log u_i relative to the level c of log g, a running
mean for each direction over the batches t (i in the batch):

    c_t = c_(t-1) + max(drift_rate, 1/t) (mean_i log g_i - c_(t-1))
    u_i = (1 - gamma) exp(v_i + c_t) + gamma g_i,   v_i <- log u_i - c_t

If all g are multiplied by the same factor between two visits, so is u_i, once c_t has followed.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from neuclip_ds.distributed.communicator import Pending
from neuclip_ds.objectives.base import Context, Normalizer, NormalizerOutput, Step
from neuclip_ds.objectives.gather import GatheredFeatures
from neuclip_ds.objectives.options import MovingAverageConfig, ObjectiveConfig
from neuclip_ds.objectives.pair_arithmetic import log_eps_plus
from neuclip_ds.state.partition import RowTable
from neuclip_ds.state.sample_store import SampleStore


def gamma_of(step: Step, config: MovingAverageConfig) -> float:
    """Return gamma at a step: gamma_min, or on a half cosine from 1 to it over E = gamma_epochs (FastCLIP eq. 2).

    gamma = 1/2 (1 + cos(pi epoch/E)) (1 - gamma_min) + gamma_min,   gamma_min from epoch E on
    """
    if config.gamma == "constant" or step.epoch >= config.gamma_epochs:
        return config.gamma_min
    half_cosine = 0.5 * (1 + math.cos(math.pi * step.epoch / config.gamma_epochs))
    return half_cosine * (1 - config.gamma_min) + config.gamma_min


def moving_average(log_u: Tensor, log_g: Tensor, gamma: float) -> Tensor:
    """Return log((1 - gamma) u + gamma g), or log g where log u is -inf (not yet seen)."""
    log_keep = math.log1p(-gamma) if gamma < 1 else -math.inf
    updated = torch.logaddexp(log_u + log_keep, log_g + math.log(gamma))
    return torch.where(torch.isneginf(log_u), log_g, updated)


class MovingAverageNormalizer(Normalizer):
    """w_i = 1 / (eps + u_i), with u by global sample index in a store partitioned over ranks."""

    needs_index = True

    def __init__(self, config: ObjectiveConfig, eps: float, context: Context) -> None:
        self._config, self._communicator = config.moving_average, context.communicator
        self._eps = eps
        # c, the running mean of log g for each direction; stays 0 with a rate of 0
        self._level = torch.zeros((2, 1), dtype=context.dtype, device=context.communicator.device)
        self._batches = 0
        # different names, so that one cannot be loaded as the other
        name = "log_u_above_level" if self._config.drift_rate else "log_u"
        fields = {f"{name}_image": -math.inf, f"{name}_text": -math.inf}
        self._store = SampleStore(context.samples + context.spare_rows, fields, context.communicator, context.dtype)
        self._stores = (self._store,)
        self._reading: Pending  # set by prefetch

    def prefetch(self, padded_index: Tensor) -> None:
        self._reading = self._store.begin_read(padded_index)

    def __call__(self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor, step: Step) -> NormalizerOutput:
        gamma = gamma_of(step, self._config)
        level = self._next_level(log_g, batch.size)
        log_u = moving_average(self._read(batch) + level, log_g, gamma)
        gathered = batch.gather(log_u, "normalizer")
        if step.learn:
            self._level, self._batches = level, self._batches + 1
            self._store.write(batch.index, (gathered - level).T)
        value = log_eps_plus(log_u, self._eps)
        metrics = {"gamma": log_g.new_full((), gamma), "log_u": gathered.mean()}
        return NormalizerOutput(-log_eps_plus(gathered, self._eps), value, value, metrics)

    def log_estimate(self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor) -> Tensor:
        return self._read(batch) + self._level

    def _read(self, batch: GatheredFeatures) -> Tensor:
        """(2, local) log u of this rank's anchors, relative to the level."""
        return batch.compact(self._reading.wait()).T

    def _next_level(self, log_g: Tensor, size: int) -> Tensor:
        """Return c after a batch of `size` anchors; `log_g` is that of this rank's, (2, local)."""
        rate = self._config.drift_rate
        if not rate:
            return self._level
        mean = self._communicator.all_reduce(log_g.sum(dim=1, keepdim=True), "normalizer") / size
        return self._level.lerp(mean, max(rate, 1 / (self._batches + 1)))

    def replicated_state(self) -> dict[str, Tensor]:
        if not self._config.drift_rate:
            return {}
        return {"level": self._level, "level_batches": torch.tensor(self._batches)}

    def load_replicated_state(self, state: Mapping[str, Tensor]) -> None:
        if self._config.drift_rate:
            self._level, self._batches = state["level"].to(self._level), int(state["level_batches"])

    def row_tables(self) -> dict[str, RowTable]:
        return {"samples": self._store.rows()}


build = MovingAverageNormalizer
