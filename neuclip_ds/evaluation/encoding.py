"""The model as a function from images and tokens to features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from neuclip_ds.evaluation import Encode


def encoder_of(model: Any, device: torch.device) -> Encode:
    """Return the `Encode` of a `DualEncoder`, or of the engine around one: evaluation mode, without gradients."""

    def encode(image: Tensor | None, tokens: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        model.eval()
        with torch.no_grad():
            return model(*(None if x is None else x.to(device, non_blocking=True) for x in (image, tokens)))

    return encode
