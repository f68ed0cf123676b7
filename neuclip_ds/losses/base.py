"""Inputs and outputs of a loss, and the base classes of losses and of their components.

Shapes: b rows on this rank (`local` of them valid), K ranks, a total of B valid rows, feature width d. In a `(2, B)`
tensor, row 0 is for image anchors (contrasted with texts), and row 1 is for text anchors (contrasted with images).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from neuclip_ds.distributed.communicator import Communicator, Pending
from neuclip_ds.losses.gather import GatheredFeatures
from neuclip_ds.losses.sample_store import SampleStore
from neuclip_ds.state.partition import RowTable

T = TypeVar("T")

CLIP_TEMPERATURE = 0.07
"""Tau at the start of CLIP's training from random weights."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """Position of a call in the training run."""

    step: int
    """Number of the training step, from 0."""
    epoch: int = 0
    """Number of the epoch, from 0."""
    progress: float = 0.0
    """Completed fraction of the run, in [0, 1)."""
    lr: float
    """The encoders' learning rate at this step."""
    peak_lr: float
    """The peak of the encoders' learning rate."""


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """The loss of the global batch, and its gradient with respect to this rank's valid features."""

    loss: Tensor
    """0-dim loss, equal on all ranks."""
    image_gradient: Tensor
    """(local, d): gradient with respect to the image features"""
    text_gradient: Tensor
    """(local, d): gradient with respect to the text features"""
    gradient_norm: Tensor
    """0-dim: norm of the gradient with respect to the features of all ranks, equal on all ranks."""
    metrics: dict[str, Tensor]
    """Values to log, by name; 0-dim and equal on all ranks."""


@dataclass(frozen=True)
class AdamSettings:
    """Betas and epsilon for updates of the temperature, of SigLIP's bias and, with `npn.order=joint`, of prototypes."""

    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-6


@dataclass(frozen=True, kw_only=True)
class LossContext:
    """Sizes and settings of a run that a loss needs in addition to its options."""

    dim: int
    """Width d of the features."""
    samples: int
    """Size n of the dataset; 0 if unknown."""
    communicator: Communicator
    """Communicator between the ranks of the global batch."""
    dtype: torch.dtype = torch.float32
    """Dtype of similarities, losses and state."""
    temperature: float | None = CLIP_TEMPERATURE
    """Tau at step 0 if the options do not set it: the tau of the encoders' checkpoint (None if the checkpoint has no
    tau), or 0.07 for random weights."""
    bias: float | None = -10.0
    """SigLIP's bias at step 0 if the options do not set it: the bias of the checkpoint (None if the checkpoint has no
    bias), or -10 for random weights."""
    adam: AdamSettings = field(default_factory=AdamSettings)
    spare_rows: int = 0
    """Rows added to every per-sample table, for samples that are not in the training set."""


