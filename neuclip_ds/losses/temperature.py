"""Update rules for one temperature that all samples share; each class implements one rule.

The trained variable is theta = log(1/tau), as in the papers' released code, or tau itself (FastCLIP Procedure 5). The
gradient with respect to theta is -tau dL/dtau. The variable is kept outside the DeepSpeed engine, in float32 or
float64. All ranks compute the same gradient, so the variable has the same value on all ranks.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from neuclip_ds.errors import UserError
from neuclip_ds.losses.base import LossContext, Position, Stateful, adam_state, entries_under, load_adam_state
from neuclip_ds.losses.gather import GatheredFeatures
from neuclip_ds.losses.options import ObjectiveConfig, TemperatureConfig

_LOW_TAU = 0.03  # below it, schedule=third_below_0.03 divides the learning rate by 3


@dataclass(frozen=True, kw_only=True)
class DistillationSignal:
    """Derivatives of the distillation, multiplied by its weight, for the temperature's update."""

    contrastive_weight: float
    """Factor on the derivative of the contrastive loss."""
    grad_theta: Tensor
    """0-dim: derivative of the distillation with respect to theta = log(1/tau); equal on all ranks."""
    local_grad_tau: Tensor | None = None
    """(2, local): derivatives of the anchors' distillation with respect to their taus; None if they share tau."""


@dataclass(frozen=True, kw_only=True)
class TemperatureSignal:
    """Statistics of one step that a temperature rule may use.

    The mean logit of an anchor is w_i/(B-1) sum_j exp(y_ij) y_ij with y_ij = l(s_ij - s_ii)/tau. This equals -tau times
    the data term w_i dg_i/dtau. The anchor's tau term is the derivative d(tau loss)/dtau without the data term.
    """

    mean_logit: Tensor
    """0-dim: mean logits, summed over both directions and averaged over the global batch; equal on all ranks."""
    tau_term: Tensor
    """0-dim: tau terms, summed and averaged in the same way."""
    grad_theta: Tensor
    """0-dim: d loss / d log(1/tau), for losses whose scale does not depend on tau."""
    local_mean_logit: Tensor
    """(2, local) mean logits with individual temperatures; with one tau, this rank's 0-dim contribution to their sum
    over all 2B anchors."""
    local_tau_term: Tensor
    """(2, local): tau terms."""
    distillation: DistillationSignal | None = None
    """Derivatives of the distillation, if there is any."""

    def with_distillation(self, grad_theta: Tensor) -> Tensor:
        """Return d loss/d theta with distillation; `grad_theta` is d loss/d theta without distillation."""
        if self.distillation is None:
            return grad_theta
        return self.distillation.contrastive_weight * grad_theta + self.distillation.grad_theta


class Temperature(Stateful):
    """Base class of the update rules for the temperature tau.

    Args:
        config: the options of the loss.
        rho_weight: factor on the configured rho: 1 for a loss with 2 rho tau (rho tau for each direction), 0 for a loss
            without rho.
    """

    def __init__(self, config: ObjectiveConfig, rho_weight: float = 0.0) -> None:
        """Store the options; subclasses also set the initial temperature."""
        self._config = config.temperature
        self._rho_weight = rho_weight

    def of(self, batch: GatheredFeatures) -> Tensor:
        """Return the temperature of the batch's anchors: 0-dim if all anchors share it, else (2, B)."""
        raise NotImplementedError

    def rho(self, position: Position) -> float:
        """Return rho at a step, multiplied by `rho_weight`, so that the loss contains rho tau for each direction.

        If the configured rho is a list, each entry applies to an equal fraction of the run (AmorLIP's annealing).
        """
        rho = self._config.rho
        if isinstance(rho, list):
            segment = min(int(position.progress * len(rho)), len(rho) - 1)
            rho = rho[segment]
        return self._rho_weight * rho

    def update(self, batch: GatheredFeatures, signal: TemperatureSignal, position: Position) -> None:
        """Update the temperature by one optimizer step, once the batch's gradient is known; by default, do nothing."""

    def _lr(self, position: Position) -> float:
        """Return the temperature's learning rate at a step, before `third_below_0.03` reduces it."""
        peak = position.peak_lr if self._config.lr is None else self._config.lr
        if self._config.schedule != "encoder":
            return peak
        if not position.peak_lr:
            return 0.0
        return peak * position.lr / position.peak_lr


