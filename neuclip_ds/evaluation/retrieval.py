"""Image-text retrieval: the fraction of queries with a match among the first k candidates (recall@k).

`retrieval` evaluates pairs of one image and one caption. `caption_retrieval` evaluates sets in which an image may have
several captions, as CLIP_benchmark and DataComp do: an image is a hit at k if one of its captions is among the first k
captions, and a caption is a hit if its image is among the first k images. Recall is the mean over the images or over
the captions. Every rank stores all features, but only blocks of the score matrix.

Ties are resolved in expectation (`hit_probability`): a collapsed model, whose features are all equal, has the recall
k / n on n pairs.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize

from neuclip_ds.data.dataset import PADDING, Batch
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.encoding import BatchEncoder, Encode, EncodedBatch, encode_batch
from neuclip_ds.evaluation.metrics import chance_recall, hit_probability
from neuclip_ds.evaluation.sets import EvaluationSet, Sample
from neuclip_ds.evaluation.sharded_batches import decode, sharded_batches
from neuclip_ds.losses.options import PREFIX
from neuclip_ds.reporting.retrieved import RankedImage, Retrieved

_NO_PAIR = (
    "The validation data contains no readable pair, so recall cannot be measured; check data.val, or --data of "
    "`neuclip-ds evaluate`."
)
_QUERY_CHUNK = 4096  # queries that are compared at once
_CANDIDATE_CHUNK = 1024  # candidates that are compared at once


@torch.no_grad()
def retrieval(
    encode: Encode,
    batches: Iterable[Batch],
    communicator: Communicator,
    ks: Sequence[int] = (1, 5, 10),
    chunk: int = _CANDIDATE_CHUNK,
    prefixes: Iterable[int] = (),
) -> dict[str, float]:
    """Return recall@k in both directions over the valid pairs of all ranks.

    All ranks need the same number of batches with the same shapes. See `recalls_of_pairs`.
    """
    encoded = [encode_batch(encode, batch) for batch in batches]
    return recalls_of_pairs(encoded, communicator, ks, chunk, prefixes)


@torch.no_grad()
def recalls_of_pairs(
    encoded: Sequence[EncodedBatch],
    communicator: Communicator,
    ks: Sequence[int] = (1, 5, 10),
    chunk: int = _CANDIDATE_CHUNK,
    prefixes: Iterable[int] = (),
) -> dict[str, float]:
    """Return recall@k in both directions over the valid pairs of all ranks; ranks must have equal numbers of rows.

    Up to 4,096 queries are compared with `chunk` candidates at a time. The gathered features of n pairs take O(n d)
    memory on each rank.

    Returns:
        `image_to_text_recall@k`, `text_to_image_recall@k`, and `retrieval_pairs`, the number of pairs. For each p in
        `prefixes`, the recalls with only the first p dimensions of the features are added as `prefixP/NAME`.

    Raises:
        UserError: no rank has a valid pair.
    """
    if not encoded:
        raise UserError(_NO_PAIR)
    all_images = torch.cat([batch.image for batch in encoded]).float()
    all_texts = torch.cat([batch.text for batch in encoded]).float()
    all_valid = torch.cat([batch.valid for batch in encoded])
    device = all_images.device

    # number the pairs of all ranks; an image matches the text with the same number
    pair_numbers = communicator.rank * len(all_valid) + torch.arange(len(all_valid))
    labels = torch.where(all_valid, pair_numbers, PADDING).to(device, non_blocking=True)
    candidate_labels = communicator.all_gather(labels, "evaluation")

    # this rank's valid pairs are its queries
    valid_rows = all_valid.nonzero().squeeze(1).to(device, non_blocking=True)
    query_labels = labels.index_select(0, valid_rows)

    counts = {}
    for prefix, (images_of_all, texts_of_all) in _with_prefixes(all_images, all_texts, prefixes).items():
        images = images_of_all.index_select(0, valid_rows)
        texts = texts_of_all.index_select(0, valid_rows)
        score = inner_products(images, texts)
        directions = {"image_to_text": (images, texts_of_all), "text_to_image": (texts, images_of_all)}
        for name, (query_features, candidate_features) in directions.items():
            queries = _Queries(
                features=query_features,
                label=query_labels,
                score=score,
                matches=torch.ones_like(query_labels),
            )
            candidates = communicator.all_gather(candidate_features, "evaluation")
            counts[prefix + name] = _count_hits(queries, candidates, candidate_labels, ks, chunk)
    pairs, recalls = _recalls(counts, ks, communicator)
    return {**recalls, "retrieval_pairs": pairs}


@torch.no_grad()
def example_retrievals(
    encoded: Sequence[EncodedBatch], communicator: Communicator, queries: int, images: int
) -> list[Retrieved]:
    """Return up to `images` best images over all ranks for each caption of up to `queries` evenly spaced pairs.

    The result is equal on all ranks and, up to rounding, does not depend on the number of ranks.
    """
    valid = torch.cat([batch.valid for batch in encoded])
    own_indices = torch.cat([batch.index for batch in encoded])[valid].tolist()
    rows = valid.to(encoded[0].image.device)
    own_images = torch.cat([batch.image for batch in encoded])[rows].float()
    own_texts = torch.cat([batch.text for batch in encoded])[rows].float()

    # the features of the queries' captions, on all ranks
    indices = sorted(itertools.chain.from_iterable(communicator.gather_objects(own_indices)))
    chosen = indices[:: max(1, len(indices) // queries)][:queries]
    own_row = {index: row for row, index in enumerate(own_indices)}
    texts = own_texts.new_zeros(len(chosen), own_texts.shape[1])
    for number, index in enumerate(chosen):
        if index in own_row:
            texts[number] = own_texts[own_row[index]]
    texts = communicator.all_reduce(texts, "evaluation")

    # each rank's best images, from which the best images of all ranks are chosen
    scores = score_matrix(texts, own_images)
    best = scores.topk(min(images, len(own_indices)), dim=1)
    own_best = []  # (-score, index) of the best images, for each query
    for row_scores, row_numbers in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        own_best.append([(-score, own_indices[row]) for score, row in zip(row_scores, row_numbers, strict=True)])
    best_of_ranks = communicator.gather_objects(own_best)
    retrieved = []
    for number, index in enumerate(chosen):
        candidates = sorted(itertools.chain.from_iterable(best_of_rank[number] for best_of_rank in best_of_ranks))
        ranked = [RankedImage(index=candidate, score=-negative) for negative, candidate in candidates[:images]]
        retrieved.append(Retrieved(index=index, images=ranked))
    return retrieved


def _with_prefixes(images: Tensor, texts: Tensor, prefixes: Iterable[int]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the full features and the features of each prefix, keyed by the start of their metrics' names."""
    features = {"": (images, texts)}
    for length in prefixes:
        of_prefix = normalize(images[:, :length], dim=1), normalize(texts[:, :length], dim=1)
        features[f"{PREFIX}{length}/"] = of_prefix
    return features


