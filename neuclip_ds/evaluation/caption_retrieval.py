"""Retrieval on captioned sets: text retrieval (captions of an image) and image retrieval (the image of a caption).

An image may have several captions. It is a hit at k where one of them is among the first k of all captions; a caption
is a hit where its image is among the first k of all images. Recall is the mean over images, or over captions, as in
CLIP_benchmark and DataComp.

Every rank holds the features of all images and captions, O((n + m) d), but only blocks of the n x m scores.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from neuclip_ds.data.dataset import PADDING
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.evaluation import chance
from neuclip_ds.evaluation.encoding import BatchEncoder
from neuclip_ds.evaluation.folder import EvaluationSet, Sample
from neuclip_ds.evaluation.loading import IN_PROCESS, EvaluationLoader
from neuclip_ds.evaluation.metrics import hit_probability
from neuclip_ds.evaluation.retrieval import count_negatives, inner_products
from neuclip_ds.evaluation.sharded_batches import decode, sharded_batches

_ANCHORS = 4096  # compared with a chunk of candidates at once


class _Queries(NamedTuple):
    """This rank's anchors of one direction; rows with the same label match."""

    features: Tensor  # (n, d)
    label: Tensor  # (n,) int64
    score: Tensor  # (n,) with the best match
    matches: Tensor  # (n,) matches with that score


@torch.no_grad()
def caption_retrieval(
    encoder: BatchEncoder,
    folder: EvaluationSet,
    transform: Callable[[bytes], Tensor],
    ks: Sequence[int] = (1, 5, 10),
    loader: EvaluationLoader = IN_PROCESS,
) -> dict[str, float]:
    """Return recall@k in both directions, each image and each caption counted once.

    Args:
        folder: images, and captions in a .txt member, one per line.
        transform: encoded image -> (3, H, W) uint8.
        ks: lengths of the lists.
        loader: of samples.

    Returns:
        `image_retrieval_recall@k` (captions find images), `text_retrieval_recall@k` (images find captions),
        `mean_recall@1` and its `chance`, in [0, 1] and equal on all ranks.

    Raises:
        UserError: the set is empty, or a sample is broken or has no caption.
    """
    communicator = encoder.communicator
    images, captions, image_of = _encode_all(encoder, folder, transform, loader)
    rows = torch.arange(len(images), device=images.device)
    score = inner_products(images[image_of], captions)  # of each caption with its image
    best = torch.full((len(images),), -torch.inf, device=images.device).scatter_reduce(0, image_of, score, "amax")
    best_captions = torch.zeros_like(rows).index_add_(0, image_of, (score == best[image_of]).long())
    label = rows * communicator.world_size + communicator.rank

    by_caption = _Queries(captions, label[image_of], score, torch.ones_like(image_of))
    by_image = _Queries(images, label, best, best_captions)
    found = {}
    for name, queries, candidates in (("image", by_caption, by_image), ("text", by_image, by_caption)):
        recalls = _recalls(queries, *_gather(candidates.features, candidates.label, communicator), ks, communicator)
        found.update({f"{name}_retrieval_recall@{k}": recall for k, recall in zip(ks, recalls, strict=True)})
    count = communicator.all_reduce(rows.new_tensor(len(images)), "evaluation")
    found["chance"] = chance.recall(1, int(count))  # in either direction, however the captions are shared out
    found["mean_recall@1"] = (found["image_retrieval_recall@1"] + found["text_retrieval_recall@1"]) / 2
    return found


def read_captions(sample: Sample) -> list[str]:
    """Return the captions of a sample, the lines of its .txt member; raise UserError if it has none."""
    captions = [line.strip() for line in sample.text("txt").splitlines() if line.strip()]
    if not captions:
        raise UserError(f"{sample.name} has no caption; its .txt member must hold one per line.")
    return captions


def _recalls(
    queries: _Queries, candidates: Tensor, labels: Tensor, ks: Sequence[int], communicator: Communicator
) -> list[float]:
    """Return recall@k of all ranks' queries for each k."""
    device = queries.features.device
    sums = [torch.tensor(float(len(queries.label)), dtype=torch.float64, device=device)]
    sums += [torch.zeros_like(sums[0]) for _ in ks]
    for anchors, label, score, matches in zip(*(part.split(_ANCHORS) for part in queries), strict=True):
        ahead, tied = count_negatives(anchors, score, label, candidates, labels)
        for place, k in enumerate(ks, start=1):
            sums[place] += hit_probability(ahead, tied, k, matches).sum()
    total, *hits = communicator.all_reduce(torch.stack(sums), "evaluation").tolist()
    return [hit / total for hit in hits]


def _encode_all(
    encoder: BatchEncoder, folder: EvaluationSet, transform: Callable[[bytes], Tensor], loader: EvaluationLoader
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's (n, d) images, (m, d) captions, and (m,) int64 row of each caption's image."""
    prepare = partial(_prepare, transform=transform)
    images, captions, image_of, seen = [], [], [], 0
    for batch in sharded_batches(folder, prepare, encoder.communicator, encoder.size, loader):
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
    """Gather all ranks' rows (m, d) and labels (m,), whose numbers may differ, with padding."""
    counts = communicator.all_gather(torch.tensor([len(rows)], device=rows.device), "evaluation")
    missing = int(counts.max()) - len(rows)
    rows = torch.cat([rows, rows.new_zeros((missing, rows.shape[1]))])
    labels = torch.cat([labels, labels.new_full((missing,), PADDING)])
    return communicator.all_gather(rows, "evaluation"), communicator.all_gather(labels, "evaluation")
