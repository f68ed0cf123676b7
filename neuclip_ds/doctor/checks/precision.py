"""Whether float32 products keep float32's precision: TF32 rounds their inputs to 10 bits of mantissa."""

import os
from collections.abc import Iterator

import torch

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.doctor.finding import Finding, fine, warning, wrong
from neuclip_ds.doctor.request import Request

_OVERRIDE = "NVIDIA_TF32_OVERRIDE"


def examine(request: Request, communicator: Communicator) -> Iterator[Finding]:
    override = os.environ.get(_OVERRIDE)
    if override == "1":
        yield wrong(
            f"{_OVERRIDE}=1 makes all float32 products TF32, those of losses and normalisers too.",
            f"unset {_OVERRIDE}, also in .deepspeed_env.",
        )
    elif override == "0":
        yield warning(f"{_OVERRIDE}=0 turns TF32 off, also where a run asks for it.", f"unset {_OVERRIDE}.")
    by_default = torch.backends.cuda.matmul.allow_tf32
    if by_default:
        yield wrong(
            "torch computes float32 products in TF32 by default here.",
            "unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, or remove what sets the precision at start-up (sitecustomize).",
        )
    yield fine(facts={"float32 products": "in TF32" if by_default or override == "1" else "in float32, TF32 off"})
