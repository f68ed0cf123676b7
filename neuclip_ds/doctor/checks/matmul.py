"""Speed of large matrix products: bf16 for the towers, float32 for the objective, TF32 where a run asks for it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.doctor.finding import Finding, fine
from neuclip_ds.doctor.request import Request
from neuclip_ds.doctor.timing import seconds_of

BF16, FLOAT32, TF32 = "matmul bf16, TFLOP/s", "matmul float32, TFLOP/s", "matmul TF32, TFLOP/s"
_SIDE = {"cpu": 1024, "cuda": 8192}


def examine(request: Request, communicator: Communicator) -> Iterator[Finding]:
    device = communicator.device
    side = _SIDE[device.type]
    rates = {BF16: _rate(side, torch.bfloat16, device), FLOAT32: _rate(side, torch.float32, device)}
    if device.type == "cuda":
        with tf32():
            rates[TF32] = _rate(side, torch.float32, device)
    yield fine(figures=rates)


@contextmanager
def tf32() -> Iterator[None]:
    """Compute float32 products on GPUs in TF32 within the block."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _rate(side: int, dtype: torch.dtype, device: torch.device) -> float:
    left, right = torch.randn(2, side, side, device=device).to(dtype)
    return 2 * side**3 / seconds_of(lambda: left @ right, device) / 1e12
