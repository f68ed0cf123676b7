"""Encode images and texts into features, with the same number of calls and the same shapes on every rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neuclip_ds.data.dataset import Batch
from neuclip_ds.data.loader import IN_PROCESS, Loader
from neuclip_ds.distributed.communicator import Communicator, to_device

Encode = Callable[[Tensor | None, Tensor | None], tuple[Tensor | None, Tensor | None]]
"""Function (uint8 images (b, 3, H, W) or None, tokens (b, T) or None) -> L2-normalized float32 features (b, d) or None.

The function moves its inputs to the model's device and puts the model into evaluation mode. It may run collectives
(under ZeRO-3), so all ranks must call it the same number of times, with inputs of the same shapes.
"""


def encoder_of(model: Any, device: torch.device) -> Encode:
    """Return an `Encode` function that runs a `DualEncoder`, or an engine that wraps one, without gradients."""

    def encode(image: Tensor | None, tokens: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        model.eval()
        with torch.no_grad():
            return model(*(None if x is None else to_device(x, device) for x in (image, tokens)))

    return encode


def encode_batch(encode: Encode, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (b, d) image and text features on the device, and the (b,) `index` and `valid` in host memory."""
    image, text = encode(batch.image, batch.tokens)
    assert image is not None and text is not None
    return image, text, batch.index, batch.valid


@dataclass(frozen=True)
class BatchEncoder:
    """Encodes rows in equal-sized batches; the number of batches is the same on all ranks, as ZeRO-3 requires."""

    encode: Encode
    tokenize: Callable[[list[str]], Tensor]  # n texts -> (n, T) tokens
    communicator: Communicator  # all its ranks must call `encode_images` and `encode_texts` together
    size: int  # rows per call
    transform: Callable[[bytes], Tensor]  # encoded image -> (3, H, W) uint8
    loader: Loader = IN_PROCESS  # reads evaluation sets

    def encode_images(self, rows: Sequence[Tensor]) -> Tensor:
        """Encode n >= 1 images (3, H, W) into (n, d) features; n may differ between ranks."""
        return self._encode_batches(lambda batch: self.encode(torch.stack(batch), None)[0], rows)

    def encode_texts(self, rows: Sequence[str]) -> Tensor:
        """Encode n >= 1 texts into (n, d) features; n may differ between ranks."""
        return self._encode_batches(lambda batch: self.encode(None, self.tokenize(batch))[1], rows)

    def _encode_batches(self, encode: Callable[[list], Tensor | None], rows: Sequence) -> Tensor:
        """Encode rows in batches padded with the first row; the rank with the most rows sets the number of batches."""
        most = max(self.communicator.gather_objects(len(rows)))
        features = []
        for low in range(0, most, self.size):
            batch = list(rows[low : low + self.size])
            found = encode(batch + [rows[0]] * (self.size - len(batch)))
            assert found is not None
            features.append(found)
        return torch.cat(features)[: len(rows)]
