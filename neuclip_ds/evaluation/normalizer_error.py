"""Error of a method's estimates of the normalizers over the whole training set (NeuCLIP Figures 2c and 4).

With the current model and temperatures, an anchor's true normalizer is the mean over its negatives among all n samples

    g_i = 1/(n-1) sum_{j != i} exp(l(s_ij - s_ii) / tau_i)

where s_ij is the similarity of anchor i and partner j, an image anchor's negatives are texts, a text anchor's negatives
are images, and l is the method's pair loss. TuneCLIP's losses divide by n instead of n - 1. With a reference model,
s_ij stands for the similarity minus that model's similarity. The error is the logarithm of the method's estimate of g_i
minus the logarithm of g_i. The estimate excludes the eps in NeuCLIP's alpha_i and the positive's contribution to
AmorLIP's lambda_i, which is c/(B-1) if the positive has the weight c (neuclip_ds/losses/amorlip.py).

A fixed sample of A anchors is encoded first, in batches of the training batch size, and the method estimates their
normalizers. Each of the K ranks then stores all anchors, in O(A d) memory, and compares its n/K samples with them, one
batch at a time. The sums over negatives are computed in the log domain, within and across ranks.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from neuclip_ds.data.dataset import PADDING, Batch
from neuclip_ds.distributed.communicator import Communicator, to_device
from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.encoding import Encode, encode_batch
from neuclip_ds.losses.arithmetic import products_exact_for
from neuclip_ds.losses.pairs import PairLoss
from neuclip_ds.losses.stored_features import REFERENCE, StoredBatch, StoredRows, minus_reference


class EstimateNormalizers(Protocol):
    """Function that returns a method's estimates, such as `ContrastiveLoss.estimate_normalizers`."""

    def __call__(
        self,
        image_features: Tensor,
        text_features: Tensor,
        index: Tensor,
        valid: Tensor,
        *,
        reference: StoredRows | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the log of the method's estimate of g, and tau, for the valid rows of this rank's part of a batch.

        Both are (2, number of valid rows): direction 0 contains image anchors, and direction 1 contains text anchors.
        An estimate that does not exist yet is -inf. The function runs collectives, so all ranks must call it the same
        number of times.

        Args:
            image_features, text_features: (b, d) features.
            index, valid: (b,) global indices, and whether each row is valid; both in host memory.
            reference: (b, D) stored features of images and texts from the reference model, if there is one.
        """


@dataclass(frozen=True, kw_only=True)
class _Anchors:
    """All A anchors, identical on all ranks; the first dimension of every tensor except `sample` is the direction."""

    features: Tensor  # (2, A, d), or (2, A, d + D) with a reference model; see `_minus_reference`
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
    parts_per_batch: int = 1,
) -> dict[str, float]:
    """Return the errors of a method's estimates for the first `anchors` valid samples of `anchor_batches`.

    All ranks must have the same number of batches, with the same shapes. Every `parts_per_batch` consecutive
    `anchor_batches` are this rank's part of one batch of the training batch size; over all ranks, `all_batches` contain
    every training sample once. Logits are computed for `chunk` anchors at a time. Raises UserError if `anchor_batches`
    is empty, or if there are fewer than two valid samples.

    Returns:
        Metrics, equal on all ranks: `normalizer_mse`, the mean of `normalizer_mse_image` and `normalizer_mse_text`;
        `normalizer_bias`, the mean of log estimate - log g; `normalizer_anchors`, the number of anchors in these means;
        and `normalizer_unseen`, the number of anchors whose image or text has no estimate yet, or an AmorLIP lambda
        below the positive's contribution. The means are NaN if `normalizer_anchors` is 0.
    """
    encoded_anchors = _encode_anchors(encode, estimate, anchor_batches, parts_per_batch, communicator, anchors)
    log_sum, samples = _log_sum_over_negatives(encode, encoded_anchors, pair_loss, all_batches, communicator, chunk)
    if samples < 2:
        raise UserError("The training data contains fewer than two readable pairs; check data.train.")
    log_g = log_sum - math.log(samples - pair_loss.divisor_offset)  # (2, A)
    has_estimate = ~torch.isneginf(encoded_anchors.log_estimate).any(dim=0)
    error = (encoded_anchors.log_estimate.double() - log_g)[:, has_estimate]
    mse_by_direction = error.square().mean(dim=1)
    return {
        "normalizer_mse": float(mse_by_direction.mean()),
        "normalizer_mse_image": float(mse_by_direction[0]),
        "normalizer_mse_text": float(mse_by_direction[1]),
        "normalizer_bias": float(error.mean()),
        "normalizer_anchors": float(has_estimate.sum()),
        "normalizer_unseen": float((~has_estimate).sum()),
    }


def _encode_anchors(
    encode: Encode,
    estimate: EstimateNormalizers,
    batches: Iterable[Batch],
    parts_per_batch: int,
    communicator: Communicator,
    limit: int,
) -> _Anchors:
    """Encode the first `limit` valid rows of the batches; a batch consists of all ranks' rows in rank order."""
    gathered_rows = []  # of each batch: image features, text features, log estimates (2) and temperatures (2)
    gathered_index = []
    encoded_parts = ((encode_batch(encode, batch), _reference_of(batch)) for batch in batches)
    while parts_and_references := list(islice(encoded_parts, parts_per_batch)):
        parts = [part for part, _ in parts_and_references]
        image = torch.cat([part.image for part in parts])
        text = torch.cat([part.text for part in parts])
        index = torch.cat([part.index for part in parts])
        valid = torch.cat([part.valid for part in parts])
        reference = StoredBatch.concatenated([part for _, part in parts_and_references]).reference

        # invalid rows have no estimate; the estimates are (2, number of valid rows)
        log_estimate, tau = estimate(image, text, index, valid, reference=reference)
        image, text = _minus_reference(image, text, reference)
        values = image.new_full((len(index), 4), math.nan)
        valid_rows = valid.nonzero().squeeze(1).to(image.device, non_blocking=True)
        values.index_copy_(0, valid_rows, torch.cat([log_estimate, tau]).T.to(values))

        gathered_rows.append(communicator.all_gather(torch.cat([image, text, values], dim=1), "evaluation"))
        padded_index = torch.where(valid, index, PADDING).to(image.device, non_blocking=True)
        gathered_index.append(communicator.all_gather(padded_index, "evaluation"))
    if not gathered_rows:
        raise UserError("The training data contains no readable sample for run.normalizer_anchors; check data.train.")

    all_rows = torch.cat(gathered_rows)
    all_index = torch.cat(gathered_index)
    first_valid = torch.nonzero(all_index != PADDING).squeeze(1)[:limit]
    rows = all_rows[first_valid]
    dim = (rows.shape[1] - 4) // 2
    image, text, log_estimates, temperatures = rows.split([dim, dim, 2, 2], dim=1)
    return _Anchors(
        features=torch.stack([image, text]),
        sample=all_index[first_valid],
        log_estimate=log_estimates.T,
        tau=temperatures.T,
    )


def _reference_of(batch: Batch) -> StoredBatch:
    """Return the stored features of the reference model, if there is one."""
    stored = batch.stored.get(REFERENCE)
    return StoredBatch.of(None if stored is None else stored.pair(), None)


def _minus_reference(image: Tensor, text: Tensor, reference: StoredRows | None) -> tuple[Tensor, Tensor]:
    """Return (b, d + D) features whose similarities are s_ij - r_ij, or the given ones without a reference model."""
    if reference is None:
        return image, text
    reference_image, reference_text = (to_device(rows, image.device).to(image.dtype) for rows in reference)
    return minus_reference((image, text), (reference_image, reference_text))


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
    anchor_chunks = [slice(start, start + chunk) for start in range(0, len(anchors.sample), chunk)]

    # compare all anchors with this rank's samples
    for batch in batches:
        encoded = encode_batch(encode, batch)
        index = encoded.index.to(samples.device, non_blocking=True)
        valid = encoded.valid.to(samples.device, non_blocking=True)
        samples += valid.sum()
        image, text = _minus_reference(encoded.image, encoded.text, _reference_of(batch).reference)
        candidates = torch.stack([text, image])  # of image anchors and of text anchors
        for rows in anchor_chunks:
            is_positive = index == anchors.sample[rows].unsqueeze(1)  # (chunk, b)
            logits = _logits(anchors, rows, candidates, pair_loss).masked_fill_(~valid | is_positive, -math.inf)
            log_sum[:, rows] = torch.logaddexp(log_sum[:, rows], logits.logsumexp(dim=2).double())

    # add the sums of all ranks
    for rows in anchor_chunks:
        log_sums_of_ranks = communicator.all_gather(log_sum[None, :, rows].contiguous(), "evaluation")  # (K, 2, chunk)
        log_sum[:, rows] = log_sums_of_ranks.logsumexp(dim=0)
    return log_sum, int(communicator.all_reduce(samples.reshape(1), "evaluation"))


@products_exact_for(torch.float32)
def _logits(anchors: _Anchors, rows: slice, candidates: Tensor, pair_loss: PairLoss) -> Tensor:
    """Return l(s_ij - s_ii) / tau_i, (2, chunk, b), for the anchors i in `rows` and texts or images j, the candidates.

    `candidates` is (2, b, d): texts for image anchors, and images for text anchors.
    """
    features = anchors.features[:, rows]
    positive = (features[0] * features[1]).sum(dim=1)  # (chunk,)
    differences = (features @ candidates.mT).sub_(positive.unsqueeze(1))
    return pair_loss.value_(differences).div_(anchors.tau[:, rows].unsqueeze(2))
