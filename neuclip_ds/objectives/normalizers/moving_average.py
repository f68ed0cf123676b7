"""Moving average of each sample's normalizer over the batches with that sample, as in SogCLR and FastCLIP (eq. 1).

The update is u_i <- (1 - gamma) u_i + gamma g_i; u_i is initialized to g_i. The per-sample store contains log u.
"""

import math

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
    """Return gamma at a step: constant gamma_min, or a half cosine from 1 to gamma_min (FastCLIP eq. 2).

    Before epoch E = gamma_epochs, the cosine is gamma = 1/2 (1 + cos(pi epoch/E)) (1 - gamma_min) + gamma_min.
    """
    if config.gamma == "constant" or step.epoch >= config.gamma_epochs:
        return config.gamma_min
    half_cosine = 0.5 * (1 + math.cos(math.pi * step.epoch / config.gamma_epochs))
    return half_cosine * (1 - config.gamma_min) + config.gamma_min


def moving_average(log_u: Tensor, log_g: Tensor, gamma: float) -> Tensor:
    """Return log((1 - gamma) u + gamma g), or log g where log u is -inf because the sample has not been seen."""
    log_keep = math.log1p(-gamma) if gamma < 1 else -math.inf
    updated = torch.logaddexp(log_u + log_keep, log_g + math.log(gamma))
    return torch.where(torch.isneginf(log_u), log_g, updated)


class MovingAverageNormalizer(Normalizer):
    """Moving-average normalizer, w_i = 1/(eps + u_i), with u in a per-sample store that is partitioned over ranks."""

    needs_index = True

    def __init__(self, config: ObjectiveConfig, eps: float, context: Context) -> None:
        self._config = config.moving_average
        self._eps = eps
        fields = {"log_u_image": -math.inf, "log_u_text": -math.inf}
        self._store = SampleStore(context.samples + context.spare_rows, fields, context.communicator, context.dtype)
        self._stores = (self._store,)
        self._reading: Pending  # set by prefetch

    def prefetch(self, padded_index: Tensor) -> None:
        self._reading = self._store.begin_read(padded_index)

    def __call__(self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor, step: Step) -> NormalizerOutput:
        gamma = gamma_of(step, self._config)
        log_u = moving_average(self._read(batch), log_g, gamma)
        gathered = batch.gather(log_u, "normalizer")
        if step.learn:
            self._store.write(batch.index, gathered.T)
        value = log_eps_plus(log_u, self._eps)
        metrics = {"gamma": log_g.new_full((), gamma), "log_u": gathered.mean()}
        return NormalizerOutput(-log_eps_plus(gathered, self._eps), value, value, metrics)

    def log_estimate(self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor) -> Tensor:
        return self._read(batch)

    def _read(self, batch: GatheredFeatures) -> Tensor:
        """Return the (2, local) log u of this rank's anchors."""
        return batch.compact(self._reading.wait()).T

    def row_tables(self) -> dict[str, RowTable]:
        return {"samples": self._store.rows()}


build = MovingAverageNormalizer
