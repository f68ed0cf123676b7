"""Subnormal numbers, below 1.2e-38 in float32, with which CPUs compute slowly.

Moments of weights that no longer get gradients decay into them, as those of rare tokens do, and so do exponentials.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def flushed_subnormals() -> Iterator[None]:
    """Take subnormal numbers for zero in this thread, and in the threads and processes that it starts in the block.

    The threads of torch's operations count among them if none has run in parallel before the block. Outside the block
    this thread is as it was. A CPU that cannot do so leaves them.
    """
    before = bool(torch.tensor(2.0**-126).div(2) == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)
