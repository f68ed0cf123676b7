"""For developers of neuclip_ds: the error of the feature gradient for each precision of the matrix products.

The products of a GPU are emulated by rounding what they read: TF32 to the nearest of 11 significant bits or towards
zero, as hardware may do either, bf16 to the nearest of 8. Errors are norms relative to the gradient in float64 of
features that nothing has rounded. bf16 features are those that travel in bf16.

Example:
    python tools/benchmark_products.py --tau 0.07 0.01 --features random matched collapsed
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from benchmarking import FEATURES, random_features
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from neuclip_ds.config import Config
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.objectives import build_objective
from neuclip_ds.objectives.base import Context, Step
from neuclip_ds.objectives.gather import Features

HEADER = "| tau | features | features travel in | similarities | gradient's products | error | of the products alone |"
_TF32_REST = 1 << 13  # a float32 has so many numbers between two of TF32
_ATEN = torch.ops.aten
Rounding = Callable[[Tensor], Tensor]


def exact(x: Tensor) -> Tensor:
    return x


def tf32_nearest(x: Tensor) -> Tensor:
    bits = x.contiguous().view(torch.int32)
    return ((bits + _TF32_REST // 2) & -_TF32_REST).view(torch.float32).view_as(x)


def tf32_towards_zero(x: Tensor) -> Tensor:
    return (x.contiguous().view(torch.int32) & -_TF32_REST).view(torch.float32).view_as(x)


def bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


# what similarities and the gradient's products round their inputs to
PRODUCTS: dict[str, tuple[Rounding, Rounding]] = {
    "float32 | float32": (exact, exact),
    "TF32, nearest | TF32, nearest": (tf32_nearest, tf32_nearest),
    "TF32, towards zero | TF32, towards zero": (tf32_towards_zero, tf32_towards_zero),
    "bf16 | bf16": (bf16, bf16),
}


class RoundedProducts(TorchDispatchMode):
    """Rounds what matrix products read: of similarities by one rule, of the gradient by another."""

    def __init__(self, similarities: Rounding, gradient: Rounding) -> None:
        super().__init__()
        self._rules = {_ATEN.mm.default: (similarities, 0), _ATEN.addmm_.default: (gradient, 1)}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        rule, first = self._rules.get(func, (exact, len(args)))
        return func(*args[:first], *map(rule, args[first:]), **(kwargs or {}))


def gradient(features: Features, method: str, tau: float, comm_dtype: torch.dtype) -> Tensor:
    """Return the (2 b, d) feature gradient of a fresh objective, in float64."""
    dtype, (rows, dim) = features.image.dtype, features.image.shape
    config = Config.model_validate({"objective": {"method": method, "temperature": {"initial": tau}}})
    objective = build_objective(config, Context(dim, rows, Communicator(), dtype), comm_dtype)
    found = objective(features, Step(0, 0, 1e-4, 1e-4))
    return torch.cat([found.image, found.text]).double()


def errors(features: Features, method: str, tau: float) -> dict[tuple[str, str], tuple[float, float]]:
    """Return the relative error, and that against float32 products of the same features, by features and products."""
    double = features.__class__(features.image.double(), features.text.double(), features.index, features.valid)
    wanted = gradient(double, method, tau, torch.float64)
    found = {}
    for comm_dtype in (torch.float32, torch.bfloat16):
        plain = gradient(features, method, tau, comm_dtype)
        for products, rules in PRODUCTS.items():
            with RoundedProducts(*rules):
                rounded = gradient(features, method, tau, comm_dtype)
            error, added = (float((rounded - other).norm() / wanted.norm()) for other in (wanted, plain))
            found[str(comm_dtype).removeprefix("torch."), products] = error, added
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024, help="of the batch (default 1024)")
    parser.add_argument("--dim", type=int, default=512, help="feature width (default 512)")
    parser.add_argument("--tau", type=float, nargs="+", default=[0.07, 0.01], help="temperatures (default 0.07 0.01)")
    parser.add_argument("--features", choices=FEATURES, nargs="+", default=FEATURES, help="of what kind (default all)")
    parser.add_argument("--method", default="openclip", help="default openclip")
    options = parser.parse_args()
    print(f"{HEADER}\n{'|---' * 7}|")
    for tau in options.tau:
        for kind in options.features:
            features = random_features(options.rows, options.dim, Communicator(), kind)
            for (travel, products), (error, added) in errors(features, options.method, tau).items():
                print(f"| {tau} | {kind} | {travel} | {products} | {error:.1e} | {added:.1e} |", flush=True)


if __name__ == "__main__":
    main()
