"""Evaluation on held-out data, shared by all ranks: retrieval, zero-shot classification, DataComp's tasks."""

from collections.abc import Callable

from torch import Tensor

Encode = Callable[[Tensor | None, Tensor | None], tuple[Tensor | None, Tensor | None]]
"""(images uint8 (b, 3, H, W) or None, tokens (b, T) or None) -> their float32 L2-normalised features (b, d) or None.

It moves its input to the model's device, puts the model into evaluation mode and may run collectives of its own
(ZeRO-3): evaluators call it equally often, with equal shapes, on every rank.
"""
