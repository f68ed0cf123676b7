"""Error of a method's estimates of the normalizers over the whole training set (NeuCLIP Figures 2c and 4).

With the current model and temperatures, an anchor's true normalizer is the mean over its negatives among all n samples

    g_i = 1/(n-1) sum_{j != i} exp(l(s_ij - s_ii) / tau_i)

where an image anchor's negatives are texts, a text anchor's negatives are images, and l is the method's pair loss. The
error is the logarithm of the method's estimate of g_i minus the logarithm of g_i. The estimate excludes the eps in
NeuCLIP's alpha_i and the positive's contribution, c/(B-1), to AmorLIP's lambda_i.

A fixed sample of A anchors is encoded first, in batches of the training batch size, and the method estimates their
normalizers. Every rank then stores all anchors, in O(A d) memory, and compares its n/K samples with them, one batch at
a time. The sums over negatives are computed in the log domain, within and across the K ranks.
"""

import math
from collections.abc import Callable, Iterable
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from neuclip_ds.data.dataset import PADDING, Batch
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.encoding import Encode, encode_batch
from neuclip_ds.objectives.pair_arithmetic import products_exact_for
from neuclip_ds.objectives.pair_loss import PairLoss

EstimateNormalizers = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function (image features (b, d), text features (b, d), index (b,), valid (b,)) -> (log of the method's estimate of g,
tau), both (2, local), for the valid rows of this rank's part of a batch. An estimate that does not exist yet is -inf.

Direction 0 has image anchors and direction 1 text anchors. `index` and `valid` are in host memory. The function runs
collectives, so all ranks must call it the same number of times.
"""


class _Anchors(NamedTuple):
    """All A anchors, identical on all ranks; the first dimension of every tensor except `sample` is the direction."""

    features: Tensor  # (2, A, d)
    sample: Tensor  # (A,) global indices
    log_estimate: Tensor  # (2, A)
    tau: Tensor  # (2, A)


@torch.no_grad()
def normalizer_error(
    encode: Encode,
    estimate: EstimateNormalizers,
    pair_loss: PairLoss,
    anchor_batches: Iterable[Batch],
    all_batches: Iterable[Batch],
    communicator: Communicator,
    anchors: int,
    chunk: int = 4096,
    parts: int = 1,
) -> dict[str, float]:
    """Return the errors of a method's estimates for the first `anchors` valid samples of `anchor_batches`.

    All ranks must have the same number of batches, with the same shapes. Every `parts` consecutive `anchor_batches`
    form one batch of the training batch size; over all ranks, `all_batches` contain every training sample once. Logits
    are computed for `chunk` anchors at a time. Raises UserError if there are fewer than two valid samples.

    Returns:
        Metrics, equal on all ranks: `normalizer_mse`, the mean of `normalizer_mse_image` and `normalizer_mse_text`;
        `normalizer_bias`, the mean of log estimate - log g; `normalizer_anchors`, the number of anchors in these means;
        and `normalizer_unseen`, the number of anchors that have no estimate yet, or whose AmorLIP lambda is below the
        positive's contribution. The means are NaN if `normalizer_anchors` is 0.
    """
    encoded = _encode_anchors(encode, estimate, anchor_batches, parts, communicator, anchors)
    log_sum, samples = _log_sum_over_negatives(encode, encoded, pair_loss, all_batches, communicator, chunk)
    if samples < 2:
        raise UserError("The training data has fewer than two readable pairs to contrast; check data.train.")
    log_g = log_sum - math.log(samples - pair_loss.excluded)  # (2, A)
    seen = ~torch.isneginf(encoded.log_estimate).any(dim=0)
    error = (encoded.log_estimate.double() - log_g)[:, seen]
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
    encode: Encode,
    estimate: EstimateNormalizers,
    batches: Iterable[Batch],
    parts: int,
    communicator: Communicator,
    limit: int,
) -> _Anchors:
    """Encode the first `limit` valid rows of the batches; a batch consists of all ranks' rows in rank order."""
    all_rows, all_index = [], []
    encoded = (encode_batch(encode, batch) for batch in batches)
    while whole := list(islice(encoded, parts)):
        image, text, index, valid = (torch.cat(column) for column in zip(*whole, strict=True))
        values = image.new_full((len(index), 4), math.nan)
        rows = valid.nonzero().squeeze(1).to(image.device, non_blocking=True)
        values.index_copy_(0, rows, torch.cat(estimate(image, text, index, valid)).T.to(values))
        all_rows.append(communicator.all_gather(torch.cat([image, text, values], dim=1), "evaluation"))
        padded = torch.where(valid, index, PADDING).to(image.device, non_blocking=True)
        all_index.append(communicator.all_gather(padded, "evaluation"))
    if not all_rows:
        raise UserError("The training data yields no batch of anchors; check data.train.")
    rows, index = torch.cat(all_rows), torch.cat(all_index)
    first = torch.nonzero(index != PADDING).squeeze(1)[:limit]
    rows, dim = rows[first], (rows.shape[1] - 4) // 2
    image, text, log_estimate, tau = rows.split([dim, dim, 2, 2], dim=1)
    return _Anchors(torch.stack([image, text]), index[first], log_estimate.T, tau.T)


def _log_sum_over_negatives(
    encode: Encode,
    anchors: _Anchors,
    pair_loss: PairLoss,
    batches: Iterable[Batch],
    communicator: Communicator,
    chunk: int,
) -> tuple[Tensor, int]:
    """Return each anchor's log-sum-exp over its negatives, (2, A) float64, and the number of valid samples."""
    log_sum = torch.full_like(anchors.tau, -math.inf, dtype=torch.float64)
    samples = torch.zeros((), dtype=torch.int64, device=log_sum.device)
    chunks = [slice(low, low + chunk) for low in range(0, len(anchors.sample), chunk)]
    for batch in batches:
        image, text, index, valid = encode_batch(encode, batch)
        index, valid = (x.to(image.device, non_blocking=True) for x in (index, valid))
        samples += valid.sum()
        partners = torch.stack([text, image])
        for part in chunks:
            masked = ~valid | (index == anchors.sample[part].unsqueeze(1))  # (chunk, b)
            logits = _logits(anchors, part, partners, pair_loss).masked_fill_(masked, -math.inf)
            log_sum[:, part] = torch.logaddexp(log_sum[:, part], logits.logsumexp(dim=2).double())
    for part in chunks:
        gathered = communicator.all_gather(log_sum[None, :, part].contiguous(), "evaluation")  # (K, 2, chunk)
        log_sum[:, part] = gathered.logsumexp(dim=0)
    return log_sum, int(communicator.all_reduce(samples.reshape(1), "evaluation"))


@products_exact_for(torch.float32)
def _logits(anchors: _Anchors, part: slice, partners: Tensor, pair_loss: PairLoss) -> Tensor:
    """Return l(s_ij - s_ii) / tau_i, (2, chunk, b), for anchors i in `part` and texts or images j in `partners`."""
    features = anchors.features[:, part]
    positive = (features[0] * features[1]).sum(dim=1)  # (chunk,)
    differences = (features @ partners.mT).sub_(positive.unsqueeze(1))
    return pair_loss.value_(differences).div_(anchors.tau[:, part].unsqueeze(2))
