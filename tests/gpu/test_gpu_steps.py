"""Steps on GPUs are those of the CPU: every method, DeepSpeed file and optimizer, two passes, compiled towers.

`make test-gpu` runs them on GPUs, `python -m pytest -m gpu` on the CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import test_objective_ranks
import test_optimizers
import torch
from ranks import run_ranks
from test_non_finite import check, gradient
from test_step import ROWS, plain, under_deepspeed

from neuclip_ds.engine.config import FOLDER

pytestmark = pytest.mark.gpu
FILES = sorted(path.stem for path in FOLDER.glob("*.json"))
FLOAT32 = [name for name in FILES if "fp32" in name]
# five AdamW steps of 1e-3; bf16 has 8 bits, fp16 has 11
TOLERANCE = {
    "fp32": {"rtol": 0, "atol": 1e-4},
    "bf16": {"rtol": 2**-7, "atol": 1.2e-2},
    "fp16": {"rtol": 2**-7, "atol": 1.2e-2},
}


@pytest.fixture(params=[1, 2])
def ranks(request: pytest.FixtureRequest, device: str) -> int:
    if device == "cuda" and torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} GPUs")
    return int(request.param)


def test_every_method(ranks: int, device: str) -> None:
    """Gradients, losses, temperatures and per-sample statistics of five float64 steps."""
    test_objective_ranks.check_ranks(run_ranks(ranks, test_objective_ranks.train, 5, device=device))


def check_weights(method: str, files: list[str], passes: int, ranks: int, device: str, **options: Any) -> None:
    """The weights after five steps are those of plain PyTorch on the CPU."""
    wanted, tau = plain(method, clip=0.5)
    for rank in run_ranks(ranks, under_deepspeed, method, files, ROWS // ranks // passes, options, device=device):
        for name, (weights, found_tau) in zip(files, rank, strict=True):
            precision = name.split("_")[1]
            assert found_tau == pytest.approx(tau, rel=1e-4 if precision == "fp32" else 1e-2), name
            for key, value in weights.items():
                torch.testing.assert_close(value, wanted[key], **TOLERANCE[precision], msg=f"{name} {key}")


@pytest.mark.parametrize("passes", [1, 2])
def test_every_deepspeed_file(passes: int, ranks: int, device: str) -> None:
    files = [name for name in FILES if device == "cuda" or not name.endswith("fp16")]  # which few CPUs compute
    check_weights("openclip", files, passes, ranks, device)


@pytest.mark.parametrize("method", ["fastclip_v3", "neuclip"])
def test_methods_with_state_under_zero(method: str, ranks: int, device: str) -> None:
    check_weights(method, FLOAT32, 2, ranks, device)


def test_compiled_towers(device: str) -> None:
    check_weights("openclip", ["zero1_fp32"], 1, 1, device, model={"compile": True})


@pytest.mark.parametrize(("precision", "atol"), [("fp32", 1e-4), ("bf16", 0.03)])
def test_every_optimizer(precision: str, atol: float, ranks: int, device: str) -> None:
    stages = [f"zero{stage}_{precision}" for stage in range(4)]
    for results in run_ranks(ranks, test_optimizers.under_zero, stages, device=device):
        for (name, engine), (found, _) in results.items():
            for value, wanted in zip(found, test_optimizers.plain(name), strict=True):
                torch.testing.assert_close(value, wanted, rtol=0, atol=atol, msg=f"{name} {engine}")


def test_a_gradient_that_overflows_is_skipped(device: str) -> None:
    files = [f"zero{stage}_{precision}" for stage in range(3) for precision in ("bf16", "fp32")]
    check([("openclip", name, ROWS, gradient) for name in files], ranks=1, device=device)
