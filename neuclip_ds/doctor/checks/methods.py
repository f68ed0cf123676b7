"""Every method's objective step in float32 on the device, against float64 on the CPU.

A method is run with each of the options that its file tests, with inner optimizers kept still: their steps amplify
roundings without being wrong.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from neuclip_ds.config import Config
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.doctor.finding import Finding, fine, wrong
from neuclip_ds.doctor.request import Request
from neuclip_ds.objectives import METHODS, build_objective
from neuclip_ds.objectives.base import Context, FeatureGradients, Step
from neuclip_ds.objectives.gather import Features
from neuclip_ds.section import merge

TOLERANCE = 1e-4  # largest norm of a gradient's difference, relative to the gradient; TF32 would exceed it
_ROWS, _DIM, _SAMPLES, _STEPS = 256, 64, 1024, 2
_FIX = (
    "Do not train with this method here. Check `nvidia-smi` for memory errors and NVIDIA_TF32_OVERRIDE, then report "
    "the machine and the versions."
)


class Variant(NamedTuple):
    """A method with options that its file tests."""

    name: str
    method: str
    options: Mapping[str, Any]


def examine(request: Request, communicator: Communicator) -> Iterator[Finding]:
    errors: dict[str, float] = {}
    for variant in variants():
        try:
            errors[variant.name] = largest_error(variant, communicator.device)
        except (RuntimeError, NotImplementedError) as error:  # what the device cannot compute
            yield wrong(f"{variant.name} fails: {' '.join(str(error).split())[:200]}", _FIX)
            continue
        if not errors[variant.name] <= TOLERANCE:  # not a number is no agreement
            yield wrong(
                f"{variant.name}: gradients differ from the CPU's float64 by {errors[variant.name]:.1e} of their norm; "
                f"{TOLERANCE:.0e} is allowed.",
                _FIX,
            )
    agreeing = [error for error in errors.values() if error <= TOLERANCE]
    if agreeing:
        yield fine(
            f"{len(agreeing)} variants of methods agree with float64 on the CPU to {max(agreeing):.0e} "
            f"(allowed: {TOLERANCE:.0e})."
        )


def variants() -> Iterator[Variant]:
    """Yield every method of the table with each of its test options."""
    for name, method in METHODS.items():
        for variant, options in method.test_options.items():
            yield Variant(f"{name} {variant}".strip(), name, merge(options, method.float32_options))


def largest_error(variant: Variant, device: torch.device) -> float:
    """Return the largest relative difference of a gradient between the device's float32 and the CPU's float64."""
    single, double = (run(variant, *where) for where in ((device, torch.float32), (torch.device("cpu"), torch.float64)))
    pairs = [(a, b) for one, other in zip(single, double, strict=True) for a, b in zip(one[:2], other[:2], strict=True)]
    return max((_relative(found, wanted) for found, wanted in pairs), key=lambda error: (error != error, error))


def run(variant: Variant, device: torch.device, dtype: torch.dtype) -> list[FeatureGradients]:
    """Return the results of the variant's first steps on random pairs."""
    tree = {"objective": {"method": variant.method, **variant.options}, "optimizer": {"eps": 1e-8}}
    context = Context(_DIM, _SAMPLES, Communicator(device), dtype)
    objective = build_objective(Config.model_validate(tree), context, dtype)
    found = []
    for number in range(_STEPS):
        image, text, index = _pairs(number)
        valid = torch.ones(_ROWS, dtype=torch.bool)
        features = Features(image.to(device, dtype), text.to(device, dtype), index, valid)
        found.append(objective(features, Step(number, 0, lr=0.0, peak_lr=1e-3)))
    return found


def _pairs(number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (rows, d) images, texts that resemble them, and (rows,) indices."""
    generator = torch.Generator().manual_seed(number)
    shared, a, b = torch.randn(3, _ROWS, _DIM, generator=generator, dtype=torch.float64)
    index = torch.randperm(_SAMPLES, generator=generator)[:_ROWS]
    return normalize(shared + a, dim=1), normalize(shared + b, dim=1), index


def _relative(found: Tensor, wanted: Tensor) -> float:
    wanted = wanted.cpu().double()
    return float((found.cpu().double() - wanted).norm() / wanted.norm())
