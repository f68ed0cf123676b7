"""Hash of a module's weights, to recognize the model that computed stored features."""

import hashlib

import torch
from torch import Tensor, nn


def weights_hash(module: nn.Module) -> str:
    """Return a hash (32 hex digits) of a module's parameters and floating-point buffers, regardless of their names.

    Names and their order differ between libraries that load the same weights. Call this before the weights are cast,
    moved or partitioned.
    """
    hashes = sorted(_hash(value) for value in module.state_dict().values() if value.is_floating_point())
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:32]


def _hash(value: Tensor) -> str:
    result = hashlib.sha256(f"{value.dtype} {tuple(value.shape)}".encode())
    data = value.detach().cpu().contiguous().flatten().view(torch.uint8)
    result.update(data.numpy().data)
    return result.hexdigest()
