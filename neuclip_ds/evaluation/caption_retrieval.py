"""Retrieval on captioned sets: which of all captions belongs to an image, and which of all images to a caption.

An image may have several captions. It is a hit at k where one of them is among the first k of all captions; a caption
is a hit where its image is among the first k of all images. Recall is the mean over images, or over captions: what
CLIP_benchmark and DataComp call text retrieval and image retrieval.

Features of all images and captions are held, O((n + m) d) a rank; of the n x m scores only blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from neuclip_ds.errors import UserError
from neuclip_ds.evaluation import Communicator
from neuclip_ds.evaluation.batches import BatchEncoder
from neuclip_ds.evaluation.folder import EvaluationFolder, Sample
from neuclip_ds.evaluation.metrics import hit_probability
from neuclip_ds.evaluation.retrieval import ABSENT, count_rivals, inner_products
from neuclip_ds.evaluation.sharded_batches import decode, rounds

_ANCHORS = 4096  # that are compared with a chunk of candidates at once


@torch.no_grad()
def caption_retrieval(
    encoder: BatchEncoder,
    folder: EvaluationFolder,
    transform: Callable[[bytes], Tensor],
    communicator: Communicator,
    ks: Sequence[int] = (1, 5, 10),
    workers: int = 1,
) -> dict[str, float]:
    """Recall@k in both directions, each image and each caption counted once.

    Args:
        encoder: the model.
        folder: images, and captions in a .txt member, one a line.
        transform: encoded image -> (3, H, W) uint8.
        communicator: the ranks.
        ks: lengths of the lists.
        workers: threads that decode.

    Returns:
        `image_retrieval_recall@k` (captions find images), `text_retrieval_recall@k` (images find captions) and
        `mean_recall@1`, in [0, 1] and equal on all ranks.

    Raises:
        UserError: the set is empty, or a sample is broken or has no caption.
    """
    images, captions, image_of = _encode_all(encoder, folder, transform, communicator, workers)
    own = torch.arange(len(images), device=images.device)
    score = inner_products(images[image_of], captions)  # of each caption with its image
    best = torch.full((len(images),), -torch.inf, device=images.device).scatter_reduce(0, image_of, score, "amax")
    level = torch.zeros_like(own).index_add_(0, image_of, (score == best[image_of]).long())

    identity = own * communicator.world_size + communicator.rank
    owner = identity[image_of]
    found = {}
    for name, anchors, match, whose, matches, candidates, whose_candidate in (
        ("image", captions, score, owner, torch.ones_like(owner), images, identity),
        ("text", images, best, identity, level, captions, owner),
    ):
        everything, owners = _gathered(candidates, whose_candidate, communicator)
        sums = [torch.tensor(float(len(anchors)), dtype=torch.float64, device=images.device)]
        sums += [torch.zeros_like(sums[0]) for _ in ks]
        for low in range(0, len(anchors), _ANCHORS):
            part = slice(low, low + _ANCHORS)
            ahead, tied = count_rivals(anchors[part], match[part], whose[part], everything, owners)
            for place, k in enumerate(ks, start=1):
                sums[place] += hit_probability(ahead, tied, k, matches[part]).sum()
        total, *hits = communicator.all_reduce(torch.stack(sums), "evaluation").tolist()
        found.update({f"{name}_retrieval_recall@{k}": hit / total for k, hit in zip(ks, hits, strict=True)})
    found["mean_recall@1"] = (found["image_retrieval_recall@1"] + found["text_retrieval_recall@1"]) / 2
    return found


def captions_of(sample: Sample) -> list[str]:
    """The lines of its .txt member.

    Raises:
        UserError: there is none with text.
    """
    captions = [line.strip() for line in sample.text("txt").splitlines() if line.strip()]
    if not captions:
        raise UserError(f"{sample.name} has no caption; its .txt member must hold one a line.")
    return captions


def _encode_all(
    encoder: BatchEncoder,
    folder: EvaluationFolder,
    transform: Callable[[bytes], Tensor],
    communicator: Communicator,
    workers: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's (n, d) images, (m, d) captions, and (m,) int64 which of these images each caption describes."""

    def prepare(sample: Sample) -> tuple[Tensor, list[str]]:
        return decode(sample, transform), captions_of(sample)

    images, captions, image_of, seen = [], [], [], 0
    for own in rounds(folder, prepare, communicator, encoder.size, workers):
        features = encoder.images([pixels for pixels, _ in own.rows])[: own.used]
        lines = [(seen + row, line) for row, (_, found) in enumerate(own.rows) for line in found]
        counting = sum(row - seen < own.used for row, _ in lines)
        captions.append(encoder.texts([line for _, line in lines])[:counting])
        images.append(features)
        image_of.append(torch.tensor([row for row, _ in lines[:counting]], dtype=torch.int64))
        seen += own.used
    if not images:
        raise UserError(f"{folder.path} has no sample; download the set again.")
    images_, captions_ = torch.cat(images).float(), torch.cat(captions).float()
    return images_, captions_, torch.cat(image_of).to(images_.device)


def _gathered(rows: Tensor, owners: Tensor, communicator: Communicator) -> tuple[Tensor, Tensor]:
    """All ranks' rows (m, d) and their owners (m,), another number from each, filled up with absent ones."""
    counts = communicator.all_gather(torch.tensor([len(rows)], device=rows.device), "evaluation")
    missing = int(counts.max()) - len(rows)
    rows = torch.cat([rows, rows.new_zeros((missing, rows.shape[1]))])
    owners = torch.cat([owners, owners.new_full((missing,), ABSENT)])
    return communicator.all_gather(rows, "evaluation"), communicator.all_gather(owners, "evaluation")
