"""`neuclip_queue` (this project, with MoCo's queue): InfoNCE over the dataset, with normalizers from a queue.

The normalizers are estimated from the batch and a queue of recent features, without parameters or per-sample state. The
function `neuclip_queue` builds the method; its options are in neuclip_queue_options.py.

The queue contains the last m texts, for image anchors, and the last m images, for text anchors. A batch is added after
its normalizers are computed. Entries from an anchor's own sample are skipped, so that no positive is used as a
negative; m_i entries remain. With W_k the queue's features and t_i the anchor's partner,

    z_ik = e_i . (W_k - t_i)/tau,   ghat_i = 1/m_i sum_k exp(z_ik)                 (k: entries of other samples)
    alpha_i = log(eps + (g_i + kappa ghat_i)/(1 + kappa)),   loss = mean_i alpha_i over both directions

ghat_i has a gradient for the anchor only, and only for its difference from the mean anchor of the batch: W, the t_i in
z_ik and the mean of the e_i are held constant. In the batch, a feature is repelled both as an anchor and as a negative,
and attracted both as an anchor and as a partner. The queue's entries are not anchors, so a gradient for t_i would
attract t_i without repelling it. With q_ik the softmax of z_ik over k,

    h_i = v_i (sum_k q_ik W_k - t_i)/tau,   v_i = kappa ghat_i/((1 + kappa) exp(alpha_i))
    grad_{e_i} += (h_i - mean_j h_j)/(2 B)  (j: anchors of the same modality in the whole batch)

The entries are features of earlier steps. When all features drift the same way, as at the start of training, the
entries lag behind them, and the h_i have a large common part that drives the features further away. The drift then
accelerates, and the towers collapse. Without this part, the entries only move anchors relative to each other.

The total weight of the batch's negatives is g_i/((1 + kappa) exp(alpha_i)), which is at most 1. Each rank has a
bit-identical copy of the queue and computes the terms of its local anchors; one all-reduce of 2 d values sums the h_i.

With a reference model, whose similarities are r, z_ik = (s_ik - s_ii - r_ik + r_ii)/tau. Anchors and entries include
the columns of the reference's features (`GatheredFeatures.minus_reference`).
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from neuclip_ds.distributed.communicator import to_device
from neuclip_ds.errors import UserError
from neuclip_ds.losses.arithmetic import log_eps_plus, log_pooled, log_sum_exp, pair_products, products_exact_for
from neuclip_ds.losses.base import LossContext, Position
from neuclip_ds.losses.gather import GatheredFeatures
from neuclip_ds.losses.global_contrastive import (
    GlobalContrastiveLoss,
    GlobalTemperatureRule,
    NormalizerEstimator,
    NormalizerOutput,
)
from neuclip_ds.losses.options import ObjectiveConfig
from neuclip_ds.losses.pairs import IMAGE, TEXT, block_bytes, slices


def neuclip_queue(config: ObjectiveConfig, context: LossContext) -> GlobalContrastiveLoss:
    """Build the loss of `neuclip_queue`.

    1/2n sum_i sum_{1, 2} alpha_i + log(n-1),   eps = 1/(n-1)

    With `temperature.rule=robust`, the scale is tau instead of 1/2, eps is `objective.eps`, and 2 rho tau replaces
    log(n-1).
    """
    rule = GlobalTemperatureRule.of(config, context)
    return GlobalContrastiveLoss(
        config,
        context,
        estimator=PooledQueueEstimator(config, context, rule.eps),
        temperature=rule.temperature,
        scale=rule.scale,
        constant=rule.constant,
    )


class PooledQueueEstimator(NormalizerEstimator):
    """Normalizers from a queue of features and the batch: w_i = exp(-alpha_i)/(1 + kappa).

    Until m samples have been seen, the queue has fewer entries, and their number replaces m. If the queue is empty,
    as in the first step, or contains only the anchor's sample, alpha_i = log(eps + g_i) and w_i = exp(-alpha_i).
    """

    needs_index = True
    allows_reference = True

    def __init__(self, config: ObjectiveConfig, context: LossContext, eps: float) -> None:
        self._size = config.queue.size
        self._kappa = config.queue.kappa
        self._eps = eps
        device = context.communicator.device
        self._images = torch.zeros((self._size, context.dim), dtype=context.dtype, device=device)
        self._texts = self._images.clone()
        self._index = torch.full((self._size,), -1, device="cpu")  # sample indices of the entries, in host memory
        self._seen = 0  # samples added to the queue so far

    def __call__(
        self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor, position: Position, training: bool
    ) -> NormalizerOutput:
        anchors = batch.anchors()
        log_ghat, entry_means = self._estimate(batch, anchors, tau)
        pooled, log_scale = self._pooled(log_g, log_ghat)
        alpha = log_eps_plus(pooled, self._eps)
        pull = (log_ghat + math.log(self._kappa) + log_scale - alpha).exp()  # v_i; 0 without entries
        away = entry_means - anchors.flip(0)  # the partner of an anchor is the anchor of the other direction
        gradient = (pull / (batch.size * tau)).unsqueeze(2) * away[..., : batch.width]
        gradient = batch.minus_mean(gradient, "normalizer")
        mean_logit = torch.einsum("sid,sid->si", anchors, away) / tau  # sum_k q_ik z_ik
        log_weight = batch.gather(log_scale - alpha, "normalizer")
        batch_share = (log_g + log_scale - pooled).exp()  # g_i/(g_i + kappa ghat_i)
        if training:
            self._enqueue(batch)
        return NormalizerOutput(
            log_weight=log_weight,
            value=alpha,
            tau_term=alpha - pull * mean_logit,
            feature_grad=(gradient[IMAGE], gradient[TEXT]),
            local_metrics={"alpha": alpha, "batch_share": batch_share},
        )

    def log_estimate(self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor) -> Tensor:
        log_ghat, _ = self._estimate(batch, batch.anchors(), tau)
        pooled, _ = self._pooled(log_g, log_ghat)
        return pooled

    def _pooled(self, log_g: Tensor, log_ghat: Tensor) -> tuple[Tensor, Tensor]:
        """Return log((g + kappa ghat)/(1 + kappa)) and -log(1 + kappa), each (2, local); if ghat is 0, log g and 0."""
        has_none = log_ghat.isneginf()
        log_scale = torch.full_like(log_ghat, -math.log1p(self._kappa)).masked_fill_(has_none, 0.0)
        return torch.where(has_none, log_g, log_pooled(log_g, log_ghat, self._kappa)), log_scale

    def _resize(self, width: int) -> None:
        """Resize the queue, which is empty or will be overwritten, to features of this width."""
        if self._images.shape[1] == width:
            return
        self._images = self._images.new_zeros((self._size, width))
        self._texts = torch.zeros_like(self._images)

    def _estimate(self, batch: GatheredFeatures, anchors: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        """Return log ghat_i, of shape (2, local), and sum_k q_ik W_k, of shape (2, local, d), for the anchors.

        For an anchor without entries from other samples, the results are -inf and 0.

        Raises:
            UserError: the batch's features, including those of a reference model, differ in width from the entries.
        """
        log_ghat = anchors.new_full(anchors.shape[:2], -math.inf)
        entry_means = torch.zeros_like(anchors)
        count = min(self._seen, self._size)
        if not count:
            return log_ghat, entry_means
        if anchors.shape[2] != self._images.shape[1]:
            raise UserError(
                f"The queue's entries have {self._images.shape[1]} columns, but this batch has {anchors.shape[2]} "
                "(including the features of a reference model, if it has any): pass features of the same reference "
                "model in every call, or in none."
            )
        # entries from an anchor's own sample are masked; the other entries number m_i
        owners, copies = self._copies(batch, count)
        first = torch.searchsorted(
            owners, torch.arange(anchors.shape[1] + 1, device="cpu")
        )  # start of each anchor's copies
        others = to_device(count - first.diff(), anchors.device)
        owners = to_device(owners, anchors.device)
        copies = to_device(copies, anchors.device)
        offset = batch.positive[batch.local] / tau + others.clamp(min=1).to(anchors.dtype).log()
        for side, entries in ((IMAGE, self._texts[:count]), (TEXT, self._images[:count])):
            for rows in _blocks(anchors.shape[1], entries):
                logit = pair_products(anchors[side, rows], entries, batch.comm_dtype)
                logit.div_(tau).sub_(offset[rows].unsqueeze(1))  # z_ik - log m_i
                masked = slice(int(first[rows.start]), int(first[rows.stop]))
                if masked.start < masked.stop:
                    logit[owners[masked] - rows.start, copies[masked]] = -math.inf
                log_ghat[side, rows] = log_sum_exp(logit, 1, logit)  # `logit` now has the terms relative to the largest
                with products_exact_for(batch.comm_dtype):
                    entry_means[side, rows] = (logit @ entries).div_(logit.sum(dim=1, keepdim=True))
        has_none = others == 0
        return log_ghat.masked_fill_(has_none, -math.inf), entry_means.masked_fill_(has_none.unsqueeze(1), 0.0)

    def _copies(self, batch: GatheredFeatures, count: int) -> tuple[Tensor, Tensor]:
        """Return all pairs of a local anchor and a queue entry from the same sample.

        The pairs are given by a tensor of anchor positions, in ascending order, and a tensor of entry positions.
        """
        index, order = batch.index[batch.local].sort(stable=True)
        entries = self._index[:count]
        first = torch.searchsorted(index, entries)
        copies = torch.searchsorted(index, entries, right=True) - first  # number of anchors from each entry's sample
        positions = torch.arange(count, device="cpu").repeat_interleave(copies)
        # number of each pair among the pairs of its entry
        number = torch.arange(len(positions), device="cpu") - torch.searchsorted(positions, positions)
        anchors, by_anchor = order[first[positions] + number].sort(stable=True)
        return anchors, positions[by_anchor]

    def _enqueue(self, batch: GatheredFeatures) -> None:
        """Overwrite the oldest rows with the batch's last m samples; the run's i-th sample is stored in row i mod m.

        If the batch contains the same samples as the previous one (as in a second forward pass), replace the previous
        batch's rows.
        """
        if not self._seen:
            self._resize(batch.image.shape[1])
        added = min(batch.size, self._size)
        positions = torch.arange(self._seen - added, self._seen, device="cpu") % self._size
        index = batch.index[-added:]
        if not torch.equal(self._index[positions], index):
            self._seen += batch.size
            positions = (positions + batch.size) % self._size
            self._index[positions] = index
        positions = to_device(positions, batch.image.device)
        self._images.index_copy_(0, positions, batch.image[-added:])
        self._texts.index_copy_(0, positions, batch.text[-added:])

    def replicated_state(self) -> dict[str, Tensor]:
        return {
            "seen": torch.tensor(self._seen, device="cpu"),
            "queue_image": self._images,
            "queue_text": self._texts,
            "queue_index": self._index,
        }

    def load_replicated_state(self, state: Mapping[str, Tensor]) -> None:
        self._resize(state["queue_image"].shape[1])  # with or without the columns of a reference
        for name, queue in self.replicated_state().items():
            if state[name].shape != queue.shape:
                raise UserError(
                    f"The checkpoint's {name} has the shape {tuple(state[name].shape)}, but this run needs the "
                    f"shape {tuple(queue.shape)}; set objective.queue.size={len(state[name])}, or start a new run."
                )
            queue.copy_(state[name])
        self._seen = int(state["seen"])


def _blocks(rows: int, entries: Tensor) -> list[slice]:
    """Cut rows of logits into blocks that fit into a CPU's cache or are small compared with a GPU's memory."""
    row_bytes = entries.element_size() * len(entries)
    return slices(0, rows, max(1, block_bytes(entries.device.type) // row_bytes))
