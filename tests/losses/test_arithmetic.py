"""No loss computes with subnormal numbers, and TF32 is enabled only in products that lose no precision."""

from __future__ import annotations

import math

import pytest
import torch

from neuclip_ds.losses.arithmetic import log_eps_plus, log_sum_exp

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
    torch.testing.assert_close(log_eps_plus(log_x, 0.25), torch.tensor([0.25, 0.25 + math.exp(-3), math.inf]).log())
