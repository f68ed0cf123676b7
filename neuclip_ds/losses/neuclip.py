"""NeuCLIP: normalizers predicted by a network, the NPN (ICLR 2026, eq. 10-12 and Algorithm 1; arXiv 2511.08417).

The function `neuclip` builds the method; its options are in neuclip_options.py. prototype_queue.py contains the queue
from which prototypes are drawn, and prototype_optimizers.py contains their updates.

Eq. 10: The network predicts the log-normalizer of an image anchor from the anchor's feature e1_i and m prototypes W1_k.
For a text anchor, it uses e2_i and W2_k. The functions named on the right compute the equations:

    z1_ik  = (cos(e1_i, W1_k) - s_ii) / tau                                                 `_side`
    alpha1_i = log(eps + ghat1_i),   ghat1_i = 1/m sum_k exp(z1_ik)                         `_predict`

Eq. 11 and 12: The encoders, the temperature and the network minimize J. For a batch, with g_i as in pairs.py,

    J = tau/B sum_i sum_{1, 2} [ exp(-alpha_i) (eps + g_i) + alpha_i - 1 ] + 2 rho tau

As a function of alpha_i, J has its minimum at alpha_i = log(eps + g_i), where the bracket equals alpha_i. With

    r_i  = 1 - (eps + g_i) / (eps + ghat_i) = 1 - exp(log(eps + g_i) - alpha_i)
    p_ik = exp(z_ik) / (m (eps + ghat_i))                                                   `_log_mass`

the derivatives of J, with e_i the anchor and t_i the anchor's partner, are (dJ/de_i: the part from anchor i)

    dJ/dW_k   = 1/(B |W_k|) sum_i r_i p_ik (e_i - cos(e_i, W_k) W_k/|W_k|)                  `_update`
    dJ/de_i   = tau/B [ exp(-alpha_i) dg_i/de_i + r_i dalpha_i/de_i ]                       first term: pairs.py
    dJ/dtau   = 1/B sum_i [ exp(-alpha_i) (eps + g_i) + alpha_i - 1 ] + 2 rho
                + tau/B sum_i [ exp(-alpha_i) dg_i/dtau + r_i dalpha_i/dtau ]               temperature.py
    dalpha_i/de_i = 1/tau (sum_k p_ik W_k/|W_k| - t_i sum_k p_ik),   dalpha_i/dt_i = -1/tau e_i sum_k p_ik,
    dalpha_i/dtau = -1/tau sum_k p_ik z_ik                                                  `_full_gradient`

`alpha_grad` selects how much of r_i grad alpha_i the encoders and tau receive: `full` keeps the term, `stop` drops it,
and `positive` holds beta_i = alpha_i + s_ii/tau constant. beta_i predicts log Z_i = log(eps + g_i) + s_ii/tau and
depends on the anchor alone. The derivatives of the other term in alpha_i = beta_i - s_ii/tau are

    dalpha_i/de_i = -t_i/tau,   dalpha_i/dt_i = -e_i/tau,   tau dalpha_i/dtau = s_ii/tau            prediction.py

so the weight of the positive is r_i/tau plus (1 - r_i)/tau from the first term of dJ/de_i, in total 1/tau (up to eps).

One step of Algorithm 1 (`NpnEstimator.__call__`), after the features and g_i of the batch are computed:

    every T_r steps: W1 <- text features, W2 <- image features of the same samples          `_redraw_if_due`
    (of this batch if B >= m, else of the last m samples before this batch)
    T_u times: W1, W2 <- AdaGrad on dJ/dW, or the scaled update                             `_fit`
    alpha_i from the new W1, W2                                                             `_predict`
    gradient of J for encoders and tau                                                      `_estimate`

With `kappa` (ours), the loss uses a mean of the batch's own normalizer and the predicted one, as `neuclip_queue` does:

    alpha'_i = log(eps + (g_i + kappa ghat_i)/(1 + kappa)),   loss = tau/B sum_i alpha'_i + 2 rho tau

This loss replaces J for the encoders and the temperature; the prototypes are still fitted to J. As in neuclip_queue.py,
the prototypes, the partner t_i in z_ik and the mean anchor are held constant: a gradient for t_i would attract t_i
without repelling it, because a prototype is not an anchor, and a gradient for the mean anchor would drive all features
away from the prototypes. With v_i = kappa exp(alpha_i - alpha'_i)/(1 + kappa),

    w_i = exp(-alpha'_i)/(1 + kappa),   h_i = v_i/(B tau) sum_k p_ik (W_k/|W_k| - t_i)
    grad_{e_i} += tau (h_i - mean_j h_j)                                                         `_pooled_output`

The weight of the batch's negatives, w_i (eps + g_i), is then at most 1, however wrong the prediction is.

The scaled update is ours; docs/reference/losses.md compares it with AdaGrad. With delta = 1e-3 B/m,

    W_k <- W_k/|W_k| - lr tau B |W_k| dJ/dW_k / (sum_i p_ik (1 + |1 - r_i|) + delta), then normalized  `Scaled`

Since |r_i| <= 1 + |1 - r_i|, lr tau multiplies a vector of norm below 1, so no logit changes by more than about lr.

K ranks form R groups of S = K/R consecutive ranks, where R is the number of replicas. Each rank of a group stores m/S
rows of W1 and of W2, along with their AdaGrad state and queue rows. For an update, ranks exchange only 2B sums over all
prototypes (no d x m matrix), so one all-reduce suffices, and its result is bit-identical on all ranks. The gradient of
an anchor needs sum_k p_ik W_k over one group only. Each rank therefore receives S - 1 blocks of size B/K x d instead of
K - 1, but computes R times as much per update. The 2B sums are sent as float64, relative to (1 - s_ii)/tau, the largest
possible exponent. For tau >= 0.003, the sums neither overflow nor underflow, so no all-reduce of the maximum is needed.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from neuclip_ds.errors import UserError
from neuclip_ds.losses.arithmetic import log_eps_plus, log_pooled, lowest_exponent
from neuclip_ds.losses.base import LossContext, Position
from neuclip_ds.losses.gather import GatheredFeatures
from neuclip_ds.losses.global_contrastive import (
    GlobalContrastiveLoss,
    GlobalTemperatureRule,
    NormalizerOutput,
)
from neuclip_ds.losses.neuclip_mlp import MlpEstimator
from neuclip_ds.losses.options import ObjectiveConfig
from neuclip_ds.losses.pairs import IMAGE, TEXT, slices
from neuclip_ds.losses.prediction import (
    NetworkEstimator,
    batch_output,
    fit_metrics,
    prediction_gradient,
    representable,
)
from neuclip_ds.losses.prototype_optimizers import Update, prototype_optimizer
from neuclip_ds.losses.prototype_queue import PrototypeQueue
from neuclip_ds.state.partition import Partition, RowTable

# Elements per block in each direction. On a CPU, a block stays in the core's cache after a matmul; on a GPU, the block
# size limits the memory of intermediate results.
_CPU_BLOCK = 2**20
_GPU_BLOCK = 2**25
_SHORTEST = 1e-12  # lower bound on |W_k| as a divisor
_LOWEST_TAU = 0.003  # exponents lie between -2/tau and 0, and below -708, float64 has no normal exponentials
_LOG_NOTHING = -1e4  # log of a sum without terms; finite, so that its product with zero is zero


def neuclip(config: ObjectiveConfig, context: LossContext) -> GlobalContrastiveLoss:
    """Build NeuCLIP's loss, with the network that `objective.npn.network` selects.

    tau/n sum_i sum_{1, 2} [ exp(-alpha_i) (eps + g_i) + alpha_i - 1 ] + 2 rho tau,   w_i = exp(-alpha_i)

    With `npn.kappa`, alpha'_i replaces the bracket, and w_i differs (see the module's docstring). With
    `temperature.rule=learned`, eps, the scale, the rule for tau and the constant differ (global_contrastive.py).
    """
    rule = GlobalTemperatureRule.of(config, context)
    estimator: NetworkEstimator
    if config.npn.network == "mlp":
        estimator = MlpEstimator(config, context, rule.eps)
    else:
        if config.temperature.minimum < _LOWEST_TAU:
            raise UserError(
                f"objective.temperature.minimum={config.temperature.minimum:g} is below {_LOWEST_TAU}, the lowest "
                "temperature at which float64 can represent the sums over NeuCLIP's prototypes: raise the minimum, or "
                "set objective.npn.network=mlp."
            )
        estimator = NpnEstimator(config, context, rule.eps)
    return GlobalContrastiveLoss(
        config,
        context,
        estimator=estimator,
        temperature=rule.temperature,
        scale=rule.scale,
        constant=rule.constant,
    )


@dataclass(frozen=True, kw_only=True)
class _Anchors:
    """All anchors of a batch: the images (direction 0), which use W1, and the texts (direction 1), which use W2."""

    features: Tensor
    """(2, B, d): image and text features"""
    positive: Tensor
    """(B,): s_ii/tau"""
    ceiling: Tensor
    """(B,), float64: (1 - s_ii)/tau, the largest possible exponent"""
    tau: Tensor
    """0-dim temperature"""

    @classmethod
    def of(cls, batch: GatheredFeatures, tau: Tensor) -> "_Anchors":
        return cls(
            features=torch.stack([batch.image, batch.text]),
            positive=batch.positive / tau,
            ceiling=((1 - batch.positive) / tau).double(),
            tau=tau,
        )


@dataclass(frozen=True, kw_only=True)
class _Prediction:
    """Predictions for all anchors, and the softmax over this rank's prototypes: share_ik = exp(z_ik - log_sum_i)."""

    alpha: Tensor
    """(2, B): predicted alpha_i"""
    log_ghat: Tensor
    """(2, B): alpha without eps"""
    log_sum: Tensor
    """(2, B): log of the sum of exp(z_ik) over this rank's prototypes"""
    share: Tensor
    """(2, B, local prototypes): share_ik; rows sum to one"""
    unit: Tensor
    """(2, local prototypes, d): W_k / |W_k|"""
    norm: Tensor
    """(2, local prototypes, 1): |W_k|"""


