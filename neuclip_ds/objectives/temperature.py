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
from neuclip_ds.state.partition import RowTable

_SCHEDULE_THRESHOLD = 0.03  # FastCLIP section 5: below it the temperature's learning rate is divided by 3


class TemperatureSignal(NamedTuple):
    """Global means over anchors, summed over both directions; 0-dim, equal on all ranks."""

    mean_logit: Tensor  # of w/(B-1) sum_j exp(y_ij) y_ij; tau times the data term d g / d tau is minus this
    tau_term: Tensor  # of the per-anchor part that is not the data term


class Temperature(Stateful, Protocol):
    """A rule for tau."""

    @property
    def tau(self) -> Tensor:
        """0-dim temperature."""
        ...

    def penalty(self) -> Tensor:
        """The part of the loss that depends on tau alone."""
        ...

    def update(self, signal: TemperatureSignal, step: Step) -> None:
        """One optimizer step of tau."""
        ...


class _Learnable:
    """theta = log(1/tau) with its Adam state, schedule and bounds."""

    def __init__(self, config: TemperatureConfig, optimizer: OptimizerConfig, context: Context) -> None:
        self._config = config
        theta = torch.tensor([-math.log(config.initial)], dtype=context.dtype, device=context.communicator.device)
        self._theta = torch.nn.Parameter(theta)
        self._adam = torch.optim.Adam([self._theta], lr=0.0, betas=optimizer.betas, eps=optimizer.eps)

    @property
    def tau(self) -> Tensor:
        return self._theta.detach().neg().exp().squeeze(0)

    def penalty(self) -> Tensor:
        return self.tau.new_zeros(())

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
        return peak if float(self.tau) >= _SCHEDULE_THRESHOLD else peak / 3

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
    """OpenCLIP's rule: the gradient of the method's own loss, scale 1/2, with 1/tau clamped (at 100 by default)."""

    def update(self, signal: TemperatureSignal, step: Step) -> None:
        self._descend(0.5 * signal.mean_logit, step)


class RobustTemperature(_Learnable):
    """The robust global contrastive loss with one temperature, RGCL-g (FastCLIP eq. 10, NeuCLIP eq. 12).

    d/dtau = mean over anchors of both directions' log-normaliser terms + 2 rho - c * mean logit, with c = 1 in the
    papers and 2 in FastCLIP's released code.
    """

    def penalty(self) -> Tensor:
        return 2 * self._config.rho * self.tau

    def update(self, signal: TemperatureSignal, step: Step) -> None:
        coefficient = {"paper": 1.0, "released_code": 2.0}[self._config.data_term]
        by_tau = signal.tau_term + 2 * self._config.rho - coefficient * signal.mean_logit
        self._descend(-self.tau * by_tau, step)
