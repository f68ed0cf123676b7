"""Checkpoints of transformers' dual encoders: CLIP, MetaCLIP 2, SigLIP and fixed-resolution SigLIP 2.

A checkpoint is a folder with config.json, the weights, and the preprocessor and tokenizer files.
Fixed-resolution SigLIP 2 models have the model type `siglip`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers as library
from torch import Tensor
from transformers.image_utils import PILImageResampling
from transformers.utils import logging

from neuclip_ds.config import ModelConfig
from neuclip_ds.errors import UserError, explained
from neuclip_ds.models.build import prepare
from neuclip_ds.models.pretrained.base import (
    CheckpointRef,
    LoadedModel,
    LogitParameters,
    ModelSource,
    Package,
    Preprocessing,
    logit_tensors,
    raise_on_mismatch,
    read_logit_parameters,
    rename_prefixes,
)
from neuclip_ds.models.pretrained.files import first_file, read_json, save_small_files
from neuclip_ds.models.tokenizer import CaptionTokenizer, ModelTokenizer, load_tokenizer
from neuclip_ds.models.towers import DualEncoder, TextTower, VisionTower

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
WEIGHT_PATTERNS = ("model*.safetensors", "pytorch_model*.bin")  # only the first that matches is downloaded
_PROCESSOR = "preprocessor_config.json"
_LEGACY_EOS = 2  # EOS id in old CLIP configs, for which transformers pools at the largest token id


class ModelType(NamedTuple):
    """The transformers classes for a `model_type` in config.json, and the properties in which the types differ."""

    config: Any
    model: Any
    image_processor: Any
    siglip: bool = False  # no projections; logit scale and bias of shape (1,); text pooled at the last position
    legacy_eos: bool = False  # whether an EOS id of 2 means that text is pooled at the largest id

    def processor(self, preprocessing: Preprocessing) -> Any:
        """Return transformers' image processor for the given preprocessing."""
        size, mean, std, squash = preprocessing
        square = {"height": size, "width": size}
        resized = square if squash else {"shortest_edge": size}
        return self.image_processor(
            size=resized,
            crop_size=square,
            do_center_crop=not squash,
            resample=PILImageResampling.BICUBIC,
            image_mean=list(mean),
            image_std=list(std),
        )


_PREFIXES = {  # prefixes of our parameter names -> transformers' prefixes
    "vision.trunk.": "vision_model.",
    "text.trunk.": "text_model.",
    "vision.projection.": "visual_projection.",
    "text.projection.": "text_projection.",
}
MODEL_TYPES = {
    "clip": ModelType(library.CLIPConfig, library.CLIPModel, library.CLIPImageProcessor, legacy_eos=True),
    "metaclip_2": ModelType(library.MetaClip2Config, library.MetaClip2Model, library.CLIPImageProcessor),
    "siglip": ModelType(library.SiglipConfig, library.SiglipModel, library.SiglipImageProcessor, siglip=True),
}


