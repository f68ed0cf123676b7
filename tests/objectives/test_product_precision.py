"""TF32 is on inside the products that lose nothing by it, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from build import batch, objective, pairs, step
from torch.utils._python_dispatch import TorchDispatchMode

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.objectives.product_precision import products_exact_for

MATMUL = torch.backends.cuda.matmul
aten = torch.ops.aten


@pytest.fixture(params=[False, True], ids=["float32 outside", "TF32 outside"])
def outside(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = MATMUL.allow_tf32
    MATMUL.allow_tf32 = request.param
    yield request.param
    MATMUL.allow_tf32 = before


class Products(TorchDispatchMode):
    """Records whether TF32 is allowed: in products of a block of pairs, and in the positives'."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: set[bool] = set()
        self.others: set[bool] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in (aten.mm.default, aten.addmm_.default):
            self.pairs.add(MATMUL.allow_tf32)
        elif func is aten.bmm.default:
            self.others.add(MATMUL.allow_tf32)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", ["openclip", "isogclr", "siglip"])
@pytest.mark.parametrize("comm_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_of_an_objective(method: str, comm_dtype: torch.dtype, outside: bool) -> None:
    tried = objective(method, Communicator(), 5, torch.float32)
    tried.comm_dtype = comm_dtype
    image, text = pairs(9, 5)
    with Products() as seen:
        tried(batch(image.float(), text.float()), step())
    assert seen.pairs == {comm_dtype.itemsize == 2}
    assert seen.others == {False}
    assert MATMUL.allow_tf32 == outside


def test_an_error_does_not_leave_it_on(outside: bool) -> None:
    with pytest.raises(RuntimeError), products_exact_for(torch.bfloat16):
        assert MATMUL.allow_tf32
        raise RuntimeError
    assert MATMUL.allow_tf32 == outside


@pytest.mark.skipif(not hasattr(MATMUL, "fp32_precision"), reason="came with torch 2.9")
def test_a_program_that_sets_fp32_precision() -> None:
    before = MATMUL.allow_tf32
    MATMUL.fp32_precision = "tf32"
    with products_exact_for(torch.float32):
        assert MATMUL.fp32_precision == "ieee"
        assert not MATMUL.allow_tf32  # torch's profiler reads it
    assert MATMUL.fp32_precision == "tf32"
    MATMUL.allow_tf32 = before
