"""Exact gradients from micro-batches, in two passes as in GradCache (Gao et al. 2021, arXiv 2101.06983).

The trainer's engine uses `MicroBatches`; `ContrastiveLoss.accumulate` gives other training loops a `TwoPass`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from neuclip_ds.errors import counted
from neuclip_ds.losses.batch_norm import BatchNorm, batch_norms, kept_statistics
from neuclip_ds.losses.gather import all_valid
from neuclip_ds.losses.stored_features import StoredBatch, StoredRows, Teachers

if TYPE_CHECKING:
    from neuclip_ds.losses.contrastive_loss import ContrastiveLoss

_SAME = 0.05  # largest accepted distance between a row's features in the two passes; rounding causes smaller ones
_ONCE_EACH = (
    "run features() with one add() for each micro-batch, then loss() once, and then gradients() with one backward() "
    "for each micro-batch"
)


def with_gradients(loss: Tensor, inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """Return a copy of `loss` whose backward pass propagates `gradients` to `inputs`.

    The backward pass raises `RuntimeError` with `create_graph=True`, because double backward is not supported.

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
            raise RuntimeError(
                "The loss computes its gradient in closed form and does not support double backward: omit "
                "create_graph=True."
            )
        scaled: list[Tensor] = []
        # docs: autograd
        for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True):
            scaled.append((gradient * incoming[0].to(gradient.dtype)).to(dtype))
        # docs: end
        without_gradients = [None] * len(scaled)
        return (None, None, *scaled, *without_gradients)


