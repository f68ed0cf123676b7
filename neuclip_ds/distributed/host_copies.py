"""Copies between host memory and a GPU that the host does not wait for."""

import torch
from torch import Tensor

_STAGED = 64 << 10  # bytes of pageable memory that CUDA takes at once; of more, the host waits for the copy


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, through pinned memory where it comes from the host and is large.

    Torch uses the pinned memory again only after the copy.
    """
    if device.type == "cuda" and tensor.device.type == "cpu" and tensor.nbytes > _STAGED:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


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
