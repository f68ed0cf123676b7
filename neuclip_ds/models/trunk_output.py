"""Output of a tower's trunk for a sample input, to recognize the trunk that computed stored features.

The hash of the weights does not suffice: options of timm, such as `global_pool`, and tokenizers change the features,
but not the weights.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from neuclip_ds.models.towers import Encoder

_TEXT = "A dog runs on the grass, 2 cats sleep."
_VALUES = 16  # number of values of the feature that are compared; another trunk changes all, so a few suffice
_TOLERANCE = 0.01  # relative; well above the differences between machines


def image_sample(image_size: int) -> Tensor:
    """Return the sample input of an image trunk: uint8 pixels (1, 3, image_size, image_size)."""
    values = torch.arange(3 * image_size**2) % 256
    return values.to(torch.uint8).reshape(1, 3, image_size, image_size)


def text_sample(tokenize: Callable[[list[str]], Tensor]) -> Tensor:
    """Return the sample input of a text trunk: the int64 token ids (1, T) of a sentence."""
    return tokenize([_TEXT])


def trunk_output(tower: Encoder, sample: Tensor) -> list[float]:
    """Return the first values of the trunk's feature for a sample input on the tower's device, without dropout."""
    was_training = tower.training
    tower.eval()
    with torch.no_grad():
        feature = tower.feature(sample)
    tower.train(was_training)
    return feature[0, :_VALUES].tolist()


def is_same_output(first: Sequence[float], second: Sequence[float]) -> bool:
    """Return whether two results of `trunk_output` are equal up to the rounding of different machines."""
    if len(first) != len(second):
        return False
    values = torch.tensor([first, second], dtype=torch.float64)
    difference = (values[0] - values[1]).abs().max()
    return bool(difference <= _TOLERANCE * values.abs().max())
