"""How the temperature moves: one rule a class.

The trained number is theta = log(1/tau), as in every published code base; its gradient is -tau d/dtau. It is
float32, lives outside the DeepSpeed engine, and is the same on all ranks because its gradient is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from neuclip_ds.config import OptimizerConfig, TemperatureConfig
from neuclip_ds.objectives.base import Context, Stateful, Step
from neuclip_ds.objectives.gather import GatheredFeatures
from neuclip_ds.state.partition import RowTable

_SCHEDULE_THRESHOLD = 0.03  # FastCLIP section 5: below it the temperature's learning rate is divided by 3


class TemperatureSignal(NamedTuple):
    """What a rule may use of one step.

    `mean_logit` is w/(B-1) sum_j exp(y_ij) y_ij with y = l(x)/tau: -tau times the data term d g / d tau. `tau_term` is
    the per-anchor part of d loss / d tau that is not the data term.
    """

    mean_logit: Tensor  # 0-dim, global mean over anchors of the sum of both directions, equal on all ranks
    tau_term: Tensor  # 0-dim, likewise
    by_log: Tensor  # 0-dim, gradient of the loss by log(1/tau) where its scale does not depend on tau
    own_mean_logit: Tensor  # (2, own) of this rank's anchors
    own_tau_term: Tensor  # (2, own)


class Temperature(Stateful, Protocol):
    """A rule for tau."""

    def of(self, batch: GatheredFeatures) -> Tensor:
        """Temperature of the batch's anchors: 0-dim if all share one, else (2, B)."""
        ...

    def rho(self, step: Step) -> float:
        """The loss holds rho tau for each anchor and direction."""
        ...

    def update(self, batch: GatheredFeatures, signal: TemperatureSignal, step: Step) -> None:
        """One optimizer step, after the gradient of the batch."""
        ...


class ConstantTemperature:
    """tau stays at its initial value: SogCLR, FastCLIP-v1, TuneCLIP."""

    def __init__(self, config: TemperatureConfig, optimizer: OptimizerConfig, context: Context) -> None:
        self._tau = torch.tensor(config.initial, dtype=context.dtype, device=context.communicator.device)

    def of(self, batch: GatheredFeatures) -> Tensor:
        return self._tau

    def rho(self, step: Step) -> float:
        return 0.0

    def update(self, batch: GatheredFeatures, signal: TemperatureSignal, step: Step) -> None:
        pass

    def replicated_state(self) -> dict[str, Tensor]:
        return {}

    def load_replicated_state(self, state: Mapping[str, Tensor]) -> None:
        pass

    def row_tables(self) -> dict[str, RowTable]:
        return {}


class _Learnable:
    """theta = log(1/tau) with its Adam state, schedule and bounds."""

    def __init__(self, config: TemperatureConfig, optimizer: OptimizerConfig, context: Context) -> None:
        self._config = config
        theta = torch.tensor([-math.log(config.initial)], dtype=context.dtype, device=context.communicator.device)
        self._theta = torch.nn.Parameter(theta)
        self._adam = torch.optim.Adam([self._theta], lr=0.0, betas=optimizer.betas, eps=optimizer.eps)

    def of(self, batch: GatheredFeatures) -> Tensor:
        return self._tau()

    def rho(self, step: Step) -> float:
        return 0.0

    def _tau(self) -> Tensor:
        return self._theta.detach().neg().exp().squeeze(0)

    def _descend(self, gradient: Tensor, step: Step) -> None:
        """Adam on theta with d loss / d theta (0-dim), then the clamp of tau to its bounds."""
        self._theta.grad = gradient.reshape(1).to(self._theta.dtype)
        self._adam.param_groups[0]["lr"] = self._lr(step)
        self._adam.step()
        with torch.no_grad():
            self._theta.clamp_(-math.log(self._config.maximum), -math.log(self._config.minimum))

    def _lr(self, step: Step) -> float | Tensor:
        peak = step.peak_lr if self._config.lr is None else self._config.lr
        if self._config.schedule == "encoder":
            return peak * step.lr / step.peak_lr if step.peak_lr else 0.0
        if self._config.schedule == "constant":
            return peak
        return peak if float(self._tau()) >= _SCHEDULE_THRESHOLD else peak / 3

    def replicated_state(self) -> dict[str, Tensor]:
        moments = {f"adam.{key}": value for key, value in self._adam.state[self._theta].items()}
        return {"theta": self._theta.detach(), **moments}

    def load_replicated_state(self, state: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            self._theta.copy_(state["theta"])
        moments = {key.removeprefix("adam."): value for key, value in state.items() if key.startswith("adam.")}
        self._adam.state[self._theta] = {
            key: value.clone() if key == "step" else value.clone().to(self._theta) for key, value in moments.items()
        }

    def row_tables(self) -> dict[str, RowTable]:
        return {}


class LogTemperature(_Learnable):
    """The gradient of the method's own loss: OpenCLIP, with 1/tau clamped (at 100 by default); FastCLIP-v0 (eq. 8)."""

    def update(self, batch: GatheredFeatures, signal: TemperatureSignal, step: Step) -> None:
        self._descend(signal.by_log, step)


class RobustTemperature(_Learnable):
    """The robust global contrastive loss with one temperature, RGCL-g (FastCLIP eq. 10, NeuCLIP eq. 12).

    d/dtau = mean over anchors of both directions' log-normaliser terms + 2 rho - c * mean logit, with c = 1 in the
    papers and 2 in FastCLIP's released code.
    """

    def rho(self, step: Step) -> float:
        return rho_of(self._config, step)

    def update(self, batch: GatheredFeatures, signal: TemperatureSignal, step: Step) -> None:
        coefficient = {"paper": 1.0, "released_code": 2.0}[self._config.data_term]
        by_tau = signal.tau_term + 2 * self.rho(step) - coefficient * signal.mean_logit
        self._descend(-self._tau() * by_tau, step)


def rho_of(config: TemperatureConfig, step: Step) -> float:
    """rho of a step; the entries of a list hold for equal parts of the run (AmorLIP's annealing)."""
    if isinstance(config.rho, float):
        return config.rho
    return config.rho[min(int(step.progress * len(config.rho)), len(config.rho) - 1)]
