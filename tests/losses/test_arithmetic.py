"""No loss computes with subnormal numbers, and TF32 is enabled only in products that lose no precision."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from build import VARIANTS, build_loss, call, gathered, position
from build import pairs as random_pairs
from fake_cuda import DEVICE, fake_cuda
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

from neuclip_ds.losses import arithmetic
from neuclip_ds.losses.arithmetic import log_eps_plus, log_sum_exp, pair_products, products_exact_for
from neuclip_ds.losses.pairs import FactoredSimilarities, Hinge, PairGrid, PairLoss, PairSimilarities
from neuclip_ds.section import merge

ROWS = 48
DIM = 6
TAU = 0.01
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


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("overwrites", [False, True])
def test_log_sum_exp_equals_torch_and_is_finite_without_terms(dim: int, overwrites: bool) -> None:
    x = 200 * torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    x[2, 3] = -math.inf
    exact = x.double().logsumexp(dim)
    out = x if overwrites else None
    torch.testing.assert_close(log_sum_exp(x.clone(), dim, None).double(), exact, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(log_sum_exp(x, dim, out).double(), exact, rtol=1e-6, atol=1e-5)
    assert log_sum_exp(torch.full((2, 2), -math.inf), dim, None).tolist() == 2 * [torch.finfo(torch.float32).min]


def test_log_eps_plus_adds_a_number_to_a_logarithm() -> None:
    log_x = torch.tensor([-math.inf, -3.0, 100.0])
    torch.testing.assert_close(
        log_eps_plus(log_x, 0.25), torch.tensor([math.log(0.25), math.log(0.25 + math.exp(-3)), 100])
    )


class SubnormalCounter(TorchDispatchMode):
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
        checked: list[Tensor] = []
        if func in PRODUCTS:
            checked = [x for x in args[-2:] if isinstance(x, Tensor)]
        elif func in EXPONENTIALS and result.ndim == 2 and len(result) > 2:  # of pairs, not of the 2 x B anchors
            checked = [result]
            self.exponentials += result.numel()
        elif func is aten.logsumexp.default:
            checked = [(args[0] - args[0].amax(args[1], keepdim=True)).exp()]
        for x in checked:
            if x.dtype is torch.float32:
                count = int(((x != 0) & (x.abs() < torch.finfo(x.dtype).tiny)).sum())
                if count:
                    self.subnormal[str(func)] = self.subnormal.get(str(func), 0) + count
        return result


def features(kind: str) -> tuple[Tensor, Tensor]:
    """Return (rows, dim) images and texts: unrelated, similar in pairs, or all near two opposite points."""
    image, text = torch.randn(2, ROWS, DIM, generator=torch.Generator().manual_seed(0))
    if kind == "matched":
        text = image + 0.1 * text
    if kind == "opposed":
        center = torch.where(torch.arange(ROWS) % 2 == 0, 1.0, -1.0).unsqueeze(1)
        image = center + 0.2 * image
        text = center + 0.2 * text
    return normalize(image, dim=1), normalize(text, dim=1)


KINDS = ("random", "matched", "opposed")


@pytest.mark.parametrize("name", VARIANTS)
def test_no_method_slows_down_a_cpu_with_subnormal_numbers(name: str) -> None:
    method, options = VARIANTS[name]
    options = merge(options, {"temperature": {"initial": TAU}})
    for kind in KINDS:
        loss_fn = build_loss(method, dim=DIM, dtype=torch.float32, **options)
        image, text = features(kind)
        for number in range(2):
            with SubnormalCounter() as counter:
                result = call(loss_fn, image, text, at=position(number))
            assert counter.exponentials
            assert not counter.subnormal, kind
            assert result.image.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_no_pairs_slow_down_a_cpu_with_subnormal_numbers(kind: str) -> None:
    grid = PairGrid(gathered(*features(kind), torch.float32), None, 1e9)
    tau = torch.tensor(TAU)
    for similarities in (
        FactoredSimilarities(grid, PairLoss(), tau),
        PairSimilarities(grid, PairLoss(), tau),
        PairSimilarities(grid, PairLoss(), tau.expand(2, ROWS)),
        PairSimilarities(grid, Hinge(0.2), tau),
    ):
        with SubnormalCounter() as counter:
            similarities.gradient(-similarities.log_mean_exp())
        assert counter.exponentials
        assert not counter.subnormal, similarities


@pytest.mark.parametrize("name", ["openclip", "isogclr", "siglip", "neuclip"])
def test_bounds_on_exponents_keep_nan_so_that_the_trainer_can_skip_the_step(name: str) -> None:
    image, text = features("random")
    image[3, 2] = torch.nan
    loss_fn = build_loss(name, dim=DIM, dtype=torch.float32, temperature={"initial": TAU})
    assert not call(loss_fn, image, text).image.isfinite().all()


@pytest.fixture(params=[False, True], ids=["float32 outside", "TF32 outside"])
def outside(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = MATMUL.allow_tf32
    MATMUL.allow_tf32 = request.param
    yield request.param
    MATMUL.allow_tf32 = before


class PrecisionRecorder(TorchDispatchMode):
    """Records whether TF32 is allowed, separately for products of blocks of pairs and for products of positives."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: set[bool] = set()
        self.positives: set[bool] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in (aten.mm.default, aten.addmm_.default):
            self.pairs.add(MATMUL.allow_tf32)
        elif func is aten.bmm.default:
            self.positives.add(MATMUL.allow_tf32)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("feature_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_method_allows_tf32_only_for_pairs_of_16_bit_features(feature_dtype: torch.dtype, outside: bool) -> None:
    image, text = random_pairs(9, 5)
    for method in ("openclip", "isogclr", "siglip"):
        loss_fn = build_loss(method, dim=5, dtype=torch.float32)
        with PrecisionRecorder() as recorder:
            call(loss_fn, image.to(feature_dtype), text.to(feature_dtype))
        assert recorder.pairs == {feature_dtype.itemsize == 2}
        assert recorder.positives == {False}
        assert MATMUL.allow_tf32 == outside


def test_an_error_restores_the_switch_for_tf32(outside: bool) -> None:
    with pytest.raises(RuntimeError), products_exact_for(torch.bfloat16):
        assert MATMUL.allow_tf32
        raise RuntimeError
    assert MATMUL.allow_tf32 == outside


@pytest.mark.skipif(not hasattr(MATMUL, "fp32_precision"), reason="came with torch 2.9")
def test_a_program_may_set_fp32_precision() -> None:
    before = MATMUL.allow_tf32
    MATMUL.fp32_precision = "tf32"
    with products_exact_for(torch.float32):
        assert MATMUL.fp32_precision == "ieee"
        assert not MATMUL.allow_tf32  # torch's profiler reads `allow_tf32`
    assert MATMUL.fp32_precision == "tf32"
    MATMUL.allow_tf32 = before


class ProductRecorder(TorchDispatchMode):
    """Records the input dtype of each matrix product and whether the product may round its inputs to TF32."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[Any, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is aten.mm:
            self.products.append((args[0].dtype, MATMUL.allow_tf32))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("returns_float32", [True, False], ids=["torch 2.8", "before torch 2.8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gpu_multiplies_16_bit_features_directly_or_in_tf32(
    dtype: torch.dtype, returns_float32: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arithmetic, "_MM_RETURNS_FLOAT32", returns_float32)
    with fake_cuda():
        rows = torch.empty(8, 4, device=DEVICE)
        columns = torch.empty(6, 4, device=DEVICE)
        with torch.no_grad(), ProductRecorder() as recorder:
            products = pair_products(rows, columns, dtype)
    assert (products.dtype, products.shape) == (torch.float32, (8, 6))
    is_16_bit = dtype != torch.float32
    if is_16_bit and returns_float32:
        assert recorder.products == [(dtype, False)]
    else:
        assert recorder.products == [(torch.float32, is_16_bit)]