@dataclass(frozen=True, kw_only=True)
class _Queries:
    """This rank's queries in one direction; a query matches the candidates with the same label."""

    features: Tensor  # (n, d)
    label: Tensor  # (n,) int64
    score: Tensor  # (n,) score of the best match
    matches: Tensor  # (n,) number of matches with this score


@torch.no_grad()
def caption_retrieval(
    encoder: BatchEncoder, folder: EvaluationSet, ks: Sequence[int] = (1, 5, 10), chunk: int = _CANDIDATE_CHUNK
) -> dict[str, float]:
    """Return recall@k in both directions, counting each image and each caption once.

    Up to 4,096 queries are compared with `chunk` candidates at a time.

    Returns:
        Scores in [0, 1], equal on all ranks: `image_retrieval_recall@k` (captions as queries),
        `text_retrieval_recall@k` (images as queries), `mean_recall@1` and `chance`, the chance level of
        `mean_recall@1`; and the same scores for each prefix in `encoder.prefixes`, as `prefixP/NAME`.

    Raises UserError if the set is empty or differs between nodes, or if a sample is broken or has no caption.
    """
    communicator = encoder.communicator
    all_images, all_captions, image_of_caption = _encode_all(encoder, folder)
    metrics: dict[str, float] = {}
    for prefix, features in _with_prefixes(all_images, all_captions, encoder.prefixes).items():
        for name, value in _caption_recalls(*features, image_of_caption, communicator, ks, chunk).items():
            metrics[prefix + name] = value
    return metrics