class MicroBatches:
    """Two passes over a batch that is split into micro-batches.

    The first pass stores features without a graph. Once the gradient of the whole batch's loss with respect to these
    features is known, the second pass runs each micro-batch again and backpropagates its rows of the gradient. Both
    passes draw the same random numbers, so dropout masks match. The running statistics of the given batch-norm layers
    change in the second pass only. Without batch normalization and dropout, the result is that of one large pass, up to
    rounding.
    """

    def __init__(self, layers: Sequence[BatchNorm]) -> None:
        """Prepare the passes; `layers` are the model's batch-norm layers."""
        self._layers = layers
        self._features: list[tuple[Tensor, Tensor]] = []
        self._random_states: list[tuple[Tensor, Tensor | None]] = []  # of host and GPU, before each micro-batch
        self._feature_gradients: tuple[Tensor, Tensor] | None = None
        self._micro_batch = 0  # position in the second pass
        self._row = 0

    @contextmanager
    def features(self) -> Iterator[None]:
        """Run each micro-batch of the first pass in this context, and pass its features to `add`."""
        gpu_state = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        self._random_states.append((torch.get_rng_state(), gpu_state))
        with torch.no_grad(), kept_statistics(self._layers):
            yield

    def add(self, image_features: Tensor, text_features: Tensor) -> None:
        """Store the (m, d) features of a micro-batch."""
        self._features.append((image_features.detach(), text_features.detach()))

    def concatenated_features(self) -> tuple[Tensor, Tensor]:
        """Return the (b, d) image and text features of all micro-batches, and clear the stored ones."""
        images = [image for image, _ in self._features]
        texts = [text for _, text in self._features]
        self._features.clear()
        if len(images) == 1:
            return images[0], texts[0]
        return torch.cat(images), torch.cat(texts)

    def set_feature_gradients(self, image: Tensor, text: Tensor) -> None:
        """Set the (b, d) gradients of the whole batch's loss with respect to the features, for the second pass."""
        self._feature_gradients = image, text

    @contextmanager
    def gradients(self) -> Iterator[None]:
        """Run each micro-batch of the second pass in this context, in the order of the first pass."""
        with _restored(self._random_states[self._micro_batch]):
            yield
        self._micro_batch += 1

    @property
    def is_last(self) -> bool:
        """Whether the current micro-batch of the second pass is the last."""
        return self._micro_batch + 1 == len(self._random_states)

    def trainable_outputs_and_gradients(
        self, image: Tensor | None, text: Tensor | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the micro-batch's features that have a graph, and the matching rows of the gradients.

        Each call takes the rows after those of the previous call. A frozen tower's features have no graph, and may be
        None if the tower was not run again. Raises `RuntimeError` if `set_feature_gradients` has not been called.
        """
        if self._feature_gradients is None:
            raise RuntimeError("Compute the loss of the whole batch before the second pass.")
        present = image if image is not None else text
        assert present is not None  # a model has a trained tower
        count = len(present)
        rows = slice(self._row, self._row + count)
        self._row = rows.stop
        outputs: list[Tensor] = []
        gradients: list[Tensor] = []
        for features, gradient in zip((image, text), self._feature_gradients, strict=True):
            if features is not None and features.requires_grad:
                outputs.append(features)
                gradients.append(gradient[rows])
        return outputs, gradients


@dataclass(frozen=True, kw_only=True)
class _Added:
    """A micro-batch that was passed to `TwoPass.add`, without its features."""

    rows: slice  # among the rows of the whole batch
    index: Tensor | None
    valid: Tensor
    stored: StoredBatch


class TwoPass:
    """Two passes over micro-batches: the first collects features for the loss, and the second backpropagates.

    `ContrastiveLoss.accumulate` yields this object. Both passes draw the same random numbers, so dropout masks match. A
    missing, extra or out-of-order call raises `RuntimeError`.
    """

    def __init__(self, loss_fn: ContrastiveLoss, model: nn.Module | None, scale: float | GradScaler) -> None:
        self._passes = MicroBatches([] if model is None else batch_norms(model))
        self._loss_fn = loss_fn
        self._model = model
        self._scale = scale
        self._begun = 0  # micro-batches of the first pass, including one that has not been added yet
        self._added: list[_Added] = []
        self._first_pass: tuple[Tensor, Tensor] | None = None  # the features, once the loss is computed
        self._done = 0  # micro-batches that the second pass has completed
        self._backpropagated_rows = 0

    @contextmanager
    def features(self) -> Iterator[None]:
        """Run each micro-batch of the first pass in this context, and pass its features to `add`."""
        self._begun += 1
        with self._passes.features():
            yield

    def add(
        self,
        image_features: Tensor,
        text_features: Tensor,
        index: Tensor | None = None,
        valid: Tensor | None = None,
        *,
        reference: StoredRows | None = None,
        teacher: Teachers | None = None,
    ) -> None:
        """Store the (m, d) features of a micro-batch of m rows; the other arguments are as in the call of the loss.

        Pass `index`, `reference` and `teacher` with every micro-batch, or with none; otherwise, `loss` raises
        `RuntimeError`. Raises `ValueError`, only on this rank, if `reference` or `teacher` does not consist of pairs of
        floating-point (m, D) tensors.
        """
        self._require(self._first_pass is None and len(self._added) + 1 == self._begun)
        start = self._added[-1].rows.stop if self._added else 0
        count = len(image_features)
        valid = all_valid(count) if valid is None else valid
        stored = StoredBatch.of(reference, teacher)
        problem = stored.problem_with_shape(count)
        if problem is not None:
            raise ValueError(problem)
        self._added.append(_Added(rows=slice(start, start + count), index=index, valid=valid.cpu(), stored=stored))
        self._passes.add(image_features, text_features)

    def loss(self) -> Tensor:
        """Return the whole batch's 0-dim loss, detached, and compute its gradients with respect to the features.

        Also raises the exceptions of `ContrastiveLoss.forward`.
        """
        self._require(self._first_pass is None and 0 < len(self._added) == self._begun)
        indices = [micro_batch.index for micro_batch in self._added if micro_batch.index is not None]
        if indices and len(indices) < len(self._added):
            raise RuntimeError("accumulate(): pass index with every micro-batch, or with none.")
        index = torch.cat(indices) if indices else None
        valid = torch.cat([micro_batch.valid for micro_batch in self._added])
        stored = StoredBatch.concatenated([micro_batch.stored for micro_batch in self._added])
        image, text = self._passes.concatenated_features()
        self._first_pass = image, text
        with torch.enable_grad():
            image = image.detach().requires_grad_()
            text = text.detach().requires_grad_()
            loss = self._loss_fn(image, text, index, valid, reference=stored.reference, teacher=stored.teachers or None)
            self._scaled(loss).backward()
        assert image.grad is not None and text.grad is not None
        self._passes.set_feature_gradients(image.grad, text.grad)
        return loss.detach()

    def _scaled(self, loss: Tensor) -> Tensor:
        if isinstance(self._scale, GradScaler):
            scaled: Tensor = self._scale.scale(loss)
            return scaled
        if self._loss_fn.scaler is not None:
            # a GradScaler creates its scale in its first call of `scale`, whose result is not used here
            self._loss_fn.scaler.scale(loss.detach())
        return loss * self._scale

    @contextmanager
    def gradients(self) -> Iterator[None]:
        """Run each micro-batch of the second pass and its `backward` in this context, in the order of the first pass.

        If `accumulate` received the model, gradients are reduced over ranks in the last micro-batch only, using DDP's
        `no_sync` or FSDP2's `set_requires_gradient_sync`. Without the model, or with DDP's static graph, they are
        reduced in each micro-batch.
        """
        self._require(self._first_pass is not None and self._done < len(self._added))
        is_last = self._done + 1 == len(self._added)
        with _without_reduction(self._model, is_last), self._passes.gradients():
            yield
            self._require(self._backpropagated_rows == self._added[self._done].rows.stop)
        self._done += 1

    def backward(self, image_features: Tensor | None, text_features: Tensor | None) -> None:
        """Backpropagate this micro-batch's rows of the gradient.

        A frozen tower's features may have no graph, and may be None if the tower was not run again.

        Raises `RuntimeError` if the number of rows differs from that in the first pass or, with `validate=True`, if the
        features differ from those of the first pass by more than rounding.
        """
        if self._first_pass is None or self._done == len(self._added):
            self._fail(_ONCE_EACH)
        present = text_features if image_features is None else image_features
        assert present is not None  # a model has a trained tower
        start = self._backpropagated_rows
        rows = slice(start, start + len(present))
        self._require(rows == self._added[self._done].rows)
        if self._loss_fn.validates:
            for features, first in zip((image_features, text_features), self._first_pass, strict=True):
                if features is not None:
                    self._require_same(features, first[rows])
        outputs, gradients = self._passes.trainable_outputs_and_gradients(image_features, text_features)
        self._backpropagated_rows = rows.stop
        torch.autograd.backward(outputs, gradients)

    def finish(self) -> None:
        """Check that both passes are complete; raise `RuntimeError` if a call of a method is missing.

        `accumulate` calls this at the end of its context.
        """
        self._require(self._first_pass is not None and self._done == len(self._added))

    def _require_same(self, features: Tensor, first: Tensor) -> None:
        """Raise `RuntimeError` if a micro-batch's features differ from those of the first pass."""
        distances = (features.detach() - first).norm(dim=1)
        if bool((distances > _SAME).any()):
            self._fail("pass the micro-batches in the same order again, with the model unchanged")

    def _require(self, condition: bool) -> None:
        if not condition:
            self._fail(_ONCE_EACH)

    def _fail(self, advice: str) -> NoReturn:
        done = f"{self._done} of {counted(len(self._added), 'micro-batch', 'micro-batches')}"
        raise RuntimeError(f"accumulate(): {advice}. The second pass has received {done} so far.")


@contextmanager
def _without_reduction(model: Any, last: bool) -> Iterator[None]:
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP2
        model.set_requires_gradient_sync(last)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    else:
        # with a static graph, DDP fails if its first backward pass does not reduce the gradients; reducing them after
        # each micro-batch gives the same sum
        has_static_graph = getattr(model, "static_graph", False)
        defers = not last and hasattr(model, "no_sync") and not has_static_graph
        with model.no_sync() if defers else nullcontext():
            yield


@contextmanager
def _restored(state: tuple[Tensor, Tensor | None]) -> Iterator[None]:
    """Run the enclosed code with a saved random state, and restore the current state afterward."""
    host_state, gpu_state = state
    gpus = [] if gpu_state is None else [torch.cuda.current_device()]
    with torch.random.fork_rng(gpus):
        torch.set_rng_state(host_state)
        if gpu_state is not None:
            torch.cuda.set_rng_state(gpu_state)
        yield
