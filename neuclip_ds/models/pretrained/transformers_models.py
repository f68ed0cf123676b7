"""Checkpoints of transformers' dual encoders: CLIP, MetaCLIP 2, SigLIP and fixed-resolution SigLIP 2.

A checkpoint is a folder with config.json, the weights, and the preprocessor and tokenizer files.
Fixed-resolution SigLIP 2 models have the model type `siglip`.
"""

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers.image_utils import PILImageResampling
from transformers.utils import logging

from neuclip_ds.config import Channels, ModelConfig
from neuclip_ds.errors import UserError, explained
from neuclip_ds.models.build import apply_common_options
from neuclip_ds.models.image_models import check_patches
from neuclip_ds.models.packing import pack_clip_text
from neuclip_ds.models.pretrained.base import (
    CheckpointRef,
    Interpolation,
    LibraryModel,
    LoadedModel,
    LogitParameters,
    ModelSource,
    Preprocessing,
    logit_tensors,
    raise_on_mismatch,
    read_logit_parameters,
    rename_prefixes,
)
from neuclip_ds.models.pretrained.files import first_file, read_json, refuse_adapter, save_small_files
from neuclip_ds.models.pretrained.positions import resample_positions
from neuclip_ds.models.tokenizer import CaptionTokenizer, ModelTokenizer, load_tokenizer
from neuclip_ds.models.towers import DualEncoder, TextTower, VisionTower

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
WEIGHT_PATTERNS = ("model*.safetensors", "pytorch_model*.bin")  # only the first that matches is downloaded
_PROCESSOR = "preprocessor_config.json"
_INTERPOLATIONS: dict[Any, Interpolation] = {  # values of `resample`
    PILImageResampling.BILINEAR.value: "bilinear",
    PILImageResampling.BICUBIC.value: "bicubic",
}
_LEGACY_EOS = 2  # EOS id in old CLIP configs, for which transformers pools at the largest token id


@dataclass(frozen=True, kw_only=True)
class ModelType:
    """The transformers classes for a `model_type` in config.json, and the properties in which the types differ."""

    config_class: Any
    model_class: Any
    image_processor_class: Any
    siglip: bool = False  # no projections; logit scale and bias of shape (1,); text pooled at the last position
    legacy_eos: bool = False  # whether an EOS id of 2 means that text is pooled at the largest id

    def processor(self, preprocessing: Preprocessing) -> Any:
        """Return transformers' image processor for the given preprocessing."""
        square = {"height": preprocessing.size, "width": preprocessing.size}
        return self.image_processor_class(
            size=square if preprocessing.squash else {"shortest_edge": preprocessing.size + preprocessing.margin},
            crop_size=square,
            do_center_crop=not preprocessing.squash,
            resample=PILImageResampling[preprocessing.interpolation.upper()],
            image_mean=list(preprocessing.mean),
            image_std=list(preprocessing.std),
        )


_PREFIXES = {  # prefixes of our parameter names -> transformers' prefixes
    "vision.trunk.": "vision_model.",
    "text.trunk.": "text_model.",
    "vision.projection.": "visual_projection.",
    "text.projection.": "text_projection.",
}
MODEL_TYPES = {
    "clip": ModelType(
        config_class=transformers.CLIPConfig,
        model_class=transformers.CLIPModel,
        image_processor_class=transformers.CLIPImageProcessor,
        legacy_eos=True,
    ),
    "metaclip_2": ModelType(
        config_class=transformers.MetaClip2Config,
        model_class=transformers.MetaClip2Model,
        image_processor_class=transformers.CLIPImageProcessor,
    ),
    "siglip": ModelType(
        config_class=transformers.SiglipConfig,
        model_class=transformers.SiglipModel,
        image_processor_class=transformers.SiglipImageProcessor,
        siglip=True,
    ),
}


