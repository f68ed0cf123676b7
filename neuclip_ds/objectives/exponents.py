"""Exponents of pairs that weigh too little to change a sum.

Their exponentials would be subnormal numbers (below 1.2e-38 in float32), with which CPUs compute many times slower.
Bounded exponents need no flushing of such numbers, which is a mode of each thread of the caller's process.
"""

import math

import torch


def lowest_exponent(dtype: torch.dtype) -> float:
    """Return the exponent that all lower ones are raised to: exp of it is 3e-27 in float32.

    It can still be divided by 1e11 without becoming subnormal.
    """
    return 0.7 * math.log(torch.finfo(dtype).tiny)
