"""Inputs and outputs of an objective, and the base classes of its components.

Shapes: b rows on this rank (`local` of them valid), K ranks, a total of B valid rows, feature width d. In a `(2, B)`
tensor, row 0 is for image anchors (contrasted with texts) and row 1 for text anchors (contrasted with images).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.objectives.gather import FeatureGather, Features, GatheredFeatures
from neuclip_ds.objectives.options import AdamSettings
from neuclip_ds.state.partition import RowTable
from neuclip_ds.state.sample_store import SampleStore


class Step(NamedTuple):
    """Position of a call in the training run."""

    number: int  # 0-based
    epoch: int
    lr: float  # the encoders' learning rate at this step
    peak_lr: float  # peak of the encoders' learning rate
    progress: float = 0.0  # completed fraction of the run, in [0, 1)
    learn: bool = True  # if False, compute the loss without updating the normalizer or the temperature


class FeatureGradients(NamedTuple):
    """Gradient of the global-batch loss with respect to this rank's features, plus the loss and metrics."""

    image: Tensor  # (b, d)
    text: Tensor  # (b, d)
    loss: Tensor  # 0-dim: loss of the global batch, equal on all ranks
    metrics: dict[str, Tensor]  # name -> 0-dim, equal on all ranks


class Context(NamedTuple):
    """Sizes, communicator and settings that an objective's components need in addition to their options."""

    dim: int  # d
    samples: int  # n, the size of the dataset
    communicator: Communicator
    dtype: torch.dtype = torch.float32
    temperature: float | None = 0.07  # initial tau of the encoders; None if the checkpoint has no tau
    bias: float | None = -10.0  # initial bias of SigLIP's logits; None if the checkpoint has no bias
    comm_dtype: torch.dtype = torch.float32  # dtype in which features are sent
    adam: AdamSettings = AdamSettings()  # for the temperature, and for the NPN if order=joint
    spare_rows: int = 0  # extra rows at the end of every per-sample table


