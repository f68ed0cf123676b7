"""Image-text retrieval: how often the true partner is among the k best of all candidates (recall@k).

Ties are settled by expectation. With `ahead` rivals strictly above the match and `tied` exactly level with it, a
random order of the tied puts the match among the first k with probability (k - ahead) / (tied + 1), clamped to
[0, 1]. A collapsed model, all of whose features are equal, thus scores k / n, which is chance, and neither 1 nor 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from neuclip_ds.errors import UserError
from neuclip_ds.evaluation import Communicator, Encode
from neuclip_ds.evaluation.metrics import hit_probability

ABSENT = -1  # owner of a row that only fills up


class PairBatch(Protocol):
    """One rank's rows of held-out pairs; rows that are not `valid` only fill the batch up."""

    @property
    def image(self) -> Tensor: ...  # (b, 3, H, W) uint8
    @property
    def tokens(self) -> Tensor: ...  # (b, T)
    @property
    def valid(self) -> Tensor: ...  # (b,) bool


@torch.no_grad()
def retrieval(
    encode: Encode,
    batches: Iterable[PairBatch],
    communicator: Communicator,
    ks: Sequence[int] = (1, 5, 10),
    chunk: int = 1024,
) -> dict[str, float]:
    """Recall@k in both directions over the valid pairs of all ranks.

    Scores take O(n / K x chunk) memory a rank, gathered features O(n d).

    Args:
        encode: gives the features of a batch; see `Encode`.
        batches: the same number of equally shaped batches on every rank.
        ks: the list lengths to report.
        chunk: candidates scored at once.

    Returns:
        `image_to_text_recall@k` and `text_to_image_recall@k` in [0, 1] and `retrieval_pairs`, equal on all ranks.

    Raises:
        UserError: no valid pair on any rank.
    """
    image, text, valid = _encode_pairs(encode, batches)
    rows = valid.shape[0]
    own = communicator.rank * rows + torch.arange(rows, device=valid.device)
    owners = communicator.all_gather(torch.where(valid, own, ABSENT), "evaluation")
    score = inner_products(image[valid], text[valid])
    sums = [valid.sum(dtype=torch.float64)]
    for anchors, candidates in ((image, text), (text, image)):
        gathered = communicator.all_gather(candidates, "evaluation")
        ahead, tied = count_rivals(anchors[valid], score, own[valid], gathered, owners, chunk)
        sums += [hit_probability(ahead, tied, k).sum() for k in ks]
    pairs, *hits = communicator.all_reduce(torch.stack(sums), "evaluation").tolist()
    if not pairs:
        raise UserError("The held-out data has no readable pair to retrieve; check data.val.")
    names = [f"{direction}_recall@{k}" for direction in ("image_to_text", "text_to_image") for k in ks]
    return {name: hit / pairs for name, hit in zip(names, hits, strict=True)} | {"retrieval_pairs": pairs}


def inner_products(a: Tensor, b: Tensor) -> Tensor:
    """(n,) float32 scores of rows (n, d) with rows (n, d).

    Inner products are summed in float64 and then rounded to float32, so that equal features give equal scores in
    whatever order a kernel adds them up: ties do not depend on chunks or ranks.
    """
    return (a.double() * b.double()).sum(dim=1).float()


def score_matrix(a: Tensor, b: Tensor) -> Tensor:
    """(n, m) float32 scores of rows (n, d) with rows (m, d), rounded as `inner_products`."""
    return (a.double() @ b.double().T).float()


def count_rivals(
    anchors: Tensor, score: Tensor, owner: Tensor, candidates: Tensor, owners: Tensor, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """How many wrong candidates score above each anchor's match, and how many exactly level with it.

    A NaN score counts as above. Scores are held for `chunk` candidates at a time.

    Args:
        anchors: (n, d) float32 features.
        score: (n,) of each anchor with its best match, from `inner_products`.
        owner: (n,) int64, whose the anchor is: candidates of the same owner are no rivals.
        candidates: (m, d) float32 features.
        owners: (m,) int64, whose each candidate is; `ABSENT` does not count.

    Returns:
        (n,) int64 `ahead` and (n,) int64 `tied`.
    """
    ahead, tied = torch.zeros_like(owner), torch.zeros_like(owner)
    exact, match = anchors.double(), score[:, None]
    for low in range(0, len(candidates), chunk):
        part = owners[low : low + chunk]
        scores = score_matrix(exact, candidates[low : low + chunk])  # (n, chunk)
        rival = (part != ABSENT) & (part != owner[:, None])
        ahead += (rival & ~(scores <= match)).sum(dim=1)
        tied += (rival & (scores == match)).sum(dim=1)
    return ahead, tied


def _encode_pairs(encode: Encode, batches: Iterable[PairBatch]) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's (n, d) image features, (n, d) text features and (n,) valid, on the features' device."""
    images, texts, valids = [], [], []
    for batch in batches:
        image, text = encode(batch.image, batch.tokens)
        assert image is not None and text is not None
        images.append(image.float())
        texts.append(text.float())
        valids.append(batch.valid.to(image.device))
    if not valids:
        raise UserError("The held-out data gave no batch to retrieve from; check data.val.")
    return torch.cat(images), torch.cat(texts), torch.cat(valids)
