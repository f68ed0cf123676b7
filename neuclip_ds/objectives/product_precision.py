"""Precision of float32 matrix products in a block of code; torch's switch for it holds for the whole process.

A GPU multiplies float32 matrices several times faster where it may round them to TF32, which has 11 significant bits,
and adds the products in float32. What has travelled as bf16 or float16 loses nothing by that.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_TF32_HOLDS = (torch.bfloat16, torch.float16)


@contextmanager
def products_exact_for(dtype: torch.dtype) -> Iterator[None]:
    """Multiply float32 matrices on GPUs in the fastest precision that holds numbers of `dtype` without rounding.

    Outside the block the switch is as it was.
    """
    before, wanted = _allows_tf32(), dtype in _TF32_HOLDS
    _allow_tf32(wanted)
    try:
        yield
    finally:
        _allow_tf32(before)


def _allows_tf32() -> bool:
    matmul = torch.backends.cuda.matmul
    # `allow_tf32` raises where the program has set `fp32_precision`, which came with torch 2.9
    return matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32


def _allow_tf32(allow: bool) -> None:
    if allow != _allows_tf32():
        # sets `fp32_precision` too; torch's profiler raises where only one of the two is set
        torch.backends.cuda.matmul.allow_tf32 = allow