def initial_temperature(config: TemperatureConfig, context: LossContext, learned: bool = True) -> float:
    """Return tau at step 0: the configured value or, if there is none, the encoders' value.

    Args:
        config: the options of the temperature.
        context: sizes and settings of the run, with the encoders' temperature.
        learned: whether tau is trained, and must therefore be within the configured bounds.

    Raises:
        UserError: neither the config nor the encoders have a temperature, or a learned temperature is out of bounds by
            more than 0.1%; within this tolerance, it is moved to the bound.
    """
    tau = context.temperature if config.initial is None else config.initial
    if tau is None:
        raise UserError(
            "The pretrained checkpoint has no logit_scale, so its temperature is unknown; set "
            "objective.temperature.initial (OpenAI's models use 0.01)."
        )
    if not learned:
        return tau
    bounded = min(max(tau, config.minimum), config.maximum)
    if not math.isclose(tau, bounded, rel_tol=1e-3):  # clamping 1/tau at 100 can give 0.0099999
        raise UserError(
            f"The initial temperature {tau:.4g} is outside [minimum={config.minimum}, maximum={config.maximum}] of "
            "objective.temperature; change a bound, or set objective.temperature.initial to a value within the bounds."
        )
    return bounded


class ConstantTemperature(Temperature):
    """Temperature that stays at its initial value, as in SogCLR, FastCLIP-v1 and TuneCLIP."""

    def __init__(self, config: ObjectiveConfig, context: LossContext) -> None:
        super().__init__(config)
        tau = initial_temperature(config.temperature, context, learned=False)
        self._tau = torch.tensor(tau, dtype=context.dtype, device=context.communicator.device)

    def of(self, batch: GatheredFeatures) -> Tensor:
        return self._tau

    def replicated_state(self) -> dict[str, Tensor]:
        return {"tau": self._tau}

    def load_replicated_state(self, state: Mapping[str, Tensor]) -> None:
        self._tau = state["tau"].to(self._tau)


