"""How near a model puts the negatives of a pair that resemble its positive most (TuneCLIP Figure 11)."""

from typing import NamedTuple

import torch
from torch import Tensor

_FAR = slice(89, 100)  # ranks 90 to 100, as the paper's true negatives


class NearestNegatives(NamedTuple):
    """Cosine similarities of n images with all n captions, over the images."""

    positive: float  # mean with the image's own caption
    nearest: float  # mean with its five most similar other captions
    nearest_deviation: float  # deviation of these 5 n similarities
    far: float  # mean with the captions of ranks 90 to 100


def nearest_negatives(image: Tensor, text: Tensor, k: int = 5) -> NearestNegatives:
    """Measure the negatives of n pairs.

    Args:
        image, text: (n, d) features of norm 1, n > 100; row i of both is pair i.
        k: negatives that count as nearest.
    """
    scores = image @ text.T
    positive = scores.diagonal().clone()
    ranked = scores.fill_diagonal_(-torch.inf).topk(_FAR.stop, dim=1).values
    nearest = ranked[:, :k]
    return NearestNegatives(
        *(float(x) for x in (positive.mean(), nearest.mean(), nearest.std(), ranked[:, _FAR].mean()))
    )
