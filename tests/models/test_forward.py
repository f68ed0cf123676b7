"""Copied and pickled models keep the forward methods that packing, class tokens and checkpointing replace."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from neuclip_ds.config import ModelConfig
from neuclip_ds.models.build import build_dual_encoder
from neuclip_ds.models.compilation import compile_towers
from neuclip_ds.models.towers import DualEncoder

pytestmark = pytest.mark.usefixtures("quick_meta_models")

TREE: dict[str, Any] = {
    "vision": {
        "name": "vit_tiny_patch16_224",
        "image_size": 16,
        "options": {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2},
        "class_token_only": True,
    },
    "text": {"width": 16, "layers": 2, "heads": 2, "context_length": 8, "vocab_size": 300, "packed": True},
    "embed_dim": 8,
    "activation_checkpointing": True,
}
TOKENS: Any = SimpleNamespace(vocab_size=300, bos_id=0, eos_id=1, pad_id=1, context_length=8)


def pickled(model: DualEncoder) -> DualEncoder:
    copied: DualEncoder = pickle.loads(pickle.dumps(model))
    return copied


def outputs(model: DualEncoder) -> list[torch.Tensor]:
    """Return the features of a batch, and the gradients of the weights."""
    model.zero_grad()
    image = torch.arange(2 * 3 * 16 * 16, dtype=torch.uint8).view(2, 3, 16, 16)
    tokens = torch.tensor([[0, 7, 1, 1, 1, 1, 1, 1], [0, 5, 6, 7, 8, 9, 10, 1]])
    features = model(image, tokens)
    sum(feature[:, 0].sum() for feature in features).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [feature.detach() for feature in features] + gradients


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_computes_the_same_with_its_own_weights(
    copied: Callable[[DualEncoder], DualEncoder], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch.manual_seed(0)
    model = build_dual_encoder(ModelConfig.model_validate(TREE), TOKENS)
    if compiled:
        compile_towers(model, "blocks")
    expected = outputs(model)
    duplicate = copied(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for actual, wanted in zip(outputs(duplicate), expected, strict=True):
        torch.testing.assert_close(actual, wanted)
