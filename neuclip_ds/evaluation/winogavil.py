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
from typing import NamedTuple

import torch
from torch import Tensor

from neuclip_ds.errors import UserError, explained
from neuclip_ds.evaluation.encoding import BatchEncoder
from neuclip_ds.evaluation.metrics import GroupAccumulator, chance_jaccard, jaccard
from neuclip_ds.evaluation.retrieval import score_matrix
from neuclip_ds.evaluation.sets import EvaluationSet, Sample
from neuclip_ds.evaluation.sharded_batches import decode, sharded_batches

_SIZES = {"5": (5, 5), "6": (6, 6), "10": (10, 10), "12": (12, 12), "5-6": (0, 6), "10-12": (10, 10**6)}


class Instance(NamedTuple):
    """A cue word with the images to choose from."""

    cue: str
    images: list[Tensor]  # (3, H, W) uint8
    associated: list[bool]  # whether each image is associated with the cue


@torch.no_grad()
def winogavil(encoder: BatchEncoder, folder: EvaluationSet) -> dict[str, float | None]:
    """Return the mean Jaccard index over all instances, and over the instances with a given number of images.

    Returns:
        Metrics, equal on all ranks: `avg_jaccard_score`; `jaccard_score_N` for N = 5, 6, 10, 12, 5-6 and 10-12 images
        (None if no instance has N images); and `chance`, the expected score of random choices from 10-12 images.
        Raises UserError if the set is empty or an instance is broken.
    """
    communicator, device = encoder.communicator, encoder.communicator.device
    by_size, by_chance = GroupAccumulator(device), GroupAccumulator(device)
    size = max(1, encoder.size // 8)  # an instance has about eight images
    prepare = partial(_instance, transform=encoder.transform)
    for batch in sharded_batches(folder, prepare, communicator, size, encoder.loader):
        cues = encoder.encode_texts([prompt(instance.cue) for instance in batch.rows])
        images = encoder.encode_images([pixels for instance in batch.rows for pixels in instance.images])
        sizes = [len(instance.images) for instance in batch.rows]
        valid = batch.rows[: batch.n_valid]
        indices = [_jaccard(*row) for row in zip(cues, images.split(sizes), valid, strict=False)]
        random = [chance_jaccard(len(instance.images), sum(instance.associated)) for instance in valid]
        for sums, scores in ((by_size, indices), (by_chance, random)):
            sums.add(torch.tensor(scores, dtype=torch.float64, device=device), torch.tensor(sizes[: batch.n_valid]))
    by_size.all_reduce(communicator)
    by_chance.all_reduce(communicator)
    if not by_size.counts.sum():
        raise UserError(f"{folder.path} has no instance; convert the set again.")
    found = {f"jaccard_score_{name}": _mean(by_size, *limits) for name, limits in _SIZES.items()}
    return {"avg_jaccard_score": _mean(by_size, 0, 10**6), "chance": _mean(by_chance, *_SIZES["10-12"]), **found}


def prompt(cue: str) -> str:
    """Return the prompt for a cue, worded as in DataComp."""
    cue = cue.lower()
    return f"An {cue}" if cue[:1] in ("a", "e", "i", "o", "u") else f"A {cue}"


def _jaccard(cue: Tensor, images: Tensor, instance: Instance) -> float:
    """Return the Jaccard index of the associated and the chosen images; `cue` (d,) and `images` (n, d) are features."""
    associated = torch.tensor(instance.associated)
    scores = score_matrix(cue[None], images)[0].cpu()
    chosen = torch.zeros_like(associated)
    chosen[scores.sort(descending=True, stable=True).indices[: int(associated.sum())]] = True
    return jaccard(associated, chosen)


def _mean(by_size: GroupAccumulator, least: int, most: int) -> float | None:
    hits, counts = (x[least : most + 1].sum() for x in (by_size.hits, by_size.counts))
    return float(hits / counts) if counts else None


def _instance(sample: Sample, transform: Callable[[bytes], Tensor]) -> Instance:
    with explained(f"{sample.name}: its json needs cue, candidates and associations", "convert the set again"):
        tree = json.loads(sample.read("json"))
        cue, candidates, associations = str(tree["cue"]), list(tree["candidates"]), set(tree["associations"])
    associated = [candidate in associations for candidate in candidates]
    if not any(associated):
        raise UserError(f"{sample.name}: none of its candidates is among its associations; convert the set again.")
    images = [decode(sample, transform, f"{number}.") for number in range(len(candidates))]
    return Instance(cue, images, associated)
