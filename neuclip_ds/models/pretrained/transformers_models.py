"""Checkpoints of transformers' dual encoders: CLIP, MetaCLIP 2, SigLIP and SigLIP 2 in both of its forms.

A checkpoint is a folder with config.json, weights, preprocessor and tokenizer files. SigLIP 2 of fixed resolution has
the model type `siglip`; its NaFlex form, `siglip2`, is used on square images of one size.
"""

import math
import pickle
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoTokenizer,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    MetaClip2Config,
    MetaClip2Model,
    PreTrainedTokenizerBase,
    Siglip2Config,
    Siglip2ImageProcessor,
    Siglip2Model,
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
)
from transformers.image_utils import PILImageResampling
from transformers.utils import logging

from neuclip_ds.errors import UserError
from neuclip_ds.models.dual_encoder import DualEncoder
from neuclip_ds.models.positions import ForcedSizes, check_patches, fit_positions
from neuclip_ds.models.pretrained.base import (
    CheckpointRef,
    LibraryTower,
    LoadedModel,
    LogitParameters,
    Package,
    Preprocessing,
    logit_tensors,
    raise_on_mismatch,
    read_logit_parameters,
    rename_prefixes,
)
from neuclip_ds.models.pretrained.files import first_file, first_sentence, read_json, save_small_files
from neuclip_ds.models.pretrained.square_patches import SquarePatches
from neuclip_ds.models.tokenizer import special_ids, token_ids

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
WEIGHT_PATTERNS = ("model*.safetensors", "pytorch_model*.bin")  # of a repository; the first with files is downloaded
_TOKENIZERS = (
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
)
_PROCESSOR = "preprocessor_config.json"
_LEGACY_EOS = 2  # of old CLIP configs, for which transformers reads the feature at the largest id


class ModelType(NamedTuple):
    """The classes of a `model_type` in config.json, and what differs between them."""

    config: Any
    model: Any
    processor: Callable[[Preprocessing, Any], Any]  # makes the image processor, also from the model's config
    prefixes: dict[str, str]  # prefixes of our parameters' names -> the library's
    logit_shape: tuple[int, ...]  # shape of logit_scale and logit_bias
    read_at: Callable[[Any, int], int | None]  # token that the feature is read at, of text config and largest id
    patches: bool = False  # whether its image tower takes patches instead of images


def _clip_processor(preprocessing: Preprocessing, config: Any) -> Any:
    return CLIPImageProcessor(do_center_crop=not preprocessing.squash, **_of_squares(preprocessing))


def _siglip_processor(preprocessing: Preprocessing, config: Any) -> Any:
    return SiglipImageProcessor(do_center_crop=not preprocessing.squash, **_of_squares(preprocessing))