class TransformersCheckpoint(ModelSource):
    """A checkpoint folder in the format of transformers' `save_pretrained`.

    Raises:
        UserError: config.json or preprocessor_config.json is missing, incomplete or unsupported.
    """

    def __init__(self, config: ModelConfig, ref: CheckpointRef) -> None:
        self.config, self.name, self._folder = config, config.pretrained, Path(ref.path)
        tree = read_json(self._folder / "config.json")
        self._kind = MODEL_TYPES[tree["model_type"]]
        self._published = self._kind.config.from_dict(tree)
        self._published._attn_implementation = "sdpa"
        vision = self._published.vision_config
        self.embed_dim = vision.hidden_size if self._kind.siglip else self._published.projection_dim
        self.preprocessing = _preprocessing(self._folder, vision.image_size)

    def tokenizer(self, of_run: Any = None) -> CaptionTokenizer:
        text = self._published.text_config
        tokenizer = load_tokenizer(self._folder, text.vocab_size)
        largest, eos = max(tokenizer.get_vocab().values()), tokenizer.eos_token_id
        read_at = largest if self._kind.legacy_eos and text.eos_token_id == _LEGACY_EOS else text.eos_token_id
        if not self._kind.siglip and read_at != eos:
            raise UserError(
                f"The text tower in {self._folder} reads its feature at token {read_at}, but the tokenizer ends a "
                f"caption with {eos}; put the model's tokenizer files there, or correct eos_token_id in config.json."
            )
        found = CaptionTokenizer(tokenizer, text.max_position_embeddings)
        if found.pad_id is None:
            raise UserError(
                f"The tokenizer in {self._folder} has no padding token, so it is not the model's: put the model's "
                "tokenizer files there."
            )
        return found

    def build(self, tokenizer: Any = None) -> DualEncoder:
        return self._wrapped(self._kind.model(self._published))

    def load(self, tokenizer: Any = None) -> LoadedModel:
        if first_file(self._folder, WEIGHTS) is None:
            raise UserError(f"{self._folder} has no weights; put {WEIGHTS[0]} (or pytorch_model.bin) there.")
        logging.disable_progress_bar()  # one bar per rank would flood the log
        with explained(f"transformers cannot read the weights in {self._folder}", "put the model's file there"):
            model, info = self._kind.model.from_pretrained(
                self._folder,
                config=self._published,
                local_files_only=True,
                weights_only=True,
                trust_remote_code=False,
                dtype=torch.float32,
                ignore_mismatched_sizes=True,  # rejected below
                output_loading_info=True,
            )
        missing = set(info["missing_keys"])
        needed = sorted(name for name in missing if not name.startswith("logit_"))
        shapes = [f"{name} is {tuple(found)} instead of {tuple(want)}" for name, found, want in info["mismatched_keys"]]
        raise_on_mismatch(str(self._folder), needed, sorted(info["unexpected_keys"]), shapes)
        state = {name: value for name, value in model.named_parameters() if name not in missing}
        return LoadedModel(self._wrapped(model), read_logit_parameters(state))

    def package(self, tokenizer: ModelTokenizer, weights: Mapping[str, Tensor], logits: LogitParameters) -> Package:
        if self._kind.siglip and logits.bias is None:
            logits = logits._replace(bias=0.0)  # SiglipModel always has a bias
        tensors = rename_prefixes(weights, _PREFIXES)
        tensors |= logit_tensors(logits, (1,) if self._kind.siglip else ())
        return Package("transformers", self._published.to_dict(), tensors, self.preprocessing, tokenizer)

    def save_files(self, folder: Path) -> None:
        save_small_files(self._folder, folder)

    def _wrapped(self, model: Any) -> DualEncoder:
        vision, text = (getattr(model, name, None) for name in ("visual_projection", "text_projection"))
        _, mean, std, _ = self.preprocessing
        towers = VisionTower(model.vision_model, vision, mean, std), TextTower(model.text_model, text)
        return prepare(DualEncoder(*towers), self.config)


def _preprocessing(folder: Path, image_size: Any) -> Preprocessing:
    nested = folder / "processor_config.json"  # where transformers 5 stores the image processor
    if nested.is_file() and not (folder / _PROCESSOR).is_file():
        tree = read_json(nested).get("image_processor", {})
    else:
        tree = read_json(folder / _PROCESSOR)
    mean, std = tree.get("image_mean"), tree.get("image_std")
    if not (isinstance(mean, list) and isinstance(std, list) and len(mean) == len(std) == 3):
        raise UserError(f"{folder}/{_PROCESSOR} has no image_mean and image_std of three channels; add them.")
    if not isinstance(image_size, int):
        raise UserError(f"config.json in {folder} has images of {image_size} pixels; only square images work.")
    size = tree.get("size")
    squash = isinstance(size, dict) and "height" in size and not tree.get("do_center_crop", False)
    return Preprocessing(image_size, tuple(mean), tuple(std), squash)
