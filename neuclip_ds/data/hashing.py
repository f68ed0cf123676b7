"""Hash integer tuples to 64 bits: the only source of randomness of data loading.

The hash is splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014), implemented here
because numpy's and torch's generators may change between versions, and a run must resume across them.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply splitmix64's finaliser, a bijection of 64-bit words, elementwise."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> _SHIFTS[0])) * _MULTIPLIERS[0]
        values = (values ^ (values >> _SHIFTS[1])) * _MULTIPLIERS[1]
        return values ^ (values >> _SHIFTS[2])


def hash64(*parts: ArrayLike) -> NDArray[np.uint64]:
    """Return the hash of the tuple of non-negative integers `parts`, which broadcast against each other."""
    digest = np.zeros(1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            digest = mix64(digest ^ mix64(np.asarray(part, dtype=np.uint64) + _GOLDEN))
    return digest
