"""Exact contrastive gradients for a batch that goes through the model in micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

if TYPE_CHECKING:
    from neuclip_ds.loss.contrastive_loss import ContrastiveLoss


class TwoPass:
    """Collect features without a graph, compute the loss of the whole batch, then back-propagate each micro-batch.

    Made by `ContrastiveLoss.accumulate`. Both passes draw the same random numbers, so dropout agrees.
    """

    def __init__(self, loss_fn: ContrastiveLoss, model: nn.Module | None, scale: float) -> None:
        self._loss_fn, self._model, self._scale = loss_fn, model, scale
        self._collected: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]] = []
        self._random: list[Any] = []
        self._gradients: tuple[Tensor, Tensor] | None = None
        self._micro, self._row = 0, 0

    @contextmanager
    def features(self) -> Iterator[None]:
        """Run a micro-batch of the first pass within this context; hand its features to `add`."""
        self._random.append(_random_state())
        with torch.no_grad(), kept_statistics(self._model):
            yield

    def add(
        self, image_features: Tensor, text_features: Tensor, index: Tensor | None = None, valid: Tensor | None = None
    ) -> None:
        """Keep the features of a micro-batch; arguments as those of the loss."""
        self._collected.append((image_features.detach(), text_features.detach(), index, valid))

    def loss(self) -> Tensor:
        """Return the loss of the whole batch, and compute its gradients; without a graph."""
        if not self._collected:
            raise RuntimeError("Add the features of all micro-batches before the loss.")
        image, text, index, valid = (
            None if column[0] is None else torch.cat(column) for column in zip(*self._collected, strict=True)
        )
        assert image is not None and text is not None
        self._collected.clear()
        with torch.enable_grad():
            loss = self._loss_fn(image.requires_grad_(), text.requires_grad_(), index, valid)
            (loss * self._scale).backward()
        assert image.grad is not None and text.grad is not None
        self._gradients = image.grad, text.grad
        return loss.detach()

    @contextmanager
    def gradients(self) -> Iterator[None]:
        """Run a micro-batch of the second pass within this context, in the order of the first; end with `backward`.

        The model reduces its gradients over ranks in the last micro-batch only (DDP's `no_sync`, FSDP2's
        `set_requires_gradient_sync`).
        """
        last = self._micro + 1 == len(self._random)
        with _restored(self._random[self._micro]), _without_reduction(self._model, last):
            yield
        self._micro += 1

    def backward(self, image_features: Tensor, text_features: Tensor) -> None:
        """Back-propagate the gradient of this micro-batch's rows; the features of a frozen tower have no graph."""
        if self._gradients is None:
            raise RuntimeError("Call loss() before backward().")
        rows = slice(self._row, self._row + len(image_features))
        self._row = rows.stop
        pairs = zip((image_features, text_features), self._gradients, strict=True)
        features, gradients = zip(*((x, gradient[rows]) for x, gradient in pairs if x.requires_grad), strict=True)
        torch.autograd.backward(features, gradients)


def _batch_norms(module: nn.Module) -> list[_BatchNorm]:
    return [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]


def running_statistics(module: nn.Module) -> list[Tensor]:
    """Return what batch-norm layers keep besides their weights."""
    return [buffer for layer in _batch_norms(module) for buffer in layer.buffers()]


@contextmanager
def kept_statistics(module: nn.Module | None) -> Iterator[None]:
    """Freeze the running statistics of batch-norm layers, which normalise by the batch as in training."""
    layers = [] if module is None else _batch_norms(module)
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.momentum = 0.0
    try:
        yield
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum


def _random_state() -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None


@contextmanager
def _restored(state: tuple[Tensor, Tensor | None]) -> Iterator[None]:
    """Run with an earlier random state, and continue with the present one afterwards."""
    present = _random_state()
    _set_random_state(state)
    try:
        yield
    finally:
        _set_random_state(present)


def _set_random_state(state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])


@contextmanager
def _without_reduction(model: Any, last: bool) -> Iterator[None]:
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP2
        model.set_requires_gradient_sync(last)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    else:
        with nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync():
            yield
