"""The two passes of `ContrastiveLoss.accumulate`, which computes exact gradients from micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from neuclip_ds.loss.two_pass import MicroBatches
from neuclip_ds.losses.batch_norm import batch_norms

if TYPE_CHECKING:
    from neuclip_ds.loss.contrastive_loss import ContrastiveLoss

_SAME = 0.05  # largest accepted distance between a row's features in the two passes, which differ only by rounding
_ONCE_EACH = (
    "run features() with one add() for each micro-batch, loss() once, then gradients() with one backward() for each"
)


class TwoPass(MicroBatches):
    """Two passes: the first collects features for the whole batch's loss; the second back-propagates each micro-batch.

    `ContrastiveLoss.accumulate` yields this object. Both passes draw the same random numbers, so dropout masks match. A
    missing, extra or out-of-order call raises `RuntimeError`.
    """

    def __init__(self, loss_fn: ContrastiveLoss, model: nn.Module | None, scale: float) -> None:
        super().__init__([] if model is None else batch_norms(model))
        self._loss_fn, self._model, self._scale = loss_fn, model, scale
        self._others: list[tuple[Tensor | None, Tensor | None]] = []  # index and valid of each micro-batch
        self._ends: list[int] = []  # rows up to the end of each micro-batch
        self._first: tuple[Tensor, Tensor] | None = None  # features of the first pass, once the loss is computed

    def add(
        self, image_features: Tensor, text_features: Tensor, index: Tensor | None = None, valid: Tensor | None = None
    ) -> None:
        """Store the features of a micro-batch; takes the same arguments as the loss."""
        super().add(image_features, text_features)
        self._others.append((index, valid))
        self._ends.append(sum(len(image) for image, _ in self._features))
        self._require(len(self._random) == len(self._ends) and self._first is None, _ONCE_EACH)

    def loss(self) -> Tensor:
        """Compute the gradients of the whole batch's loss, and return the detached loss."""
        complete = self._first is None and 0 < len(self._ends) == len(self._random)
        self._require(complete, _ONCE_EACH)
        columns = zip(*self._others, strict=True)
        index, valid = (None if any(x is None for x in column) else torch.cat(column) for column in columns)
        self._first = image, text = self.whole()
        with torch.enable_grad():
            image, text = image.detach().requires_grad_(), text.detach().requires_grad_()
            loss = self._loss_fn(image, text, index, valid)
            (loss * self._scale).backward()
        assert image.grad is not None and text.grad is not None
        self.differentiated(image.grad, text.grad)
        return loss.detach()

    @contextmanager
    def gradients(self) -> Iterator[None]:
        """Run each micro-batch of the second pass and its `backward` in this context, in the order of the first pass.

        Gradients are reduced over ranks in the last micro-batch only, using DDP's `no_sync` or FSDP2's
        `set_requires_gradient_sync`.
        """
        self._require(self._micro < len(self._ends) and self._first is not None, _ONCE_EACH)
        with _without_reduction(self._model, self.is_last), super().gradients():
            yield
            self._require(self._row == self._ends[self._micro], _ONCE_EACH)

    def backward(self, image_features: Tensor, text_features: Tensor) -> None:
        """Back-propagate this micro-batch's rows of the gradient; a frozen tower's features may have no graph."""
        start, given = self._row, (image_features, text_features)
        learning = self.learning(*given)
        self._require([start, self._row] == [0, *self._ends][self._micro : self._micro + 2], _ONCE_EACH)
        for x, first in zip(given, self._first or (), strict=True) if self._loss_fn.validates else ():
            far = x is not None and bool((x.detach() - first[start : self._row]).norm(dim=1).max() > _SAME)
            self._require(not far, "pass the micro-batches in the same order again, with the model unchanged")
        torch.autograd.backward(*learning)

    def finish(self) -> None:
        # raises RuntimeError if a call is missing; called by `accumulate`
        self._require(self._first is not None and self._micro == len(self._ends), _ONCE_EACH)

    def _require(self, holds: bool, order: str) -> None:
        if not holds:
            raise RuntimeError(f"accumulate(): {order}. So far: {self._micro} of {len(self._ends)} in the second pass.")


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
