"""Augment cropped training images with a timm policy or color changes; all randomness comes from the sample's seed.

torchvision's and timm's own transforms are used, on PIL images as in open_clip and timm. They draw from the global
random states of torch, numpy and Python, which are seeded for each image and restored afterward.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import ColorJitter, RandomApply, RandomGrayscale
from torchvision.transforms import functional as F

from neuclip_ds.config import AugmentConfig, Channels
from neuclip_ds.data.images import ImageTransform
from neuclip_ds.errors import explained

Augment = Callable[[Image.Image], Image.Image]

_STREAM = 0x5851F42D4C957F2D  # XORed with the seed for the augmentations, because the seed itself draws the crop
_TRANSLATION = 0.45  # timm's limit on translations, as a fraction of the image's side
_AUGMIX_TRANSLATION = 0.3  # timm's limit for AugMix, as a fraction of the image's side


@dataclass(frozen=True)
class Augmented:
    """A transform followed by augmentations of its uint8 (3, image_size, image_size) pixels, in order."""

    transform: ImageTransform
    augmentations: Sequence[Augment]

    @property
    def image_size(self) -> int:
        """Side length of the result in pixels."""
        return self.transform.image_size

    def __call__(self, data: bytes, seed: int = 0) -> Tensor:
        image = F.to_pil_image(self.transform(data, seed))
        with seeded(seed ^ _STREAM):
            for augment in self.augmentations:
                image = augment(image)
        return F.pil_to_tensor(image)


def augmented(transform: ImageTransform, config: AugmentConfig, mean: Channels) -> ImageTransform:
    """Return the transform with the configured augmentations, or unchanged if there are none.

    Args:
        transform: transform that returns the cropped image.
        config: the options under `data.augment`.
        mean: mean per channel, in [0, 1]; a policy fills the areas that it uncovers with this color.

    Raises:
        UserError: timm does not support the policy `auto_augment`.
    """
    augmentations: list[Augment] = []
    if config.auto_augment is not None:
        augmentations.append(_policy(config.auto_augment, transform.image_size, mean))
    if config.color_jitter_prob:
        augmentations.append(RandomApply([ColorJitter(*config.color_jitter)], p=config.color_jitter_prob))
    if config.gray_scale_prob:
        augmentations.append(RandomGrayscale(p=config.gray_scale_prob))
    return Augmented(transform, augmentations) if augmentations else transform


def _policy(name: str, image_size: int, mean: Channels) -> Augment:
    """Return a policy of timm with the parameters that `timm.data.create_transform` gives it."""
    from timm.data import auto_augment  # importing timm takes a second, and few runs need it

    parameters = {
        "translate_const": int(image_size * _TRANSLATION),
        "img_mean": tuple(min(255, round(255 * channel)) for channel in mean),
        "interpolation": Image.Resampling.BICUBIC,
    }
    fix = "use a policy of timm, such as rand-m9-mstd0.5-inc1, augmix-m3-w3, original or v0"
    with explained(f"timm does not support data.augment.auto_augment={name}", fix):
        if name.startswith("rand"):
            return auto_augment.rand_augment_transform(name, parameters)
        if name.startswith("augmix"):
            return auto_augment.augment_and_mix_transform(name, {**parameters, "translate_pct": _AUGMIX_TRANSLATION})
        return auto_augment.auto_augment_transform(name, parameters)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global random states of torch's CPU generator, numpy and Python, and restore them after the block."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            np.random.seed(seed % 2**32)
            random.seed(seed)
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)
