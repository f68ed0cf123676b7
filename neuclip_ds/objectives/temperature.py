"""Update rules for the temperature; each class implements one rule.

The trained variable is theta = log(1/tau), as in all released code, or tau itself (FastCLIP Procedure 5). The gradient
with respect to theta is -tau dL/dtau. The variable is kept outside the DeepSpeed engine, in float32 or float64. All
ranks compute the same gradient, so the variable has the same value on all ranks.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from neuclip_ds.errors import UserError
from neuclip_ds.objectives.base import Context, Stateful, Step, adam_state, load_adam_state
from neuclip_ds.objectives.gather import GatheredFeatures
from neuclip_ds.objectives.options import ObjectiveConfig, TemperatureConfig


class TemperatureSignal(NamedTuple):
    """Statistics of one step that a temperature rule may use.

    `mean_logit` is w_i/(B-1) sum_j exp(y_ij) y_ij with y_ij = l(s_ij - s_ii)/tau. This equals -tau times the data term
    w_i dg_i/dtau. `tau_term` is the per-anchor derivative d(tau loss)/dtau without the data term.
    """

    mean_logit: Tensor  # 0-dim: sum over both directions, averaged over the global batch; equal on all ranks
    tau_term: Tensor  # 0-dim: `tau_term` of the anchors, summed and averaged in the same way
    grad_log_scale: Tensor  # 0-dim: d loss / d log(1/tau), for losses whose scale does not depend on tau
    local_mean_logit: Tensor  # (2, local) with individual temperatures; with one tau, this rank's 0-dim contribution
    local_tau_term: Tensor  # (2, local): the per-anchor terms


class Temperature(Stateful):
    """Base class of the update rules for the temperature tau."""

    _rho_share = 0.0  # factor on the configured rho, for each anchor and direction

    def __init__(self, config: ObjectiveConfig, context: Context) -> None:
        """Store the options; subclasses also set the initial temperature."""
        self._config, self._released = config.temperature, config.reference == "released_code"

    def of(self, batch: GatheredFeatures) -> Tensor:
        """Return the temperature of the batch's anchors: 0-dim if all anchors share it, else (2, B)."""
        raise NotImplementedError

    def rho(self, step: Step) -> float:
        """Return the margin rho at a step; the loss has a term rho tau for each anchor and direction.

        If the configured rho is a list, each entry applies to an equal fraction of the run (AmorLIP's annealing).
        """
        rho = self._config.rho
        present = rho if isinstance(rho, float) else rho[min(int(step.progress * len(rho)), len(rho) - 1)]
        return self._rho_share * present

    def update(self, batch: GatheredFeatures, signal: TemperatureSignal, step: Step) -> None:
        """Take one optimizer step after the batch's gradient is known; by default, do nothing."""

    def _lr(self, step: Step) -> float:
        """Return the temperature's learning rate at a step, before `third_below_0.03` reduces it."""
        peak = step.peak_lr if self._config.lr is None else self._config.lr
        if self._config.schedule != "encoder":
            return peak
        return peak * step.lr / step.peak_lr if step.peak_lr else 0.0


def initial_temperature(config: TemperatureConfig, context: Context, learned: bool = True) -> float:
    """Return tau at step 0: the configured value or, if there is none, the encoders' value.

    Raises:
        UserError: neither the config nor the encoders have a temperature, or a learned temperature is out of bounds.
    """
    tau = context.temperature if config.initial is None else config.initial
    if tau is None:
        raise UserError(
            "The pretrained checkpoint has no logit_scale, so its temperature is unknown; pass "
            "--objective.temperature.initial (OpenAI's models have 0.01)."
        )
    bounded = min(max(tau, config.minimum), config.maximum)
    if learned and not math.isclose(tau, bounded, rel_tol=1e-3):  # clamping 1/tau at 100 can give 0.0099999
        raise UserError(
            f"The pretrained checkpoint's temperature {tau:.4g} is outside [minimum={config.minimum}, "
            f"maximum={config.maximum}] of objective.temperature; change one of them, or set initial."
        )
    return bounded if learned else tau


class ConstantTemperature(Temperature):
    """Temperature that stays at its initial value, as in SogCLR, FastCLIP-v1 and TuneCLIP."""

    def __init__(self, config: ObjectiveConfig, context: Context) -> None:
        super().__init__(config, context)
        tau = initial_temperature(config.temperature, context, learned=False)
        self._tau = torch.tensor(tau, dtype=context.dtype, device=context.communicator.device)

    def of(self, batch: GatheredFeatures) -> Tensor:
        return self._tau

    def replicated_state(self) -> dict[str, Tensor]:
        return {"tau": self._tau}

    def load_replicated_state(self, state: Mapping[str, Tensor]) -> None:
        self._tau = state["tau"].to(self._tau)