class TransformersCheckpoint(ModelSource):
    """A checkpoint folder in the format of transformers' `save_pretrained`.

    Raises:
        UserError: config.json or preprocessor_config.json is missing, incomplete or unsupported, or the image size of
            `config` is not divisible into patches.
    """

    def __init__(self, config: ModelConfig, ref: CheckpointRef) -> None:
        self.config = config
        self.name = config.pretrained
        self._folder = Path(ref.path)
        config_json = read_json(self._folder / "config.json")
        self._model_type = MODEL_TYPES[config_json["model_type"]]
        self._library_config = self._model_type.config_class.from_dict(config_json)
        self._library_config._attn_implementation = "sdpa"
        self._original_config = deepcopy(self._library_config)  # of the weights
        vision = self._library_config.vision_config
        text = self._library_config.text_config
        if config.vision.image_size not in (None, vision.image_size):
            check_patches(config.vision.image_size, vision.patch_size)
            vision.image_size = config.vision.image_size
        if config.text.context_length is not None:
            text.max_position_embeddings = config.text.context_length
        self._is_resized = (vision.image_size, text.max_position_embeddings) != (
            self._original_config.vision_config.image_size,
            self._original_config.text_config.max_position_embeddings,
        )
        self.embed_dim = vision.hidden_size if self._model_type.siglip else self._library_config.projection_dim
        self.preprocessing = _read_preprocessing(self._folder, vision.image_size, self._model_type.siglip)

    def own_tokenizer(self) -> CaptionTokenizer:
        text = self._library_config.text_config
        tokenizer = load_tokenizer(self._folder, text.vocab_size)
        pooled_id = text.eos_token_id
        if self._model_type.legacy_eos and text.eos_token_id == _LEGACY_EOS:
            pooled_id = max(tokenizer.get_vocab().values())
        if not self._model_type.siglip and pooled_id != tokenizer.eos_token_id:
            raise UserError(
                f"The text tower in {self._folder} pools at token id {pooled_id}, but the tokenizer ends captions with "
                f"id {tokenizer.eos_token_id}; put the model's tokenizer files there, or correct eos_token_id in "
                "config.json."
            )
        caption_tokenizer = CaptionTokenizer(tokenizer, text.max_position_embeddings)
        if caption_tokenizer.pad_id is None:
            raise UserError(
                f"The tokenizer in {self._folder} has no padding, EOS or SEP token, so it is not the model's: put the "
                "model's tokenizer files there."
            )
        return caption_tokenizer

    def build(self, tokenizer: ModelTokenizer | None = None) -> DualEncoder:
        return self._to_dual_encoder(self._model_type.model_class(self._library_config))

    def load(self, tokenizer: ModelTokenizer | None = None) -> LoadedModel:
        if first_file(self._folder, WEIGHTS) is None:
            raise UserError(f"{self._folder} contains no weights; put {WEIGHTS[0]} (or pytorch_model.bin) there.")
        refuse_adapter(self._folder)
        logging.disable_progress_bar()  # one bar per rank would flood the log
        with explained(f"transformers cannot read the weights in {self._folder}", "download the weights again"):
            model, info = self._model_type.model_class.from_pretrained(
                self._folder,
                config=self._original_config,
                local_files_only=True,
                weights_only=True,
                trust_remote_code=False,
                dtype=torch.float32,
                ignore_mismatched_sizes=True,  # rejected below
                output_loading_info=True,
            )
        missing = set(info["missing_keys"])
        missing_weights = sorted(name for name in missing if not name.startswith("logit_"))
        wrong_shapes = []
        for name, shape, expected in info["mismatched_keys"]:
            wrong_shapes.append(f"{name} is {tuple(shape)} instead of {tuple(expected)}")
        raise_on_mismatch(str(self._folder), missing_weights, sorted(info["unexpected_keys"]), wrong_shapes)
        state = {name: value for name, value in model.named_parameters() if name not in missing}
        logits = read_logit_parameters(state)
        if self._is_resized:
            model = self._resized(model)
        return LoadedModel(self._to_dual_encoder(model), logits)

    def to_library_model(
        self, tokenizer: ModelTokenizer, weights: Mapping[str, Tensor], logits: LogitParameters
    ) -> LibraryModel:
        logit_shape: tuple[int, ...] = ()
        if self._model_type.siglip:
            logit_shape = (1,)
            if logits.bias is None:
                logits = logits._replace(bias=0.0)  # SiglipModel always has a bias
        return LibraryModel(
            library="transformers",
            config=self._library_config.to_dict(),
            weights=rename_prefixes(weights, _PREFIXES) | logit_tensors(logits, logit_shape),
            preprocessing=self.preprocessing,
            tokenizer=tokenizer,
        )

    def save_files(self, folder: Path) -> None:
        save_small_files(self._folder, folder)
        if self._is_resized:
            self._library_config.save_pretrained(folder)

    def _resized(self, model: Any) -> Any:
        """Return transformers' model with the image size and context length of the config."""
        with torch.random.fork_rng(devices=[]):  # its random weights are replaced
            resized = self._model_type.model_class(self._library_config)
        resized.load_state_dict(resample_positions(model.state_dict(), resized.state_dict()))
        return resized

    def _to_dual_encoder(self, model: Any) -> DualEncoder:
        """Convert transformers' model to a dual encoder; SigLIP's model has no projections."""
        image_projection = getattr(model, "visual_projection", None)
        text_projection = getattr(model, "text_projection", None)
        vision = VisionTower(model.vision_model, image_projection, self.preprocessing.mean, self.preprocessing.std)
        text = TextTower(model.text_model, text_projection, pack=pack_clip_text(model.text_model))
        return apply_common_options(DualEncoder(vision, text), self.config)