def _caption_recalls(
    images: Tensor,
    captions: Tensor,
    image_of_caption: Tensor,
    communicator: Communicator,
    ks: Sequence[int],
    chunk: int,
) -> dict[str, float]:
    """Return the metrics of `caption_retrieval`.

    Args:
        images, captions: this rank's (n, d) and (m, d) features.
        image_of_caption: (m,) int64 row of each caption's image.
        communicator, ks, chunk: as in `caption_retrieval`.
    """
    score = inner_products(images[image_of_caption], captions)  # score of each caption with its image

    # the best captions of each image
    best_score = torch.full((len(images),), -torch.inf, device=images.device)
    best_score = best_score.scatter_reduce(0, image_of_caption, score, "amax")
    is_best = (score == best_score[image_of_caption]).long()
    image_rows = torch.arange(len(images), device=images.device)
    best_captions = torch.zeros_like(image_rows).index_add_(0, image_of_caption, is_best)

    label = image_rows * communicator.world_size + communicator.rank  # numbers the images of all ranks
    caption_label = label[image_of_caption]
    caption_queries = _Queries(
        features=captions,
        label=caption_label,
        score=score,
        matches=torch.ones_like(image_of_caption),
    )
    image_queries = _Queries(features=images, label=label, score=best_score, matches=best_captions)

    counts = {}
    directions = {
        "image_retrieval": (caption_queries, images, label),
        "text_retrieval": (image_queries, captions, caption_label),
    }
    for name, (queries, local_candidates, local_labels) in directions.items():
        candidates, candidate_labels = _gather(local_candidates, local_labels, communicator)
        counts[name] = _count_hits(queries, candidates, candidate_labels, ks, chunk)
    image_count, metrics = _recalls(counts, ks, communicator)
    # equal in both directions, for any number of captions per image
    metrics["chance"] = chance_recall(1, int(image_count))
    metrics["mean_recall@1"] = (metrics["image_retrieval_recall@1"] + metrics["text_retrieval_recall@1"]) / 2
    return metrics


def read_captions(sample: Sample) -> list[str]:
    """Return a sample's captions, the nonblank lines of the .txt member; raise UserError if there are none."""
    captions = [line.strip() for line in sample.text("txt").splitlines() if line.strip()]
    if not captions:
        raise UserError(f"{sample.name} has no caption; add one (in a tar: a .txt member with one caption per line).")
    return captions


def _count_hits(queries: _Queries, candidates: Tensor, labels: Tensor, ks: Sequence[int], chunk: int) -> Tensor:
    """Return the number of queries and the number of hits at each k, as (1 + len(ks),) float64.

    `candidates` are the (m, d) features of the candidates on all ranks, and `labels` are their (m,) labels.
    """
    counts = torch.zeros(1 + len(ks), dtype=torch.float64, device=queries.features.device)
    counts[0].fill_(len(queries.label))  # unlike an assignment, does not copy the number from the host and wait
    for start in range(0, len(queries.label), _QUERY_CHUNK):
        rows = slice(start, start + _QUERY_CHUNK)
        ahead, tied = count_negatives(
            queries.features[rows],
            queries.score[rows],
            queries.label[rows],
            candidates,
            labels,
            chunk,
        )
        matches = queries.matches[rows]
        counts[1:] += torch.stack([hit_probability(ahead, tied, k, matches).sum() for k in ks])
    return counts


