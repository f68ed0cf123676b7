"""WinoGAViL (Bitton et al. 2022): choose the images, out of 5 to 12, that are associated with a cue word.

The model chooses the K images nearest to the prompt "A CUE" (or "An CUE"), where K is the number of associated images.
The score is the Jaccard index of the chosen and the associated images, as in DataComp's eval_utils/wino_eval.py.

There is no published webdataset version; ours has the usual layout (test/nshards.txt, test/0.tar, ...) with members

    KEY.json     {"cue": "pogonophile", "candidates": ["bison", "beard", ...], "associations": ["beard", ...]}
    KEY.0.jpg    image of the first candidate (jpeg, png, webp), KEY.1.jpg of the second, ...
"""

import json
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from neuclip_ds.errors import UserError, explained
from neuclip_ds.evaluation.encoding import BatchEncoder
from neuclip_ds.evaluation.metrics import GroupAccumulator, chance_jaccard, jaccard
from neuclip_ds.evaluation.retrieval import score_matrix
from neuclip_ds.evaluation.sets import EvaluationSet, Sample
from neuclip_ds.evaluation.sharded_batches import decode, sharded_batches

_MAX_IMAGES = 10**6  # an upper bound on the number of images of an instance
_SIZE_RANGES = {  # name -> smallest and largest number of images, inclusive
    "5": (5, 5),
    "6": (6, 6),
    "10": (10, 10),
    "12": (12, 12),
    "5-6": (0, 6),
    "10-12": (10, _MAX_IMAGES),
}


class Instance(NamedTuple):
    """A cue word with the images to choose from."""

    cue: str
    images: list[Tensor]  # (3, H, W) uint8
    associated: list[bool]  # whether each image is associated with the cue


@torch.no_grad()
def winogavil(encoder: BatchEncoder, folder: EvaluationSet) -> dict[str, float | None]:
    """Return the mean Jaccard index over all instances, and over the instances with a given number of images.

    Returns:
        Metrics, equal on all ranks: `avg_jaccard_score`; `jaccard_score_N` for N = 5, 6, 10, 12, 5-6 and 10-12 images;
        and `chance`, the expected score of random choices from 10-12 images. A `jaccard_score_N` or `chance` is None if
        no instance has that number of images.

    Raises UserError if the set is empty or differs between nodes, or if an instance is broken.
    """
    communicator = encoder.communicator
    device = communicator.device
    # both are grouped by the number of images
    scores = GroupAccumulator(device)
    chance_scores = GroupAccumulator(device)
    instances_per_batch = max(1, encoder.batch_size // 8)  # an instance has about eight images
    prepare = partial(_read_instance, transform=encoder.transform)
    for batch in sharded_batches(folder, prepare, communicator, instances_per_batch, encoder.loader):
        # all rows are encoded, but only the valid ones count
        sizes = [len(instance.images) for instance in batch.rows]
        images = list(chain.from_iterable(instance.images for instance in batch.rows))
        cue_features = encoder.encode_texts([prompt(instance.cue) for instance in batch.rows])
        image_features = encoder.encode_images(images).split(sizes)
        batch_scores = []
        batch_chance_scores = []
        for row, instance in enumerate(batch.rows[: batch.n_valid]):
            batch_scores.append(_jaccard(cue_features[row], image_features[row], instance))
            batch_chance_scores.append(chance_jaccard(len(instance.images), sum(instance.associated)))
        valid_sizes = torch.tensor(sizes[: batch.n_valid])
        scores.add(torch.tensor(batch_scores, dtype=torch.float64, device=device), valid_sizes)
        chance_scores.add(torch.tensor(batch_chance_scores, dtype=torch.float64, device=device), valid_sizes)
    scores.all_reduce(communicator)
    chance_scores.all_reduce(communicator)
    if not scores.counts.sum():
        raise UserError(f"{folder.path} contains no instances; convert the set again.")
    smallest, largest = _SIZE_RANGES["10-12"]
    metrics = {
        "avg_jaccard_score": _mean(scores, 0, _MAX_IMAGES),
        "chance": _mean(chance_scores, smallest, largest),
    }
    for name, (smallest, largest) in _SIZE_RANGES.items():
        metrics[f"jaccard_score_{name}"] = _mean(scores, smallest, largest)
    return metrics


def prompt(cue: str) -> str:
    """Return the prompt for a cue, worded as in DataComp."""
    cue = cue.lower()
    return f"An {cue}" if cue[:1] in ("a", "e", "i", "o", "u") else f"A {cue}"


def _jaccard(cue: Tensor, images: Tensor, instance: Instance) -> float:
    """Return the Jaccard index of the associated and the chosen images; `cue` (d,) and `images` (n, d) are features."""
    associated = torch.tensor(instance.associated)
    scores = score_matrix(cue[None], images)[0].cpu()
    order = scores.sort(descending=True, stable=True).indices
    chosen = torch.zeros_like(associated)
    chosen[order[: int(associated.sum())]] = True
    return jaccard(associated, chosen)


def _mean(scores: GroupAccumulator, smallest: int, largest: int) -> float | None:
    """Return the mean score of the instances with `smallest` to `largest` images, or None if there are none."""
    total = scores.hits[smallest : largest + 1].sum()
    count = scores.counts[smallest : largest + 1].sum()
    return float(total / count) if count else None


def _read_instance(sample: Sample, transform: Callable[[bytes], Tensor]) -> Instance:
    with explained(
        f"{sample.name}: its json member must contain the keys cue, candidates and associations",
        "convert the set again",
    ):
        tree = json.loads(sample.read("json"))
        cue = str(tree["cue"])
        candidates = list(tree["candidates"])
        associations = set(tree["associations"])
    associated = [candidate in associations for candidate in candidates]
    if not any(associated):
        raise UserError(f"{sample.name}: none of its candidates is among its associations; convert the set again.")
    images = [decode(sample, transform, f"{number}.") for number in range(len(candidates))]
    return Instance(cue, images, associated)
