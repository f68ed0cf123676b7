"""A temperature for each sample and direction, learned with Adam: iSogCLR and FastCLIP-v2 (FastCLIP eq. 6-7, 9).

The temperatures tau_{1,i} and tau_{2,i} and their Adam moments are kept in a per-sample store, partitioned over ranks.
Each time a sample is seen, Adam updates the sample's temperatures with the gradient

    G_i = log(eps + u_i) + rho - mean logit of anchor i     (without the factor 1/n, because Adam is scale-invariant)

The released code differs from textbook Adam. It clamps G to [-5, 5], uses the epoch instead of the number of visits for
bias correction, and sets beta_1 = beta_2 = 0 in epoch 0, so that the first step follows the sign of G.
"""

import torch
from torch import Tensor

from neuclip_ds.distributed.communicator import Pending
from neuclip_ds.errors import UserError
from neuclip_ds.objectives.base import Context, Step
from neuclip_ds.objectives.gather import GatheredFeatures
from neuclip_ds.objectives.options import ObjectiveConfig
from neuclip_ds.objectives.temperature import Temperature, TemperatureSignal, initial_temperature
from neuclip_ds.state.partition import RowTable
from neuclip_ds.state.sample_store import SampleStore

_RELEASED_CLAMP = 5.0


class IndividualTemperature(Temperature):
    """One temperature in [minimum, maximum] per sample and direction, stored by global sample index."""

    needs_index = True
    _rho_share = 1.0

    def __init__(self, config: ObjectiveConfig, context: Context) -> None:
        super().__init__(config, context)
        schedule, optimizer = self._config.schedule, self._config.optimizer
        if schedule == "third_below_0.03":
            raise UserError(
                "objective.temperature.schedule=third_below_0.03 is a rule for one global temperature; "
                "individual ones take constant or encoder."
            )
        if optimizer != "adam":
            raise UserError(
                f"objective.temperature.optimizer={optimizer} is for one global temperature; individual ones take adam."
            )
        self._betas, self._eps = context.adam
        initial = {"tau": initial_temperature(self._config, context), "moment": 0.0, "square": 0.0}
        fields = {f"{name}_{side}": value for name, value in initial.items() for side in ("image", "text")}
        fields["visits"] = 0.0
        self._store = SampleStore(context.samples + context.spare_rows, fields, context.communicator, context.dtype)
        self._stores = (self._store,)
        self._reading: Pending  # set by prefetch

    def prefetch(self, padded_index: Tensor) -> None:
        self._reading = self._store.begin_read_all(padded_index, count=2)

    def of(self, batch: GatheredFeatures) -> Tensor:
        return batch.compact_all(self._reading.wait()).T.contiguous()

    def update(self, batch: GatheredFeatures, signal: TemperatureSignal, step: Step) -> None:
        """Take an Adam step on the ranks that store the samples' temperatures, so that only gradients are sent."""
        own_gradient = signal.local_tau_term + self.rho(step) - signal.local_mean_logit
        gradient = batch.gather(own_gradient, "temperature")
        tau, moment, square, visits = self._store.local_rows(batch.index).T.split((2, 2, 2, 1))
        (beta1, beta2), (correction1, correction2) = self._betas, self._corrections(visits + 1, step)
        if self._released:
            gradient = gradient.clamp(-_RELEASED_CLAMP, _RELEASED_CLAMP)
            if step.epoch == 0:
                beta1, beta2 = 0.0, 0.0
        moment = torch.lerp(gradient, moment, beta1)
        square = torch.lerp(gradient.square(), square, beta2)
        change = (moment / correction1) / ((square / correction2).sqrt() + self._eps)
        tau = (tau - self._lr(step) * change).clamp(self._config.minimum, self._config.maximum)
        self._store.write(batch.index, torch.cat([tau, moment, square, visits + 1]).T)

    def _corrections(self, visits: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Return 1 - beta^t for both moments, where t counts the sample's visits, or epochs in the released code."""
        times = torch.full_like(visits, step.epoch + 1 if step.epoch else torch.inf) if self._released else visits
        beta1, beta2 = self._betas
        return 1 - beta1**times, 1 - beta2**times

    def row_tables(self) -> dict[str, RowTable]:
        return {"temperatures": self._store.rows()}
