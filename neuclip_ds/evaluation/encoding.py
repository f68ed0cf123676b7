"""The model as a function from images and tokens to features, called equally often, with equal shapes, on all ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neuclip_ds.data.dataset import Batch
from neuclip_ds.data.loader import IN_PROCESS, Loader
from neuclip_ds.distributed.communicator import Communicator, to_device

Encode = Callable[[Tensor | None, Tensor | None], tuple[Tensor | None, Tensor | None]]
"""(images uint8 (b, 3, H, W) or None, tokens (b, T) or None) -> their float32 L2-normalized features (b, d) or None.

It moves its input to the model's device, puts the model into evaluation mode and may run collectives of its own
(ZeRO-3): evaluators call it equally often, with equal shapes, on every rank.
"""


def encoder_of(model: Any, device: torch.device) -> Encode:
    """Return the `Encode` of a `DualEncoder`, or of the engine around one: evaluation mode, without gradients."""

    def encode(image: Tensor | None, tokens: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        model.eval()
        with torch.no_grad():
            return model(*(None if x is None else to_device(x, device) for x in (image, tokens)))

    return encode


def encode_batch(encode: Encode, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return image and text features (b, d) on the device, and in host memory index (b,) and valid (b,)."""
    image, text = encode(batch.image, batch.tokens)
    assert image is not None and text is not None
    return image, text, batch.index, batch.valid


@dataclass(frozen=True)
class BatchEncoder:
    """Model that encodes any number of rows in batches of one shape, equally often on every rank (ZeRO-3 needs it)."""

    encode: Encode
    tokenize: Callable[[list[str]], Tensor]  # n texts -> (n, T) tokens
    communicator: Communicator  # the ranks, which call `encode_images` and `encode_texts` together
    size: int  # rows per call
    transform: Callable[[bytes], Tensor]  # encoded image -> (3, H, W) uint8
    loader: Loader = IN_PROCESS  # reads evaluation sets

    def encode_images(self, rows: Sequence[Tensor]) -> Tensor:
        """Encode n >= 1 images (3, H, W) to (n, d) features; n may differ between ranks."""
        return self._encode_batches(lambda batch: self.encode(torch.stack(batch), None)[0], rows)

    def encode_texts(self, rows: Sequence[str]) -> Tensor:
        """Encode n >= 1 texts to (n, d) features; n may differ between ranks."""
        return self._encode_batches(lambda batch: self.encode(None, self.tokenize(batch))[1], rows)

    def _encode_batches(self, encode: Callable[[list], Tensor | None], rows: Sequence) -> Tensor:
        """Encode batches that are padded with the first row, as many as the rank with the most rows needs."""
        most = max(self.communicator.gather_objects(len(rows)))
        features = []
        for low in range(0, most, self.size):
            batch = list(rows[low : low + self.size])
            found = encode(batch + [rows[0]] * (self.size - len(batch)))
            assert found is not None
            features.append(found)
        return torch.cat(features)[: len(rows)]
