"""Build random features and losses for the tests, and call a loss once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.losses import ContrastiveLoss, GatheredFeatures, Position
from neuclip_ds.losses.methods import METHODS
from neuclip_ds.losses.stored_features import StoredRows, Teachers
from neuclip_ds.state.partition import RowTable

SAMPLES = 1000
PEAK_LR = 1e-3
NO_MOMENTUM = (0.0, 0.98)
"""Betas with which Adam's first moment is the last gradient, for `scalar_gradients`."""

_AVERAGE = {"gamma_min": 0.3, "gamma_epochs": 2}
_NPN = {"prototypes": 7, "inner_steps": 3, "redraw_every": 3}  # 7 rows cannot be split evenly over ranks
_LOCAL_FITS = {"width": 0.01, "inner_steps": 1}  # with one hidden unit, the net's gradient is smaller than the features
_ADAGRAD = {"optimizer": "adagrad", "lr": 0.1}
_OPTIONS: dict[str, dict[str, dict[str, Any]]] = {  # method -> variant -> options; an unlisted method uses its defaults
    "amorlip": {
        "": {"amortized": {"width": 0.5}},
        "combined_kl": {"amortized": {"encoder_normalizer": "combined", "loss": "kl", **_LOCAL_FITS}},
        "js": {"amortized": {"width": 0.5, "loss": "js", "amortizes": "negatives"}},
        "seldom": {"amortized": {"online_every": 2, "target_every": 1, **_LOCAL_FITS}},
    },
    "neuclip": {
        "": {"eps": 1e-6, "npn": _NPN},
        "adagrad": {"npn": {**_NPN, **_ADAGRAD}},
        "positive": {"npn": {**_NPN, "alpha_grad": "positive"}},
        "split": {"eps": 1e-6, "npn": {**_NPN, "replicas": 1}},
        "stop": {"npn": {**_NPN, "alpha_grad": "stop"}},
        "no_rho": {"npn": {**_NPN, "replicas": 2}, "temperature": {"rule": "learned"}},
        "pooled": {"eps": 1e-6, "npn": {**_NPN, "kappa": 0.5, "redraw_every": 72, "redraw_unit": "samples"}},
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


def _variants() -> dict[str, tuple[str, dict[str, Any]]]:
    variants: dict[str, tuple[str, dict[str, Any]]] = {}
    for method, row in METHODS.items():
        averages = "moving_average" in row.sections
        default = {"eps": 1e-6, "moving_average": _AVERAGE} if averages else {}
        for variant, options in _OPTIONS.get(method, {"": default}).items():
            variants[f"{method}_{variant}" if variant else method] = (method, options)
    return variants


VARIANTS = _variants()
"""Maps a variant's name to its method and test options; each method has at least one variant."""
# options, by method, that keep inner optimizers out of comparisons of float32 with float64
STILL: dict[str, dict[str, Any]] = {
    "amorlip": {"amortized": {"encoder_normalizer": "combined"}},  # the batch's own target instead of the fitted net
    "neuclip": {"npn": {"inner_steps": 0, "prototypes": 48}},  # prototypes from the batch keep the ratios moderate
}


def build_loss(
    method: Any,
    communicator: Communicator | None = None,
    dim: int = 6,
    dtype: torch.dtype = torch.float64,
    *,
    samples: int = SAMPLES,
    betas: tuple[float, float] = (0.9, 0.98),
    encoder_temperature: float | None = 0.07,
    encoder_bias: float | None = -10.0,
    **options: Any,
) -> ContrastiveLoss:
    """Build a loss as the trainer does, with raw gradients, and with `options` as under `objective` in a recipe."""
    return ContrastiveLoss(
        method,
        dim=dim,
        samples=samples,
        steps_per_epoch=1000,  # unused: `call` passes the position
        lr=PEAK_LR,
        betas=betas,
        adam_eps=1e-8,
        reduction="sum",
        communicator=Communicator() if communicator is None else communicator,
        undo=True,
        validate=False,
        dtype=dtype,
        spare_row=False,
        encoder_temperature=encoder_temperature,
        encoder_bias=encoder_bias,
        **options,
    )


def position(step: int = 0, epoch: int = 0, lr: float = PEAK_LR) -> Position:
    return Position(step=step, epoch=epoch, lr=lr, peak_lr=PEAK_LR)


@dataclass(frozen=True, kw_only=True)
class Result:
    """The loss of one call, its gradient with respect to this rank's features, and its metrics."""

    loss: Tensor
    image: Tensor  # (b, d)
    text: Tensor  # (b, d)
    metrics: dict[str, Tensor]

    def tensors(self) -> list[Tensor]:
        return [self.loss, self.image, self.text, *self.metrics.values()]


def call(
    loss_fn: ContrastiveLoss,
    image: Tensor,
    text: Tensor,
    index: Tensor | None = None,
    valid: Tensor | None = None,
    *,
    at: Position | None = None,
    micro_batches: tuple[int, int] | None = None,
    reference: StoredRows | None = None,
    teacher: Teachers | None = None,
) -> Result:
    """Call a loss in training mode.

    Args:
        index: sample indices, by default 0, 1, ...
        at: position in the run, by default the first step.
        micro_batches: if given, the rows are sent in pieces of this many texts and images, as a step with micro-batches
            sends them.
        reference, teacher: stored features.
    """
    image = image.detach().requires_grad_()
    text = text.detach().requires_grad_()
    if index is None:
        index = torch.arange(len(image))
    if at is None:
        at = position()
    if micro_batches is None:
        value = loss_fn(image, text, index, valid, position=at, reference=reference, teacher=teacher)
    else:
        pending = loss_fn.begin(index, valid, at, reference=reference, teacher=teacher)
        texts, images = micro_batches
        for piece in text.split(texts):
            pending.add_text(piece)
        for piece in image.split(images):
            pending.add_image(piece)
        pending.begin_reads()
        value = loss_fn(image, text, pending=pending)
    image_gradient, text_gradient = torch.autograd.grad(value, (image, text))
    return Result(loss=value.detach(), image=image_gradient, text=text_gradient, metrics=dict(loss_fn.metric_tensors))


def accumulated(loss_fn: ContrastiveLoss, model: nn.Module, parts: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Take an accumulated step with micro-batches of images and texts, and yield after each one's backward pass."""
    with loss_fn.accumulate(model) as passes:
        for part in parts:
            with passes.features():
                passes.add(*model(*part))
        passes.loss()
        for part in parts:
            with passes.gradients():
                passes.backward(*model(*part))
            yield


def replicated_state(loss_fn: ContrastiveLoss) -> dict[str, Tensor]:
    """Return copies of the state that is equal on all ranks."""
    return {name: value.clone() for name, value in loss_fn.function.replicated_state().items()}


def table_rows(loss_fn: ContrastiveLoss, table: str) -> dict[str, Tensor]:
    """Return this rank's rows of a table of the state, by tensor."""
    return dict(loss_fn.function.row_tables()[table].tensors)


def scalar_gradients(loss_fn: ContrastiveLoss) -> dict[str, Tensor]:
    """Return the last call's gradients for theta = log(1/tau) and, if there is one, the bias.

    The loss must have been built with `betas=NO_MOMENTUM`.
    """
    gradients: dict[str, Tensor] = {}
    for name, value in replicated_state(loss_fn).items():
        for scalar in ("theta", "bias"):
            if name.endswith(f"adam.{scalar}.exp_avg"):
                gradients[scalar] = value
    return gradients


def pairs(rows: int, dim: int, seed: int = 0, likeness: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return normalized (rows, dim) images and texts; the rows of a pair share a component scaled by `likeness`."""
    generator = torch.Generator().manual_seed(seed)
    shared, a, b = torch.randn(3, rows, dim, generator=generator, dtype=torch.float64)
    return normalize(likeness * shared + a, dim=1), normalize(likeness * shared + b, dim=1)


def gathered(
    image: Tensor,
    text: Tensor,
    dtype: torch.dtype,
    communicator: Communicator | None = None,
    valid: Tensor | None = None,
) -> GatheredFeatures:
    """Gather this rank's rows, of samples 0, 1, ..., from all ranks."""
    communicator = Communicator() if communicator is None else communicator
    index = torch.arange(len(image))
    if valid is not None:
        index = torch.where(valid, index, -1)
    return GatheredFeatures(
        padded_image=communicator.all_gather(image, "features"),
        padded_text=communicator.all_gather(text, "features"),
        padded_index=communicator.begin_host_gather(index, "features").wait(),
        communicator=communicator,
        dtype=dtype,
        statistics={},
    )


def relative_error(value: Tensor, exact: Tensor) -> float:
    return float((value - exact).norm() / exact.norm())


def columns(table: RowTable) -> dict[str, Tensor]:
    """Return this rank's rows of a table by field, each of shape (n/K,)."""
    fields: dict[str, Tensor] = {}
    for key, values in table.tensors.items():
        for column, name in enumerate(key.split(",")):
            fields[name] = values[:, column]
    return fields
