"""Build random features and objectives for the tests."""

from typing import Any
from unittest.mock import patch

import torch
from neuclip_ds.objectives import METHODS, build_objective
from torch import Tensor
from torch.nn.functional import normalize

from neuclip_ds.config import Config
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.losses.base import Context, FeatureGradients, Objective, Step
from neuclip_ds.losses.gather import Features
from neuclip_ds.state.partition import RowTable

SAMPLES = 1000
_AVERAGE = {"gamma_min": 0.3, "gamma_epochs": 2}
_NPN = {"prototypes": 7, "inner_steps": 3, "redraw_every": 3}  # 7 rows cannot be split evenly over ranks
_OWN_ROWS = {"width": 0.01, "inner_steps": 1}  # with one hidden unit, the net's gradient is smaller than the features
_ADAGRAD = {"optimizer": "adagrad", "lr": 0.1}
_OPTIONS: dict[str, dict[str, dict[str, Any]]] = {  # method -> variant -> options; an unlisted method uses its defaults
    **{
        name: {"": {"eps": 1e-6, "moving_average": _AVERAGE}}
        for name, method in METHODS.items()
        if method.normalizer == "moving_average"
    },
    "amorlip": {
        "": {"amortized": {"width": 0.5}},
        "combined_kl": {"amortized": {"encoder_normalizer": "combined", "loss": "kl", **_OWN_ROWS}},
        "js": {"amortized": {"width": 0.5, "loss": "js", "amortizes": "negatives"}},
        "seldom": {"amortized": {"online_every": 2, "target_every": 1, **_OWN_ROWS}},
    },
    "neuclip": {
        "": {"eps": 1e-6, "npn": _NPN},
        "adagrad": {"npn": {**_NPN, **_ADAGRAD}},
        "positive": {"npn": {**_NPN, "alpha_grad": "positive"}},
        "split": {"eps": 1e-6, "npn": {**_NPN, "replicas": 1}},
        "stop": {"npn": {**_NPN, "alpha_grad": "stop"}},
        "no_rho": {"npn": {**_NPN, "replicas": 2}, "temperature": {"rule": "learned"}},
        "mlp": {"npn": {"network": "mlp", "inner_steps": 2}},
        "joint": {"npn": {**_NPN, "order": "joint", "weight_decay": 0.1}},
    },
    "neuclip_queue": {  # queues shorter and longer than a batch
        "": {"queue": {"size": 7}},
        "long": {"queue": {"size": 40, "kappa": 3.0}},
        "rho": {"eps": 1e-6, "queue": {"size": 7}, "temperature": {"rule": "robust"}},
        "fixed_temperature": {"queue": {"size": 7, "kappa": 0.3}, "temperature": {"lr": 0.0}},
    },
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    f"{name}_{variant}" if variant else name: (name, options)
    for name in METHODS
    for variant, options in _OPTIONS.get(name, {"": {}}).items()
}
"""Maps a variant's name to its method and test options; each method has at least one variant."""
# options, by method, that keep inner optimizers out of comparisons of float32 with float64
STILL: dict[str, dict[str, Any]] = {
    "amorlip": {"amortized": {"encoder_normalizer": "combined"}},  # the batch's own target instead of the fitted net
    "neuclip": {"npn": {"inner_steps": 0, "prototypes": 48}},  # prototypes from the batch keep the ratios moderate
}


def objective(
    method: str, communicator: Communicator, dim: int, dtype: torch.dtype = torch.float64, **options: Any
) -> Objective:
    config = Config.model_validate({"objective": {"method": method, **options}, "optimizer": {"eps": 1e-8}})
    return build_objective(config, Context(dim, SAMPLES, communicator, dtype), comm_dtype=dtype)


def pairs(rows: int, dim: int, seed: int = 0, likeness: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return normalized (rows, dim) images and texts; the rows of a pair share a component scaled by `likeness`."""
    generator = torch.Generator().manual_seed(seed)
    shared, a, b = torch.randn(3, rows, dim, generator=generator, dtype=torch.float64)
    return normalize(likeness * shared + a, dim=1), normalize(likeness * shared + b, dim=1)


def batch(image: Tensor, text: Tensor, index: Tensor | None = None, valid: Tensor | None = None) -> Features:
    rows = len(image)
    return Features(
        image,
        text,
        torch.arange(rows) if index is None else index,
        torch.ones(rows, dtype=torch.bool) if valid is None else valid,
    )


def step(number: int = 0, epoch: int = 0, lr: float = 1e-3) -> Step:
    return Step(number, epoch, lr, 1e-3)


def with_scalar_gradients(method: Any, features: Features, at: Step) -> tuple[FeatureGradients, dict[str, Tensor]]:
    """Return the objective's result and the gradients of theta and the bias, without updating theta or the bias."""
    rule = method._temperature if hasattr(method, "_temperature") else method._logit
    seen: dict[str, Tensor] = {}
    with patch.object(rule, "descend", lambda _, **gradients: seen.update(gradients)):
        return method(features, at), seen


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def columns(table: RowTable) -> dict[str, Tensor]:
    """Return this rank's rows of a table by field, each of shape (n/K,)."""
    return {name: rows[:, column] for key, rows in table.tensors.items() for column, name in enumerate(key.split(","))}
