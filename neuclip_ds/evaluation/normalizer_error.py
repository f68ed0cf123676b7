"""How far a method's normalisers are from those over the whole training set (NeuCLIP Figures 2c and 4).

With the model and temperatures of the moment, an anchor's true normaliser is the mean over all n samples

    g_i = 1/(n-1) sum_{j != i} exp(l(s_ij - s_ii) / tau_i)

for an image anchor against the texts, and for a text anchor against the images; l is the method's pair loss. The error
is the difference between the logarithms of the method's estimate of g_i and of g_i itself.

A fixed sample of A anchors is encoded first, in batches like those of the training, and the method estimates on these.
All ranks then hold all anchors, O(A d), and each streams its own n/K samples past them, one batch in memory at a time.
The sums over negatives run in the log domain, and the ranks' sums are joined there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from neuclip_ds.errors import UserError
from neuclip_ds.evaluation import Communicator, Encode
from neuclip_ds.evaluation.retrieval import PairBatch

NormalizerOutput = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""A method's answer for a batch: image features (b, d), text features (b, d), index (b,), valid (b,) of this rank's
rows -> for the valid ones the log of the estimated g (2, local), -inf where there is none yet, and tau (2, local).

Direction 0 means image anchors, 1 text anchors. It holds collectives, so all ranks call it equally often.
"""


class IndexedBatch(PairBatch, Protocol):
    """One rank's rows of training pairs, with their global sample index."""

    @property
    def index(self) -> Tensor: ...  # (b,) int64


class PairLoss(Protocol):
    """The part of an objective's pair loss that its normalisers depend on."""

    def value_(self, x: Tensor) -> Tensor:
        """l(x), in place."""

    def divisor(self, size: int) -> int:
        """What the sum over an anchor's negatives among `size` samples is divided by."""


class _Anchors(NamedTuple):
    """The A anchors, equal on all ranks; the first dimension of features and values is the direction."""

    features: Tensor  # (2, A, d)
    sample: Tensor  # (A,) global indices
    log_estimate: Tensor  # (2, A)
    tau: Tensor  # (2, A)


@torch.no_grad()
def normalizer_error(
    encode: Encode,
    estimate: NormalizerOutput,
    pair_loss: PairLoss,
    anchor_batches: Iterable[IndexedBatch],
    all_batches: Iterable[IndexedBatch],
    communicator: Communicator,
    anchors: int,
    chunk: int = 4096,
) -> dict[str, float]:
    """Errors of the estimates for the first `anchors` valid samples of `anchor_batches`.

    Args:
        encode: gives the features of a batch; see `Encode`.
        estimate: the method; see `NormalizerOutput`.
        pair_loss: its l.
        anchor_batches: this rank's share of batches of the training's size, equally many and equally shaped on every
            rank. What they hold beyond the anchors only completes the last batch.
        all_batches: every training sample once over all ranks, equally many and equally shaped batches on every rank.
        communicator: the ranks.
        anchors: A.
        chunk: anchors that a batch is compared with at once.

    Returns:
        Equal on all ranks: `normalizer_mse`, the mean over both directions of `normalizer_mse_image` and
        `normalizer_mse_text`; `normalizer_bias`, the mean of log estimate - log g; `normalizer_anchors`, over how many
        anchors these means run (NaN if over none), and `normalizer_unseen`, how many more have no estimate yet.

    Raises:
        UserError: fewer than two valid samples.
    """
    chosen = _encode_anchors(encode, estimate, anchor_batches, communicator, anchors)
    log_sum, samples = _stream(encode, chosen, pair_loss, all_batches, communicator, chunk)
    if samples < 2:
        raise UserError("The training data has no two readable pairs to contrast; check data.train.")
    error = chosen.log_estimate.double() - (log_sum - math.log(pair_loss.divisor(samples)))
    seen = ~torch.isneginf(chosen.log_estimate).any(dim=0)
    error = error[:, seen]
    by_direction = error.square().mean(dim=1)
    return {
        "normalizer_mse": float(by_direction.mean()),
        "normalizer_mse_image": float(by_direction[0]),
        "normalizer_mse_text": float(by_direction[1]),
        "normalizer_bias": float(error.mean()),
        "normalizer_anchors": float(seen.sum()),
        "normalizer_unseen": float((~seen).sum()),
    }


