"""open_clip checkpoints: ARCHITECTURE/TAG, ARCHITECTURE/FILE, or a folder with open_clip_config.json and weights.

Every model is built with its text tower as a separate module (open_clip's CustomTextCLIP), because ZeRO 3 gathers a
parameter when its module runs. For exported files, `config_names` restores the tensor names that open_clip expects.
"""

import json
import shutil
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from timm.layers import PatchEmbed
from torch import Tensor
from transformers import PreTrainedModel

from neuclip_ds.config import OPENAI_MEAN, OPENAI_STD, ModelConfig
from neuclip_ds.errors import UserError, explained, require_package
from neuclip_ds.files import expand_user
from neuclip_ds.models.build import apply_common_options
from neuclip_ds.models.image_models import check_patches, fixed_image_size, names_by_image_size
from neuclip_ds.models.pretrained.attention_masks import use_static_masks
from neuclip_ds.models.pretrained.base import (
    CheckpointRef,
    LibraryModel,
    LoadedModel,
    LogitParameters,
    ModelSource,
    Preprocessing,
    check_tensors,
    logit_tensors,
    read_logit_parameters,
    rename_prefixes,
)
from neuclip_ds.models.pretrained.files import first_file, read_json, read_tensors
from neuclip_ds.models.pretrained.packed_open_clip import pack_open_clip_text
from neuclip_ds.models.pretrained.positions import resample_positions
from neuclip_ds.models.pretrained.text_encoder import check_length
from neuclip_ds.models.tokenizer import (
    CLEAN_CAPTIONS,
    CaptionTokenizer,
    ModelTokenizer,
    make_readable_by_transformers_4,
    save_tokenizer,
)
from neuclip_ds.models.towers import DualEncoder, TextTower, VisionTower

CONFIG_FILE = "open_clip_config.json"
# only the first that matches is downloaded
WEIGHT_PATTERNS = ("open_clip*.safetensors", "open_clip*.bin", "model.safetensors")
_WEIGHTS = (
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.safetensors",
    "open_clip_pytorch_model.bin",
    "model.safetensors",
)
_IMAGE_SIZE = 224  # open_clip's default
_RESNET_STRIDE = 32  # pixels per position of CLIP's ResNets
_ENCODER = "encoder"  # folder with the config of a text encoder that is not on the hub
_PREFIXES = {"vision.trunk.": "visual.", "text.trunk.": "text."}


def import_open_clip() -> Any:
    """Return the open_clip module; raise UserError if it is not installed."""
    require_package("open_clip", "An open_clip model", "open_clip")
    import open_clip

    return open_clip


def locate_by_name(name: str, weights: bool) -> CheckpointRef:
    """Locate the weights ARCHITECTURE/FILE or ARCHITECTURE/TAG, downloading a tag's weights if the cache lacks them.

    Raises:
        UserError: open_clip is not installed, no such file or tag exists, the download fails, or the architecture lacks
            the activation function that the weights were trained with (open_clip only warns about this).
    """
    open_clip = import_open_clip()
    architecture, _, file_or_tag = name.partition("/")
    tag_config = open_clip.get_pretrained_cfg(architecture, file_or_tag) if file_or_tag else None
    if not tag_config:
        path = Path(expand_user(file_or_tag))
        if not file_or_tag or not path.is_file():
            tags = ", ".join(open_clip.list_pretrained_tags_by_model(architecture))
            fix = f"use one of the tags {tags}"
            if not tags:
                fix = f"open_clip lists no weights for it, so pass a file as open_clip:{architecture}/FILE"
            raise UserError(
                f"open_clip:{name} names neither a file nor one of open_clip's weights for {architecture}: {fix}."
            )
        return CheckpointRef("open_clip", str(path.resolve()), f"{architecture}/")
    trained_with_quick_gelu = bool(tag_config.get("quick_gelu", False))
    has_quick_gelu = bool(open_clip.get_model_config(architecture).get("quick_gelu", False))
    if has_quick_gelu != trained_with_quick_gelu:
        activation = "quick GELU" if trained_with_quick_gelu else "GELU"
        matching = architecture.removesuffix("-quickgelu")
        if trained_with_quick_gelu:
            matching += "-quickgelu"
        raise UserError(
            f"The weights {file_or_tag} were trained with {activation}, which {architecture} does not "
            f"have; use open_clip:{matching}/{file_or_tag}."
        )
    if not weights:
        return CheckpointRef("open_clip", "", name)
    source = str(tag_config.get("hf_hub", "")).rstrip("/") or tag_config.get("url")
    with explained(
        f"open_clip:{name} is not in the local cache and could not be downloaded",
        f"download {source} on a machine with network access. If you copy the complete repository, pass its folder; "
        f"if you copy only the weights file, pass open_clip:{architecture}/FILE, which assumes OpenAI's image "
        "preprocessing",
    ):
        return CheckpointRef("open_clip", str(open_clip.download_pretrained(tag_config)), name)


