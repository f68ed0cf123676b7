"""Image-text retrieval: the fraction of queries with a match among the first k candidates (recall@k).

`retrieval` evaluates pairs of one image and one caption. `caption_retrieval` evaluates sets in which an image may have
several captions, as CLIP_benchmark and DataComp do: an image is a hit at k if one of its captions is among the first k
captions, and a caption is a hit if its image is among the first k images. Recall is the mean over the images or over
the captions. Every rank stores all features, but only blocks of the score matrix.

Ties are resolved in expectation (`hit_probability`): a collapsed model, whose features are all equal, has recall k / n.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from neuclip_ds.data.dataset import PADDING, Batch
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.encoding import BatchEncoder, Encode, encode_batch
from neuclip_ds.evaluation.metrics import chance_recall, hit_probability
from neuclip_ds.evaluation.sets import EvaluationSet, Sample
from neuclip_ds.evaluation.sharded_batches import decode, sharded_batches

_ANCHORS, _CHUNK = 4096, 1024  # numbers of queries and candidates that are compared at once


@torch.no_grad()
def retrieval(
    encode: Encode,
    batches: Iterable[Batch],
    communicator: Communicator,
    ks: Sequence[int] = (1, 5, 10),
    chunk: int = _CHUNK,
) -> dict[str, float]:
    """Return recall@k in both directions over the valid pairs of all ranks.

    All ranks need the same number of batches with the same shapes. For n pairs on K ranks, scores take O(n / K x chunk)
    memory per rank, and the gathered features take O(n d). Raises UserError if no rank has a valid pair.
    """
    columns = [encode_batch(encode, batch) for batch in batches]
    if not columns:
        raise UserError("The held-out data yields no batch to retrieve from; check data.val.")
    image, text, _, valid = map(torch.cat, zip(*columns, strict=True))
    image, text = image.float(), text.float()
    pair = communicator.rank * len(valid) + torch.arange(len(valid))
    padded = torch.where(valid, pair, PADDING).to(image.device, non_blocking=True)
    all_pairs = communicator.all_gather(padded, "evaluation")
    rows = valid.nonzero().squeeze(1).to(image.device, non_blocking=True)
    pair, *sides = (x.index_select(0, rows) for x in (padded, image, text))
    score = inner_products(*sides)
    sums = {}
    for name, anchors, candidates in (("image_to_text", sides[0], text), ("text_to_image", sides[1], image)):
        queries = _Queries(anchors, pair, score, torch.ones_like(pair))
        gathered = communicator.all_gather(candidates, "evaluation")
        sums[name] = _count_hits(queries, (gathered, all_pairs), ks, chunk)
    count, recalls = _recalls(sums, ks, communicator)
    return {**recalls, "retrieval_pairs": count}


class _Queries(NamedTuple):
    """This rank's anchors in one direction; an anchor matches the candidates with the same label."""

    features: Tensor  # (n, d)
    label: Tensor  # (n,) int64
    score: Tensor  # (n,) score of the best match
    matches: Tensor  # (n,) number of matches with this score


@torch.no_grad()
def caption_retrieval(encoder: BatchEncoder, folder: EvaluationSet, ks: Sequence[int] = (1, 5, 10)) -> dict[str, float]:
    """Return recall@k in both directions, counting each image and each caption once.

    Returns:
        Scores in [0, 1], equal on all ranks: `image_retrieval_recall@k` (captions as queries),
        `text_retrieval_recall@k` (images as queries), `mean_recall@1` and `chance`, the chance level of
        `mean_recall@1`. Raises UserError if the set is empty, or a sample is broken or has no caption.
    """
    communicator = encoder.communicator
    images, captions, image_of = _encode_all(encoder, folder)
    rows = torch.arange(len(images), device=images.device)
    score = inner_products(images[image_of], captions)  # score of each caption with its image
    best = torch.full((len(images),), -torch.inf, device=images.device).scatter_reduce(0, image_of, score, "amax")
    best_captions = torch.zeros_like(rows).index_add_(0, image_of, (score == best[image_of]).long())
    label = rows * communicator.world_size + communicator.rank

    by_caption = _Queries(captions, label[image_of], score, torch.ones_like(image_of))
    by_image = _Queries(images, label, best, best_captions)
    directions = {"image_retrieval": (by_caption, by_image), "text_retrieval": (by_image, by_caption)}
    sums = {}
    for name, (queries, candidates) in directions.items():
        sums[name] = _count_hits(queries, _gather(candidates.features, candidates.label, communicator), ks, _CHUNK)
    count, found = _recalls(sums, ks, communicator)
    found["chance"] = chance_recall(1, int(count))  # equal in both directions, for any number of captions per image
    found["mean_recall@1"] = (found["image_retrieval_recall@1"] + found["text_retrieval_recall@1"]) / 2
    return found


def read_captions(sample: Sample) -> list[str]:
    """Return a sample's captions, the lines of the .txt member; raise UserError if there are none."""
    captions = [line.strip() for line in sample.text("txt").splitlines() if line.strip()]
    if not captions:
        raise UserError(f"{sample.name} has no caption; its .txt member must contain one caption per line.")
    return captions


