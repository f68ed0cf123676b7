"""Blocks of similarities on a GPU that is not there are bounded in bytes, whatever the batch and `objective.chunk`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from build import VARIANTS
from fake_cuda import DEVICE, fake_cuda
from simulated_rank import GpuRank
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from neuclip_ds.config import Config
from neuclip_ds.objectives import build_objective
from neuclip_ds.objectives.base import Context, Step
from neuclip_ds.objectives.gather import Features
from neuclip_ds.objectives.pair_grid import block_bytes

ROWS, DIM = 20_000, 4
METHODS = ("openclip", "isogclr", "tuneclip", "siglip")


class LargestResult(TorchDispatchMode):
    """The bytes of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            self.bytes = max([self.bytes, *(tensor.nbytes for tensor in tensors)])
        return result


@pytest.mark.parametrize(("world_size", "chunk"), [(1, None), (2, 100_000)])
@pytest.mark.parametrize("method", METHODS)
def test_no_tensor_exceeds_a_block(method: str, world_size: int, chunk: int | None) -> None:
    options = {**VARIANTS[method][1], "method": method, "chunk": chunk, "similarity_budget_mb": 0}
    rows = ROWS // world_size
    with fake_cuda():
        context = Context(DIM, ROWS, GpuRank(world_size))
        objective = build_objective(Config.model_validate({"objective": options}), context, torch.float32)
        image, text = torch.empty(2, rows, DIM, device=DEVICE)
        valid = torch.ones(rows, dtype=torch.bool).to(DEVICE, non_blocking=True)
        index = torch.arange(rows).to(DEVICE, non_blocking=True)
        with LargestResult() as largest:
            objective(Features(image, text, index, valid), Step(0, 0, 1e-3, 1e-3))
    assert 0.4 * block_bytes("cuda") < largest.bytes <= block_bytes("cuda")