class OpenClipTokenizer:
    """The tokenizer that open_clip uses for a model."""

    def __init__(self, tokenizer: Any) -> None:
        self.context_length: int = tokenizer.context_length
        self.inner = tokenizer

    def __call__(self, captions: list[str]) -> Tensor:
        """Return the (b, context_length) int64 token ids of b captions."""
        return self.inner(captions) if captions else torch.empty(0, self.context_length, dtype=torch.int64)

    def save(self, folder: Path | str) -> None:
        tokenizer = to_transformers_tokenizer(self.inner)
        save_tokenizer(tokenizer, folder)
        make_readable_by_transformers_4(tokenizer, Path(folder))


class OpenClipCheckpoint(ModelSource):
    """An open_clip checkpoint whose architecture is given by a config file or by one of open_clip's names.

    Raises:
        UserError: open_clip is not installed; the checkpoint's config is missing, incomplete or unsupported; or the
            image tower does not support `model.vision.image_size`.
    """

    def __init__(self, config: ModelConfig, ref: CheckpointRef) -> None:
        import_open_clip()  # raises UserError if it is not installed
        self.config = config
        self.name = config.pretrained
        self._ref = ref
        if ref.name:
            self._where = f"open_clip:{ref.name}"
            self._tokenizer_source = ref.name.partition("/")[0]
        else:
            self._where = ref.path
            self._tokenizer_source = f"local-dir:{ref.path}"
        self._model_config, preprocess_config = _read_configs(ref)
        if "embed_dim" not in self._model_config:
            raise UserError(
                f"{CONFIG_FILE} in {self._where} has no model_cfg.embed_dim, the width of the joint space; add it."
            )
        self.embed_dim = int(self._model_config["embed_dim"])
        vision = self._model_config.setdefault("vision_cfg", {})
        vision["timm_model_pretrained"] = False
        if config.vision.image_size not in (None, vision.get("image_size", _IMAGE_SIZE)):
            if "timm_model_name" in vision:
                vision["timm_model_name"] = _timm_name(vision["timm_model_name"], config.vision.image_size)
            else:
                has_blocks = isinstance(vision.get("layers"), int)
                check_patches(config.vision.image_size, vision.get("patch_size", 16) if has_blocks else _RESNET_STRIDE)
            vision["image_size"] = config.vision.image_size
        if config.text.context_length is not None:
            self._model_config.setdefault("text_cfg", {})["context_length"] = config.text.context_length
        if not ref.name:
            _use_own_encoder(self._model_config, Path(ref.path))
        self.preprocessing = _read_preprocessing(self._model_config["vision_cfg"], preprocess_config, self._where)

    def own_tokenizer(self) -> ModelTokenizer:
        options = {"context_length": self._model_config.get("text_cfg", {}).get("context_length")}
        if self._model_config.get("text_cfg", {}).get("hf_tokenizer_name"):
            options["trust_remote_code"] = False  # open_clip passes the options on to transformers' tokenizer
        with explained(
            f"open_clip cannot read the tokenizer of {self._where}",
            "put the tokenizer's files (tokenizer.json and tokenizer_config.json) into a folder with the weights and "
            f"{CONFIG_FILE}, and pass this folder as the model",
        ):
            return OpenClipTokenizer(import_open_clip().get_tokenizer(self._tokenizer_source, **options))

    def build(self, tokenizer: ModelTokenizer | None = None) -> DualEncoder:
        return self._to_dual_encoder(architecture(self._model_config, self._where))

    def load(self, tokenizer: ModelTokenizer | None = None) -> LoadedModel:
        path = Path(self._ref.path)
        weights = first_file(path, _WEIGHTS) if path.is_dir() else path
        if not self._ref.path or weights is None:
            raise UserError(f"{self._where} contains no weights; put {_WEIGHTS[0]} there.")
        tensors = import_open_clip().model.convert_to_custom_text_state_dict(read_tensors(weights))
        logits = read_logit_parameters(tensors)
        model = architecture(self._model_config, self._where)
        expected = _without_logit_parameters(model.state_dict())
        state = _without_logit_parameters(tensors)
        if self.config.vision.image_size is not None or self.config.text.context_length is not None:
            state = resample_positions(state, expected)
        check_tensors(str(weights), expected, state)
        model.load_state_dict(state, strict=False)
        return LoadedModel(self._to_dual_encoder(model), logits)

    def to_library_model(
        self, tokenizer: ModelTokenizer, weights: Mapping[str, Tensor], logits: LogitParameters
    ) -> LibraryModel:
        vision = self._model_config["vision_cfg"]
        image_size = self.preprocessing.size
        if "timm_model_name" in vision:
            own_size = fixed_image_size(vision["timm_model_name"])
            if own_size not in (None, image_size):
                raise UserError(
                    f"This model cannot be exported: open_clip cannot express timm's image model "
                    f"{vision['timm_model_name']!r} with images of {image_size} instead of {own_size} pixels. Use the "
                    "run's folder with evaluate, embed or model.pretrained."
                )
        tensors = rename_prefixes(weights, _PREFIXES) | logit_tensors(logits, ())
        config = deepcopy(self._model_config)
        if logits.bias is not None:
            config.setdefault("init_logit_bias", logits.bias)
        return LibraryModel(
            library="open_clip",
            config=config,
            weights=config_names(config, tensors),
            preprocessing=self.preprocessing,
            tokenizer=tokenizer,
        )

    def save_files(self, folder: Path) -> None:
        write_config(folder, with_own_encoder(self._model_config, folder), self.preprocessing)
        self.own_tokenizer().save(folder)

    def _to_dual_encoder(self, model: Any) -> DualEncoder:
        encoder = getattr(model.text, "transformer", None)
        if isinstance(encoder, PreTrainedModel):
            use_static_masks(encoder)
            length = self.config.text.context_length or 0
            check_length(length, encoder, "model.text.context_length", f"the text encoder of {self._where}")
        vision = VisionTower(model.visual, None, self.preprocessing.mean, self.preprocessing.std)
        text = TextTower(model.text, None, pack=pack_open_clip_text(model.text))
        return apply_common_options(DualEncoder(vision, text), self.config)


