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
(under ZeRO 3), so all ranks must call it the same number of times, with inputs of the same shapes.
"""


def encoder_of(model: Any, device: torch.device) -> Encode:
    """Return an `Encode` function that runs a `DualEncoder`, or an engine that wraps one, without gradients."""

    def encode(image: Tensor | None, tokens: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        model.eval()
        image_on_device = None if image is None else to_device(image, device)
        tokens_on_device = None if tokens is None else to_device(tokens, device)
        with torch.no_grad():
            return model(image_on_device, tokens_on_device)

    return encode


@dataclass(frozen=True, kw_only=True)
class EncodedBatch:
    """Features of the b rows of a batch, without its pixels and tokens."""

    image: Tensor  # (b, d), on the device
    text: Tensor  # (b, d), on the device
    index: Tensor  # (b,) int64, in host memory
    valid: Tensor  # (b,) bool, in host memory


def encode_batch(encode: Encode, batch: Batch) -> EncodedBatch:
    """Encode the images and texts of a batch."""
    image, text = encode(batch.image, batch.tokens)
    assert image is not None and text is not None
    return EncodedBatch(image=image, text=text, index=batch.index, valid=batch.valid)


@dataclass(frozen=True)
class BatchEncoder:
    """Encodes rows in equal-sized batches; the number of batches is the same on all ranks, as ZeRO 3 requires."""

    encode: Encode
    tokenize: Callable[[list[str]], Tensor]  # n texts -> (n, T) tokens
    communicator: Communicator  # all its ranks must call `encode_images` and `encode_texts` together
    batch_size: int  # rows per call
    transform: Callable[[bytes], Tensor]  # encoded image -> (3, H, W) uint8
    loader: Loader = IN_PROCESS  # reads evaluation sets
    prefixes: Sequence[int] = ()  # retrieval is also scored with only the first p dimensions, for each p

    def encode_images(self, rows: Sequence[Tensor]) -> Tensor:
        """Encode n >= 1 images (3, H, W) into (n, d) features; n may differ between ranks."""

        def encode(batch: list[Tensor]) -> Tensor | None:
            image, _ = self.encode(torch.stack(batch), None)
            return image

        return self._encode_batches(encode, rows)

    def encode_texts(self, rows: Sequence[str]) -> Tensor:
        """Encode n >= 1 texts into (n, d) features; n may differ between ranks."""

        def encode(batch: list[str]) -> Tensor | None:
            _, text = self.encode(None, self.tokenize(batch))
            return text

        return self._encode_batches(encode, rows)

    def _encode_batches(self, encode: Callable[[list], Tensor | None], rows: Sequence) -> Tensor:
        """Encode rows in batches padded with the first row; the rank with the most rows sets the number of batches."""
        most_rows = max(self.communicator.gather_objects(len(rows)))
        features = []
        for start in range(0, most_rows, self.batch_size):
            batch = list(rows[start : start + self.batch_size])
            padding = [rows[0]] * (self.batch_size - len(batch))
            encoded = encode(batch + padding)
            assert encoded is not None
            features.append(encoded)
        return torch.cat(features)[: len(rows)]
