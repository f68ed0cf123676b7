"""The interface of model sources, and code shared by the sources of pretrained checkpoints.

The towers' trunks are modules of the checkpoint's library, so they compute the same features as that library. The
logit scale and the bias belong to the objective.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from neuclip_ds.config import ModelConfig
from neuclip_ds.errors import UserError, counted
from neuclip_ds.files import safetensors_as_os_error
from neuclip_ds.models.pretrained.files import read_json
from neuclip_ds.models.tokenizer import ModelTokenizer
from neuclip_ds.models.towers import DualEncoder

Interpolation = Literal["bicubic", "bilinear"]  # of images, antialiased

# file with a run's initial logit parameters, its preprocessing and the hash of the weights of `model.pretrained`, next
# to the library's files
START_FILE = "start.json"
_START_HASH = "weights"  # key of the hash


class CheckpointRef(NamedTuple):
    """Location of a checkpoint, returned by `locate`; can be sent to other ranks."""

    library: str  # `transformers` or `open_clip`
    path: str  # folder, or weights file if `name` gives the architecture (empty if no weights are needed)
    name: str = ""  # ARCHITECTURE/TAG for weights that the library lists, ARCHITECTURE/ for a file, empty for a folder


class LogitParameters(NamedTuple):
    """Temperature and bias of the logits, similarity / temperature + bias; None if absent from the checkpoint."""

    temperature: float | None
    bias: float | None


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """The image size, geometry and normalization that a model expects."""

    size: int  # side of the square image, in pixels
    mean: tuple[float, float, float]  # per channel, of pixels in [0, 1]
    std: tuple[float, float, float]
    squash: bool = False  # whether to resize the whole image to a square instead of cropping its center
    margin: int = 0  # pixels by which the shorter side of the resized image exceeds `size`, before cropping
    interpolation: Interpolation = "bicubic"  # used for resizing

    def to_json(self) -> dict[str, Any]:
        """Return the fields in a JSON-compatible form; omit `margin` and `interpolation` at their defaults."""
        fields = {"size": self.size, "mean": list(self.mean), "std": list(self.std), "squash": self.squash}
        if self.margin:
            fields["margin"] = self.margin
        if self.interpolation != "bicubic":
            fields["interpolation"] = self.interpolation
        return fields


class LoadedModel(NamedTuple):
    """A dual encoder with its weights and logit parameters."""

    model: DualEncoder
    logits: LogitParameters


@dataclass(frozen=True, kw_only=True)
class LibraryModel:
    """A model's config, weights, preprocessing and tokenizer, in the format of one library."""

    library: str  # `transformers` or `open_clip`
    config: dict[str, Any]  # config of the architecture
    weights: dict[str, Tensor]  # under the library's names, including logit scale and bias
    preprocessing: Preprocessing
    tokenizer: ModelTokenizer


@dataclass(frozen=True, kw_only=True)
class TrainedTowers:
    """The towers of a trained model that was built from the config, to be converted to a library's format."""

    config: ModelConfig
    model: DualEncoder  # on the meta device
    weights: Mapping[str, Tensor]  # of `model`
    logits: LogitParameters
    preprocessing: Preprocessing
    tokenizer: ModelTokenizer


class ModelSource(ABC):
    """Interface through which a run builds, loads, converts and describes its model.

    Attributes:
        config: the model config; some options, such as LoRA, apply to every source.
        name: name of the model in messages.
        preprocessing: preprocessing of the model's images.
        embed_dim: width d of the joint embedding space.
    """

    config: ModelConfig
    name: str
    preprocessing: Preprocessing
    embed_dim: int

    def with_config(self, config: ModelConfig) -> "ModelSource":
        """Return the source of the same model with another config, which must not change sizes or preprocessing."""
        source = copy(self)
        source.config = config
        return source

    @abstractmethod
    def own_tokenizer(self) -> ModelTokenizer | None:
        """Return the tokenizer of the model's checkpoint or text encoder, or None if the caller must provide one.

        It is None only for a model that is built from the config without a pretrained text encoder.

        Raises:
            UserError: that tokenizer is missing or unsupported, or does not match the model.
        """

    @abstractmethod
    def build(self, tokenizer: ModelTokenizer) -> DualEncoder:
        """Build the model with random weights; under `torch.device("meta")`, allocate no memory.

        `tokenizer` determines the vocabulary and the pooled token of a text tower that is built from the config; other
        models do not need it.

        Raises:
            UserError: the model cannot be built, or does not match the tokenizer.
        """

    @abstractmethod
    def load(self, tokenizer: ModelTokenizer) -> LoadedModel:
        """Load the model that the run starts from, in float32.

        Raises:
            UserError: as in `build`, or the weights are missing or do not match the model.
        """

    @abstractmethod
    def to_library_model(
        self, tokenizer: ModelTokenizer, weights: Mapping[str, Tensor], logits: LogitParameters
    ) -> LibraryModel | TrainedTowers:
        """Return the model in its library's format, or its towers if the model was built from the config.

        Args:
            tokenizer: the model's tokenizer.
            weights: the model's tensors, named as in the result of `build` without adapters.
            logits: the temperature and the bias.

        Raises:
            UserError: the library's format cannot express the model.
        """

    def save(self, folder: Path, logits: LogitParameters, start_hash: str | None = None) -> None:
        """Save all files that `open_saved` needs to reopen the source, except the model config and the weights.

        Args:
            folder: the folder to write to, which is created.
            logits: the initial temperature and bias.
            start_hash: hash of the weights of `model.pretrained`, which blends and soups compare; None without
                `model.pretrained`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.save_files(folder)
        start: dict[str, Any] = {"logits": logits._asdict(), "preprocessing": asdict(self.preprocessing)}
        if start_hash is not None:
            start[_START_HASH] = start_hash
        (folder / START_FILE).write_text(json.dumps(start), encoding="utf-8")

    @abstractmethod
    def save_files(self, folder: Path) -> None:
        """Save all files that the model's library needs to build the model, except the weights."""