def _without_logit_parameters(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("logit_")}


def architecture(config: Mapping[str, Any], where: str) -> Any:
    """Build the open_clip model that a config describes, with random weights; raise UserError if that fails."""
    open_clip = import_open_clip()
    options = {key: value for key, value in config.items() if key != "custom_text"}
    text = options.get("text_cfg", {})
    if text.get("hf_model_name"):
        _refuse_foreign_code(text["hf_model_name"], where)
        options["text_cfg"] = {**text, "hf_model_pretrained": False}  # the checkpoint has the weights
    problem = f"open_clip {open_clip.__version__} cannot build {where}"
    with explained(problem, "correct its model_cfg, or update open_clip_torch"):
        model = open_clip.CustomTextCLIP(**options)
    if "timm_model_name" in options["vision_cfg"]:
        _set_timm_image_size(model.visual, options["vision_cfg"])
    return model


def _set_timm_image_size(visual: Any, vision_config: Mapping[str, Any]) -> None:
    """Set the image size of timm's model, which open_clip builds with timm's own size.

    Raises UserError if the model takes only images of its own size, or the size is not divisible into patches.
    """
    name = vision_config["timm_model_name"]
    size = vision_config.get("image_size", _IMAGE_SIZE)
    own_size = fixed_image_size(name)
    if own_size in (None, size):
        return
    if not hasattr(visual.trunk, "set_input_size"):
        raise UserError(
            f"An image size of {size} pixels does not fit timm's {name!r}, which takes only images of {own_size} "
            f"pixels; set model.vision.image_size={own_size}."
        )
    if isinstance(getattr(visual.trunk, "patch_embed", None), PatchEmbed):
        check_patches(size, visual.trunk.patch_embed.patch_size[0])
    visual.set_input_size(size)