def _recalls(
    counts: dict[str, Tensor], ks: Sequence[int], communicator: Communicator
) -> tuple[float, dict[str, float]]:
    """Return the last direction's number of queries, and `NAME_recall@k` for each direction, both over all ranks.

    Raises UserError if there are no queries.
    """
    totals = communicator.all_reduce(torch.stack(list(counts.values())), "evaluation").tolist()
    first_direction = totals[0]
    if not first_direction[0]:
        raise UserError(_NO_PAIR)
    recalls = {}
    for name, (queries, *hits_at) in zip(counts, totals, strict=True):
        for k, hits in zip(ks, hits_at, strict=True):
            recalls[f"{name}_recall@{k}"] = hits / queries
    return queries, recalls


def _encode_all(encoder: BatchEncoder, folder: EvaluationSet) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's (n, d) image features, (m, d) caption features, and each caption's image row, (m,) int64."""
    prepare = partial(_prepare, transform=encoder.transform)
    image_features = []
    caption_features = []
    image_of_caption: list[int] = []
    images_before = 0  # valid images of earlier batches
    for batch in sharded_batches(folder, prepare, encoder.communicator, encoder.batch_size, encoder.loader):
        images = [pixels for pixels, _ in batch.rows]
        captions: list[str] = []
        valid_captions = 0  # the captions of valid images, which come first
        for row, (_, captions_of_image) in enumerate(batch.rows):
            captions += captions_of_image
            if row < batch.n_valid:
                valid_captions += len(captions_of_image)
                image_of_caption += [images_before + row] * len(captions_of_image)
        image_features.append(encoder.encode_images(images)[: batch.n_valid])
        caption_features.append(encoder.encode_texts(captions)[:valid_captions])
        images_before += batch.n_valid
    if not image_features:
        raise UserError(f"{folder.path} contains no samples; correct the set, or download it again.")
    all_images = torch.cat(image_features).float()
    all_captions = torch.cat(caption_features).float()
    return all_images, all_captions, torch.tensor(image_of_caption, dtype=torch.int64).to(all_images.device)


def _prepare(sample: Sample, transform: Callable[[bytes], Tensor]) -> tuple[Tensor, list[str]]:
    return decode(sample, transform), read_captions(sample)


def _gather(rows: Tensor, labels: Tensor, communicator: Communicator) -> tuple[Tensor, Tensor]:
    """Gather all ranks' (m, d) rows and (m,) labels, padded because m may differ between ranks."""
    rows_per_rank = communicator.all_gather(torch.tensor([len(rows)], device=rows.device), "evaluation")
    missing = int(rows_per_rank.max()) - len(rows)
    padded_rows = torch.cat([rows, rows.new_zeros((missing, rows.shape[1]))])
    padded_labels = torch.cat([labels, labels.new_full((missing,), PADDING)])
    all_rows = communicator.all_gather(padded_rows, "evaluation")
    all_labels = communicator.all_gather(padded_labels, "evaluation")
    return all_rows, all_labels


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
    queries: Tensor,
    score: Tensor,
    label: Tensor,
    candidates: Tensor,
    candidate_labels: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Count, for each query, the negatives that score higher than the best match and the negatives that tie with it.

    A NaN score counts as higher. Scores are computed for `chunk` candidates at a time.

    Args:
        queries, score: (n, d) float32 features and the (n,) scores of their best matches, from `inner_products`.
        label: (n,) int64 labels of the queries; candidates with the same label are not negatives.
        candidates: (m, d) float32 features.
        candidate_labels: (m,) int64 labels of the candidates; candidates labeled `PADDING` are ignored.

    Returns:
        `ahead` and `tied`, the two counts, each (n,) int64.
    """
    ahead = torch.zeros_like(label)
    tied = torch.zeros_like(label)
    queries = queries.double()  # converted once, not for each chunk
    match_score = score[:, None]
    for start in range(0, len(candidates), chunk):
        chunk_labels = candidate_labels[start : start + chunk]
        scores = score_matrix(queries, candidates[start : start + chunk])  # (n, chunk)
        is_negative = (chunk_labels != PADDING) & (chunk_labels != label[:, None])
        ahead += (is_negative & ~(scores <= match_score)).sum(dim=1)
        tied += (is_negative & (scores == match_score)).sum(dim=1)
    return ahead, tied
