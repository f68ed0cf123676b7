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
    """Leave the running statistics of batch-norm layers, including `num_batches_tracked`, as they were before a block.

    Layers in training mode still normalize with batch statistics.
    """
    momenta = [layer.momentum for layer in layers]
    # with momentum=None, running statistics are averages over `num_batches_tracked` passes
    counts = [None if layer.num_batches_tracked is None else layer.num_batches_tracked.clone() for layer in layers]
    for layer in layers:
        layer.momentum = 0.0
    try:
        yield
    finally:
        for layer, momentum, count in zip(layers, momenta, counts, strict=True):
            layer.momentum = momentum
            if layer.num_batches_tracked is not None and count is not None:
                layer.num_batches_tracked.copy_(count)
