"""Copies from a GPU to the host that overlap what the GPU does next."""

import torch
from torch import Tensor


class HostCopy:
    """A copy of a tensor in host memory, begun when it is made; of a tensor that is there already the tensor itself."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor
        self._arrived: torch.cuda.Event | None = None
        if tensor.device.type != "cpu":
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> Tensor:
        """Wait for the copy alone, not for what the device was given after it, and return it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy
