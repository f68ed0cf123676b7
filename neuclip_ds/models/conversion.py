"""Convert trained models to other libraries, and write them in the libraries' file formats.

The config and weights of a CLIP model are converted from timm's ViT to transformers' CLIPModel, and from CLIPModel to
open_clip's ViT. Tables map the tensor names. open_clip and timm store q, k and v in one tensor, and open_clip stores
projections transposed.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from neuclip_ds.errors import UserError
from neuclip_ds.models.export_towers import to_open_clip, write_sentence_transformers, write_vision_text_model
from neuclip_ds.models.pretrained.base import (
    LibraryModel,
    TrainedTowers,
    check_tensors,
    logit_tensors,
    rename_prefixes,
    save_weights,
)
from neuclip_ds.models.pretrained.files import SENTENCE_TRANSFORMERS
from neuclip_ds.models.pretrained.open_clip_models import (
    architecture,
    config_names,
    import_open_clip,
    with_own_encoder,
    write_config,
)
from neuclip_ds.models.pretrained.text_encoder import PretrainedTextTower
from neuclip_ds.models.pretrained.transformers_models import MODEL_TYPES
from neuclip_ds.models.towers import DualEncoder, VisionTower

_ACTIVATIONS = {"quick_gelu": True, "gelu": False}  # transformers' name -> open_clip's `quick_gelu`
_DEFAULT_EPS = 1e-5
_LEGACY_EOS = 2  # EOS id in old configs, for which CLIPModel pools at the largest token id
# transformers' tower options -> open_clip's options with the same values
_VISION_OPTIONS = {"hidden_size": "width", "num_hidden_layers": "layers", "patch_size": "patch_size"}
_TEXT_OPTIONS = {
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "max_position_embeddings": "context_length",
    "vocab_size": "vocab_size",
}
_QKV = re.compile(r"\.self_attn\.([qkv])_proj\.")  # the other libraries store these in one tensor
_TRANSPOSED = ("visual.proj", "text.text_projection")  # transposed in open_clip


class _Renaming(NamedTuple):
    """A pattern in transformers' tensor names, and its replacements in the names of the other libraries."""

    pattern: str
    open_clip: str
    timm: str  # in our dual encoder with a timm ViT; unused for text towers, which are transformers' own


_RENAMINGS = (  # applied in this order
    _Renaming(_QKV.pattern, ".attn.in_proj_", ".attn.qkv."),
    _Renaming("self_attn", "attn", "attn"),
    _Renaming("vision_model", "visual", "vision.trunk"),
    _Renaming("text_model", "text", ""),
    _Renaming("class_embedding", "class_embedding", "cls_token"),
    _Renaming("patch_embedding", "conv1", "patch_embed.proj"),
    _Renaming("position_embedding.weight", "positional_embedding", "pos_embed"),
    _Renaming(r"embeddings\.", "", ""),
    _Renaming("pre_layrnorm", "ln_pre", "norm_pre"),
    _Renaming("post_layernorm", "ln_post", "norm"),
    _Renaming("final_layer_norm", "ln_final", ""),
    _Renaming(r"encoder\.layers", "transformer.resblocks", "blocks"),
    _Renaming("layer_norm", "ln_", "norm"),
    _Renaming("fc1", "c_fc", "fc1"),
    _Renaming("fc2", "c_proj", "fc2"),
    _Renaming("out_proj", "out_proj", "proj"),
    _Renaming("visual_projection.weight", "visual.proj", "vision.projection.weight"),
    _Renaming("text_projection.weight", "text.text_projection", ""),
)


def timm_name(clip_name: str) -> str:
    """Convert a tensor name in transformers' CLIPModel to its name in our dual encoder with a timm ViT."""
    if clip_name.startswith("text_"):
        return clip_name.replace("text_model", "text.trunk").replace("text_projection", "text.projection")
    name = clip_name
    for renaming in _RENAMINGS:
        name = re.sub(renaming.pattern, renaming.timm, name)
    return name


def open_clip_name(clip_name: str) -> str:
    """Convert a tensor name in transformers' CLIPModel to its name in open_clip's CustomTextCLIP."""
    name = clip_name
    for renaming in _RENAMINGS:
        name = re.sub(renaming.pattern, renaming.open_clip, name)
    return name


def clip_to_open_clip_tensors(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert transformers' CLIP tensors to open_clip's names and layout."""
    converted: dict[str, Tensor] = {}
    for clip_name, tensor in weights.items():
        name = open_clip_name(clip_name)
        if name in converted:  # the first of q, k and v has added all three
            continue
        qkv = _QKV.search(clip_name)
        if qkv:
            names = [clip_name.replace(qkv[0], f".self_attn.{letter}_proj.") for letter in "qkv"]
            converted[name] = torch.cat([weights[part] for part in names])
        elif name in _TRANSPOSED:
            converted[name] = tensor.T.contiguous()
        else:
            converted[name] = tensor
    return converted


def tower_to_clip_tensors(config: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert our towers' tensors to the names and layout of the transformers model that a config describes."""
    converted = {}
    for clip_name, target in _meta_state(config).items():
        if clip_name == "logit_scale":
            continue
        name = timm_name(clip_name)
        tensor = weights[name]
        qkv = _QKV.search(clip_name)
        if qkv and qkv[0] not in name:  # timm's q, k and v are one tensor, those of our text tower are not
            tensor = tensor.chunk(3)["qkv".index(qkv[1])]
        # timm's embeddings have leading dimensions of 1
        converted[clip_name] = tensor.reshape(target.shape).contiguous()
    return converted


def _meta_state(config: Any) -> dict[str, Tensor]:
    """Return the tensors, on the meta device, of the transformers model that a config describes."""
    with torch.device("meta"):
        return MODEL_TYPES[config.model_type].model_class(config).state_dict()


def clip_to_open_clip(model: LibraryModel) -> LibraryModel:
    """Convert transformers' CLIPModel or MetaClip2Model to open_clip.

    Raises:
        UserError: the model is a SiglipModel, its towers do not use the same activation (GELU or quick GELU), or its
            preprocessing resizes images to more pixels than it crops them to.
    """
    clip_config = model.config
    if clip_config["model_type"] not in ("clip", "metaclip_2"):
        raise UserError(
            "This model cannot be exported to open_clip: transformers' SiglipModel uses tanh GELU, which open_clip's "
            "config cannot select for a timm tower. Use --format=transformers."
        )
    size = model.preprocessing.size
    margin = model.preprocessing.margin
    if margin:
        raise UserError(
            f"This model cannot be exported to open_clip: it resizes images to {size + margin} pixels and crops them "
            f"to {size}, which open_clip's config cannot express. Use --format=transformers."
        )
    vision = clip_config["vision_config"]
    text = clip_config["text_config"]
    activations = {vision["hidden_act"], text["hidden_act"]}
    if len(activations) != 1 or not activations <= _ACTIVATIONS.keys():
        raise UserError(
            "This model cannot be exported to open_clip, which needs either GELU or quick GELU in both towers, not "
            f"{' and '.join(sorted(activations))}. Use --format=transformers."
        )
    eos_id = text["eos_token_id"]
    if clip_config["model_type"] == "clip" and eos_id == _LEGACY_EOS:
        pooling = {"pool_type": "argmax"}  # at the largest id
    else:
        pooling = {"pool_type": "eos", "eos_id": eos_id}
    config = {
        "embed_dim": clip_config["projection_dim"],
        "quick_gelu": _ACTIVATIONS[activations.pop()],
        "vision_cfg": {
            "image_size": vision["image_size"],
            "head_width": vision["hidden_size"] // vision["num_attention_heads"],
            **_open_clip_options(vision, _VISION_OPTIONS),
        },
        "text_cfg": {
            **_open_clip_options(text, _TEXT_OPTIONS),
            **pooling,
            "hf_tokenizer_name": "tokenizer",  # open_clip reads the tokenizer from the local folder
        },
    }
    weights = clip_to_open_clip_tensors(model.weights)
    if "logit_bias" in weights:
        config["init_logit_bias"] = weights["logit_bias"].item()
    return LibraryModel(
        library="open_clip",
        config=config,
        weights=config_names(config, weights),
        preprocessing=model.preprocessing,
        tokenizer=model.tokenizer,
    )


def _open_clip_options(tower_config: Mapping[str, Any], options: Mapping[str, str]) -> dict[str, Any]:
    """Convert a tower's config from transformers to open_clip; `options` maps transformers' names to open_clip's."""
    converted = {}
    for clip_option, open_clip_option in options.items():
        converted[open_clip_option] = tower_config[clip_option]
    width = tower_config["hidden_size"]
    mlp_width = tower_config["intermediate_size"]
    if int(width * (mlp_width / width)) == mlp_width:  # open_clip computes the MLP's width in this way
        converted["mlp_ratio"] = mlp_width / width
    else:
        converted["mlp_ratio"] = (mlp_width + 0.5) / width
    if tower_config["layer_norm_eps"] != _DEFAULT_EPS:
        converted["norm_kwargs"] = {"eps": tower_config["layer_norm_eps"]}
    return converted


def towers_to_clip(towers: TrainedTowers) -> LibraryModel | None:
    """Convert a model built from a run's config to CLIPModel or MetaClip2Model; return None if it fits neither class.

    Any logit bias is kept for conversion to open_clip.
    """
    model = towers.model
    vision = _clip_vision_config(model.vision, towers.preprocessing.size)
    heads = {towers.config.vision.projection, towers.config.text.projection}
    if vision is None or isinstance(model.text, PretrainedTextTower) or heads != {"linear"}:
        return None
    model_type = "metaclip_2" if model.text.eos_id == _LEGACY_EOS else "clip"  # CLIPModel cannot pool at EOS id 2
    config = MODEL_TYPES[model_type].config_class(
        projection_dim=towers.config.embed_dim, vision_config=vision, text_config=_clip_text_options(model)
    )
    return LibraryModel(
        library="transformers",
        config=config.to_dict(),
        weights=tower_to_clip_tensors(config, towers.weights) | logit_tensors(towers.logits, ()),
        preprocessing=towers.preprocessing,
        tokenizer=towers.tokenizer,
    )


def _clip_text_options(model: DualEncoder) -> dict[str, Any]:
    """Return the options that describe a model's CLIP text transformer in transformers' CLIPTextConfig."""
    options = {**model.text.trunk.config.to_dict(), "eos_token_id": model.text.eos_id}
    del options["model_type"]
    return options


def _timm_towers_to_open_clip(towers: TrainedTowers) -> LibraryModel:
    """Convert a model that is not a CLIP model to open_clip; raise UserError if open_clip cannot express it."""
    if isinstance(towers.model.text, PretrainedTextTower):
        return to_open_clip(towers, {}, {})
    options = _clip_text_options(towers.model)
    text_config = {
        **_open_clip_options(options, _TEXT_OPTIONS),
        "pool_type": "eos",
        "eos_id": options["eos_token_id"],
        "hf_tokenizer_name": "tokenizer",  # open_clip reads the tokenizer from the local folder
        "quick_gelu": _ACTIVATIONS[options["hidden_act"]],
    }
    clip_names = {"text.trunk.": "text_model.", "text.projection.": "text_projection."}
    weights = clip_to_open_clip_tensors(rename_prefixes(towers.weights, clip_names))
    return to_open_clip(towers, text_config, weights)


def _clip_vision_config(tower: VisionTower, image_size: int) -> dict[str, Any] | None:
    """Return a tower's options for transformers' CLIPVisionConfig, or None if the tower is not a CLIP ViT."""
    trunk = tower.trunk
    if not isinstance(trunk, VisionTransformer) or trunk.global_pool != "token":
        return None
    block = trunk.blocks[0]
    activation = {"GELU": "gelu", "QuickGELU": "quick_gelu"}.get(type(block.mlp.act).__name__)
    if activation is None or trunk.pos_embed is None or trunk.pos_embed.shape[1] != trunk.patch_embed.num_patches + 1:
        return None
    patch_height, patch_width = trunk.patch_embed.patch_size
    if patch_height != patch_width:
        return None
    sizes = {
        "hidden_size": trunk.embed_dim,
        "num_hidden_layers": len(trunk.blocks),
        "num_attention_heads": block.attn.num_heads,
        "intermediate_size": block.mlp.fc1.out_features,
        "patch_size": patch_height,
        "image_size": image_size,
        "hidden_act": activation,
        "layer_norm_eps": trunk.norm.eps,
    }
    # A CLIP ViT has exactly the tensors of transformers' CLIP vision model.
    clip_config = MODEL_TYPES["clip"].config_class(vision_config=sizes, text_config={"num_hidden_layers": 1})
    clip_names = {timm_name(name) for name in _meta_state(clip_config) if name.startswith("vis")}
    names = {f"vision.{name}" for name in tower.state_dict()}
    return sizes if names == clip_names else None


def write_library_model(model: LibraryModel | TrainedTowers, library: str, folder: Path) -> None:
    """Write a model to a folder in a library's file format, converted if needed.

    Args:
        model: the model in its own library's format, or the towers of a model that was built from the config.
        library: library whose format to write, `transformers`, `open_clip` or `sentence_transformers`.
        folder: an empty folder.

    Raises:
        UserError: the format does not support the model, or `library` is open_clip, which is not installed.
    """
    if isinstance(model, TrainedTowers):
        _write_towers(model, library, folder)
    elif library == SENTENCE_TRANSFORMERS:
        raise UserError(
            f"A pretrained {model.library} model cannot be converted to sentence-transformers; export it with "
            f"--format={model.library}."
        )
    elif library == model.library == "transformers":
        write_transformers(model, folder)
    elif library == model.library == "open_clip":
        write_open_clip(model, folder)
    elif library == "open_clip":
        write_open_clip(clip_to_open_clip(model), folder)
    else:
        raise UserError("An open_clip model cannot be converted to transformers; export it with --format=open_clip.")


def _write_towers(towers: TrainedTowers, library: str, folder: Path) -> None:
    """Write a model that was built from the config; for transformers and open_clip, as a CLIP model if it is one."""
    if library == SENTENCE_TRANSFORMERS:
        write_sentence_transformers(towers, folder)
        return
    clip = towers_to_clip(towers)
    if clip is not None:
        write_library_model(clip, library, folder)
    elif library == "transformers":
        write_vision_text_model(towers, folder)
    else:
        write_open_clip(_timm_towers_to_open_clip(towers), folder)


def write_transformers(model: LibraryModel, folder: Path) -> None:
    """Write the config, weights, preprocessor and tokenizer for transformers' `AutoModel` and `AutoProcessor`."""
    model_type = MODEL_TYPES[model.config["model_type"]]
    config = model_type.config_class.from_dict(
        {**model.config, "architectures": [model_type.model_class.__name__], "dtype": "float32"}
    )
    if hasattr(config, "projection_dim"):  # single-tower classes read it from their tower's config
        config.vision_config.projection_dim = config.projection_dim
        config.text_config.projection_dim = config.projection_dim
    expected = _meta_state(config)
    weights = dict(model.weights)
    if "logit_bias" not in expected:  # CLIPModel has no bias
        weights.pop("logit_bias", None)
    check_tensors(str(folder), expected, weights)
    config.save_pretrained(folder)
    save_weights(weights, folder / "model.safetensors")
    model_type.processor(model.preprocessing).save_pretrained(folder)
    model.tokenizer.save(folder)


def write_open_clip(model: LibraryModel, folder: Path) -> None:
    """Write the config, weights and tokenizer in files that open_clip can load with `local-dir:`.

    If the model's text encoder is a local folder, open_clip must run in `folder` (see `with_own_encoder`).
    """
    with torch.device("meta"):
        expected = architecture(model.config, str(folder)).state_dict()
    weights = import_open_clip().model.convert_to_custom_text_state_dict(model.weights)
    check_tensors(str(folder), expected, weights)
    write_config(folder, with_own_encoder(model.config, folder), model.preprocessing)
    save_weights(model.weights, folder / "open_clip_model.safetensors")
    model.tokenizer.save(folder)