class LearnableTemperature(Temperature):
    """Global temperature that is learned as theta = log(1/tau) or as tau, optionally together with other scalars."""

    def __init__(self, config: ObjectiveConfig, context: Context, **further: float) -> None:
        super().__init__(config, context)
        tau, self._by_tau = initial_temperature(self._config, context), self._config.variable == "tau"
        initial = {**({"tau": tau} if self._by_tau else {"theta": -math.log(tau)}), **further}
        device = context.communicator.device
        self._scalars = {
            name: Parameter(torch.tensor([value], dtype=context.dtype, device=device))
            for name, value in initial.items()
        }
        self._optimizer = _optimizer(list(self._scalars.values()), self._config.optimizer, context)

    def of(self, batch: GatheredFeatures) -> Tensor:
        return self.tau

    @property
    def tau(self) -> Tensor:
        """Current temperature: 0-dim, within its bounds."""
        return self.scalar("tau") if self._by_tau else self.scalar("theta").neg().exp()

    def scalar(self, name: str) -> Tensor:
        """Return a 0-dim copy of a learned scalar."""
        return self._scalars[name].detach().squeeze(0).clone()

    def descend(self, step: Step, **gradients: Tensor) -> None:
        """Take an optimizer step with a 0-dim gradient for each scalar, passed by name, and clamp tau.

        The temperature's gradient is always passed as `theta` and taken with respect to theta, even if tau is learned.
        """
        if self._by_tau:
            gradients["tau"] = gradients.pop("theta") / -self.tau
        for name, gradient in gradients.items():
            self._scalars[name].grad = gradient.reshape(1).to(self._scalars[name].dtype)
        self._optimizer.param_groups[0]["lr"] = self._lr(step)
        with self._third_below() if self._config.schedule == "third_below_0.03" else nullcontext():
            self._optimizer.step()
        low, high = self._config.minimum, self._config.maximum
        with torch.no_grad():
            if self._by_tau:
                self._scalars["tau"].clamp_(low, high)
            else:
                self._scalars["theta"].clamp_(-math.log(high), -math.log(low))

    @contextmanager
    def _third_below(self) -> Iterator[None]:
        """Scale the enclosed optimizer step by 1/3 if tau is below 0.03 (FastCLIP section 5).

        The step is proportional to the learning rate, so it can be scaled afterward, without reading tau on the host.
        """
        share = 1 - 2 / 3 * (self.tau < 0.03).to(self.tau.dtype)
        before = {name: scalar.detach().clone() for name, scalar in self._scalars.items()}
        yield
        for name, scalar in self._scalars.items():
            scalar.detach().copy_(before[name].lerp(scalar.detach(), share))

    def replicated_state(self) -> dict[str, Tensor]:
        state = {name: scalar.detach() for name, scalar in self._scalars.items()}
        for name, scalar in self._scalars.items():
            state |= adam_state(self._optimizer, scalar, f"adam.{name}.")
        return state

    def load_replicated_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state from `replicated_state`; raise `UserError` if the state is for a different variable."""
        if not self._scalars.keys() <= state.keys():
            other = "log" if self._by_tau else "tau"
            raise UserError(
                f"The saved temperature was learned with objective.temperature.variable={other}, but this run has "
                f"{self._config.variable}: set it back, or start a new run."
            )
        for name, scalar in self._scalars.items():
            with torch.no_grad():
                scalar.copy_(state[name])
            load_adam_state(self._optimizer, scalar, state, f"adam.{name}.")


class LogTemperature(LearnableTemperature):
    """Temperature that follows the gradient of the method's loss, as in OpenCLIP and FastCLIP-v0 (eq. 8)."""

    def update(self, batch: GatheredFeatures, signal: TemperatureSignal, step: Step) -> None:
        self.descend(step, theta=signal.grad_log_scale)


class RobustTemperature(LearnableTemperature):
    """Temperature of RGCL-g, the robust global contrastive loss (FastCLIP eq. 10, NeuCLIP eq. 12).

    The gradient is dL/dtau = tau_term + 2 rho - c mean_logit, where `tau_term` and `mean_logit` are fields
    of `TemperatureSignal`. The factor c is 1 in the papers and 2 in FastCLIP's released code.
    """

    _rho_share = 1.0

    def update(self, batch: GatheredFeatures, signal: TemperatureSignal, step: Step) -> None:
        coefficient = 2.0 if self._released else 1.0
        grad_tau = signal.tau_term + 2 * self.rho(step) - coefficient * signal.mean_logit
        self.descend(step, theta=-self.tau * grad_tau)


class RescaledTemperature(RobustTemperature):
    """Temperature of AmorLIP's rescaled loss tau L + rho tau: as in RGCL-g, but with rho tau instead of 2 rho tau."""

    _rho_share = 0.5


def _optimizer(scalars: list[Parameter], name: str, context: Context) -> torch.optim.Optimizer:
    """Return the optimizer called `name`; the learning rate is set at each step."""
    betas, eps = context.adam
    if name == "lion":
        from timm.optim import Lion

        return Lion(scalars, lr=0.0, betas=betas)
    if name == "sgd":
        return torch.optim.SGD(scalars, lr=0.0, momentum=betas[0])
    return torch.optim.Adam(scalars, lr=0.0, betas=betas, eps=eps, fused=True)


def trained_temperature(state: Mapping[str, Tensor]) -> Tensor | None:
    """Return tau from an objective's replicated state, or None if each sample has its own temperature."""
    theta = state.get("temperature.theta", state.get("theta"))
    return state.get("temperature.tau", state.get("tau")) if theta is None else theta.neg().exp()