def _read_preprocessing(folder: Path, image_size: Any, siglip: bool) -> Preprocessing:
    """Read the preprocessing from a checkpoint's image processor; raise UserError if it is not supported.

    Args:
        folder: the checkpoint's folder.
        image_size: side of the model's images in pixels.
        siglip: whether the image processor squashes images by default, as SigLIP's does.
    """
    path = folder / _PROCESSOR
    nested = folder / "processor_config.json"  # where transformers 5 stores the image processor
    if nested.is_file() and not path.is_file():
        processor = read_json(nested).get("image_processor", {})
        path = nested
    else:
        processor = read_json(path)
    if not isinstance(image_size, int):
        raise UserError(
            f"config.json in {folder} specifies image_size={image_size}; only square images, whose image_size is "
            "one number, are supported: use another checkpoint."
        )
    mean, std = _read_statistics(processor, path)
    resample = processor.get("resample", PILImageResampling.BICUBIC.value)
    if resample not in _INTERPOLATIONS:
        raise UserError(
            f"{path} sets resample={resample}; only 2 (bilinear) and 3 (bicubic) are supported: use another checkpoint."
        )
    geometry = _read_geometry(processor, path, siglip)
    return Preprocessing(
        size=image_size,
        mean=mean,
        std=std,
        squash=geometry.squash,
        margin=geometry.margin,
        interpolation=_INTERPOLATIONS[resample],
    )


def _read_statistics(processor: Mapping[str, Any], path: Path) -> tuple[Channels, Channels]:
    """Return the per-channel mean and standard deviation with which pixels in [0, 1] are normalized.

    Raises UserError if they are missing, or if pixels are not rescaled to [0, 1].
    """
    factor = processor.get("rescale_factor", 1 / 255)
    if not (processor.get("do_rescale", True) and math.isclose(factor, 1 / 255, rel_tol=1e-6)):
        raise UserError(f"{path} does not rescale pixels by 1/255, the only supported factor: use another checkpoint.")
    if not processor.get("do_normalize", True):
        return (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    mean = processor.get("image_mean")
    std = processor.get("image_std")
    if not (isinstance(mean, list) and isinstance(std, list) and len(mean) == len(std) == 3):
        raise UserError(f"{path} contains no image_mean and image_std of three channels; add them.")
    return (mean[0], mean[1], mean[2]), (std[0], std[1], std[2])


class _Geometry(NamedTuple):
    """The way in which images are made square; the fields are those of `Preprocessing`."""

    squash: bool
    margin: int


def _read_geometry(processor: Mapping[str, Any], path: Path, siglip: bool) -> _Geometry:
    """Return how an image processor resizes and crops images; raise UserError if this is not supported."""
    crops = processor.get("do_center_crop", not siglip)
    size = processor.get("size")
    if isinstance(size, int):  # in files of old versions
        size = {"height": size, "width": size} if siglip else {"shortest_edge": size}
    size = size or {}
    height = size.get("height")
    width = size.get("width")
    edge = size.get("shortest_edge")
    crop_size = processor.get("crop_size") or height or edge
    if not isinstance(crop_size, dict):
        crop_size = {"height": crop_size, "width": crop_size}
    crop_height = crop_size.get("height")
    crop_width = crop_size.get("width")
    problem = ""
    if edge is None and height is None:
        squash = siglip
    else:
        squash = height is not None
    if not processor.get("do_resize", True):
        problem = "does not resize images"
    elif size and edge is None and height is None:
        problem = f"resizes images to size {size}"
    elif not squash and not crops:
        problem = "does not crop images to a square (do_center_crop)"
    elif crops and crop_height != crop_width:
        problem = f"crops images to {crop_height} x {crop_width} pixels"
    elif height != width or (squash and crops and crop_height != height):
        problem = f"resizes whole images to {height} x {width} pixels, which are not square or are cropped again"
    elif edge is not None and edge < crop_height:
        problem = f"pads images of {edge} pixels to {crop_height}"
    if problem:
        raise UserError(
            f"{path} {problem}; only images that are resized to a square, or resized by their shorter side and then "
            "cropped to a square, are supported: use another checkpoint."
        )
    margin = 0 if squash or edge is None else edge - crop_height
    return _Geometry(squash, margin)
