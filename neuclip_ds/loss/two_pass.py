"""Pass closed-form gradients to autograd, and back-propagate them through a batch one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from neuclip_ds.models.batch_norm import BatchNorm, batch_norms, kept_statistics

if TYPE_CHECKING:
    from neuclip_ds.loss.contrastive_loss import ContrastiveLoss


def with_gradients(loss: Tensor, inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """Return `loss` as a scalar whose backward pass gives these gradients to `inputs`.

    Args:
        loss: 0-dim.
        inputs: tensors of any floating dtype; those that require no gradient get none.
        gradients: gradients of the loss, shaped like the inputs. They are multiplied by the incoming gradient in their
            own dtype, and the product is returned in that of the input.
    """
    result: Tensor = _WithGradients.apply(loss, len(inputs), *inputs, *gradients)
    return result


_SAME = 0.05  # largest distance between a row's features in the two passes, which differ by rounding
_ONCE_EACH = (
    "run features() with one add() for each micro-batch, loss() once, then gradients() with one backward() for each"
)


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, count: int, *tensors: Tensor) -> Tensor:
        ctx.dtypes = [x.dtype for x in tensors[:count]]
        ctx.save_for_backward(*tensors[count:])
        return loss.detach().clone()

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # autograd would treat the result as a constant
            raise RuntimeError("The loss's gradient is in closed form and has no derivative: omit create_graph=True.")
        gradients = ctx.saved_tensors
        scaled = [(g * incoming[0].to(g.dtype)).to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True)]
        return (None, None, *scaled, *[None] * len(gradients))


class MicroBatches:
    """Two passes over a batch that goes through a model one micro-batch at a time, as in GradCache.

    The first pass keeps features without a graph. Once the gradient of the whole batch's loss with respect to them is
    known, the second pass runs each micro-batch again and back-propagates its rows. Both passes draw the same random
    numbers, so dropout masks agree, and running statistics of batch normalization change in the second pass only: the
    result is that of one large pass.
    """

    def __init__(self, layers: Sequence[BatchNorm]) -> None:
        """`layers` are the model's `batch_norms`."""
        self._layers = layers
        self._features: list[tuple[Tensor, Tensor]] = []
        self._random: list[tuple[Tensor, Tensor | None]] = []  # generator states before the micro-batches
        self._gradients: tuple[Tensor, Tensor] | None = None
        self._micro, self._row = 0, 0  # position in the second pass

    @contextmanager
    def features(self) -> Iterator[None]:
        """Run a micro-batch of the first pass within this context; pass its features to `add`."""
        self._random.append(_random_state())
        with torch.no_grad(), kept_statistics(self._layers):
            yield

    def add(self, image_features: Tensor, text_features: Tensor) -> None:
        """Keep the (m, d) features of a micro-batch."""
        self._features.append((image_features.detach(), text_features.detach()))

    def whole(self) -> tuple[Tensor, Tensor]:
        """Return (b, d) image and text features of all micro-batches."""
        if len(self._features) == 1:
            return self._features.pop()
        images, texts = zip(*self._features, strict=True)
        self._features.clear()
        return torch.cat(images), torch.cat(texts)

    def differentiated(self, image: Tensor, text: Tensor) -> None:
        """Set the (b, d) gradients of the whole batch's loss with respect to its features, before the second pass."""
        self._gradients = image, text

    @contextmanager
    def gradients(self) -> Iterator[None]:
        """Run a micro-batch of the second pass within this context, in the order of the first."""
        with _restored(self._random[self._micro]):
            yield
        self._micro += 1

    @property
    def is_last(self) -> bool:
        """Whether the current micro-batch of the second pass is the last."""
        return self._micro + 1 == len(self._random)

    def learning(self, image: Tensor | None, text: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
        """Return the micro-batch's features that have a graph, and their rows of the gradients.

        A frozen tower's features have no graph; they may be None if the tower has not run again.
        """
        if self._gradients is None:
            raise RuntimeError("Compute the loss of the whole batch before the second pass.")
        rows = slice(self._row, self._row + next(len(x) for x in (image, text) if x is not None))
        self._row = rows.stop
        pairs = zip((image, text), self._gradients, strict=True)
        learning = [(x, gradient[rows]) for x, gradient in pairs if x is not None and x.requires_grad]
        return [x for x, _ in learning], [gradient for _, gradient in learning]


class TwoPass(MicroBatches):
    """Collect features without a graph, compute the loss of the whole batch, then back-propagate each micro-batch.

    `ContrastiveLoss.accumulate` yields it. Both passes draw the same random numbers, so dropout masks agree. A
    missing, extra or out-of-order call raises `RuntimeError`.
    """

    def __init__(self, loss_fn: ContrastiveLoss, model: nn.Module | None, scale: float) -> None:
        super().__init__([] if model is None else batch_norms(model))
        self._loss_fn, self._model, self._scale = loss_fn, model, scale
        self._others: list[tuple[Tensor | None, Tensor | None]] = []  # index and valid
        self._ends: list[int] = []  # rows up to the end of each micro-batch
        self._first: tuple[Tensor, Tensor] | None = None  # features of the first pass, once the loss is computed

    def add(
        self, image_features: Tensor, text_features: Tensor, index: Tensor | None = None, valid: Tensor | None = None
    ) -> None:
        """Keep the features of a micro-batch; takes the arguments of the loss."""
        super().add(image_features, text_features)
        self._others.append((index, valid))
        self._ends.append(sum(len(image) for image, _ in self._features))
        self._require(len(self._random) == len(self._ends) and self._first is None, _ONCE_EACH)

    def loss(self) -> Tensor:
        """Compute the gradients of the whole batch's loss, and return the loss without a graph."""
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
        """Run a micro-batch of the second pass within this context, in the order of the first; end it with `backward`.

        The model reduces its gradients over ranks in the last micro-batch only (DDP's `no_sync`, FSDP2's
        `set_requires_gradient_sync`).
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
            self._require(not far, "pass the micro-batches in the same order again, without changing the model between")
        torch.autograd.backward(*learning)

    def finish(self) -> None:
        # raises RuntimeError if a call is missing; `accumulate` calls it
        self._require(self._first is not None and self._micro == len(self._ends), _ONCE_EACH)

    def _require(self, holds: bool, order: str) -> None:
        if not holds:
            raise RuntimeError(f"accumulate(): {order}. So far: {self._micro} of {len(self._ends)} in the second pass.")


def _random_state() -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None


@contextmanager
def _restored(state: tuple[Tensor, Tensor | None]) -> Iterator[None]:
    """Run with an earlier random state, and restore the current one afterward."""
    of_host, of_device = state
    with torch.random.fork_rng([] if of_device is None else [torch.cuda.current_device()]):
        torch.set_rng_state(of_host)
        if of_device is not None:
            torch.cuda.set_rng_state(of_device)
        yield


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