def _encode_anchors(
    encode: Encode, estimate: NormalizerOutput, batches: Iterable[IndexedBatch], communicator: Communicator, limit: int
) -> _Anchors:
    """The first `limit` valid rows of the batches, each batch being all ranks' rows in rank order."""
    all_rows, all_index = [], []
    for batch in batches:
        image, text, index, valid = _features(encode, batch)
        values = image.new_full((len(index), 4), math.nan)
        values[valid] = torch.cat(estimate(image, text, index, valid)).T.to(values)
        all_rows.append(communicator.all_gather(torch.cat([image, text, values], dim=1), "evaluation"))
        all_index.append(communicator.all_gather(torch.where(valid, index, -1), "evaluation"))
    if not all_rows:
        raise UserError("The training data gave no batch of anchors; check data.train.")
    rows, index = torch.cat(all_rows), torch.cat(all_index)
    first = torch.nonzero(index >= 0).squeeze(1)[:limit]
    rows, dim = rows[first], (rows.shape[1] - 4) // 2
    image, text, log_estimate, tau = rows.split([dim, dim, 2, 2], dim=1)
    return _Anchors(torch.stack([image, text]), index[first], log_estimate.T, tau.T)


def _stream(
    encode: Encode,
    anchors: _Anchors,
    pair_loss: PairLoss,
    batches: Iterable[IndexedBatch],
    communicator: Communicator,
    chunk: int,
) -> tuple[Tensor, int]:
    """(2, A) float64 log of the sum over each anchor's negatives, and the number of valid samples, over all ranks."""
    log_sum = torch.full_like(anchors.tau, -math.inf, dtype=torch.float64)
    samples = torch.zeros((), dtype=torch.int64, device=log_sum.device)
    chunks = [slice(low, low + chunk) for low in range(0, len(anchors.sample), chunk)]
    for batch in batches:
        image, text, index, valid = _features(encode, batch)
        samples += valid.sum()
        partners = torch.stack([text, image])
        for part in chunks:
            skipped = ~valid | (index == anchors.sample[part].unsqueeze(1))  # (chunk, b)
            logits = _logits(anchors, part, partners, pair_loss).masked_fill_(skipped, -math.inf)
            log_sum[:, part] = torch.logaddexp(log_sum[:, part], logits.logsumexp(dim=2).double())
    for part in chunks:
        everyones = communicator.all_gather(log_sum[None, :, part].contiguous(), "evaluation")  # (K, 2, chunk)
        log_sum[:, part] = everyones.logsumexp(dim=0)
    return log_sum, int(communicator.all_reduce(samples.reshape(1), "evaluation"))


def _logits(anchors: _Anchors, part: slice, partners: Tensor, pair_loss: PairLoss) -> Tensor:
    """(2, chunk, b) l(s_ij - s_ii) / tau_i of some anchors with (2, b, d) partners: texts, images."""
    own = anchors.features[:, part]
    positive = (own[0] * own[1]).sum(dim=1)  # (chunk,)
    differences = (own @ partners.mT).sub_(positive.unsqueeze(1))
    return pair_loss.value_(differences).div_(anchors.tau[:, part].unsqueeze(2))


def _features(encode: Encode, batch: IndexedBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Image and text features (b, d), index (b,) and valid (b,) on the features' device."""
    image, text = encode(batch.image, batch.tokens)
    assert image is not None and text is not None
    return image, text, batch.index.to(image.device), batch.valid.to(image.device)