def read_start_hash(folder: Path) -> str | None:
    """Return the hash that `ModelSource.save` wrote, or None if the run has none.

    Runs without `model.pretrained` and runs of earlier versions have none. Raises `UserError` as in `read_json`.
    """
    start_hash: str | None = read_json(folder / START_FILE).get(_START_HASH)
    return start_hash


def read_start_logits(folder: Path) -> LogitParameters:
    """Return the initial logit parameters that `ModelSource.save` wrote; raise `UserError` as in `read_json`."""
    return LogitParameters(**read_json(folder / START_FILE)["logits"])


def read_start_preprocessing(folder: Path) -> dict[str, Any]:
    """Return the fields of the preprocessing that `ModelSource.save` wrote; raise `UserError` as in `read_json`.

    Runs of earlier versions may lack some fields.
    """
    return dict(read_json(folder / START_FILE).get("preprocessing", {}))


def read_logit_parameters(weights: Mapping[str, Tensor]) -> LogitParameters:
    """Read the temperature (exp(-logit_scale)) and the bias from a checkpoint's tensors; each is None if absent."""
    scale = weights.get("logit_scale")
    bias = weights.get("logit_bias")
    return LogitParameters(
        temperature=None if scale is None else math.exp(-scale.item()),
        bias=None if bias is None else bias.item(),
    )


def logit_tensors(logits: LogitParameters, shape: Sequence[int]) -> dict[str, Tensor]:
    """Return logit_scale and logit_bias as tensors, omitting unknown values; inverse of `read_logit_parameters`."""
    tensors = {}
    if logits.temperature is not None:
        tensors["logit_scale"] = torch.full(shape, -math.log(logits.temperature))
    if logits.bias is not None:
        tensors["logit_bias"] = torch.full(shape, logits.bias)
    return tensors


def save_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write weights as safetensors, with floating-point tensors in float32; raise OSError if that fails."""
    plain = {}
    for name, tensor in weights.items():
        if tensor.is_floating_point():
            tensor = tensor.float()
        plain[name] = tensor.contiguous().clone()  # safetensors requires contiguous tensors that share no memory
    with safetensors_as_os_error():
        save_file(plain, path, metadata={"format": "pt"})


def rename_prefixes(tensors: Mapping[str, Tensor], prefixes: Mapping[str, str]) -> dict[str, Tensor]:
    """Replace the prefixes of tensor names, omitting tensors whose names have none of the prefixes."""
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in prefixes.items():
            if name.startswith(old):
                renamed[new + name.removeprefix(old)] = tensor
    return renamed


def check_tensors(where: str, expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Raise UserError, with `where` as the weights' name, if tensors are missing, unexpected or of the wrong shape."""
    missing = [name for name in expected if name not in tensors]
    unexpected = [name for name in tensors if name not in expected]
    wrong_shapes = []
    for name, tensor in expected.items():
        if name in tensors and tensors[name].shape != tensor.shape:
            wrong_shapes.append(f"{name} is {tuple(tensors[name].shape)} instead of {tuple(tensor.shape)}")
    raise_on_mismatch(where, missing, unexpected, wrong_shapes)


def raise_on_mismatch(
    where: str, missing: Sequence[str], unexpected: Sequence[str], wrong_shapes: Sequence[str]
) -> None:
    """Raise UserError if any list is nonempty; the message gives the length and first entry of each nonempty list."""
    tensors_by_problem = {"missing": missing, "unexpected": unexpected, "of the wrong shape": wrong_shapes}
    problems = []
    for problem, names in tensors_by_problem.items():
        if names:
            problems.append(f"{counted(len(names), 'tensor is', 'tensors are')} {problem} (first: {names[0]})")
    if problems:
        raise UserError(
            f"The weights of {where} do not match its config: {', '.join(problems)}; "
            "use the config and the weights of the same model."
        )