def _timm_name(name: str, size: int) -> str:
    """Return timm's name for the model `name` at an image size of `size` pixels; raise UserError if timm lists none.

    A model that takes images of any size keeps its name. open_clip builds each of timm's models at timm's own size,
    whatever the image size in the config.
    """
    names = names_by_image_size(name)
    if not names:
        return name
    if size not in names:
        raise UserError(
            f"model.vision.image_size={size}: open_clip supports timm's {name!r} only for images of "
            f"{' or '.join(map(str, sorted(names)))} pixels, so the run could not be exported. Change or omit "
            "model.vision.image_size, or start from a checkpoint in the transformers format."
        )
    return names[size]


def _refuse_foreign_code(name: str, where: str) -> None:
    """Raise UserError if transformers lacks the text encoder; open_clip would otherwise offer to run custom code."""
    from transformers import MODEL_MAPPING, AutoConfig

    with explained(
        f"transformers cannot read the text encoder {name} of {where}",
        "correct text_cfg.hf_model_name, or download the encoder on a machine with network access and set "
        "text_cfg.hf_model_name to its folder",
    ):
        encoder_config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    if type(encoder_config) not in MODEL_MAPPING:
        raise UserError(
            f"transformers does not include the text encoder {name} of {where}, and neuclip_ds does not run code from "
            "the hub: start from a checkpoint with a different text encoder."
        )


