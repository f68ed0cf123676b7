"""A hash of a tensor's bits, computed on its device, to compare copies of one tensor."""

import torch
from torch import Tensor

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
_ODD = 0x1E3779B97F4A7C15  # its double fits int64
_CHUNK = 2**22  # elements, which take 64 MB of int64


def bit_hash(x: Tensor) -> Tensor:
    """Return the 0-dim int64 sum, modulo 2^64, of the elements' bits times an odd weight of each position.

    It does not depend on the order of summation. A change of one element always changes it, as the weights are odd.
    """
    words = x.detach().reshape(-1).view(_WORDS[x.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, len(words), _CHUNK):
        part = words[start : start + _CHUNK].long()
        weights = torch.arange(start, start + len(part), device=x.device).mul_(2 * _ODD).add_(_ODD)
        total += part.mul_(weights).sum()
    return total
