"""Exponentials of pairs, most of which weigh too little to change a sum.

Those would be subnormal numbers (below 1.2e-38 in float32), with which CPUs compute many times slower. Bounded
exponents need no flushing of such numbers, which is a mode of each thread of the caller's process.
"""

import math

import torch
from torch import Tensor

_LOG2_E = math.log2(math.e)


def lowest_exponent(dtype: torch.dtype) -> float:
    """Return the exponent that all lower ones are raised to: exp of it is 3e-27 in float32.

    It can still be divided by 1e11 without becoming subnormal.
    """
    return 0.7 * math.log(torch.finfo(dtype).tiny)


def exp_(x: Tensor) -> Tensor:
    """Overwrite x with exp(x); in float32 with a relative error of 1e-7 (|x| + 1)."""
    # on some CPUs torch's exp takes three times as long as its exp2
    return x.mul_(_LOG2_E).exp2_() if x.device.type == "cpu" else x.exp_()


def bounded_exp_(x: Tensor) -> Tensor:
    """Overwrite x with exp(max(x, `lowest_exponent`)), as `exp_` does."""
    return exp_(x.clamp_(min=lowest_exponent(x.dtype)))


def log_sum_exp(x: Tensor, dim: int, out: Tensor) -> Tensor:
    """Return log of the sum of exp along a dimension, finfo.min where all x are -inf.

    `out`, which may be x, is overwritten by the terms relative to the largest.
    """
    largest = x.amax(dim, keepdim=True).clamp_(min=torch.finfo(x.dtype).min)
    return bounded_exp_(torch.sub(x, largest, out=out)).sum(dim).log_().add_(largest.squeeze(dim))
