"""No method computes with subnormal numbers, and TF32 is enabled only in products that lose no precision."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from build import VARIANTS, batch, objective, pairs, step
from neuclip_ds.objectives.pair_arithmetic import products_exact_for
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.section import merge

ROWS, DIM, TAU = 48, 6, 0.01
TINY = torch.finfo(torch.float32).tiny
aten = torch.ops.aten
MATMUL = torch.backends.cuda.matmul
PRODUCTS = {aten.mm.default, aten.mm.out, aten.addmm_.default, aten.bmm.default, aten.baddbmm.default}
EXPONENTIALS = {
    aten.exp.default,
    aten.exp_.default,
    aten.exp2_.default,
    aten.sigmoid.default,
    aten.softmax.int_out,
}


class Watch(TorchDispatchMode):
    """Counts the subnormal numbers that matrix products read and exponentials of pairs return.

    Attributes:
        exponentials: the number of elements that exponentials have returned.
        subnormal: the number of subnormal elements by operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.exponentials = 0
        self.subnormal: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        seen: list[Tensor] = []
        if func in PRODUCTS:
            seen = [x for x in args[-2:] if isinstance(x, Tensor)]
        elif func in EXPONENTIALS and result.ndim == 2 and len(result) > 2:  # of pairs, not of the 2 x B anchors
            seen = [result]
            self.exponentials += result.numel()
        elif func is aten.logsumexp.default:
            seen = [(args[0] - args[0].amax(args[1], keepdim=True)).exp()]
        found = sum(int(((x != 0) & (x.abs() < TINY)).sum()) for x in seen if x.dtype is torch.float32)
        if found:
            self.subnormal[str(func)] = self.subnormal.get(str(func), 0) + found
        return result


def features(kind: str) -> tuple[Tensor, Tensor]:
    """Return (rows, dim) images and texts: unrelated, similar in pairs, or all near two opposite points."""
    image, text = torch.randn(2, ROWS, DIM, generator=torch.Generator().manual_seed(0))
    if kind == "matched":
        text = image + 0.1 * text
    if kind == "opposed":
        place = torch.where(torch.arange(ROWS) % 2 == 0, 1.0, -1.0).unsqueeze(1)
        image, text = place + 0.2 * image, place + 0.2 * text
    return normalize(image, dim=1), normalize(text, dim=1)


@pytest.mark.parametrize("kind", ["random", "matched", "opposed"])
@pytest.mark.parametrize("name", VARIANTS)
def test_no_product_or_exponential_is_slowed_down(name: str, kind: str) -> None:
    method, options = VARIANTS[name]
    options = merge(options, {"temperature": {"initial": TAU}})
    tried = objective(method, Communicator(), DIM, torch.float32, **options)
    image, text = features(kind)
    for number in range(3):
        with Watch() as watch:
            found = tried(batch(image, text), step(number))
        assert watch.exponentials
        assert not watch.subnormal
        assert found.image.isfinite().all()


def test_a_feature_that_is_not_finite_is_not_hidden() -> None:
    """Bounds on exponents keep NaN, so that the trainer can detect it and skip the step."""
    for name in ("openclip", "isogclr", "siglip", "neuclip"):
        image, text = features("random")
        image[3, 2] = torch.nan
        tried = objective(name, Communicator(), DIM, torch.float32, temperature={"initial": TAU})
        assert not tried(batch(image, text), step()).image.isfinite().all(), name


@pytest.fixture(params=[False, True], ids=["float32 outside", "TF32 outside"])
def outside(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = MATMUL.allow_tf32
    MATMUL.allow_tf32 = request.param
    yield request.param
    MATMUL.allow_tf32 = before


class Products(TorchDispatchMode):
    """Records whether TF32 is allowed, separately for products of blocks of pairs and for products of positives."""

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
        assert not MATMUL.allow_tf32  # torch's profiler reads `allow_tf32`
    assert MATMUL.fp32_precision == "tf32"
    MATMUL.allow_tf32 = before
