"""Where a run's dual encoder comes from: built from the config with random weights, or a pretrained checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from neuclip_ds.config import ModelConfig
from neuclip_ds.models.dual_encoder import DualEncoder, build_dual_encoder
from neuclip_ds.models.export.convert import clip_vision_config
from neuclip_ds.models.pretrained import locate, open_checkpoint
from neuclip_ds.models.pretrained.base import (
    Checkpoint,
    CheckpointRef,
    LoadedModel,
    LogitParameters,
    Package,
    Preprocessing,
    logit_tensors,
)
from neuclip_ds.models.pretrained.files import read_json
from neuclip_ds.models.tokenizer import CaptionTokenizer, Tokenize
from neuclip_ds.models.towers import TextTower, VisionTower

_LOGITS = "logits.json"
INITIAL_LOGITS = LogitParameters(temperature=0.07, bias=-10.0)  # CLIP's and SigLIP's starting values


class ModelSource(Protocol):
    """What a run asks of its model.

    Attributes:
        name: for people.
        pixels: what becomes of an image before it enters the model.
        embed_dim: width d of the joint space.
    """

    name: str
    preprocessing: Preprocessing
    embed_dim: int

    def tokenizer(self, train: Callable[[], CaptionTokenizer]) -> Tokenize:
        """The model's tokenizer; `train` makes one where none is named.

        Raises:
            UserError: it cannot be found.
        """
        ...

    def build(self, tokenizer: Tokenize) -> DualEncoder:
        """The architecture, without memory under `torch.device("meta")`.

        Raises:
            UserError: it cannot be built, or does not fit the tokenizer.
        """
        ...

    def load(self, tokenizer: Tokenize) -> LoadedModel:
        """The model to start from, and the logits that it was trained with.

        Raises:
            UserError: as `build`, or the weights are missing or do not fit.
        """
        ...

    def save(self, folder: Path, logits: LogitParameters) -> None:
        """Writes what `open_saved` needs beside config and tokenizer; the folder is made."""
        ...

    def package(self, tokenizer: Tokenize, weights: Mapping[str, Tensor], logits: LogitParameters) -> Package:
        """The files' form of trained weights, which are named as those of `build`."""
        ...


class FromConfig:
    """Random weights, a function of torch's seed."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self.name = config.vision.name
        self.preprocessing = Preprocessing(config.vision.image_size, config.vision.mean, config.vision.std)
        self.embed_dim = config.embed_dim

    def tokenizer(self, train: Callable[[], CaptionTokenizer]) -> CaptionTokenizer:
        text = self._config.text
        return train() if text.tokenizer is None else CaptionTokenizer.load(text.tokenizer, text.context_length)

    def build(self, tokenizer: Tokenize) -> DualEncoder:
        return build_dual_encoder(self._config, cast(CaptionTokenizer, tokenizer))  # the one that `tokenizer` gave

    def load(self, tokenizer: Tokenize) -> LoadedModel:
        return LoadedModel(self.build(tokenizer), INITIAL_LOGITS)

    def save(self, folder: Path, logits: LogitParameters) -> None:
        """The run's config.yaml and tokenizer say it all."""

    def package(self, tokenizer: Tokenize, weights: Mapping[str, Tensor], logits: LogitParameters) -> Package:
        with torch.device("meta"):
            model = self.build(tokenizer)
        vision, text = cast(VisionTower, model.vision), cast(TextTower, model.text)
        config = {
            "embed_dim": self.embed_dim,
            "vision": self._config.vision.model_dump(),
            "clip_vision": clip_vision_config(vision, self.preprocessing.size),
            "default_image_size": vision.trunk.pretrained_cfg["input_size"][-1],
            "linear_projection": isinstance(vision.projection, nn.Linear),
            "text": text.trunk.config.to_dict(),
        }
        return Package("timm", config, {**weights, **logit_tensors(logits, ())}, self.preprocessing, tokenizer)


class Pretrained:
    """A checkpoint's architecture, tokenizer and weights; nothing of the config but activation checkpointing."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint) -> None:
        self._config, self._checkpoint = config, checkpoint
        self.name = config.pretrained
        self.preprocessing, self.embed_dim = checkpoint.preprocessing, checkpoint.embed_dim

    def tokenizer(self, train: Callable[[], CaptionTokenizer]) -> Tokenize:
        return self._checkpoint.tokenizer()

    def build(self, tokenizer: Tokenize) -> DualEncoder:
        return self._prepared(self._checkpoint.build())

    def load(self, tokenizer: Tokenize) -> LoadedModel:
        model, logits = self._checkpoint.load()
        return LoadedModel(self._prepared(model), logits)

    def save(self, folder: Path, logits: LogitParameters) -> None:
        self._checkpoint.save(folder)
        (folder / _LOGITS).write_text(json.dumps(logits._asdict()), encoding="utf-8")

    def package(self, tokenizer: Tokenize, weights: Mapping[str, Tensor], logits: LogitParameters) -> Package:
        return self._checkpoint.package(weights, logits)

    def _prepared(self, model: DualEncoder) -> DualEncoder:
        if self._config.activation_checkpointing:
            model.checkpoint_activations()
        return model


def locate_model(config: ModelConfig, weights: bool = True) -> CheckpointRef | None:
    """Finds the checkpoint that the config names, and downloads it where it is the hub's: for one rank to do.

    Args:
        config: the model's.
        weights: False looks for the architecture alone, as a plan does.

    Returns:
        What `model_source` takes on every rank; None without a checkpoint.

    Raises:
        UserError: there is no such checkpoint, or no network to fetch it.
    """
    return locate(config.pretrained, weights) if config.pretrained else None


def model_source(config: ModelConfig, ref: CheckpointRef | None) -> ModelSource:
    """The source that `locate_model` found.

    Raises:
        UserError: the checkpoint's config is missing or lacks something.
    """
    return FromConfig(config) if ref is None else Pretrained(config, open_checkpoint(ref))


def open_saved(config: ModelConfig, folder: Path) -> tuple[ModelSource, LogitParameters]:
    """The model of a run and the logits that it started with; a checkpoint's weights are not there any more.

    Args:
        config: the run's.
        folder: that `ModelSource.save` wrote.

    Raises:
        UserError: files are missing.
    """
    if not config.pretrained:
        return FromConfig(config), INITIAL_LOGITS
    return model_source(config, locate(str(folder), weights=False)), LogitParameters(**read_json(folder / _LOGITS))