def _siglip2_processor(preprocessing: Preprocessing, config: Any) -> Any:
    patch = config.vision_config.patch_size
    statistics = {"image_mean": list(preprocessing.mean), "image_std": list(preprocessing.std)}
    return Siglip2ImageProcessor(patch_size=patch, max_num_patches=(preprocessing.size // patch) ** 2, **statistics)


def _of_squares(preprocessing: Preprocessing) -> dict[str, Any]:
    side, mean, std, squash = preprocessing
    square = {"height": side, "width": side}
    return {
        "size": square if squash else {"shortest_edge": side},
        "crop_size": square,
        "image_mean": list(mean),
        "image_std": list(std),
        "resample": PILImageResampling.BICUBIC,
    }


def _at_eos_or_largest(text: Any, largest: int) -> int:
    return largest if text.eos_token_id == _LEGACY_EOS else text.eos_token_id


def _at_eos(text: Any, largest: int) -> int:
    return text.eos_token_id


def _at_the_end(text: Any, largest: int) -> None:
    """Return None: the feature is read at the last position, whatever is there."""


_TRUNKS = {"vision.trunk.": "vision_model.", "text.trunk.": "text_model."}
_PROJECTIONS = {"vision.projection.": "visual_projection.", "text.projection.": "text_projection."}
_BOTH = {**_TRUNKS, **_PROJECTIONS}
MODEL_TYPES = {
    "clip": ModelType(CLIPConfig, CLIPModel, _clip_processor, _BOTH, (), _at_eos_or_largest),
    "metaclip_2": ModelType(MetaClip2Config, MetaClip2Model, _clip_processor, _BOTH, (), _at_eos),
    "siglip": ModelType(SiglipConfig, SiglipModel, _siglip_processor, _TRUNKS, (1,), _at_the_end),
    "siglip2": ModelType(Siglip2Config, Siglip2Model, _siglip2_processor, _TRUNKS, (1,), _at_the_end, patches=True),
}


def is_transformers_model(folder: Path) -> bool:
    """Whether the folder's config.json has a supported `model_type`."""
    path = folder / "config.json"
    return path.is_file() and read_json(path).get("model_type") in MODEL_TYPES


class LibraryTokenizer:
    """A transformers tokenizer used as by its model's processor, with its special tokens and padded to one length."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context_length: int) -> None:
        self.context_length = context_length
        self.inner = tokenizer
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token

    @property
    def special_ids(self) -> dict[str, int | None]:
        return special_ids(self.inner)

    @property
    def eos_id(self) -> int | None:
        """Id of the token that ends a caption: EOS, or BERT's SEP."""
        eos, sep = self.inner.eos_token_id, self.inner.sep_token_id
        return sep if eos is None else eos

    def __call__(self, captions: list[str]) -> Tensor:
        """Return (b, context_length) int64 ids."""
        ids = token_ids(self.inner, captions, self.context_length, padding="max_length")
        return torch.tensor(ids, dtype=torch.int64).reshape(len(captions), self.context_length)

    def save(self, folder: Path | str) -> None:
        """Save the tokenizer's files for `transformers.AutoTokenizer`."""
        self.inner.model_max_length = self.context_length
        # these models take no padding mask, and SigLIP's features would change with one
        self.inner.model_input_names = self.inner.init_kwargs["model_input_names"] = ["input_ids"]
        self.inner.save_pretrained(folder)


class TransformersCheckpoint:
    """A folder that `save_pretrained` wrote.

    Raises:
        UserError: config.json or preprocessor_config.json is missing or lacks what the run needs, or the model cannot
            have a forced size.
    """

    def __init__(self, ref: CheckpointRef, sizes: ForcedSizes) -> None:
        self._folder, self._stretch = Path(ref.path), sizes.stretch
        tree = read_json(self._folder / "config.json")
        self._kind = _kind_of(tree, self._folder)
        self._published = self._kind.config.from_dict(tree)
        self._published._attn_implementation = "sdpa"
        self._config, image_size = _resized(self._published, sizes)
        self.embed_dim = _embed_dim(tree, self._config, self._folder)
        self.preprocessing = _preprocessing(self._folder, image_size, self._kind.patches)

    def tokenizer(self) -> LibraryTokenizer:
        tokenizer = load_tokenizer(self._folder)
        text = self._config.text_config
        largest, eos = max(tokenizer.get_vocab().values()), tokenizer.eos_token_id
        if largest >= text.vocab_size:
            raise UserError(
                f"The tokenizer in {self._folder} has ids up to {largest}, but the model's vocabulary ends at "
                f"{text.vocab_size - 1}; put the model's tokenizer files there."
            )
        read_at = self._kind.read_at(text, largest)
        if read_at not in (None, eos):
            raise UserError(
                f"The text tower in {self._folder} reads its feature at token {read_at}, but the tokenizer ends a "
                f"caption with {eos}; put the model's tokenizer files there, or correct eos_token_id in config.json."
            )
        return LibraryTokenizer(tokenizer, text.max_position_embeddings)

    def build(self) -> DualEncoder:
        return self._wrapped(self._kind.model(self._config))

    def load(self) -> LoadedModel:
        model, info = read_model(self._kind.model, self._folder, self._published)
        missing = set(info["missing_keys"])
        logit_names = {"logit_scale", "logit_bias"}
        shapes = [f"{name} is {tuple(found)} instead of {tuple(want)}" for name, found, want in info["mismatched_keys"]]
        raise_on_mismatch(str(self._folder), sorted(missing - logit_names), sorted(info["unexpected_keys"]), shapes)
        state = {name: value for name, value in model.named_parameters() if name in logit_names - missing}
        if self._config.to_dict() != self._published.to_dict():
            resized = self._kind.model(self._config)
            resized.load_state_dict(fit_positions(model.state_dict(), resized.state_dict(), self._stretch))
            model = resized
        return LoadedModel(self._wrapped(model), read_logit_parameters(state))

    def package(self, weights: Mapping[str, Tensor], logits: LogitParameters) -> Package:
        if self._kind.logit_shape and logits.bias is None:
            logits = logits._replace(bias=0.0)  # SiglipModel always has a bias
        tensors = rename_prefixes(weights, self._kind.prefixes) | logit_tensors(logits, self._kind.logit_shape)
        return Package("transformers", self._config.to_dict(), tensors, self.preprocessing, self.tokenizer())

    def save(self, folder: Path) -> None:
        save_small_files(self._folder, folder)

    def _wrapped(self, model: Any) -> DualEncoder:
        vision, text = (getattr(model, name, None) for name in ("visual_projection", "text_projection"))
        arguments = {}
        if self._kind.patches:
            model.vision_model.embeddings = SquarePatches(model.vision_model.embeddings)
            arguments = {"pixel_attention_mask": None, "spatial_shapes": None}
        return DualEncoder(
            LibraryTower(model.vision_model, _checkpoint, vision, self.preprocessing, arguments),
            LibraryTower(model.text_model, _checkpoint, text),
        )


def read_model(kind: Any, folder: Path, config: Any) -> tuple[Any, dict[str, Any]]:
    """Return a transformers model of a class with the folder's weights, and which of them are missing or do not fit.

    Raises:
        UserError: there are no weights, or transformers cannot read them.
    """
    if first_file(folder, WEIGHTS) is None:
        raise UserError(f"{folder} has no weights; put {WEIGHTS[0]} (or pytorch_model.bin) there.")
    logging.disable_progress_bar()  # one bar per rank would flood the log
    try:
        model, info = kind.from_pretrained(
            folder,
            config=config,
            local_files_only=True,
            weights_only=True,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,  # listed in `info`, for the caller to refuse
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, pickle.UnpicklingError, SafetensorError) as error:
        raise UserError(
            f"transformers cannot read the weights in {folder} ({first_sentence(error)}); put the model's file there."
        ) from error
    return model, info


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer in a folder; raise UserError if it has no tokenizer files that transformers can read."""
    try:
        if first_file(folder, _TOKENIZERS) is None:  # transformers would create an empty one
            raise FileNotFoundError("it has no tokenizer files")
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError, ImportError) as error:
        reason = first_sentence(error)
        raise UserError(
            f"{folder} holds no tokenizer that transformers can read ({reason}); put the model's tokenizer files there "
            "(tokenizer.json and tokenizer_config.json, or vocab.json and merges.txt, or spiece.model)."
        ) from error


def _checkpoint(trunk: Any) -> None:
    trunk.gradient_checkpointing_enable({"use_reentrant": False})


def _kind_of(tree: dict[str, Any], folder: Path) -> ModelType:
    model_type = tree.get("model_type")
    if model_type not in MODEL_TYPES:
        raise UserError(
            f"config.json in {folder} has model_type {model_type!r}, which is not supported; "
            f"name a checkpoint of type {' or '.join(MODEL_TYPES)}."
        )
    return MODEL_TYPES[model_type]


def _resized(published: Any, sizes: ForcedSizes) -> tuple[Any, Any]:
    """Return a config with the forced sizes, and the side of its images."""
    config = deepcopy(published)
    vision = config.vision_config
    if sizes.context_length is not None:
        config.text_config.max_position_embeddings = sizes.context_length
    if sizes.image_size is not None:
        check_patches(sizes.image_size, vision.patch_size)
    if not hasattr(vision, "image_size"):  # its positions are for a square of patches, and resized by the tower
        return config, sizes.image_size or vision.patch_size * math.isqrt(vision.num_patches)
    if sizes.image_size is not None:
        vision.image_size = sizes.image_size
    return config, vision.image_size


def _embed_dim(tree: dict[str, Any], config: Any, folder: Path) -> int:
    """Return the width of the joint space; for a missing one transformers would silently use 512."""
    if isinstance(config, SiglipConfig | Siglip2Config):
        text, vision = config.text_config, config.vision_config
        if not vision.vision_use_head:
            raise UserError(
                f"The image tower in {folder} has no pooling head (vision_use_head), which is not supported; "
                "use another model."
            )
        if text.projection_size != vision.hidden_size:
            raise UserError(
                f"config.json in {folder} projects texts to {text.projection_size} numbers and images to "
                f"{vision.hidden_size}; correct text_config.projection_size."
            )
        return int(vision.hidden_size)
    if "projection_dim" not in tree:
        raise UserError(
            f"config.json in {folder} has no projection_dim, the width of the joint space; add it (the number of rows "
            "of visual_projection.weight)."
        )
    return int(tree["projection_dim"])


def _preprocessing(folder: Path, image_size: Any, patches: bool) -> Preprocessing:
    nested = folder / "processor_config.json"  # where transformers 5 keeps the image processor
    if nested.is_file() and not (folder / _PROCESSOR).is_file():
        tree = read_json(nested).get("image_processor", {})
    else:
        tree = read_json(folder / _PROCESSOR)
    mean, std = tree.get("image_mean"), tree.get("image_std")
    if not (isinstance(mean, list) and isinstance(std, list) and len(mean) == len(std) == 3):
        raise UserError(f"{folder}/{_PROCESSOR} has no image_mean and image_std of three channels; add them.")
    if not isinstance(image_size, int):
        raise UserError(f"config.json in {folder} has images of {image_size} pixels; only square ones are supported.")
    size = tree.get("size")
    squash = patches or (isinstance(size, dict) and "height" in size and not tree.get("do_center_crop", False))
    return Preprocessing(image_size, tuple(mean), tuple(std), squash)
