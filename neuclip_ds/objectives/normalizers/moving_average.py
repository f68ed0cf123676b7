"""A moving average of each sample's normaliser over its visits: SogCLR, FastCLIP (FastCLIP eq. 1).

u_i <- (1 - gamma) u_i + gamma g_i, kept as log u in the per-sample store; the first visit takes g_i itself.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from neuclip_ds.distributed.communicator import Pending
from neuclip_ds.objectives.base import Context, Normalizer, NormalizerOutput, Step
from neuclip_ds.objectives.gather import GatheredFeatures
from neuclip_ds.objectives.sogclr_family import MovingAverageConfig
from neuclip_ds.state.partition import RowTable
from neuclip_ds.state.sample_store import SampleStore


def gamma_of(step: Step, config: MovingAverageConfig) -> float:
    """Return gamma of a step: gamma_min, or on a half cosine from 1 to it over E = gamma_epochs (FastCLIP eq. 2).

    gamma = 1/2 (1 + cos(pi epoch/E)) (1 - gamma_min) + gamma_min,   gamma_min from epoch E on
    """
    epoch = step.epoch if config.gamma_epoch_steps is None else step.number // config.gamma_epoch_steps
    if config.gamma == "constant" or epoch >= config.gamma_epochs:
        return config.gamma_min
    half_cosine = 0.5 * (1 + math.cos(math.pi * epoch / config.gamma_epochs))
    return half_cosine * (1 - config.gamma_min) + config.gamma_min


def moving_average(log_u: Tensor, log_g: Tensor, gamma: float) -> Tensor:
    """Return log((1 - gamma) u + gamma g), or log g where log u is -inf (not yet seen)."""
    log_keep = math.log1p(-gamma) if gamma < 1 else -math.inf
    updated = torch.logaddexp(log_u + log_keep, log_g + math.log(gamma))
    return torch.where(torch.isneginf(log_u), log_g, updated)


class MovingAverageNormalizer(Normalizer):
    """w_i = 1 / (eps + u_i), with u by global sample index in a store partitioned over ranks."""

    def __init__(self, config: MovingAverageConfig, eps: float, context: Context) -> None:
        self._config = config
        self._log_eps = math.log(eps)
        fields = {"log_u_image": -math.inf, "log_u_text": -math.inf}
        self._store = SampleStore(context.samples, fields, context.communicator, context.dtype)
        self._reading: Pending  # after prefetch

    def prefetch(self, padded_index: Tensor) -> None:
        self._reading = self._store.begin_read(padded_index)

    def __call__(self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor, step: Step) -> NormalizerOutput:
        gamma = gamma_of(step, self._config)
        before = self._read(batch)
        log_u = moving_average(before, log_g, gamma)
        gathered = batch.gather(log_u, "normalizer")
        if step.learn:
            self._store.write(batch.index, gathered.T)
        log_eps = log_g.new_full((), self._log_eps)
        value = torch.logaddexp(log_u, log_eps)
        metrics = {"gamma": log_g.new_full((), gamma), "log_u": gathered.mean()}
        return NormalizerOutput(-torch.logaddexp(gathered, log_eps), value, value, metrics)

    def log_estimate(self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor) -> Tensor:
        return self._read(batch)

    def _read(self, batch: GatheredFeatures) -> Tensor:
        """(2, local) log u of this rank's anchors."""
        return batch.compact(self._reading.wait()).T

    def restore_point(self) -> Callable[[], None]:
        return self._store.undo

    def row_tables(self) -> dict[str, RowTable]:
        return {"samples": self._store.rows()}
