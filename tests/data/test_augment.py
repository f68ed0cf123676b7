"""Check that augmentations equal timm's and torchvision's, depend only on the seed, and restore the random states."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tars import jpeg
from timm.data.auto_augment import auto_augment_transform, rand_augment_transform
from torch import Tensor
from torchvision.transforms import functional as F

from neuclip_ds.config import OPENAI_MEAN, AugmentConfig
from neuclip_ds.data.augment import Augmented, augmented, seeded
from neuclip_ds.data.images import EvalTransform, ImageTransform, train_transform
from neuclip_ds.errors import UserError

IMAGE = jpeg(1, 60, 50)
SIZE = 24
POLICIES = ["rand-m9-mstd0.5-inc1", "augmix-m3-w3", "original", "v0", "3a"]
OPTIONS: dict[str, dict[str, Any]] = {
    **{policy: {"auto_augment": policy} for policy in POLICIES},
    "jitter": {"color_jitter_prob": 1.0},
    "gray": {"gray_scale_prob": 0.5},
    "all": {"auto_augment": "rand-m9", "color_jitter_prob": 0.5, "gray_scale_prob": 0.2},
}


def build(options: dict[str, Any], crop_scale: float = 0.5) -> ImageTransform:
    return augmented(train_transform(SIZE, crop_scale), AugmentConfig(**options), OPENAI_MEAN)


def states() -> list[Any]:
    """Return the global random states."""
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", OPTIONS)
def test_an_image_depends_on_its_seed_alone(name: str) -> None:
    transform = build(OPTIONS[name])
    first: list[Tensor] = []
    for seed in range(20):
        first.append(transform(IMAGE, seed))
    random.seed(99)
    np.random.seed(99)
    torch.manual_seed(99)
    before = states()
    again = [build(OPTIONS[name])(IMAGE, seed) for seed in reversed(range(20))]
    assert states() == before
    assert all(torch.equal(*images) for images in zip(first, reversed(again), strict=True))
    assert all(image.shape == (3, SIZE, SIZE) and image.dtype == torch.uint8 for image in first)
    plain = build({})
    assert any(not torch.equal(image, plain(IMAGE, seed)) for seed, image in enumerate(first))


def test_the_largest_seed_can_be_used() -> None:
    build(OPTIONS["all"])(IMAGE, 2**64 - 1)


def test_an_exception_restores_the_random_states() -> None:
    before = states()
    with pytest.raises(KeyError), seeded(3):
        random.random()
        np.random.rand()
        torch.rand(1)
        raise KeyError
    assert states() == before


def test_the_policies_are_those_of_timm() -> None:
    parameters = {"translate_const": int(0.45 * SIZE), "img_mean": (123, 117, 104), "interpolation": 3}
    for policy, theirs in (
        ("rand-m9-mstd0.5-inc1", rand_augment_transform("rand-m9-mstd0.5-inc1", dict(parameters))),
        ("original", auto_augment_transform("original", parameters)),
    ):
        transform = augmented(EvalTransform(SIZE), AugmentConfig(auto_augment=policy), OPENAI_MEAN)
        assert isinstance(transform, Augmented)
        (ours,) = transform.augmentations
        image = F.to_pil_image(EvalTransform(SIZE)(IMAGE))
        for seed in range(20):
            with seeded(seed):
                expected = F.pil_to_tensor(theirs(image))
            with seeded(seed):
                assert torch.equal(F.pil_to_tensor(ours(image)), expected)


def test_probabilities_are_those_of_the_options() -> None:
    plain = build({}, crop_scale=1.0)(IMAGE)
    gray = F.rgb_to_grayscale(plain, 3)
    seeds = range(400)
    converted = 0
    for seed in seeds:
        image = build({"gray_scale_prob": 0.2}, crop_scale=1.0)(IMAGE, seed)
        is_gray = bool((image[0] == image[1]).all())
        assert is_gray or torch.equal(image, plain)
        if is_gray:
            assert (image.int() - gray.int()).abs().max() <= 1  # PIL and torchvision round differently
        converted += is_gray
    assert 50 < converted < 110
    changed = sum(not torch.equal(build({"color_jitter_prob": 0.5}, 1.0)(IMAGE, seed), plain) for seed in seeds)
    assert 160 < changed < 240


def test_jitter_has_open_clips_ranges() -> None:
    """With brightness alone, all values are scaled by one factor in [1 - b, 1 + b], as by torchvision's ColorJitter."""
    transform = build({"color_jitter_prob": 1.0, "color_jitter": (0.4, 0, 0, 0)}, crop_scale=1.0)
    plain = build({}, crop_scale=1.0)(IMAGE).float()
    ratios: list[float] = []
    for seed in range(50):
        ratios.append(float(transform(IMAGE, seed).float().mean() / plain.mean()))
    assert 0.55 < min(ratios) < 0.75
    assert 1.2 < max(ratios) < 1.45


@pytest.mark.parametrize("policy", ["rend-m9", "rand-q3", "augmix-q3", ""])
def test_an_unknown_policy_is_refused_by_name(policy: str) -> None:
    with pytest.raises(UserError, match="auto_augment"):
        build({"auto_augment": policy})


def test_jitter_without_a_probability_is_refused() -> None:
    with pytest.raises(ValidationError, match="color_jitter_prob"):
        AugmentConfig(color_jitter=(0.1, 0.1, 0.1, 0.1))
    assert AugmentConfig(**AugmentConfig().model_dump()) == AugmentConfig()