class LearnableTemperature(Temperature):
    """Global temperature that is learned as theta = log(1/tau) or as tau, optionally together with other scalars.

    Args:
        config, context: options of the loss, and sizes and settings of the run.
        rho_weight: as in `Temperature`.
        other_scalars: initial values of the other scalars, by name.
    """

    def __init__(
        self, config: ObjectiveConfig, context: LossContext, rho_weight: float = 0.0, **other_scalars: float
    ) -> None:
        super().__init__(config, rho_weight)
        tau = initial_temperature(self._config, context)
        self._learns_tau = self._config.variable == "tau"
        initial = {"tau": tau} if self._learns_tau else {"theta": -math.log(tau)}
        initial.update(other_scalars)
        self._scalars: dict[str, Parameter] = {}
        for name, value in initial.items():
            tensor = torch.tensor([value], dtype=context.dtype, device=context.communicator.device)
            self._scalars[name] = Parameter(tensor)
        self._optimizer = _optimizer(list(self._scalars.values()), self._config.optimizer, context)

    def of(self, batch: GatheredFeatures) -> Tensor:
        return self.tau

    @property
    def tau(self) -> Tensor:
        """Current temperature: 0-dim, within its bounds."""
        return self.scalar("tau") if self._learns_tau else self.scalar("theta").neg().exp()

    def scalar(self, name: str) -> Tensor:
        """Return a 0-dim copy of a learned scalar."""
        return self._scalars[name].detach().squeeze(0).clone()

    def descend(self, position: Position, **gradients: Tensor) -> None:
        """Take an optimizer step with a 0-dim gradient for each scalar, passed by name, and clamp tau.

        Pass the temperature's gradient as `theta`, with respect to theta, even if the optimizer updates tau itself
        (`temperature.variable=tau`).
        """
        if self._learns_tau:
            gradients["tau"] = gradients.pop("theta") / -self.tau
        for name, gradient in gradients.items():
            scalar = self._scalars[name]
            scalar.grad = gradient.reshape(1).to(scalar.dtype)
        self._optimizer.param_groups[0]["lr"] = self._lr(position)
        if self._config.schedule == "third_below_0.03":
            with self._third_below():
                self._optimizer.step()
        else:
            self._optimizer.step()
        self._clamp_tau()

    @torch.no_grad()
    def _clamp_tau(self) -> None:
        low = self._config.minimum
        high = self._config.maximum
        if self._learns_tau:
            self._scalars["tau"].clamp_(low, high)
        else:
            self._scalars["theta"].clamp_(-math.log(high), -math.log(low))

    @contextmanager
    def _third_below(self) -> Iterator[None]:
        """Scale the enclosed optimizer step by 1/3 if tau is below 0.03 (FastCLIP section 5).

        The step is proportional to the learning rate, so it can be scaled afterward, without reading tau on the host.
        """
        fraction = 1 - 2 / 3 * (self.tau < _LOW_TAU).to(self.tau.dtype)
        before = {name: scalar.detach().clone() for name, scalar in self._scalars.items()}
        yield
        for name, scalar in self._scalars.items():
            scalar.detach().copy_(before[name].lerp(scalar.detach(), fraction))

    def replicated_state(self) -> dict[str, Tensor]:
        state = {name: scalar.detach() for name, scalar in self._scalars.items()}
        for name, scalar in self._scalars.items():
            state.update(adam_state(self._optimizer, scalar, f"adam.{name}."))
        return state

    def load_replicated_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state from `replicated_state`.

        Raises `UserError` if the state is for a different variable or optimizer.
        """
        if not self._scalars.keys() <= state.keys():
            saved_variable = "log" if self._learns_tau else "tau"
            raise UserError(
                f"The saved temperature was learned with objective.temperature.variable={saved_variable}, but this run "
                f"uses {self._config.variable}: set this option to {saved_variable}, or start a new run."
            )
        for name, scalar in self._scalars.items():
            prefix = f"adam.{name}."
            saved_keys = set(entries_under(prefix, state))
            if saved_keys not in (set(), _STATE_KEYS[self._config.optimizer]):
                fitting = [optimizer for optimizer, keys in _STATE_KEYS.items() if keys == saved_keys]
                raise UserError(
                    f"The saved temperature was learned with another optimizer ({', '.join(fitting) or 'unknown'}) "
                    f"than objective.temperature.optimizer={self._config.optimizer}: set this option to the saved one."
                )
            with torch.no_grad():
                scalar.copy_(state[name])
            load_adam_state(self._optimizer, scalar, state, prefix)


class LogTemperature(LearnableTemperature):
    """Temperature that follows the gradient of the method's loss, as in OpenCLIP and FastCLIP-v0 (eq. 8).

    Args:
        config, context: options of the loss, and sizes and settings of the run.
        gradient_factor: factor on the gradient with respect to theta.
    """

    def __init__(self, config: ObjectiveConfig, context: LossContext, gradient_factor: float = 1.0) -> None:
        super().__init__(config, context)
        self._gradient_factor = gradient_factor

    def update(self, batch: GatheredFeatures, signal: TemperatureSignal, position: Position) -> None:
        self.descend(position, theta=signal.with_distillation(self._gradient_factor * signal.grad_theta))


class RobustTemperature(LearnableTemperature):
    """Temperature of RGCL-g, the robust global contrastive loss (FastCLIP eq. 10, NeuCLIP eq. 12).

    The gradient is dL/dtau = tau_term + 2 rho - c mean_logit, where `tau_term` and `mean_logit` are fields of
    `TemperatureSignal`, and rho includes the factor `rho_weight`.

    Args:
        config, context: options of the loss, and sizes and settings of the run.
        rho_weight: 1 for a loss with 2 rho tau, 1/2 for a loss with rho tau.
        data_term_factor: the factor c, which is 1 in the papers.
    """

    def __init__(
        self,
        config: ObjectiveConfig,
        context: LossContext,
        rho_weight: float = 1.0,
        data_term_factor: float = 1.0,
    ) -> None:
        super().__init__(config, context, rho_weight)
        self._data_term_factor = data_term_factor

    def update(self, batch: GatheredFeatures, signal: TemperatureSignal, position: Position) -> None:
        # docs: temperature
        data_term = self._data_term_factor * signal.mean_logit
        grad_tau = signal.tau_term + 2 * self.rho(position) - data_term
        self.descend(position, theta=signal.with_distillation(-self.tau * grad_tau))
        # docs: end


# names of the optimizer's state of a parameter, by the value of `temperature.optimizer`
_STATE_KEYS = {"adam": {"step", "exp_avg", "exp_avg_sq"}, "lion": {"exp_avg"}, "sgd": {"momentum_buffer"}}


def _optimizer(scalars: list[Parameter], name: str, context: LossContext) -> torch.optim.Optimizer:
    """Return the optimizer called `name`; the learning rate is set at each step."""
    betas = context.adam.betas
    if name == "lion":
        from timm.optim import Lion

        return Lion(scalars, lr=0.0, betas=betas)
    if name == "sgd":
        return torch.optim.SGD(scalars, lr=0.0, momentum=betas[0])
    return torch.optim.Adam(scalars, lr=0.0, betas=betas, eps=context.adam.eps, fused=True)


def trained_temperature(state: Mapping[str, Tensor]) -> Tensor | None:
    """Return tau from a loss's replicated state, or None if it contains none, as with individual temperatures."""
    theta = state.get("temperature.theta", state.get("theta"))
    if theta is None:
        return state.get("temperature.tau", state.get("tau"))
    return theta.neg().exp()
