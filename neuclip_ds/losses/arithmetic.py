"""Arithmetic that losses share: exponentials that are never subnormal, and the precision of matrix products.

Most pairs contribute too little to change a sum. Their exponentials would be subnormal numbers (below 1.2e-38 in
float32), on which CPUs are many times slower. Bounding the exponents avoids subnormal numbers without the
flush-to-zero mode, which would have to be set in every thread of the caller's process.

A GPU multiplies float32 matrices several times faster if it may round them to TF32, which has 11 significant bits. It
multiplies bf16 or float16 matrices even faster. In both cases, the GPU accumulates in float32, so features that were
sent as bf16 or float16 lose no precision. torch's switch for TF32 is process-wide.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_MATMUL = torch.backends.cuda.matmul
_LOG2_E = math.log2(math.e)
_EXACT_IN_TF32 = (torch.bfloat16, torch.float16)
# whether torch.mm can multiply 16-bit matrices and return float32
_MM_RETURNS_FLOAT32 = torch.version.cuda is not None and torch.__version__ >= (2, 8)  # type: ignore[operator]  # a TorchVersion


def lowest_exponent(dtype: torch.dtype) -> float:
    """Return the lower bound on exponents; in float32, the exponential of the bound is 3e-27.

    The number 3e-27 can be divided by 1e11 without becoming subnormal.
    """
    return 0.7 * math.log(torch.finfo(dtype).tiny)


def exp_(x: Tensor) -> Tensor:
    """Overwrite x with exp(x); in float32, the relative error is at most about 1e-7 (|x| + 1)."""
    if x.device.type == "cpu":  # on some CPUs torch's exp takes three times as long as its exp2
        return x.mul_(_LOG2_E).exp2_()
    return x.exp_()


def bounded_exp_(x: Tensor) -> Tensor:
    """Overwrite x with exp(max(x, `lowest_exponent`)), computed by `exp_`."""
    return exp_(x.clamp_(min=lowest_exponent(x.dtype)))


def log_sum_exp(x: Tensor, dim: int, out: Tensor | None) -> Tensor:
    """Return the log of the sum of exp(x) along a dimension, or finfo.min where all x are -inf.

    If `out`, which may be x, is not None, it is overwritten with the terms of the sum, divided by the largest term.
    """
    largest = x.amax(dim, keepdim=True).clamp_(min=torch.finfo(x.dtype).min)
    terms = bounded_exp_(torch.sub(x, largest, out=out))
    return terms.sum(dim).log_().add_(largest.squeeze(dim))


def leaf_of(x: Tensor) -> Tensor:
    """Return the values of x as a leaf of a new graph; call this outside inference mode.

    Tensors that were created in inference mode, as in many evaluation loops, cannot be part of a graph and are copied;
    otherwise, the leaf shares the memory of x.
    """
    leaf = x.clone() if x.is_inference() else x.detach()
    return leaf.requires_grad_()


def log_pooled(log_batch: Tensor, log_estimate: Tensor, kappa: float) -> Tensor:
    """Return the log of the weighted mean (batch + kappa estimate)/(1 + kappa) of two values given as logs."""
    return torch.logaddexp(log_batch, log_estimate + math.log(kappa)) - math.log1p(kappa)


def log_eps_plus(log_x: Tensor, eps: float) -> Tensor:
    """Return log(eps + x)."""
    return torch.logaddexp(log_x, log_x.new_full((), math.log(eps)))


@contextmanager
def products_exact_for(dtype: torch.dtype) -> Iterator[None]:
    """Let GPUs multiply float32 matrices in the fastest precision that represents numbers of `dtype` exactly.

    torch's switch for TF32 is restored afterward.
    """
    allowed_before = _allows_tf32()
    is_exact = dtype in _EXACT_IN_TF32
    if allowed_before == is_exact:  # the usual case on a CPU; torch's switch is slow
        yield
        return
    _allow_tf32(is_exact)
    try:
        yield
    finally:
        _allow_tf32(allowed_before)


@contextmanager
def restored_tf32() -> Iterator[None]:
    """Restore torch's switch for TF32 at the end of the block."""
    allowed_before = _allows_tf32()
    try:
        yield
    finally:
        if _allows_tf32() != allowed_before:
            _allow_tf32(allowed_before)


def pair_products(rows: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows @ columns.T for features that `dtype` represents exactly; only the sums are rounded.

    If `dtype` has 16 bits, a GPU multiplies such numbers directly and returns float32; on ROCm or with torch < 2.8, it
    uses TF32 instead.
    """
    if _MM_RETURNS_FLOAT32 and rows.is_cuda and dtype in _EXACT_IN_TF32 and rows.dtype == torch.float32:
        return torch.mm(rows.to(dtype), columns.to(dtype).T, out_dtype=torch.float32)
    with products_exact_for(dtype):
        return rows @ columns.T


def _allows_tf32() -> bool:
    # `allow_tf32` raises if the program has set `fp32_precision`, which torch 2.9 introduced
    precision = getattr(_MATMUL, "fp32_precision", None)
    if precision is None:
        return _MATMUL.allow_tf32
    return precision == "tf32"


def _allow_tf32(allow: bool) -> None:
    # this sets `fp32_precision` too; torch's profiler raises if only one of the two is set
    _MATMUL.allow_tf32 = allow