def config_names(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors to the names that open_clip uses for a config, undoing `convert_to_custom_text_state_dict`."""
    if config.get("custom_text") or "hf_model_name" in config.get("text_cfg", {}):
        return dict(tensors)
    return {name.removeprefix("text."): value for name, value in tensors.items()}


def write_config(folder: Path, config: Mapping[str, Any], preprocessing: Preprocessing) -> None:
    """Write open_clip_config.json, with a model's config and preprocessing, to a folder."""
    preprocess = {
        "mean": list(preprocessing.mean),
        "std": list(preprocessing.std),
        "interpolation": preprocessing.interpolation,
        "resize_mode": "squash" if preprocessing.squash else "shortest",
    }
    content = {"model_cfg": config, "preprocess_cfg": preprocess}
    (folder / CONFIG_FILE).write_text(json.dumps(content, indent=2), encoding="utf-8")


def clip_bpe(context_length: int) -> CaptionTokenizer:
    """Return CLIP's BPE tokenizer, with the vocabulary and the ids of open_clip's tokenizer.

    It differs from open_clip's tokenizer in two ways: it pads with EOS, and it treats special tokens that are spelled
    out in a caption as plain text. Raises `UserError` if open_clip or ftfy is not installed.
    """
    tokenizer = to_transformers_tokenizer(import_open_clip().SimpleTokenizer())
    tokenizer.init_kwargs[CLEAN_CAPTIONS] = True
    return CaptionTokenizer.closed(tokenizer, context_length)


def to_transformers_tokenizer(tokenizer: Any) -> Any:
    """Convert an open_clip tokenizer to a transformers tokenizer with the same ids, except for padding.

    Captions must first be cleaned as open_clip does: for CLIP's BPE, as in `clean_caption`. The `strip_sep_token` and
    `tokenizer_mode` options of open_clip's configs are lost.
    """
    inner = getattr(tokenizer, "tokenizer", None)
    if inner is not None:
        return inner
    from transformers import CLIPTokenizer

    # transformers' tokenizer expects these names for the two special tokens
    names = {tokenizer.sot_token_id: "<|startoftext|>", tokenizer.eot_token_id: "<|endoftext|>"}
    return CLIPTokenizer(
        vocab={names.get(number, token): number for token, number in tokenizer.encoder.items()},
        merges=list(tokenizer.bpe_ranks),
        model_max_length=tokenizer.context_length,
    )


def with_own_encoder(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Copy the config of a local text encoder to `folder`, and return a model config that names the copy.

    The name is `encoder`, a relative path that open_clip finds if it runs in `folder`. A hub name is kept.
    """
    text = config.get("text_cfg", {})
    encoder = Path(expand_user(text.get("hf_model_name") or ""))
    if not text.get("hf_model_name") or not encoder.is_dir():
        return config
    (folder / _ENCODER).mkdir()
    shutil.copy(encoder / "config.json", folder / _ENCODER)
    return {**config, "text_cfg": {**text, "hf_model_name": _ENCODER}}


def _use_own_encoder(config: dict[str, Any], folder: Path) -> None:
    """Replace the relative path of the text encoder, which `with_own_encoder` wrote, with the full path in `folder`."""
    text = config.get("text_cfg", {})
    if text.get("hf_model_name") == _ENCODER and (folder / _ENCODER).is_dir():
        text["hf_model_name"] = str(folder / _ENCODER)


def _read_configs(ref: CheckpointRef) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a checkpoint's `model_cfg` and `preprocess_cfg`, which is empty (OpenAI's) for ARCHITECTURE/FILE.

    Raises UserError if a folder's config file is missing or has no `model_cfg`.
    """
    if not ref.name:
        content = read_json(Path(ref.path) / CONFIG_FILE)
        if not isinstance(content.get("model_cfg"), dict):
            raise UserError(
                f"{ref.path}/{CONFIG_FILE} has no model_cfg: replace it with the {CONFIG_FILE} of this checkpoint."
            )
        return content["model_cfg"], content.get("preprocess_cfg", {})
    open_clip = import_open_clip()
    architecture, _, tag = ref.name.partition("/")
    return open_clip.get_model_config(architecture), open_clip.get_pretrained_cfg(architecture, tag) or {}


def _read_preprocessing(
    vision_config: Mapping[str, Any], preprocess_config: Mapping[str, Any], where: str
) -> Preprocessing:
    """Return a checkpoint's preprocessing; raise UserError if it is not supported."""
    size = vision_config.get("image_size", _IMAGE_SIZE)
    sides = set(size) if isinstance(size, list | tuple) else {size}
    mean = _channels(preprocess_config.get("mean") or OPENAI_MEAN)
    std = _channels(preprocess_config.get("std") or OPENAI_STD)
    if len(sides) != 1 or len(mean) != 3 or len(std) != 3:
        raise UserError(
            f"{where} takes images of {size} pixels with mean {mean} and std {std}; only square images with three "
            "channels are supported: use another checkpoint."
        )
    resize_mode = preprocess_config.get("resize_mode") or "shortest"
    interpolation = preprocess_config.get("interpolation") or "bicubic"
    if resize_mode not in ("shortest", "squash") or interpolation not in ("bicubic", "bilinear", "random"):
        raise UserError(
            f"{where} resizes images with resize_mode={resize_mode} and interpolation={interpolation}; only "
            "resize_mode shortest or squash, and interpolation bicubic, bilinear or random, are supported: use another "
            "checkpoint."
        )
    return Preprocessing(
        size=int(sides.pop()),
        mean=mean,
        std=std,
        squash=resize_mode == "squash",
        interpolation="bilinear" if interpolation == "bilinear" else "bicubic",  # open_clip evaluates random as bicubic
    )


def _channels(value: Any) -> tuple[Any, ...]:
    """Return a statistic as one value per channel; a single number applies to all three channels."""
    return tuple(value) if isinstance(value, list | tuple) else (value,) * 3
