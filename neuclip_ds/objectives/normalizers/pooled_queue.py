"""NeuCLIP's normalizer without an inner optimizer: weighted recent features, pooled with the batch.

docs/reference/losses.md derives it. For an image anchor the prototypes W_k are the last m text features, for a text
anchor the last m image features; a batch enters the queue after use. An anchor is not compared with entries of its own
sample, which would count its positive as a negative; m_i is the number of the others. Weights c_k are computed for each
batch and not kept.

    z_ik = (e_i . W_k - s_ii)/tau,   ghat_i = 1/m_i sum_k c_k exp(z_ik)            (k over other samples' entries)
    r_i = (eps + g_i)/(eps + ghat_i),   p_ik = exp(z_ik)/(m_i (eps + ghat_i)),   both at c = 1
    c_k = (sum_i p_ik r_i + delta)/(sum_i p_ik + delta),   delta = 1e-3 B/m                     `_log_weights`
    alpha_i = log(((eps + g_i) + kappa (eps + ghat_i))/(1 + kappa)),   R_i = (eps + g_i) exp(-alpha_i) in (0, 1 + kappa)

The gradient for encoders and temperature is that of a surrogate, not of the reported loss R_i + alpha_i - 1:

    1/B sum_i [ R_i log(eps + g_i) + (1 - R_i) log(eps + ghat_i) ]   over both directions, c and R held constant

An anchor's negatives in the batch then weigh R_i and those in the queue 1 - R_i (at eps = 0). Where R_i > 1 the queue's
weight is negative: the anchor is attracted to them, with weight below kappa, so that its positive's weight stays 1/tau.

The first term's gradient is exp(-alpha_i) grad g_i, which all methods share (pair_gradient.py). In the second, with
q_ik the softmax of z_ik + log c_k over k, t_i the anchor's partner and M_i = ghat_i/(eps + ghat_i),

    tau grad_{e_i} = M_i (sum_k q_ik W_k - t_i),   tau grad_{t_i} = -M_i e_i,   tau d/dtau = -M_i sum_k q_ik z_ik

Ranks. Each rank holds a bit-identical copy of the whole queue and computes the rows of its own anchors. Besides w_i,
only two sums over anchors per prototype are exchanged, as float64: their logarithms lie within 2/tau, which float64
represents if tau >= 0.003. Everything else is a logarithm relative to the largest term.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from neuclip_ds.distributed.communicator import to_device
from neuclip_ds.errors import UserError
from neuclip_ds.objectives.base import Context, Normalizer, NormalizerOutput, Step
from neuclip_ds.objectives.gather import GatheredFeatures
from neuclip_ds.objectives.normalizers.prediction import batch_output, log_eps_plus, prediction_gradient
from neuclip_ds.objectives.options import ObjectiveConfig
from neuclip_ds.objectives.pair_arithmetic import bounded_exp_, log_sum_exp, pair_products, products_exact_for
from neuclip_ds.objectives.pair_grid import block_bytes, slices

_DELTA = 1e-3  # share of the anchors' mean mass on a prototype
_RATIO = "normalizer_ratio"  # mean of R_i


class _Estimate(NamedTuple):
    """Estimates for this rank's anchors from the queue and the batch; direction 0 has image anchors."""

    alpha: Tensor  # (2, local)
    ratio: Tensor  # (2, local): R_i
    log_ghat: Tensor  # (2, local)
    drawn: Tensor  # (2, local, d): sum_k q_ik W_k


