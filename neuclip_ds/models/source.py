"""The source of a run's dual encoder: the config with random weights, or a pretrained checkpoint."""

import json
from collections.abc import Callable, Mapping
from copy import copy
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from neuclip_ds.config import ModelConfig
from neuclip_ds.models.dual_encoder import DualEncoder, build_dual_encoder, prepare
from neuclip_ds.models.export.convert import clip_vision_config
from neuclip_ds.models.lora import has_adapters, merge_adapters, without_adapters
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
from neuclip_ds.models.tokenizer import CaptionTokenizer, ModelTokenizer
from neuclip_ds.models.towers import TextTower, VisionTower

_LOGITS = "logits.json"
INITIAL_LOGITS = LogitParameters(temperature=0.07, bias=-10.0)  # CLIP's and SigLIP's starting values


class FromConfig:
    """A model built from the config with random weights, which depend on torch's seed only."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.name = config.vision.name  # for messages
        self.preprocessing = Preprocessing(config.vision.image_size, config.vision.mean, config.vision.std)
        self.embed_dim = config.embed_dim  # width d of the joint space

    def tokenizer(self, train: Callable[[], CaptionTokenizer]) -> ModelTokenizer:
        """Return the model's tokenizer, from `train` if none is named; raise UserError if it cannot be found."""
        text = self.config.text
        return train() if text.tokenizer is None else CaptionTokenizer.load(text.tokenizer, text.context_length)

    def build(self, tokenizer: ModelTokenizer) -> DualEncoder:
        """Build the architecture; without memory under `torch.device("meta")`.

        Raises:
            UserError: it cannot be built, or does not fit the tokenizer.
        """
        return build_dual_encoder(self.config, cast(CaptionTokenizer, tokenizer))  # the one that `tokenizer` returned

    def load(self, tokenizer: ModelTokenizer) -> LoadedModel:
        """Load the initial model and the logit parameters it was trained with.

        Raises:
            UserError: as `build`, or the weights are missing or do not fit.
        """
        return LoadedModel(self.build(tokenizer), INITIAL_LOGITS)

    def save(self, folder: Path, logits: LogitParameters) -> None:
        """Save what `open_saved` needs in addition to config and tokenizer: nothing; or into the folder, created."""

    def package(self, tokenizer: ModelTokenizer, weights: Mapping[str, Tensor], logits: LogitParameters) -> Package:
        """Return trained weights, named as those of `build`, in the form of the family's files; without adapters."""
        with torch.device("meta"):
            model = self.build(tokenizer)
        vision, text = cast(VisionTower, model.vision), cast(TextTower, model.text)
        config = {
            "embed_dim": self.embed_dim,
            "vision": self.config.vision.model_dump(),
            "clip_vision": clip_vision_config(vision, self.preprocessing.size),
            "default_image_size": vision.trunk.pretrained_cfg["input_size"][-1],
            "linear_projection": isinstance(vision.projection, nn.Linear),
            "text": text.trunk.config.to_dict(),
        }
        return Package("timm", config, {**weights, **logit_tensors(logits, ())}, self.preprocessing, tokenizer)


class Pretrained:
    """A checkpoint's architecture, tokenizer and weights, as `FromConfig`; the config sets what `prepare` applies."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint) -> None:
        self.config, self._checkpoint = config, checkpoint
        self.name = config.pretrained
        self.preprocessing, self.embed_dim = checkpoint.preprocessing, checkpoint.embed_dim

    def tokenizer(self, train: Callable[[], CaptionTokenizer]) -> ModelTokenizer:
        return self._checkpoint.tokenizer()

    def build(self, tokenizer: ModelTokenizer) -> DualEncoder:
        return prepare(self._checkpoint.build(), self.config)

    def load(self, tokenizer: ModelTokenizer) -> LoadedModel:
        model, logits = self._checkpoint.load()
        return LoadedModel(prepare(model, self.config), logits)

    def save(self, folder: Path, logits: LogitParameters) -> None:
        self._checkpoint.save(folder)
        (folder / _LOGITS).write_text(json.dumps(logits._asdict()), encoding="utf-8")

    def package(self, tokenizer: ModelTokenizer, weights: Mapping[str, Tensor], logits: LogitParameters) -> Package:
        return self._checkpoint.package(weights, logits)


ModelSource = FromConfig | Pretrained  # through which a run builds, loads and saves its model


def locate_model(config: ModelConfig, weights: bool = True) -> CheckpointRef | None:
    """Locate the config's checkpoint, if it names one, as `locate` does; call on one rank only.

    Returns:
        A reference for `model_source` on every rank; None without a checkpoint.
    """
    return locate(config.pretrained, weights) if config.pretrained else None


def model_source(config: ModelConfig, ref: CheckpointRef | None) -> ModelSource:
    """Open the source that `locate_model` found; raise UserError if the checkpoint's config lacks something."""
    return FromConfig(config) if ref is None else Pretrained(config, open_checkpoint(ref))


def merged(
    source: ModelSource, tokenizer: ModelTokenizer, weights: dict[str, Tensor]
) -> tuple[ModelSource, dict[str, Tensor]]:
    """Return the source of the same model without LoRA adapters, and its weights, into which they are merged."""
    if not has_adapters(source.config):
        return source, weights
    model = source.build(tokenizer)
    model.load_state_dict(weights)
    merge_adapters(model)
    plain = copy(source)
    plain.config = without_adapters(source.config)
    return plain, model.state_dict()


def open_saved(config: ModelConfig, folder: Path) -> tuple[ModelSource, LogitParameters]:
    """Open the model of a run and its initial logit parameters, without a pretrained checkpoint's weights.

    The folder is the one that `save` wrote; raise UserError if files are missing.
    """
    if not config.pretrained:
        return FromConfig(config), INITIAL_LOGITS
    return model_source(config, locate(str(folder), weights=False)), LogitParameters(**read_json(folder / _LOGITS))