def _count_hits(queries: _Queries, candidates: tuple[Tensor, Tensor], ks: Sequence[int], chunk: int) -> Tensor:
    """Return the number of queries and the number of hits at each k, as (1 + len(ks),) float64.

    `candidates` are the (m, d) features and (m,) labels of the candidates on all ranks.
    """
    sums = torch.zeros(1 + len(ks), dtype=torch.float64, device=queries.features.device)
    sums[0].fill_(len(queries.label))  # unlike an assignment, does not copy the number from the host and wait
    for anchors, label, score, matches in zip(*(part.split(_ANCHORS) for part in queries), strict=True):
        ahead, tied = count_negatives(anchors, score, label, *candidates, chunk)
        sums[1:] += torch.stack([hit_probability(ahead, tied, k, matches).sum() for k in ks])
    return sums


def _recalls(sums: dict[str, Tensor], ks: Sequence[int], communicator: Communicator) -> tuple[float, dict[str, float]]:
    """Return the last direction's number of queries, and `NAME_recall@k` for each direction, both over all ranks."""
    totals = communicator.all_reduce(torch.stack(list(sums.values())), "evaluation").tolist()
    if not totals[0][0]:
        raise UserError("The held-out data has no readable pair to retrieve; check data.val.")
    found = {}
    for name, (count, *hits) in zip(sums, totals, strict=True):
        found.update({f"{name}_recall@{k}": hit / count for k, hit in zip(ks, hits, strict=True)})
    return totals[-1][0], found


def _encode_all(encoder: BatchEncoder, folder: EvaluationSet) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's (n, d) image features, (m, d) caption features, and each caption's image row, (m,) int64."""
    prepare = partial(_prepare, transform=encoder.transform)
    images, captions, image_of, seen = [], [], [], 0
    for batch in sharded_batches(folder, prepare, encoder.communicator, encoder.size, encoder.loader):
        images.append(encoder.encode_images([pixels for pixels, _ in batch.rows])[: batch.n_valid])
        lines = [(seen + row, line) for row, (_, found) in enumerate(batch.rows) for line in found]
        n_valid = sum(row - seen < batch.n_valid for row, _ in lines)
        captions.append(encoder.encode_texts([line for _, line in lines])[:n_valid])
        image_of.append(torch.tensor([row for row, _ in lines[:n_valid]], dtype=torch.int64))
        seen += batch.n_valid
    if not images:
        raise UserError(f"{folder.path} has no sample; download the set again.")
    images_, captions_ = torch.cat(images).float(), torch.cat(captions).float()
    return images_, captions_, torch.cat(image_of).to(images_.device)


def _prepare(sample: Sample, transform: Callable[[bytes], Tensor]) -> tuple[Tensor, list[str]]:
    return decode(sample, transform), read_captions(sample)


def _gather(rows: Tensor, labels: Tensor, communicator: Communicator) -> tuple[Tensor, Tensor]:
    """Gather all ranks' (m, d) rows and (m,) labels, padded because m may differ between ranks."""
    counts = communicator.all_gather(torch.tensor([len(rows)], device=rows.device), "evaluation")
    missing = int(counts.max()) - len(rows)
    rows = torch.cat([rows, rows.new_zeros((missing, rows.shape[1]))])
    labels = torch.cat([labels, labels.new_full((missing,), PADDING)])
    return communicator.all_gather(rows, "evaluation"), communicator.all_gather(labels, "evaluation")


def inner_products(a: Tensor, b: Tensor) -> Tensor:
    """Return the (n,) float32 scores, which are inner products of corresponding rows of `a` and `b`, both (n, d).

    Inner products are summed in float64 and then rounded to float32, so that equal features give equal scores
    regardless of a kernel's summation order. Ties therefore do not depend on the chunk size or the number of ranks.
    """
    return (a.double() * b.double()).sum(dim=1).float()


def score_matrix(a: Tensor, b: Tensor) -> Tensor:
    """Return the (n, m) float32 scores of each row of `a` (n, d) with each row of `b` (m, d); see `inner_products`."""
    return (a.double() @ b.double().T).float()


def count_negatives(
    anchors: Tensor, score: Tensor, label: Tensor, candidates: Tensor, labels: Tensor, chunk: int = _CHUNK
) -> tuple[Tensor, Tensor]:
    """Count, for each anchor, the negatives that score higher than the best match and the negatives that tie with it.

    A NaN score counts as higher. Scores are computed for `chunk` candidates at a time.

    Args:
        anchors, score: (n, d) float32 features and the (n,) scores of their best matches, from `inner_products`.
        label: (n,) int64 labels of the anchors; candidates with the same label are not negatives.
        candidates: (m, d) float32 features.
        labels: (m,) int64 labels of the candidates; candidates labeled `PADDING` are ignored.

    Returns:
        `ahead` and `tied`, the two counts, each (n,) int64.
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
