"""What is measured on a rank's device and among ranks, and what a faulty device would look like."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.doctor.checks import all_reduce, clocks, host_copies, matmul, memory_bandwidth, methods, training
from neuclip_ds.doctor.checks.methods import Variant
from neuclip_ds.doctor.finding import Finding
from neuclip_ds.doctor.request import Request
from neuclip_ds.objectives import METHODS, build_objective
from neuclip_ds.recipe import parse

CPU = torch.device("cpu")


def request() -> Request:
    return Request(parse(["demo"]).config, Path("doctor"), [])


def test_rates_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuclip_ds.doctor.timing._BUDGET", 0.01)
    monkeypatch.setitem(matmul._SIDE, "cpu", 64)
    monkeypatch.setitem(memory_bandwidth._BYTES, "cpu", 1 << 16)
    (products,) = matmul.examine(request(), Communicator())
    (memory,) = memory_bandwidth.examine(request(), Communicator())
    assert set(products.figures) == {matmul.BF16, matmul.FLOAT32}
    assert min(*products.figures.values(), *memory.figures.values()) > 0
    assert list(host_copies.examine(request(), Communicator())) == []


def test_tf32_is_left_as_it_was() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    with matmul.tf32():
        assert torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cuda.matmul.allow_tf32 == before


def test_every_method_has_a_variant() -> None:
    assert {variant.method for variant in methods.variants()} == set(METHODS)


def test_a_method_that_computes_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(config: Any, context: Any, dtype: torch.dtype) -> Any:
        objective = build_objective(config, context, dtype)
        if config.objective.method == "openclip":
            return objective
        factor = {"siglip": 1.01, "sogclr": math.nan}[config.objective.method] if dtype is torch.float32 else 1.0

        def scaled(*given: Any) -> Any:
            found = objective(*given)
            return found._replace(text=found.text * factor)

        return scaled

    monkeypatch.setattr(
        methods, "variants", lambda: [Variant(name, name, {}) for name in ("openclip", "siglip", "sogclr")]
    )
    monkeypatch.setattr(methods, "build_objective", build)
    scaled, nan, good = methods.examine(request(), Communicator())
    assert scaled.level == nan.level == "wrong" and good.level == "fine"
    assert scaled.message.startswith("siglip: gradients differ") and "1.0e-02" in scaled.message
    assert nan.message.startswith("sogclr") and good.message.startswith("1 variants")


def test_products_in_tf32_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its inputs have 10 bits of mantissa: emulated by rounding the features."""
    pairs = methods._pairs

    def rounded(number: int) -> tuple[Tensor, Tensor, Tensor]:
        image, text, index = pairs(number)
        return *((x * 2.0**11).round() / 2.0**11 for x in (image, text)), index

    exact = methods.run(Variant("openclip", "openclip", {}), CPU, torch.float64)
    monkeypatch.setattr(methods, "_pairs", rounded)
    coarse = methods.run(Variant("openclip", "openclip", {}), CPU, torch.float64)
    assert methods._relative(coarse[0].image, exact[0].image) > methods.TOLERANCE


def test_a_method_that_the_device_cannot_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(variant: Variant, device: torch.device) -> float:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(methods, "variants", lambda: [Variant("siglip", "siglip", {})])
    monkeypatch.setattr(methods, "largest_error", fail)
    (one,) = methods.examine(request(), Communicator())
    assert one.level == "wrong" and "siglip fails: CUDA error" in one.message


class Faulty(Communicator):
    """A link that flips a bit of what rank 1 receives."""

    def all_reduce(self, x: Tensor, purpose: str) -> Tensor:
        total = super().all_reduce(x, purpose)
        total[0] += self.rank
        return total


def reduced(communicator: Communicator) -> list[list[Finding]]:
    all_reduce._SIZES["cpu"] = (1 << 10, 2 << 20, 4 << 20)
    all_reduce._CALLS = 2
    return [list(all_reduce.examine(request(), link)) for link in (communicator, Faulty())]


def test_all_reduces() -> None:
    good, faulty = zip(*run_ranks(2, reduced), strict=True)
    names = {name for finding in good[0] for name in finding.figures}
    middle = "GB/s of an all-reduce of 2 MB"
    assert names == {f"{all_reduce.CALLS} of one node", middle, f"{all_reduce.LINK} of one node"}
    assert [finding.level for finding in good[1]] == ["fine", "fine"]
    assert sum(finding.level == "wrong" for finding in faulty[1]) == 3
    assert list(all_reduce.examine(request(), Communicator())) == []


class TwoNodes(Communicator):
    """Rank 0 of two nodes, the other of which has another time."""

    def __init__(self, ahead: float) -> None:
        super().__init__()
        self._ahead = ahead

    def gather_objects(self, x: Any) -> list[Any]:
        return [x, (x[0] + self._ahead, "node2")]


@pytest.mark.parametrize(("ahead", "level"), [(0.5, "fine"), (30.0, "warning"), (-3600.0, "wrong")])
def test_clocks(ahead: float, level: str) -> None:
    (one,) = clocks.examine(request(), TwoNodes(ahead))
    assert one.level == level
    assert level == "fine" or f"{abs(ahead):,.0f} s ahead" in one.message
    assert list(clocks.examine(request(), Communicator())) == []


def test_losses_of_deepspeed_files_are_compared() -> None:
    losses = {"zero1_fp32": [2.0, 1.9], "zero3_fp32": [2.0, 1.8], "zero1_bf16": [2.0, 1.8], "zero2_bf16": [2.0]}
    found = list(training.compare(losses))
    assert [one.level for one in found] == ["wrong", "fine", "wrong", "fine"]
    assert "zero3_fp32 differ from those of zero1_fp32 by 5e-02" in found[0].message
