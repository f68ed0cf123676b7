"""Count reads of tensor values by the host, each of which would make the host wait for a GPU."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class HostReads(TorchDispatchMode):
    """Context manager that counts the host reads in its block, including those caused by `if tensor:`."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.is_nonzero)
        return func(*args, **(kwargs or {}))
