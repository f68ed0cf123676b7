"""The interface of model sources, and code that pretrained checkpoints share.

The trunks of the towers are the library's modules, so features equal the library's. Logit scale and bias belong to the
objective.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from neuclip_ds.config import ModelConfig
from neuclip_ds.errors import UserError
from neuclip_ds.models.tokenizer import CaptionTokenizer, ModelTokenizer
from neuclip_ds.models.towers import DualEncoder

START_FILE = "start.json"  # a run's initial logit parameters and preprocessing, next to the library's files


class CheckpointRef(NamedTuple):
    """Location of a checkpoint, as found by `locate`; can be sent to other ranks."""

    family: str  # a key of LIBRARIES
    path: str  # its folder, or its weights file if `name` gives the architecture; empty without weights
    name: str = ""  # ARCHITECTURE/TAG, for checkpoints that the library lists by name


class LogitParameters(NamedTuple):
    """Temperature and bias of the logits s / temperature + bias; None if not in the checkpoint."""

    temperature: float | None
    bias: float | None


class Preprocessing(NamedTuple):
    """The image size and normalization that a model expects."""

    size: int  # side of the square, pixels
    mean: tuple[float, float, float]  # per channel, of pixels in [0, 1]
    std: tuple[float, float, float]
    squash: bool = False  # whether to resize the whole image to the square, instead of a center crop


class LoadedModel(NamedTuple):
    """A dual encoder with its weights and logit parameters."""

    model: DualEncoder
    logits: LogitParameters


class Package(NamedTuple):
    """A model in the form of a library's files."""

    family: str
    config: dict[str, Any]  # config of the architecture
    weights: dict[str, Tensor]  # under the library's names, including logit scale and bias
    preprocessing: Preprocessing
    tokenizer: ModelTokenizer


class ModelSource(ABC):
    """Source through which a run builds, loads and saves its model.

    Attributes:
        config: the model's config; some options apply to every source.
        name: name for messages.
        preprocessing: preprocessing of its images.
        embed_dim: width d of the joint space.
    """

    config: ModelConfig
    name: str
    preprocessing: Preprocessing
    embed_dim: int

    @abstractmethod
    def tokenizer(self, of_run: Callable[[], CaptionTokenizer]) -> ModelTokenizer:
        """Return the model's tokenizer, from `of_run` if the run has its own; raise UserError if there is none."""

    @abstractmethod
    def build(self, tokenizer: ModelTokenizer) -> DualEncoder:
        """Build the architecture with random weights, or without memory under `torch.device("meta")`.

        Raises:
            UserError: it cannot be built, or does not fit the tokenizer.
        """

    @abstractmethod
    def load(self, tokenizer: ModelTokenizer) -> LoadedModel:
        """Load the model that the run starts from, in float32.

        Raises:
            UserError: as `build`, or the weights are missing or do not fit.
        """

    @abstractmethod
    def package(self, tokenizer: ModelTokenizer, weights: Mapping[str, Tensor], logits: LogitParameters) -> Package:
        """Convert weights, named as in `build` without adapters, to the form of a library's files.

        Raises:
            UserError: no library can express the model.
        """

    def save(self, folder: Path, logits: LogitParameters) -> None:
        """Save the files from which `open_saved` reopens the source without weights, next to config and tokenizer."""
        folder.mkdir(parents=True, exist_ok=True)
        self.save_files(folder)
        start = {"logits": logits._asdict(), "preprocessing": self.preprocessing._asdict()}
        (folder / START_FILE).write_text(json.dumps(start), encoding="utf-8")

    @abstractmethod
    def save_files(self, folder: Path) -> None:
        """Save the files that describe the model to its library, without the weights."""


def read_logit_parameters(weights: Mapping[str, Tensor]) -> LogitParameters:
    """Read temperature exp(-logit_scale) and bias from a checkpoint's tensors, if present."""
    scale, bias = (weights.get(name) for name in ("logit_scale", "logit_bias"))
    return LogitParameters(
        temperature=None if scale is None else math.exp(-scale.item()), bias=None if bias is None else bias.item()
    )


def logit_tensors(logits: LogitParameters, shape: Sequence[int]) -> dict[str, Tensor]:
    """Return logit_scale and logit_bias as tensors, without unknown ones; the inverse of `read_logit_parameters`."""
    tensors = {}
    if logits.temperature is not None:
        tensors["logit_scale"] = torch.full(shape, -math.log(logits.temperature))
    if logits.bias is not None:
        tensors["logit_bias"] = torch.full(shape, logits.bias)
    return tensors


def rename_prefixes(tensors: Mapping[str, Tensor], prefixes: Mapping[str, str]) -> dict[str, Tensor]:
    """Return tensors with renamed prefixes; tensors without any of the given prefixes are omitted."""
    return {
        new + name.removeprefix(old): tensor
        for name, tensor in tensors.items()
        for old, new in prefixes.items()
        if name.startswith(old)
    }


def check_tensors(where: str, wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Raise UserError if tensors are missing, unexpected or of another shape."""
    shapes = [
        f"{name} is {tuple(found[name].shape)} instead of {tuple(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in found and found[name].shape != tensor.shape
    ]
    raise_on_mismatch(where, [n for n in wanted if n not in found], [n for n in found if n not in wanted], shapes)


def raise_on_mismatch(where: str, missing: Sequence[str], unexpected: Sequence[str], shapes: Sequence[str]) -> None:
    """Raise UserError with the count and the first name of mismatched tensors, unless all lists are empty."""
    problems = [
        f"{len(names)} tensors {kind} (first {names[0]})"
        for kind, names in (("are missing", missing), ("are unexpected", unexpected), ("have another shape", shapes))
        if names
    ]
    if problems:
        raise UserError(
            f"The weights of {where} do not match its config: {', '.join(problems)}; "
            "use the config and the weights of one model."
        )