class PooledQueueNormalizer(Normalizer):
    """w_i = exp(-alpha_i), with alpha from a queue of features and the batch.

    Until m samples have been seen, the queue holds fewer, and that number replaces m. An anchor for which the queue has
    no entries of other samples, as in the first step, has alpha_i = log(eps + g_i).
    """

    needs_index = True

    def __init__(self, config: ObjectiveConfig, eps: float, context: Context) -> None:
        self._size, self._kappa = config.queue.size, config.queue.kappa
        self._eps, self._communicator = eps, context.communicator
        empty = torch.zeros((self._size, context.dim), dtype=context.dtype, device=context.communicator.device)
        self._images, self._texts = empty, empty.clone()
        self._index = torch.full((self._size,), -1)  # the entries' sample indices, in host memory like the batch's
        self._seen = 0  # samples that have gone into the queue

    def __call__(self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor, step: Step) -> NormalizerOutput:
        log_target = log_eps_plus(log_g, self._eps)
        if self._seen:
            output = self._from_both(batch, log_target, tau)
        else:
            output = batch_output(batch.gather(log_target, "normalizer"), log_target)
            output = output._replace(local_metrics={_RATIO: torch.ones_like(log_target)})
        if step.learn:
            self._enqueue(batch)
        return output

    def log_estimate(self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor) -> Tensor:
        if not self._seen:
            return log_g
        log_ghat = self._estimate(batch, log_eps_plus(log_g, self._eps), tau).log_ghat
        pooled = torch.logaddexp(log_g, log_ghat + math.log(self._kappa)) - math.log1p(self._kappa)
        return torch.where(log_ghat.isfinite(), pooled, log_g)  # without entries of other samples

    def _from_both(self, batch: GatheredFeatures, log_target: Tensor, tau: Tensor) -> NormalizerOutput:
        """Return loss, weights and the gradient of (1 - R_i) log(eps + ghat_i)."""
        estimate = self._estimate(batch, log_target, tau)
        residual = 1 - estimate.ratio
        mass = (estimate.log_ghat - log_eps_plus(estimate.log_ghat, self._eps)).exp()  # M_i
        feature_grad = prediction_gradient(residual, estimate.drawn * mass.unsqueeze(2), mass, batch, tau)
        similar = torch.einsum("sid,sid->si", batch.anchors(), estimate.drawn)
        mean_logit = (similar - batch.positive[batch.local]) / tau  # sum_k q_ik z_ik
        value = estimate.ratio + estimate.alpha - 1  # NeuCLIP's loss of an anchor, which is also its part of dL/dtau
        alpha = batch.gather(estimate.alpha, "normalizer")
        tau_term, metrics = value - residual * mass * mean_logit, {"alpha": alpha.mean()}
        return NormalizerOutput(-alpha, value, tau_term, metrics, feature_grad, {_RATIO: estimate.ratio})

    def _estimate(self, batch: GatheredFeatures, log_target: Tensor, tau: Tensor) -> _Estimate:
        """Compare this rank's anchors with the queue, weigh the prototypes, and pool with log(eps + g)."""
        count = min(self._seen, self._size)
        prototypes = (self._texts[:count], self._images[:count])
        logits = [
            pair_products(x[batch.local], w, batch.comm_dtype)
            for x, w in zip((batch.image, batch.text), prototypes, strict=True)
        ]
        anchors, copies = self._copies(batch, count)
        offset = batch.positive[batch.local] / tau + math.log(count)
        if len(anchors):
            copied = torch.searchsorted(anchors, torch.arange(len(offset) + 1)).diff()  # entries of the same sample
            log_others = (1 - copied.double() / count).log()  # m_i/m
            offset = offset + to_device(log_others.to(offset.dtype), offset.device)
            copies = to_device(anchors * count + copies, offset.device)
        for logit in logits:  # to z_ik - log m_i
            for rows in _blocks(logit):
                logit[rows].div_(tau).sub_(offset[rows].unsqueeze(1))
            if len(anchors):
                logit.view(-1).index_fill_(0, copies, -math.inf)
        log_weights = self._log_weights(logits, log_target, batch.size)
        log_ghat, drawn = [], []
        for logit, w, log_weight in zip(logits, prototypes, log_weights, strict=True):
            log_ghat.append(_log_sum_exp_(logit, log_weight))
            with products_exact_for(batch.comm_dtype):
                drawn.append((logit @ w).div_(logit.sum(dim=1, keepdim=True)))
        estimate = torch.stack(log_ghat)
        pooled = torch.logaddexp(log_target, log_eps_plus(estimate, self._eps) + math.log(self._kappa))
        alpha = torch.where(offset.isneginf(), log_target, pooled - math.log1p(self._kappa))
        return _Estimate(alpha, (log_target - alpha).exp(), estimate, torch.stack(drawn))

    def _log_weights(self, logits: list[Tensor], log_target: Tensor, size: int) -> Tensor:
        """Return (2, prototypes) log c_k from (local, prototypes) z_ik - log m_i of both directions; B is `size`."""
        sums = torch.stack([self._sums(*side) for side in zip(logits, log_target, strict=True)])
        moved, mass = self._communicator.all_reduce(sums, "normalizer").unbind(dim=1)
        delta = _DELTA * size / logits[0].shape[1]
        return ((moved + delta) / (mass + delta)).log().to(log_target)

    def _sums(self, logit: Tensor, log_target: Tensor) -> Tensor:
        """Return (2, prototypes) sums of p_ik r_i and of p_ik over this rank's anchors, as float64."""
        log_moved = logit.new_full(logit.shape[1:], -math.inf)
        mass = torch.zeros_like(log_moved)
        for rows in _blocks(logit):
            block, spare = logit[rows], torch.empty_like(logit[rows])
            log_prediction = log_eps_plus(log_sum_exp(block, 1, spare), self._eps)
            log_ratio = log_target[rows] - log_prediction
            torch.sub(block, (log_prediction - log_ratio).unsqueeze(1), out=spare)
            torch.logaddexp(log_moved, log_sum_exp(spare, 0, spare), out=log_moved)
            mass += bounded_exp_(torch.sub(block, log_prediction.unsqueeze(1), out=spare)).sum(dim=0)
        return torch.stack([log_moved.double().exp(), mass.double()])

    def _copies(self, batch: GatheredFeatures, count: int) -> tuple[Tensor, Tensor]:
        """Return positions of this rank's anchors and of queue entries of the same sample, one of each per pair.

        The anchors' positions ascend.
        """
        index = batch.index[batch.local]
        known = torch.isin(self._index[:count], index).nonzero().squeeze(1)
        anchors, places = (index.unsqueeze(1) == self._index[known]).nonzero().unbind(dim=1)
        return anchors, known[places]

    def _enqueue(self, batch: GatheredFeatures) -> None:
        """Write the batch's last m samples over the oldest rows; sample number i of the run has place i mod m.

        A batch with the same samples as the last one replaces it, as in a second forward pass on one batch.
        """
        kept = min(batch.size, self._size)
        places, index = torch.arange(self._seen - kept, self._seen) % self._size, batch.index[-kept:]
        if not torch.equal(self._index[places], index):
            self._seen += batch.size
            places = (places + batch.size) % self._size
            self._index[places] = index
        places = to_device(places, batch.image.device)
        for queue, features in ((self._images, batch.image), (self._texts, batch.text)):
            queue.index_copy_(0, places, features[-kept:])

    def replicated_state(self) -> dict[str, Tensor]:
        queue = {"queue_image": self._images, "queue_text": self._texts, "queue_index": self._index}
        return {"seen": torch.tensor(self._seen), **queue}

    def load_replicated_state(self, state: Mapping[str, Tensor]) -> None:
        for name, queue in self.replicated_state().items():
            if state[name].shape != queue.shape:
                raise UserError(
                    f"The checkpoint's {name} has the shape {tuple(state[name].shape)}, but this run has "
                    f"{tuple(queue.shape)}; set objective.queue.size={len(state[name])}, or start a new run."
                )
            queue.copy_(state[name])
        self._seen = int(state["seen"])


build = PooledQueueNormalizer


def _log_sum_exp_(logit: Tensor, log_weight: Tensor) -> Tensor:
    """Return (local,) log sum_k exp(logit_ik + log_weight_k), and overwrite `logit`, (local, prototypes).

    It then holds the terms relative to the largest of each row.
    """
    result = logit.new_empty(len(logit))
    for rows in _blocks(logit):
        block = logit[rows].add_(log_weight)
        result[rows] = log_sum_exp(block, 1, block)
    return result


def _blocks(x: Tensor) -> list[slice]:
    """Cut the rows of a matrix into blocks that stay in a CPU's cache, or are small next to a GPU's memory."""
    return slices(0, len(x), max(1, block_bytes(x.device.type) // (x.element_size() * x.shape[1])))