class Stateful:
    """Base class of components that may have state, either replicated on all ranks or partitioned over ranks by row."""

    _stores: Sequence[SampleStore] = ()  # stores of the per-sample state
    needs_index = False  # whether training needs each row's sample index

    def prefetch(self, padded_index: Tensor) -> None:
        """Start reading the per-sample state for the next call while the encoders are still running.

        Args:
            padded_index: (K b,) sample indices of the batch in host memory, -1 for invalid rows.
        """

    def replicated_state(self) -> dict[str, Tensor]:
        return {}

    def load_replicated_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state that `replicated_state` returned."""

    def row_tables(self) -> dict[str, RowTable]:
        return {}

    def restore_point(self) -> Callable[[], None]:
        """Return a function that restores the current state after the next call and undoes its per-sample writes."""
        replicated = {name: value.clone() for name, value in self.replicated_state().items()}
        tables = [table.tensors.values() for table in self.row_tables().values() if not table.per_sample]
        rows = [(tensor, tensor.clone()) for tensors in tables for tensor in tensors]

        def restore() -> None:
            self.load_replicated_state(replicated)
            for tensor, before in rows:
                tensor.copy_(before)
            for store in self._stores:
                store.undo()

        return restore


def adam_state(adam: torch.optim.Optimizer, parameter: Parameter, prefix: str = "adam.") -> dict[str, Tensor]:
    """Return a parameter's optimizer state for `replicated_state`; it is empty before the optimizer's first step."""
    return {f"{prefix}{key}": value for key, value in adam.state[parameter].items()}


def load_adam_state(
    adam: torch.optim.Optimizer, parameter: Parameter, state: Mapping[str, Tensor], prefix: str = "adam."
) -> None:
    """Restore the optimizer state that `adam_state` returned."""
    values = {key.removeprefix(prefix): value.clone() for key, value in state.items() if key.startswith(prefix)}
    steps = values.pop("step", None)
    adam.state[parameter] = {key: value.to(parameter) for key, value in values.items()}
    if steps is not None:  # fused Adam keeps its step count on the parameter's device, unfused Adam on the CPU
        adam.state[parameter]["step"] = steps.to(parameter.device if adam.defaults["fused"] else "cpu")


class NormalizerOutput(NamedTuple):
    """Estimated normalizers of one batch.

    The feature gradient is the gradient of `1/B sum_i exp(log_weight_i) g_i`, summed over both directions with the
    weights held constant. If the estimate itself depends on the features, `feature_grad` is added to this gradient.
    """

    log_weight: Tensor  # (2, B): log w of every anchor of the global batch
    value: Tensor  # (2, local): per-anchor loss, without the method's scale
    tau_term: Tensor  # (2, local): per-anchor derivative d(tau loss)/dtau without the data term
    metrics: dict[str, Tensor]  # name -> 0-dim, equal on all ranks
    feature_grad: tuple[Tensor, Tensor] | None = None  # (local, d) for images and for texts, without the method's scale
    local_metrics: Mapping[str, Tensor] = {}  # name -> (2, local) values; their mean over all anchors is logged


class Normalizer(Stateful):
    """Base class of the normalizer estimators in `objectives/normalizers/`.

    Attributes:
        always_gathers: whether every step needs the features of all ranks.
    """

    always_gathers = True

    def gathers(self, step: Step) -> bool:
        """Return whether this step needs the features of all ranks; the result is the same on all ranks."""
        return True

    def __call__(self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor, step: Step) -> NormalizerOutput:
        """Estimate the normalizers of a batch, and update the estimator.

        Args:
            batch: the gathered features.
            log_g: (2, local) log of g, the mean over the batch's negatives, for this rank's anchors.
            tau: temperature, 0-dim if shared by all anchors, else (2, B).
            step: position in the run.
        """
        raise NotImplementedError

    def log_estimate(self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor) -> Tensor:
        """Return the (2, local) log of the current estimate of g for this rank's anchors, or -inf where there is none.

        g is the mean over negatives alone. Terms that a method adds, such as eps or the positive's term, are removed,
        so that methods are comparable. The arguments are those of `__call__`; the state is not changed.
        """
        raise NotImplementedError


class Objective(Stateful):
    """Function that maps this rank's features to the gradient of the global loss with respect to these features.

    The objective's parameters (temperature, NPN) are outside the DeepSpeed engine; each training call updates them.

    Attributes:
        comm_dtype: dtype in which features are sent between ranks.
    """

    def __init__(self, context: Context, parts: dict[str, Stateful]) -> None:
        """
        Args:
            context: sizes, communicator and settings.
            parts: the components with state, keyed by the prefix of their entries in the state.
        """
        self._communicator, self._parts = context.communicator, parts
        self.needs_index = any(part.needs_index for part in parts.values())
        self.comm_dtype = context.comm_dtype

    def begin_gather(self, index: Tensor, valid: Tensor) -> FeatureGather | None:
        """Return a `FeatureGather` for a batch's rows, or None if the objective gathers the features itself.

        `index` is (b,) int64 and `valid` is (b,) bool; both are in host memory.
        """
        return FeatureGather(index, valid, self._communicator, self.comm_dtype, self.prefetch)

    def __call__(self, features: Features, step: Step) -> FeatureGradients:
        """Return the gradient of the global loss with respect to this rank's features, and update the state.

        Raises `UserError` if fewer than two rows of the batch are valid, because no anchor would have a negative.
        """
        raise NotImplementedError

    def prefetch(self, padded_index: Tensor) -> None:
        for part in reversed(self._parts.values()):  # the temperature is read before the normalizer
            part.prefetch(padded_index)

    def replicated_state(self) -> dict[str, Tensor]:
        parts = self._parts.items()
        return {prefix + key: value for prefix, part in parts for key, value in part.replicated_state().items()}

    def load_replicated_state(self, state: Mapping[str, Tensor]) -> None:
        for prefix, part in self._parts.items():
            part.load_replicated_state({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})

    def restore_point(self) -> Callable[[], None]:
        points = [part.restore_point() for part in self._parts.values()]

        def restore() -> None:
            for point in points:
                point()

        return restore

    def row_tables(self) -> dict[str, RowTable]:
        return {name: table for part in self._parts.values() for name, table in part.row_tables().items()}
