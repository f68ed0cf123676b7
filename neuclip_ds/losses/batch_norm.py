"""Keep batch-norm statistics correct when a forward pass runs twice."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm


def batch_norms(module: nn.Module) -> list[BatchNorm]:
    """Return a module's batch-norm layers."""
    return [layer for layer in module.modules() if isinstance(layer, BatchNorm)]


@contextmanager
def kept_statistics(layers: Sequence[BatchNorm]) -> Iterator[None]:
    """Keep the running means and variances of batch-norm layers unchanged in the enclosed code.

    Layers in training mode still normalize with batch statistics, and their `num_batches_tracked` still counts the
    passes.
    """
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.momentum = 0.0
    try:
        yield
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
