"""What every family of pretrained models offers, and how its two towers stand behind a `DualEncoder`.

The towers are the library's own modules, so a feature is what the library would give. The logit scale and bias stay
outside: they belong to the objective, and DeepSpeed's ZeRO cannot hold 0-dimensional parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from neuclip_ds.errors import UserError
from neuclip_ds.models.dual_encoder import DualEncoder
from neuclip_ds.models.tokenizer import Tokenize
from neuclip_ds.models.towers import Encoder, normalize_pixels


class CheckpointRef(NamedTuple):
    """Where `locate` found a checkpoint; can be sent to other ranks."""

    family: str  # a key of FAMILIES
    path: str  # its folder, or its weights file where `name` tells the architecture; empty where that is all
    name: str = ""  # ARCHITECTURE/TAG, for those that the library has by name


class LogitParameters(NamedTuple):
    """How the features were turned into logits, s / temperature + bias; None is not in the checkpoint."""

    temperature: float | None
    bias: float | None


class Preprocessing(NamedTuple):
    """What becomes of an image before it enters the model."""

    size: int  # side of the square, pixels
    mean: tuple[float, float, float]  # of pixels in [0, 1], by channel
    std: tuple[float, float, float]
    squash: bool = False  # whether the whole image is squeezed into the square, instead of its centre cut out


class LoadedModel(NamedTuple):
    """A dual encoder with its weights."""

    model: DualEncoder
    logits: LogitParameters


class Package(NamedTuple):
    """A model in the form of its family: what its files hold."""

    family: str
    config: dict[str, Any]  # of the architecture
    weights: dict[str, Tensor]  # by the family's names, logit scale and bias among them
    preprocessing: Preprocessing
    tokenizer: Tokenize


class Checkpoint(Protocol):
    """A pretrained dual encoder before its weights are in memory.

    Attributes:
        pixels: what its image tower was trained on.
        embed_dim: width of the joint space.
    """

    preprocessing: Preprocessing
    embed_dim: int

    def tokenizer(self) -> Tokenize:
        """Its own tokenizer.

        Raises:
            UserError: it is missing.
        """
        ...

    def build(self) -> DualEncoder:
        """The architecture with random weights, or with none under `torch.device("meta")`."""
        ...

    def load(self) -> LoadedModel:
        """The model with its weights in float32.

        Raises:
            UserError: the weights are missing, or belong to another architecture.
        """
        ...

    def package(self, weights: Mapping[str, Tensor], logits: LogitParameters) -> Package:
        """The family's form of weights that are named as those of `build()`."""
        ...

    def save(self, folder: Path) -> None:
        """Writes everything but the weights, so that the folder can be opened as a checkpoint that has none."""
        ...


class LibraryTower(Encoder):
    """A library's encoder and the projection behind it.

    Image towers get uint8 pixels (b, 3, H, W), text towers int64 ids (b, T); both give (b, d) in the weights' dtype.
    """

    def __init__(
        self,
        trunk: nn.Module,
        projection: nn.Module | None = None,
        preprocessing: Preprocessing | None = None,
        checkpointing: Callable[[nn.Module], None] | None = None,
    ) -> None:
        """
        Args:
            trunk: the encoder; gives the pooled feature, or an output that has it as `pooler_output`.
            projection: into the joint space, where the trunk does not end in it.
            pixels: the mean and standard deviation to normalise by, for image towers.
            checkpointing: the library's own way to recompute the trunk's activations.
        """
        super().__init__()
        self.trunk = trunk
        self.projection = nn.Identity() if projection is None else projection
        self._preprocessing = preprocessing
        self._checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        if self._preprocessing is not None:
            x = normalize_pixels(x, self._preprocessing.mean, self._preprocessing.std).to(next(self.parameters()).dtype)
        feature = self.trunk(x)
        return self.projection(getattr(feature, "pooler_output", feature))

    def checkpoint_activations(self) -> None:
        """Blocks recompute their activations in the backward pass."""
        assert self._checkpointing is not None, "the family says how"
        self._checkpointing(self.trunk)


def read_logit_parameters(weights: Mapping[str, Tensor]) -> LogitParameters:
    """Temperature exp(-logit_scale) and bias of a checkpoint's tensors, where they have them."""
    scale, bias = (weights.get(name) for name in ("logit_scale", "logit_bias"))
    return LogitParameters(
        temperature=None if scale is None else math.exp(-scale.item()),
        bias=None if bias is None else bias.item(),
    )


def logit_tensors(logits: LogitParameters, shape: Sequence[int]) -> dict[str, Tensor]:
    """The inverse of `read_logit_parameters`, for what is known."""
    tensors = {}
    if logits.temperature is not None:
        tensors["logit_scale"] = torch.full(shape, -math.log(logits.temperature))
    if logits.bias is not None:
        tensors["logit_bias"] = torch.full(shape, logits.bias)
    return tensors


def rename_prefixes(tensors: Mapping[str, Tensor], prefixes: Mapping[str, str]) -> dict[str, Tensor]:
    """Tensors under names whose beginnings are exchanged; those that begin with none of the keys are left out."""
    result = {}
    for name, tensor in tensors.items():
        for old, new in prefixes.items():
            if name.startswith(old):
                result[new + name.removeprefix(old)] = tensor
                break
    return result


def check_tensors(where: str, wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """
    Raises:
        UserError: tensors are missing, left over or of another shape; names the first of each kind.
    """
    shapes = [
        f"{name} is {tuple(found[name].shape)} instead of {tuple(wanted[name].shape)}"
        for name in wanted
        if name in found and found[name].shape != wanted[name].shape
    ]
    raise_on_mismatch(
        where, [name for name in wanted if name not in found], [n for n in found if n not in wanted], shapes
    )


def raise_on_mismatch(where: str, missing: Sequence[str], unexpected: Sequence[str], shapes: Sequence[str]) -> None:
    """
    Raises:
        UserError: any of the lists has an entry.
    """
    problems = [
        f"{len(names)} tensors {kind} (first {names[0]})"
        for kind, names in (("are missing", missing), ("are left over", unexpected), ("have another shape", shapes))
        if names
    ]
    if problems:
        raise UserError(
            f"The weights of {where} belong to another architecture than its config says: {', '.join(problems)}; "
            "put the config and the weights of one model there."
        )
