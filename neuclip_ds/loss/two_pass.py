"""Pass closed-form gradients to autograd, and back-propagate them one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from neuclip_ds.losses.batch_norm import BatchNorm, kept_statistics


def with_gradients(loss: Tensor, inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """Return a copy of `loss` whose backward pass propagates `gradients` to `inputs`.

    Args:
        loss: 0-dim loss.
        inputs: tensors of any floating dtype; inputs that do not require gradients get none.
        gradients: gradients of the loss, shaped like the inputs. The product with the incoming gradient is computed in
            the dtype of `gradients` and returned in the dtype of the input.
    """
    result: Tensor = _WithGradients.apply(loss, len(inputs), *inputs, *gradients)
    return result


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
    """Two passes over a batch that is split into micro-batches, as in GradCache.

    The first pass stores features without a graph. Once the gradient of the whole batch's loss with respect to these
    features is known, the second pass runs each micro-batch again and back-propagates its rows of the gradient. Both
    passes draw the same random numbers, so dropout masks agree. The running statistics of batch normalization change in
    the second pass only. Without batch normalization, the result is the same as that of one large pass.
    """

    def __init__(self, layers: Sequence[BatchNorm]) -> None:
        """Prepare the passes; `layers` are the model's batch-norm layers."""
        self._layers = layers
        self._features: list[tuple[Tensor, Tensor]] = []
        self._random: list[tuple[Tensor, Tensor | None]] = []  # generator states before each micro-batch
        self._gradients: tuple[Tensor, Tensor] | None = None
        self._micro, self._row = 0, 0  # position in the second pass

    @contextmanager
    def features(self) -> Iterator[None]:
        """Context in which to run each micro-batch of the first pass; pass the features to `add`."""
        of_device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        self._random.append((torch.get_rng_state(), of_device))
        with torch.no_grad(), kept_statistics(self._layers):
            yield

    def add(self, image_features: Tensor, text_features: Tensor) -> None:
        """Store the (m, d) features of a micro-batch."""
        self._features.append((image_features.detach(), text_features.detach()))

    def whole(self) -> tuple[Tensor, Tensor]:
        """Return the (b, d) image and text features of all micro-batches, and clear the stored ones."""
        if len(self._features) == 1:
            return self._features.pop()
        images, texts = zip(*self._features, strict=True)
        self._features.clear()
        return torch.cat(images), torch.cat(texts)

    def differentiated(self, image: Tensor, text: Tensor) -> None:
        """Before the second pass, set the (b, d) gradients of the whole batch's loss with respect to the features."""
        self._gradients = image, text

    @contextmanager
    def gradients(self) -> Iterator[None]:
        """Context in which to run each micro-batch of the second pass, in the order of the first pass."""
        with _restored(self._random[self._micro]):
            yield
        self._micro += 1

    @property
    def is_last(self) -> bool:
        """Whether the current micro-batch of the second pass is the last."""
        return self._micro + 1 == len(self._random)

    def learning(self, image: Tensor | None, text: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
        """Return the micro-batch's features that have a graph, and the matching rows of the gradients.

        A frozen tower's features have no graph and may be None if the tower was not run again.
        """
        if self._gradients is None:
            raise RuntimeError("Compute the loss of the whole batch before the second pass.")
        rows = slice(self._row, self._row + next(len(x) for x in (image, text) if x is not None))
        self._row = rows.stop
        pairs = zip((image, text), self._gradients, strict=True)
        learning = [(x, gradient[rows]) for x, gradient in pairs if x is not None and x.requires_grad]
        return [x for x, _ in learning], [gradient for _, gradient in learning]


@contextmanager
def _restored(state: tuple[Tensor, Tensor | None]) -> Iterator[None]:
    """Run the enclosed code with a saved random state, and restore the current state afterward."""
    of_host, of_device = state
    with torch.random.fork_rng([] if of_device is None else [torch.cuda.current_device()]):
        torch.set_rng_state(of_host)
        if of_device is not None:
            torch.cuda.set_rng_state(of_device)
        yield
