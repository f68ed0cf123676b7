"""The source of a run's dual encoder: the config, with random or pretrained weights in each tower, or a checkpoint.

Readers and writers of other libraries' models are imported when used, because most runs need neither.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from neuclip_ds.config import CLIP_BPE, LoraConfig, ModelConfig
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.models.build import build_dual_encoder
from neuclip_ds.models.pretrained.base import (
    START_FILE,
    CheckpointRef,
    LoadedModel,
    LogitParameters,
    ModelSource,
    Package,
    Preprocessing,
)
from neuclip_ds.models.pretrained.files import fetch, read_json, read_tensors, save_small_files
from neuclip_ds.models.pretrained.image_weights import ImageWeights, locate_image_weights
from neuclip_ds.models.tokenizer import CaptionTokenizer, ModelTokenizer
from neuclip_ds.models.towers import DualEncoder
from neuclip_ds.models.trained_parts import merge_adapters

if TYPE_CHECKING:
    from neuclip_ds.models.pretrained.text_encoders import TextEncoder

INITIAL_LOGITS = LogitParameters(temperature=0.07, bias=-10.0)  # CLIP's and SigLIP's starting values


class TowerRefs(NamedTuple):
    """Locations of the towers' initial weights, as found by `locate_model`."""

    image: ImageWeights | None = None
    text: str = ""  # folder of the text encoder


_NEW_TOWERS = TowerRefs()


class FromConfig(ModelSource):
    """A model built from the config; towers start from pretrained weights, or random ones drawn with torch's seed."""

    def __init__(self, config: ModelConfig, towers: TowerRefs = _NEW_TOWERS) -> None:
        self._towers = towers
        mean, std = config.vision.statistics() if towers.image is None else towers.image[1:]
        vision = config.vision.model_copy(update={"mean": mean, "std": std})
        self.config = config.model_copy(update={"vision": vision})
        self._text: TextEncoder | None = None
        if towers.text:
            from neuclip_ds.models.pretrained.text_encoders import TextEncoder

            self._text = TextEncoder(towers.text, config.text)
        self.name = config.vision.name
        self.preprocessing = Preprocessing(config.vision.image_size, mean, std)
        self.embed_dim = config.embed_dim

    def tokenizer(self, of_run: Callable[[], CaptionTokenizer]) -> ModelTokenizer:
        text = self.config.text
        if self._text is not None:
            return self._text.tokenizer()
        if text.tokenizer in (None, CLIP_BPE):
            return of_run()
        return CaptionTokenizer.load(text.tokenizer, text.context_length)

    def build(self, tokenizer: ModelTokenizer, weights: bool = False) -> DualEncoder:
        image, encoder = self._towers.image, self._text
        tensors = read_tensors(Path(image.path)) if weights and image is not None else None
        captions = cast(CaptionTokenizer, tokenizer)  # returned by `tokenizer` above
        tower = None if encoder is None else partial(encoder.tower, captions, self.embed_dim, weights)
        return build_dual_encoder(self.config, captions, tensors, tower)

    def load(self, tokenizer: ModelTokenizer) -> LoadedModel:
        return LoadedModel(self.build(tokenizer, weights=True), INITIAL_LOGITS)

    def save_files(self, folder: Path) -> None:
        if self._text is not None:
            save_small_files(self._text.folder, folder)

    def package(self, tokenizer: ModelTokenizer, weights: Mapping[str, Tensor], logits: LogitParameters) -> Package:
        from neuclip_ds.models.export import towers_to_clip

        with torch.device("meta"):
            model = self.build(tokenizer)
        return towers_to_clip(model, weights, logits, self.preprocessing, tokenizer)


ModelRef = CheckpointRef | TowerRefs


def locate_model(config: ModelConfig, weights: bool = True) -> ModelRef:
    """Locate the weights that the config's model starts from, like `locate`; call on one rank only.

    Returns:
        A reference for `model_source` on every rank; an empty one if all weights are random.
    """
    if config.pretrained:
        from neuclip_ds.models.pretrained.locate import locate

        return locate(config.pretrained, weights)
    image = locate_image_weights(config.vision) if config.vision.pretrained and weights else None
    if not config.text.pretrained:
        return TowerRefs(image)
    from neuclip_ds.models.pretrained.transformers_models import WEIGHT_PATTERNS

    text = fetch(config.text.pretrained, "model.text.pretrained", WEIGHT_PATTERNS if weights else ())
    return TowerRefs(image, str(text))


def locate_on_rank_zero(config: ModelConfig, communicator: Communicator) -> ModelRef:
    """Call `locate_model`, which may download, on rank 0 and return its result on all ranks."""
    found: list[Any] = json.loads(communicator.on_rank_zero(lambda: json.dumps(locate_model(config))))
    if config.pretrained:
        return CheckpointRef(*found)
    image, text = found
    return TowerRefs(None if image is None else ImageWeights(image[0], *map(tuple, image[1:])), text)


def model_source(config: ModelConfig, ref: ModelRef) -> ModelSource:
    """Open the source that `locate_model` found; raise UserError if the checkpoint's config is incomplete."""
    if isinstance(ref, TowerRefs):
        return FromConfig(config, ref)
    from neuclip_ds.models.pretrained.locate import open_checkpoint

    return open_checkpoint(ref, config)


def merged(
    source: ModelSource, tokenizer: ModelTokenizer, weights: dict[str, Tensor]
) -> tuple[ModelSource, dict[str, Tensor]]:
    """Merge LoRA adapters into the weights; return the source of the model without adapters, and its weights."""
    if not source.config.lora.rank:
        return source, weights
    model = source.build(tokenizer)
    model.load_state_dict(weights)
    merge_adapters(model)
    plain = copy(source)
    plain.config = source.config.model_copy(update={"lora": LoraConfig()})
    return plain, model.state_dict()


def open_saved(config: ModelConfig, folder: Path) -> tuple[ModelSource, LogitParameters]:
    """Open the model of a run and its initial logit parameters, without a pretrained checkpoint's weights.

    `ModelSource.save` wrote the folder. Raises UserError if files are missing.
    """
    start = read_json(folder / START_FILE)
    logits = LogitParameters(**start["logits"])
    if config.pretrained:
        here = config.model_copy(update={"pretrained": str(folder)})
        return model_source(config, locate_model(here, weights=False)), logits
    pixels = start["preprocessing"]
    image = ImageWeights("", tuple(pixels["mean"]), tuple(pixels["std"]))
    return FromConfig(config, TowerRefs(image, str(folder) if config.text.pretrained else "")), logits