class NpnEstimator(NetworkEstimator):
    """Estimator w_i = exp(-alpha_i), where the prototypes predict alpha_i from the anchor's feature.

    A queue keeps the last m samples, because a batch may have fewer than m. Until m samples have been seen, prototypes
    cannot be drawn; alpha_i is then log(eps + g_i), which a perfectly fitted network would predict.
    """

    def __init__(self, config: ObjectiveConfig, context: LossContext, eps: float) -> None:
        super().__init__(config, context, eps)
        ranks = context.communicator
        self._replicas = self._config.replicas_on(ranks.world_size)
        group_size = ranks.world_size // self._replicas
        group_start = ranks.rank // group_size * group_size
        self._group = range(group_start, group_start + group_size)
        self._partition = Partition.of(self._config.prototypes, ranks.rank % group_size, group_size)
        shape = (2, self._partition.size, context.dim)
        self._prototypes = torch.zeros(shape, dtype=context.dtype, device=ranks.device)  # W1 and W2, one row each
        self._queue = PrototypeQueue(self._partition, context)
        self._drawn = False
        self._drawn_at = 0  # samples added to the queue when the prototypes were drawn
        self._is_joint = self._config.order == "joint"
        self._optimizer = prototype_optimizer(self._config, context.adam, self._prototypes)

    def __call__(
        self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor, position: Position, training: bool
    ) -> NormalizerOutput:
        """Predict the normalizers; if `training`, take one step of Algorithm 1 or, with `order=joint`, Algorithm 3.

        Algorithm 1 updates the prototypes before the prediction, and Algorithm 3 updates them afterward.
        """
        log_target = log_eps_plus(batch.gather(log_g, "normalizer"), self._eps)  # log(eps + g), (2, B)
        fills_queue = batch.size >= self._config.prototypes
        if training and fills_queue:
            self._queue.add(batch)
        if training:
            self._redraw_if_due(position)

        if self._drawn:
            anchors = _Anchors.of(batch, tau)
            if training and not self._is_joint:
                self._fit(anchors, log_target, position.lr)
            output = self._estimate(anchors, log_target, batch, tau)
            if training and self._is_joint:
                self._fit(anchors, log_target, position.lr)
        else:
            output = batch_output(log_target, log_target[:, batch.local])
        if training and not fills_queue:
            self._queue.add(batch)
        return output

    def log_estimate(self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor) -> Tensor:
        if not self._drawn:
            return log_g
        log_ghat = self._predict(_Anchors.of(batch, tau)).log_ghat[:, batch.local]
        kappa = self._config.kappa
        return log_ghat if kappa is None else log_pooled(log_g, log_ghat, kappa)

    def _estimate(
        self, anchors: _Anchors, log_target: Tensor, batch: GatheredFeatures, tau: Tensor
    ) -> NormalizerOutput:
        """Return the estimate with the current prototypes; `log_target` is the (2, B) log(eps + g_i)."""
        prediction = self._predict(anchors)
        if self._config.kappa is not None:
            return self._pooled_output(prediction, log_target, batch, tau, self._config.kappa)

        def full_gradient(residual: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
            return self._full_gradient(prediction, batch, residual, tau)

        return self._output(prediction.alpha, log_target, batch, tau, full_gradient)

    def _pooled_output(
        self, prediction: _Prediction, log_target: Tensor, batch: GatheredFeatures, tau: Tensor, kappa: float
    ) -> NormalizerOutput:
        """Return the output of the loss with pooled normalizers; `log_target` is the (2, B) log(eps + g_i)."""
        alpha = log_pooled(log_target, prediction.alpha, kappa)  # the mean of eps + g and eps + ghat
        log_scale = -math.log1p(kappa)
        local_alpha = alpha[:, batch.local]
        log_share = prediction.alpha[:, batch.local] - local_alpha + math.log(kappa) + log_scale
        share = log_share.exp()  # v_i, at most 1
        prototype_sums, mass, logit_sum = self._prototype_sums(prediction, batch)
        away = prototype_sums - mass.unsqueeze(2) * batch.anchors().flip(0)  # an anchor's partner is in the other row
        gradient = batch.minus_mean((share / (batch.size * tau)).unsqueeze(2) * away, "normalizer")
        return NormalizerOutput(
            log_weight=log_scale - alpha,
            value=local_alpha,
            tau_term=local_alpha - share * logit_sum,
            metrics=fit_metrics(prediction.alpha, log_target) | {"alpha": alpha.mean()},
            feature_grad=(gradient[IMAGE], gradient[TEXT]),
        )

    def _redraw_if_due(self, position: Position) -> None:
        """Set W1 to the queue's texts and W2 to the queue's images every T_r steps or samples.

        If T_r is 0, and in Algorithm 3, this happens only once. The samples come from this batch if it has at least m
        pairs (Algorithm 1, line 4). With B = m, each anchor's partner is then among the prototypes. If the batch is
        smaller, the samples are the last m before this batch.
        """
        if not self._queue.is_full:
            return
        if self._drawn and not self._is_redraw_due(position):
            return
        self._prototypes.copy_(self._queue.rows.flip(0))
        self._drawn = True
        self._drawn_at = self._queue.seen

    def _is_redraw_due(self, position: Position) -> bool:
        """Return whether to draw the prototypes again, after they have been drawn for the first time."""
        redraw_every = 0 if self._is_joint else self._config.redraw_every
        if redraw_every == 0:
            return False
        if self._config.redraw_unit == "samples":
            return self._queue.seen - self._drawn_at >= redraw_every
        return position.step % redraw_every == 0

    def _fit(self, anchors: _Anchors, log_target: Tensor, lr: float) -> None:
        """Update the prototypes T_u times or, if `order=joint`, once with AdamW, always with this batch's g_i."""
        updates = 1 if self._is_joint else self._config.inner_steps
        for _ in range(updates):
            self._update(self._predict(anchors), anchors, log_target, lr)

    def _predict(self, anchors: _Anchors) -> _Prediction:
        """Compute eq. 10, alpha_i = log(eps + 1/m sum_k exp(z_ik)), summing over the prototypes of all ranks."""
        norm = torch.linalg.vector_norm(self._prototypes, dim=2, keepdim=True).clamp_(min=_SHORTEST)
        unit = self._prototypes / norm
        share, log_sum = self._softmax(anchors, unit)
        log_sum = log_sum - anchors.positive
        total = self._communicator.all_reduce((log_sum.double() - anchors.ceiling).exp(), "normalizer")  # all replicas
        count = self._replicas * self._config.prototypes
        log_ghat = (total.log() + anchors.ceiling - math.log(count)).to(log_sum.dtype)  # log(1/m sum_k exp(z_ik))
        alpha = log_eps_plus(log_ghat, self._eps)
        return _Prediction(alpha=alpha, log_ghat=log_ghat, log_sum=log_sum, share=share, unit=unit, norm=norm)

    def _softmax(self, anchors: _Anchors, unit: Tensor) -> tuple[Tensor, Tensor]:
        """Return the softmax of cos(e_i, W_k)/tau over this rank's prototypes, and the log of its denominators.

        Args:
            anchors: the anchors.
            unit: (2, local prototypes, d) W_k / |W_k|.

        Returns:
            (2, B, local prototypes) shares and (2, B) logs of sums.
        """
        features = anchors.features
        batch_size = features.shape[1]
        local_prototypes = unit.shape[1]
        share = features.new_empty((2, batch_size, local_prototypes))
        if local_prototypes == 0:
            return share, features.new_full((2, batch_size), _LOG_NOTHING)
        cold = unit / anchors.tau  # dividing here takes a pass over the prototypes, not over the logits
        log_sum = features.new_empty((2, batch_size))
        lowest = lowest_exponent(features.dtype)
        for rows in _blocks(batch_size, features, local_prototypes):
            logit = _products(features[:, rows], cold.mT)
            logit.clamp_(min=logit.amax(dim=2, keepdim=True) + lowest)
            block = share[:, rows]
            for direction in (IMAGE, TEXT):  # into contiguous memory, without a copy
                torch.softmax(logit[direction], dim=1, out=block[direction])
            # log share_ik = logit_ik - log_sum_i for any k
            torch.sub(logit[..., 0], block[..., 0].log(), out=log_sum[:, rows])
        return share, log_sum

    def _update(self, prediction: _Prediction, anchors: _Anchors, log_target: Tensor, lr: float) -> None:
        """Update the prototypes with dJ/dW_k = 1/(B |W_k|) sum_i r_i p_ik (e_i - cos(e_i, W_k) W_k/|W_k|).

        Multiplied by B |W_k|, this is the component of V_k = sum_i r_i p_ik e_i that is orthogonal to W_k. With the
        separate objective (ablation), 1/B sum_i (alpha_i - log(eps + g_i))^2, r_i is 2/tau (alpha_i - log(eps + g_i)).
        """
        if self._config.objective == "separate":
            residual = 2 / anchors.tau * (prediction.alpha - log_target)  # (2, B) r_i
        else:
            residual = 1 - (log_target - representable(prediction.alpha, log_target)).exp()
        batch_size = anchors.features.shape[1]
        mass = self._log_mass(prediction).exp_().div_(batch_size)  # (2, B), sum_k p_ik / B over this rank's prototypes
        weighted_anchors = (mass * residual).unsqueeze(2) * anchors.features
        update = Update(
            share=prediction.share,
            mass=mass,
            residual=residual,
            unit=prediction.unit,
            norm=prediction.norm,
            tau=anchors.tau,
            lr=lr,
        )
        self._optimizer.step(self._prototypes, _gradients(prediction, weighted_anchors), update)

    def _log_mass(self, prediction: _Prediction) -> Tensor:
        """Return the (2, B) log of the sum of p_ik = exp(z_ik) / (m (eps + ghat_i)) over this rank's prototypes."""
        mass = prediction.log_sum - prediction.alpha - math.log(self._config.prototypes)
        return mass.clamp_(min=lowest_exponent(mass.dtype))

    def _full_gradient(
        self, prediction: _Prediction, batch: GatheredFeatures, residual: Tensor, tau: Tensor
    ) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return r_i/B grad alpha_i for local features, and r_i tau dalpha_i/dtau; `residual` is the (2, local) r_i."""
        prototype_sums, mass, logit_sum = self._prototype_sums(prediction, batch)
        gradient = prediction_gradient(residual, prototype_sums, mass, batch, tau)
        return gradient, -residual * logit_sum

    def _prototype_sums(self, prediction: _Prediction, batch: GatheredFeatures) -> tuple[Tensor, Tensor, Tensor]:
        """Return sums over all prototypes for this rank's anchors.

        Returns:
            (2, local, d) sum_k p_ik W_k/|W_k|, (2, local) sum_k p_ik, and (2, local) sum_k p_ik z_ik.
        """
        rows = batch.rows_of(self._group)
        mass = self._log_mass(prediction)[:, rows].exp().unsqueeze(2)
        log_sum = prediction.log_sum[:, rows].unsqueeze(2)
        partial_sums = []  # of p_ik W_k/|W_k|, p_ik and p_ik z_ik over this rank's prototypes
        for direction in (IMAGE, TEXT):  # one at a time, because the temporary tensors are large
            share = prediction.share[direction, rows]
            mean_logit = torch.xlogy(share, share).sum(dim=1, keepdim=True) + log_sum[direction]
            means = torch.cat([share @ prediction.unit[direction], torch.ones_like(mean_logit), mean_logit], dim=1)
            partial_sums.append(means * mass[direction])
        sums = batch.sum_local(torch.stack(partial_sums, dim=1), self._group, "normalizer").transpose(0, 1)
        return sums[..., :-2], sums[..., -2], sums[..., -1]

    def replicated_state(self) -> dict[str, Tensor]:
        state = {
            "seen": torch.tensor(self._queue.seen, device="cpu"),
            "drawn": torch.tensor(self._drawn, device="cpu"),
            **self._optimizer.replicated_state(),
        }
        if self._config.redraw_unit == "samples":
            state["drawn_at"] = torch.tensor(self._drawn_at, device="cpu")
        return state

    def load_replicated_state(self, state: Mapping[str, Tensor]) -> None:
        self._queue.seen = int(state["seen"])
        self._drawn = bool(state["drawn"])
        self._optimizer.load_replicated_state(state)
        self._drawn_at = int(state["drawn_at"]) if "drawn_at" in state else 0

    def row_tables(self) -> dict[str, RowTable]:
        tensors = {"queue_image": self._queue.rows[IMAGE], "queue_text": self._queue.rows[TEXT]}
        for name, direction in (("w1", IMAGE), ("w2", TEXT)):
            tensors[name] = self._prototypes[direction]
            for key, values in self._optimizer.moments.items():
                tensors[f"{name}_{key}"] = values[direction]
        return {"npn": RowTable(self._partition, tensors, saved=self._group.start == 0)}


def _gradients(prediction: _Prediction, weighted_anchors: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield, block by block, a range of prototypes and their gradients dJ/dW_k in both directions.

    Row i of `weighted_anchors`, (2, B, d), is r_i p_ik e_i / (B share_ik).
    """
    local_prototypes = prediction.unit.shape[1]
    for columns in _blocks(local_prototypes, weighted_anchors, weighted_anchors.shape[2]):
        unit = prediction.unit[:, columns]
        pull = _products(prediction.share[:, :, columns].mT, weighted_anchors)  # V_k / B
        component = (pull * unit).sum(dim=2, keepdim=True)  # along W_k
        yield columns, pull.addcmul_(component, unit, value=-1).div_(prediction.norm[:, columns])


def _products(left: Tensor, right: Tensor) -> Tensor:
    """Return the (2, n, k) products of (2, n, m) and (2, m, k) matrices; `torch.bmm` rounds small ones differently."""
    products = left.new_empty((2, left.shape[1], right.shape[2]))
    for direction in (IMAGE, TEXT):
        torch.mm(left[direction], right[direction], out=products[direction])
    return products


def _blocks(count: int, like: Tensor, width: int) -> list[slice]:
    """Cut `count` rows of `width` elements into blocks whose size suits the device of the tensor `like`."""
    elements = _CPU_BLOCK if like.device.type == "cpu" else _GPU_BLOCK
    return slices(0, count, max(1, elements // max(1, width)))
