"""Image-text retrieval: how often the matching partner is among the first k of all candidates (recall@k).

Ties count by expectation. With `ahead` negatives scoring higher than the match and `tied` scoring exactly the same, a
random order of the tied puts the match among the first k with probability (k - ahead) / (tied + 1), clamped to
[0, 1]. A collapsed model, all of whose features are equal, thus scores k / n, which is chance, and neither 1 nor 0.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from neuclip_ds.data.dataset import PADDING, Batch
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.evaluation import Encode
from neuclip_ds.evaluation.metrics import hit_probability


class EncodedPairs(NamedTuple):
    """Features of a rank's n pairs, in their order in the data; invalid rows have any."""

    image: Tensor  # (n, d) float32
    text: Tensor  # (n, d) float32
    sample: Tensor  # (n,) int64 index in the manifest, in host memory
    valid: Tensor  # (n,) bool, in host memory


@torch.no_grad()
def encode_pairs(encode: Encode, batches: Iterable[Batch]) -> EncodedPairs:
    """Encode this rank's pairs.

    Args:
        batches: the same number of equally shaped batches on every rank.

    Raises:
        UserError: there is no batch.
    """
    images, texts, samples, valids = [], [], [], []
    for batch in batches:
        image, text = encode(batch.image, batch.tokens)
        assert image is not None and text is not None
        images.append(image.float())
        texts.append(text.float())
        samples.append(batch.index)
        valids.append(batch.valid)
    if not valids:
        raise UserError("The held-out data gives no batch to retrieve from; check data.val.")
    return EncodedPairs(*map(torch.cat, (images, texts, samples, valids)))


@torch.no_grad()
def retrieval(
    pairs: EncodedPairs,
    communicator: Communicator,
    ks: Sequence[int] = (1, 5, 10),
    chunk: int = 1024,
) -> dict[str, float]:
    """Return recall@k in both directions over the valid pairs of all ranks.

    Scores take O(n / K x chunk) memory per rank, gathered features O(n d).

    Args:
        pairs: of this rank, equally many on every rank.
        ks: lengths of the lists to report.
        chunk: candidates scored at once.

    Returns:
        `image_to_text_recall@k` and `text_to_image_recall@k` in [0, 1] and `retrieval_pairs`, equal on all ranks.

    Raises:
        UserError: no valid pair on any rank.
    """
    image, text, _, valid = pairs
    pair = communicator.rank * len(valid) + torch.arange(len(valid))
    padded = torch.where(valid, pair, PADDING).to(image.device, non_blocking=True)
    all_pairs = communicator.all_gather(padded, "evaluation")
    rows = valid.nonzero().squeeze(1).to(image.device, non_blocking=True)
    pair, *sides = (x.index_select(0, rows) for x in (padded, image, text))
    score = inner_products(*sides)
    sums = [image.new_full((), len(rows), dtype=torch.float64)]
    for anchors, candidates in zip(sides, (text, image), strict=True):
        gathered = communicator.all_gather(candidates, "evaluation")
        ahead, tied = count_negatives(anchors, score, pair, gathered, all_pairs, chunk)
        sums += [hit_probability(ahead, tied, k).sum() for k in ks]
    count, *hits = communicator.all_reduce(torch.stack(sums), "evaluation").tolist()
    if not count:
        raise UserError("The held-out data has no readable pair to retrieve; check data.val.")
    names = [f"{direction}_recall@{k}" for direction in ("image_to_text", "text_to_image") for k in ks]
    return {name: hit / count for name, hit in zip(names, hits, strict=True)} | {"retrieval_pairs": count}


def inner_products(a: Tensor, b: Tensor) -> Tensor:
    """Return the (n,) float32 scores of rows (n, d) with rows (n, d).

    Inner products are summed in float64 and then rounded to float32, so that equal features give equal scores in
    whatever order a kernel sums: ties do not depend on chunks or ranks.
    """
    return (a.double() * b.double()).sum(dim=1).float()


def score_matrix(a: Tensor, b: Tensor) -> Tensor:
    """Return the (n, m) float32 scores of rows (n, d) with rows (m, d), rounded as in `inner_products`."""
    return (a.double() @ b.double().T).float()


def count_negatives(
    anchors: Tensor, score: Tensor, label: Tensor, candidates: Tensor, labels: Tensor, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """Count the negatives that score higher than each anchor's match, and those that score exactly the same.

    A NaN score counts as higher. Scores are held for `chunk` candidates at a time.

    Args:
        anchors: (n, d) float32 features.
        score: (n,) of each anchor with its best match, from `inner_products`.
        label: (n,) int64 of the anchors: candidates with the same label are no negatives.
        candidates: (m, d) float32 features.
        labels: (m,) int64 of the candidates; those labelled `PADDING` do not count.

    Returns:
        (n,) int64 `ahead` and (n,) int64 `tied`.
    """
    ahead, tied = torch.zeros_like(label), torch.zeros_like(label)
    exact, match = anchors.double(), score[:, None]
    for low in range(0, len(candidates), chunk):
        part = labels[low : low + chunk]
        scores = score_matrix(exact, candidates[low : low + chunk])  # (n, chunk)
        negative = (part != PADDING) & (part != label[:, None])
        ahead += (negative & ~(scores <= match)).sum(dim=1)
        tied += (negative & (scores == match)).sum(dim=1)
    return ahead, tied