class Stateful:
    """Base class of components that may have state, either replicated on all ranks or partitioned over ranks by row."""

    stores: Sequence[SampleStore] = ()
    """Stores of per-sample statistics."""
    needs_index = False
    """Whether training needs each row's sample index."""

    def begin_reads(self, padded_index: Tensor) -> dict[str, Pending]:
        """Start reading the statistics of a batch's samples, so that reads can overlap the encoders' forward pass.

        Args:
            padded_index: (K b,) sample indices of the batch in host memory, -1 for invalid rows.

        Returns:
            Reads in progress, by name; the loss receives them as `GatheredFeatures.statistics`.
        """
        return {}

    def replicated_state(self) -> dict[str, Tensor]:
        """Return the state that is equal on all ranks, by name."""
        return {}

    def load_replicated_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state that `replicated_state` returned."""

    def row_tables(self) -> dict[str, RowTable]:
        """Return the state that is partitioned over ranks, by name."""
        return {}

    def restore_point(self) -> Callable[[], None]:
        """Return a function that reverts the next training call of the loss.

        The function restores the state and undoes the per-sample writes.
        """
        replicated = {name: value.clone() for name, value in self.replicated_state().items()}
        rows: list[tuple[Tensor, Tensor]] = []
        for table in self.row_tables().values():
            if not table.per_sample:
                rows.extend((tensor, tensor.clone()) for tensor in table.tensors.values())

        def restore() -> None:
            self.load_replicated_state(replicated)
            for tensor, before in rows:
                tensor.copy_(before)
            for store in self.stores:
                store.undo()

        return restore


class LossFunction(Stateful):
    """Base class of losses: functions of the features of all ranks, which may have state.

    `ContrastiveLoss` gathers the features and passes the gradient to autograd. Parameters of a loss, such as the
    temperature, are not parameters of the model: each training call updates them.

    Args:
        components: the parts of the loss that have state, keyed by the prefix of their entries in the replicated state;
            the names of their row tables have no prefix and must differ.
    """

    uses_stored: frozenset[str] = frozenset()
    """Names of the stored features that the loss can use: `reference`, `teacher`."""

    def __init__(self, components: dict[str, Stateful]) -> None:
        self._components = components
        self.needs_index = any(component.needs_index for component in components.values())
        stores: list[SampleStore] = []
        for component in components.values():
            stores.extend(component.stores)
        self.stores = stores

    def __call__(self, batch: GatheredFeatures, position: Position, training: bool) -> LossOutput:
        """Return the loss and its gradient; if `training`, update the state.

        Args:
            batch: the gathered features, with at least two valid rows.
            position: position in the run.
            training: if False, compute the loss without changing any state.
        """
        raise NotImplementedError

    def gathers(self, position: Position) -> bool:
        """Return whether a training step needs the features of all ranks; the result is the same on all ranks."""
        return True

    def begin_reads(self, padded_index: Tensor) -> dict[str, Pending]:
        reads: dict[str, Pending] = {}
        for component in self._components.values():
            reads.update(component.begin_reads(padded_index))
        return reads

    def replicated_state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for prefix, component in self._components.items():
            state |= with_prefix(prefix, component.replicated_state())
        return state

    def load_replicated_state(self, state: Mapping[str, Tensor]) -> None:
        for prefix, component in self._components.items():
            component.load_replicated_state(entries_under(prefix, state))

    def row_tables(self) -> dict[str, RowTable]:
        tables: dict[str, RowTable] = {}
        for component in self._components.values():
            for name, table in component.row_tables().items():
                if name in tables:
                    raise ValueError(f"Two components of the loss have a table {name!r}: give each table its own name.")
                tables[name] = table
        return tables


def sum_over_ranks(communicator: Communicator, terms: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sum 0-dim tensors over ranks in one all-reduce, and return the sums by name.

    All ranks must call this with the same names in the same order.
    """
    sums = communicator.all_reduce(torch.stack(list(terms.values())), "scalars")
    return dict(zip(terms, sums.unbind(), strict=True))


def with_prefix(prefix: str, entries: Mapping[str, T]) -> dict[str, T]:
    """Return the entries with the prefix added to their names."""
    return {prefix + name: value for name, value in entries.items()}


def entries_under(prefix: str, entries: Mapping[str, T]) -> dict[str, T]:
    """Return the entries whose names start with the prefix, without the prefix."""
    return {name.removeprefix(prefix): value for name, value in entries.items() if name.startswith(prefix)}


def adam_state(adam: torch.optim.Optimizer, parameter: Parameter, prefix: str = "adam.") -> dict[str, Tensor]:
    """Return a parameter's optimizer state for `replicated_state`; it is empty before the optimizer's first step."""
    return with_prefix(prefix, adam.state[parameter])


def load_adam_state(
    adam: torch.optim.Optimizer, parameter: Parameter, state: Mapping[str, Tensor], prefix: str = "adam."
) -> None:
    """Restore the optimizer state that `adam_state` returned."""
    values = {key: value.clone() for key, value in entries_under(prefix, state).items()}
    steps = values.pop("step", None)
    adam.state[parameter] = {key: value.to(parameter) for key, value in values.items()}
    if steps is not None:  # fused Adam keeps its step count on the parameter's device, unfused Adam on the CPU
        adam.state[parameter]["step"] = steps.to(parameter.device if adam.defaults["fused"] else "cpu")
