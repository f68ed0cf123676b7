"""Asynchronous copies between host memory and a GPU."""

import torch
from torch import Tensor

_STAGED = 64 << 10  # bytes of pageable memory that CUDA copies asynchronously; the host waits for larger copies


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, through pinned memory if it is large and comes from the host.

    Torch uses the pinned memory again only after the copy.
    """
    if device.type == "cuda" and tensor.device.type == "cpu" and tensor.nbytes > _STAGED:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class HostCopy:
    """An asynchronous copy of a tensor to host memory; a tensor that is already there is not copied."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor
        self._arrived: torch.cuda.Event | None = None
        if tensor.device.type != "cpu":
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> Tensor:
        """Wait for the copy, but not for later work of the device, and return it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy
