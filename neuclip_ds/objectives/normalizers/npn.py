"""The normaliser-prediction network of NeuCLIP (eq. 10-12, Algorithm 1), its prototypes partitioned over ranks.

    alpha_i = log(eps + 1/m sum_k exp((cos(e_i, W_k) - s_ii) / tau))

Each rank owns m/K prototypes of W1 (read by images) and W2 (read by texts), their AdaGrad state and their slots
of the feature queue. An update needs the 2B sums over all prototypes and nothing of size d x m: one all-reduce.
Those sums travel as float64 relative to the largest possible exponent, (1 - s_ii)/tau: with tau >= 0.003 they
neither overflow nor vanish there, which saves the second all-reduce for a maximum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from neuclip_ds.config import ObjectiveConfig
from neuclip_ds.objectives.base import Context, NormalizerOutput, NoState, Step
from neuclip_ds.objectives.gather import GatheredFeatures
from neuclip_ds.objectives.normalizers.npn_health import NpnHealth
from neuclip_ds.objectives.pair_grid import IMAGE, TEXT
from neuclip_ds.state.partition import Partition, RowTable

_CPU_BLOCK = 2**18  # elements worked on at once: what follows the product finds them in the core's cache


class _Side(NamedTuple):
    """One direction's anchors against this rank's prototypes: exp(z_ik) = exponential_ik exp(log_scale_i)."""

    unit: Tensor  # (own prototypes, d): W_k / |W_k|
    exponential: Tensor  # (B, own prototypes), at most 1
    total: Tensor  # (B,) sums of the exponential's rows
    log_scale: Tensor  # (B,): the largest z_ik of the row, with z_ik = (cos(e_i, W_k) - s_ii) / tau


class _Prediction(NamedTuple):
    """The network's answer for all anchors; direction 0 reads W1, direction 1 W2."""

    alpha: Tensor  # (2, B)
    sides: tuple[_Side, _Side]


class NpnNormalizer(NoState):
    """w_i = exp(-alpha_i), with alpha predicted from the anchor's feature.

    Until the queue has seen m samples there is nothing to draw prototypes from, and the batch's own eps + g_i is
    the prediction: the optimum that the network would be fitted to.
    """

    def __init__(self, config: ObjectiveConfig, context: Context) -> None:
        self._config = config.npn
        self._eps = config.eps
        self._communicator = context.communicator
        self._partition = Partition.of(
            self._config.prototypes, context.communicator.rank, context.communicator.world_size
        )
        shape = (self._partition.size, context.dim)
        empty = torch.zeros(shape, dtype=context.dtype, device=context.communicator.device)
        self._prototypes = [torch.nn.Parameter(empty.clone()) for _ in (IMAGE, TEXT)]  # W1, W2, one row a prototype
        self._queue = [empty.clone() for _ in (IMAGE, TEXT)]
        self._seen = 0  # samples that have gone into the queue
        self._drawn = False
        self._health = NpnHealth(self._config.lr)
        self._adagrad = torch.optim.Adagrad(
            self._prototypes, lr=self._config.lr, initial_accumulator_value=self._config.initial_accumulator
        )

    def __call__(self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor, step: Step) -> NormalizerOutput:
        log_target = log_eps_plus(batch.gather(log_g, "normalizer"), self._eps)  # log(eps + g), (2, B)
        self._restart_if_due(step)
        if self._drawn:
            positive = torch.einsum("id,id->i", batch.image, batch.text)  # s_ii
            if self._config.order == "alternating":
                self._fit(batch, positive, log_target, tau)
            estimate = self._estimate(self._predict(batch, positive, tau), batch, log_target, tau, step)
            if self._config.order == "simultaneous":
                self._fit(batch, positive, log_target, tau)
        else:
            estimate = self._batch_estimate(batch, log_target)
        self._enqueue(batch)
        return estimate

    def log_estimate(self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor) -> Tensor:
        if not self._drawn:
            return log_eps_plus(log_g, self._eps)
        positive = torch.einsum("id,id->i", batch.image, batch.text)
        return self._predict(batch, positive, tau).alpha[:, batch.local]

    def _restart_if_due(self, step: Step) -> None:
        """Every T_r steps W1 becomes the last m texts, W2 the images of the same samples; never the current batch."""
        if self._seen < self._config.prototypes:
            return
        every = self._config.restart_every
        if self._drawn and not (every and step.number % every == 0):
            return
        for prototype, queue in zip(self._prototypes, reversed(self._queue), strict=True):
            prototype.copy_(queue)
            if self._config.reset_accumulator:
                self._adagrad.state[prototype]["sum"].fill_(self._config.initial_accumulator)
        self._drawn = True

    def _fit(self, batch: GatheredFeatures, positive: Tensor, log_target: Tensor, tau: Tensor) -> None:
        for _ in range(self._config.updates):
            self._update(self._predict(batch, positive, tau), batch, log_target, tau)

    def _predict(self, batch: GatheredFeatures, positive: Tensor, tau: Tensor) -> _Prediction:
        anchors = (batch.image, batch.text)
        sides = [self._side(e, w, positive, tau) for e, w in zip(anchors, self._prototypes, strict=True)]
        ceiling = ((1 - positive) / tau).double()
        partial = torch.stack([side.total.double().log() + side.log_scale.double() - ceiling for side in sides]).exp()
        total = self._communicator.all_reduce(partial, "normalizer")
        log_ghat = total.log() + ceiling - math.log(self._config.prototypes)
        return _Prediction(log_eps_plus(log_ghat.to(positive.dtype), self._eps), (sides[IMAGE], sides[TEXT]))

    def _side(self, anchors: Tensor, prototypes: Tensor, positive: Tensor, tau: Tensor) -> _Side:
        unit = normalize(prototypes.detach(), dim=1)
        exponential = anchors.new_empty((len(anchors), len(unit)))
        total, peak = torch.zeros_like(positive), torch.zeros_like(positive)
        rows_at_once = max(1, _CPU_BLOCK // max(1, len(unit))) if anchors.device.type == "cpu" else len(anchors)
        for low in range(0, len(anchors) if len(unit) else 0, rows_at_once):
            rows = slice(low, low + rows_at_once)
            block = torch.mm(anchors[rows], unit.T, out=exponential[rows]).div_(tau)
            peak[rows] = block.amax(dim=1)
            total[rows] = block.sub_(peak[rows].unsqueeze(1)).exp_().sum(dim=1)
        return _Side(unit, exponential, total, peak - positive / tau)

    def _update(self, prediction: _Prediction, batch: GatheredFeatures, log_target: Tensor, tau: Tensor) -> None:
        """One AdaGrad step on J = tau/B sum_i [exp(-alpha_i)(eps + g_i) + alpha_i] over both directions.

        dJ/dW_k = 1/(B |W_k|) sum_i r_i p_ik (e_i - cos(e_i, W_k) W_k/|W_k|), the part of V_k = sum_i r_i p_ik e_i
        that is orthogonal to W_k. The separate objective 1/B sum_i (alpha_i - log(eps + g_i))^2 has another r_i.
        """
        error = prediction.alpha - log_target
        residual = 2 / tau * error if self._config.objective == "separate" else 1 - error.neg().exp()  # (2, B) r_i
        weights = self._log_share(prediction).exp_().mul_(residual).div_(batch.size)
        for number, anchors in enumerate((batch.image, batch.text)):
            side, prototype = prediction.sides[number], self._prototypes[number]
            pull = side.exponential.T @ (weights[number].unsqueeze(1) * anchors)
            along = (pull * side.unit).sum(dim=1, keepdim=True)
            prototype.grad = (pull - along * side.unit).div_(prototype.detach().norm(dim=1, keepdim=True))
        self._adagrad.step()

    def _log_share(self, prediction: _Prediction) -> Tensor:
        """(2, B) log of what turns the exponentials into p_ik = exp(z_ik) / (m (eps + ghat_i)); p sums to about 1."""
        log_scale = torch.stack([side.log_scale for side in prediction.sides])
        return log_scale - prediction.alpha - math.log(self._config.prototypes)

    def _estimate(
        self, prediction: _Prediction, batch: GatheredFeatures, log_target: Tensor, tau: Tensor, step: Step
    ) -> NormalizerOutput:
        alpha = prediction.alpha
        ratio = (log_target - alpha).exp()
        metrics = {**self._health.watch(ratio, step), "alpha": alpha.mean()}
        value = (ratio + alpha - 1)[:, batch.local]
        if self._config.alpha_grad == "stop":
            return NormalizerOutput(-alpha, value, value, metrics)
        feature_grad, grad_tau = self._full_gradient(prediction, batch, 1 - ratio, tau)
        return NormalizerOutput(-alpha, value, value + grad_tau, metrics, feature_grad)

    def _full_gradient(
        self, prediction: _Prediction, batch: GatheredFeatures, residual: Tensor, tau: Tensor
    ) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """The terms r_i grad alpha_i of eq. 12: by the features (own rows) and tau times those by tau."""
        sides, share = prediction.sides, self._log_share(prediction).exp_()
        drawn = torch.stack([side.exponential @ side.unit for side in sides]) * share.unsqueeze(2)
        image_drawn, text_drawn = batch.sum_local(drawn.transpose(0, 1), "normalizer").unbind(
            dim=1
        )  # sum_k p_ik W_k/|W_k|
        total = torch.stack([side.total for side in sides])
        log_scale = torch.stack([side.log_scale for side in sides])
        logit = torch.stack([torch.xlogy(side.exponential, side.exponential).sum(dim=1) for side in sides])
        moments = torch.stack([share * total, share * (logit + log_scale * total)], dim=1)  # sums of p_ik, p_ik z_ik
        mass, mean_logit = self._communicator.all_reduce(moments, "normalizer")[:, :, batch.local].unbind(dim=1)
        residual = residual[:, batch.local]
        pull = (residual * mass).sum(dim=0).unsqueeze(1)  # both directions' alpha_i fall with s_ii
        weight = residual.unsqueeze(2) / (batch.size * tau)
        image = weight[IMAGE] * image_drawn - pull / (batch.size * tau) * batch.text[batch.local]
        text = weight[TEXT] * text_drawn - pull / (batch.size * tau) * batch.image[batch.local]
        return (image, text), -residual * mean_logit

    def _batch_estimate(self, batch: GatheredFeatures, log_target: Tensor) -> NormalizerOutput:
        value = log_target[:, batch.local]
        return NormalizerOutput(-log_target, value, value, {"alpha": log_target.mean()})

    def _enqueue(self, batch: GatheredFeatures) -> None:
        """Writes the batch's rows over the oldest slots; each rank keeps the slots of its own prototypes."""
        m = self._config.prototypes
        rows = torch.arange(max(0, batch.size - m), batch.size, device=batch.index.device)
        slots = (self._seen + rows) % m
        mine = (slots >= self._partition.start) & (slots < self._partition.stop)
        for queue, features in zip(self._queue, (batch.image, batch.text), strict=True):
            queue[slots[mine] - self._partition.start] = features[rows[mine]]
        self._seen += batch.size

    def replicated_state(self) -> dict[str, Tensor]:
        return {"seen": torch.tensor(self._seen), "drawn": torch.tensor(self._drawn)}

    def load_replicated_state(self, state: Mapping[str, Tensor]) -> None:
        self._seen, self._drawn = int(state["seen"]), bool(state["drawn"])

    def row_tables(self) -> dict[str, RowTable]:
        tensors = {}
        for name, prototype, queue in zip(("w1", "w2"), self._prototypes, self._queue, strict=True):
            tensors[name] = prototype.detach()
            tensors[f"{name}_accumulator"] = self._adagrad.state[prototype]["sum"]
            tensors["queue_image" if name == "w1" else "queue_text"] = queue
        return {"npn": RowTable(self._partition, tensors)}


def log_eps_plus(log_x: Tensor, eps: float) -> Tensor:
    return torch.logaddexp(log_x, log_x.new_tensor(math.log(eps)))
