"""Export trained models to the file formats of other libraries.

The config and weights of a CLIP model are converted from timm's ViT to transformers' CLIPModel, and from CLIPModel to
open_clip's ViT. Tables map the tensor names. open_clip and timm store q, k and v in one tensor, and open_clip stores
projections transposed.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from neuclip_ds.errors import UserError
from neuclip_ds.models.pretrained.base import LogitParameters, Package, Preprocessing, check_tensors, logit_tensors
from neuclip_ds.models.pretrained.open_clip_models import (
    architecture,
    config_names,
    library,
    write_config,
)
from neuclip_ds.models.pretrained.transformers_models import MODEL_TYPES
from neuclip_ds.models.tokenizer import ModelTokenizer
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
# (pattern in transformers' names, replacement for open_clip, replacement for our timm towers), applied in this order
_NAMES = (
    (_QKV.pattern, ".attn.in_proj_", ".attn.qkv."),
    ("self_attn", "attn", "attn"),
    ("vision_model", "visual", "vision.trunk"),
    ("text_model", "text", ""),
    ("class_embedding", "class_embedding", "cls_token"),
    ("patch_embedding", "conv1", "patch_embed.proj"),
    ("position_embedding.weight", "positional_embedding", "pos_embed"),
    (r"embeddings\.", "", ""),
    ("pre_layrnorm", "ln_pre", "norm_pre"),
    ("post_layernorm", "ln_post", "norm"),
    ("final_layer_norm", "ln_final", ""),
    (r"encoder\.layers", "transformer.resblocks", "blocks"),
    ("layer_norm", "ln_", "norm"),
    ("fc1", "c_fc", "fc1"),
    ("fc2", "c_proj", "fc2"),
    ("out_proj", "out_proj", "proj"),
    ("visual_projection.weight", "visual.proj", "vision.projection.weight"),
    ("text_projection.weight", "text.text_projection", ""),
)


def timm_name(clip: str) -> str:
    """Convert a tensor name in transformers' CLIPModel to its name in our dual encoder with a timm ViT."""
    if clip.startswith("text_"):
        return clip.replace("text_model", "text.trunk").replace("text_projection", "text.projection")
    return _renamed(clip, 2)


def _renamed(clip: str, column: int) -> str:
    for names in _NAMES:
        clip = re.sub(names[0], names[column], clip)
    return clip


def from_clip(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert transformers' CLIP tensors to open_clip's names and layout."""
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        key, part = _renamed(name, 1), _QKV.search(name)
        if part and key not in found:
            tensor = torch.cat([weights[name.replace(part[0], f".self_attn.{one}_proj.")] for one in "qkv"])
        found.setdefault(key, tensor.T.contiguous() if key in _TRANSPOSED else tensor)
    return found


def to_clip(config: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert our towers' tensors to the names and layout of the transformers model that a config describes."""
    found = {}
    for name, wanted in _meta_state(config).items():
        key, part = timm_name(name), _QKV.search(name)
        if key == "logit_scale":
            continue
        tensor = weights[key]
        if part and part[0] not in key:
            tensor = tensor.chunk(3)["qkv".index(part[1])]
        found[name] = tensor.reshape(wanted.shape).contiguous()  # timm's embeddings have leading dimensions of 1
    return found


def _meta_state(config: Any) -> dict[str, Tensor]:
    with torch.device("meta"):
        return MODEL_TYPES[config.model_type].model(config).state_dict()


def clip_to_open_clip(package: Package) -> Package:
    """Convert transformers' CLIPModel or MetaClip2Model to open_clip.

    Raises:
        UserError: the model is a SiglipModel, or its towers do not both use GELU or both use quick GELU.
    """
    tree = package.config
    if tree["model_type"] not in ("clip", "metaclip_2"):
        raise UserError(
            "A SiglipModel of transformers uses tanh GELU, which open_clip's config cannot set for its "
            "timm tower; export it with --format=transformers."
        )
    vision, text = tree["vision_config"], tree["text_config"]
    acts = {part["hidden_act"] for part in (vision, text)}
    if len(acts) != 1 or not acts <= _ACTIVATIONS.keys():
        raise UserError(
            f"open_clip needs GELU, or quick GELU, in both towers, not {' and '.join(sorted(acts))}; export with "
            "--format=transformers."
        )
    head_width, eos = vision["hidden_size"] // vision["num_attention_heads"], text["eos_token_id"]
    at_largest_id = tree["model_type"] == "clip" and eos == _LEGACY_EOS
    config = {
        "embed_dim": tree["projection_dim"],
        "quick_gelu": _ACTIVATIONS[acts.pop()],
        "vision_cfg": {
            "image_size": vision["image_size"],
            "head_width": head_width,
            **_open_clip_options(vision, _VISION_OPTIONS),
        },
        "text_cfg": {
            **_open_clip_options(text, _TEXT_OPTIONS),
            **({"pool_type": "argmax"} if at_largest_id else {"pool_type": "eos", "eos_id": eos}),
            "hf_tokenizer_name": "tokenizer",  # open_clip reads the tokenizer from the local folder
        },
    }
    weights = from_clip(package.weights)
    if "logit_bias" in weights:
        config["init_logit_bias"] = weights["logit_bias"].item()
    return Package("open_clip", config, config_names(config, weights), package.preprocessing, package.tokenizer)


def _open_clip_options(part: Mapping[str, Any], options: Mapping[str, str]) -> dict[str, Any]:
    """Convert a tower's config from transformers to open_clip."""
    found = {theirs: part[ours] for ours, theirs in options.items()}
    width, inner = part["hidden_size"], part["intermediate_size"]
    exact = int(width * (inner / width)) == inner  # the width as open_clip computes it
    found["mlp_ratio"] = (inner if exact else inner + 0.5) / width
    if part["layer_norm_eps"] != _DEFAULT_EPS:
        found["norm_kwargs"] = {"eps": part["layer_norm_eps"]}
    return found


def towers_to_clip(
    model: DualEncoder,
    weights: Mapping[str, Tensor],
    logits: LogitParameters,
    preprocessing: Preprocessing,
    tokenizer: ModelTokenizer,
) -> Package:
    """Convert a model built from a run's config to CLIPModel or MetaClip2Model; `model` may be on the meta device.

    Any logit bias is kept for conversion to open_clip. Raises `UserError` if the image tower is not a CLIP ViT.
    """
    image_tower = model.vision
    vision = _clip_vision_config(image_tower, preprocessing.size)
    if vision is None:
        name = image_tower.trunk.pretrained_cfg["architecture"]
        raise UserError(
            f"A CLIP model of transformers or open_clip cannot express timm's image model {name!r}: open the run with "
            "neuclip_ds.load, or train one of timm's vit_*_clip_* models."
        )
    text = {**model.text.trunk.config.to_dict(), "eos_token_id": model.text.eos_id}
    del text["model_type"]
    kind = "metaclip_2" if model.text.eos_id == _LEGACY_EOS else "clip"  # CLIPModel cannot pool at EOS id 2
    config = MODEL_TYPES[kind].config(
        projection_dim=cast(nn.Linear, image_tower.projection).out_features, vision_config=vision, text_config=text
    )
    found = to_clip(config, weights) | logit_tensors(logits, ())
    return Package("transformers", config.to_dict(), found, preprocessing, tokenizer)


def _clip_vision_config(tower: VisionTower, image_size: int) -> dict[str, Any] | None:
    """Return a tower's options for transformers' CLIPVisionConfig, or None if the tower is not a CLIP ViT."""
    trunk = tower.trunk
    if not isinstance(trunk, VisionTransformer) or trunk.global_pool != "token":
        return None
    block = trunk.blocks[0]
    activation = {"GELU": "gelu", "QuickGELU": "quick_gelu"}.get(type(block.mlp.act).__name__)
    if activation is None or trunk.pos_embed is None or trunk.pos_embed.shape[1] != trunk.patch_embed.num_patches + 1:
        return None
    sizes = {
        "hidden_size": trunk.embed_dim,
        "num_hidden_layers": len(trunk.blocks),
        "num_attention_heads": block.attn.num_heads,
        "intermediate_size": block.mlp.fc1.out_features,
        "patch_size": trunk.patch_embed.patch_size[0],
        "image_size": image_size,
        "hidden_act": activation,
        "layer_norm_eps": trunk.norm.eps,
    }
    wanted = _meta_state(MODEL_TYPES["clip"].config(vision_config=sizes, text_config={"num_hidden_layers": 1}))
    names = {timm_name(name) for name in wanted if name.startswith("vis")}
    return sizes if {f"vision.{name}" for name in tower.state_dict()} == names else None


def export(package: Package, form: str, folder: Path) -> None:
    """Write a model to a folder, converted to the requested format if needed.

    Args:
        package: the model in its library's format.
        form: the format to write, `transformers` or `open_clip`.
        folder: an empty folder.

    Raises:
        UserError: the format does not support the model.
    """
    if form == "open_clip":
        write_open_clip(package if package.family == form else clip_to_open_clip(package), folder)
    elif package.family == form:
        write_transformers(package, folder)
    else:
        raise UserError("An open_clip model cannot be converted to transformers; export it with --format=open_clip.")


def write_transformers(package: Package, folder: Path) -> None:
    """Write the config, weights, preprocessor and tokenizer for transformers' `AutoModel` and `AutoProcessor`."""
    kind = MODEL_TYPES[package.config["model_type"]]
    config = kind.config.from_dict({**package.config, "architectures": [kind.model.__name__], "dtype": "float32"})
    if hasattr(config, "projection_dim"):  # single-tower classes read it from their tower's config
        config.vision_config.projection_dim = config.text_config.projection_dim = config.projection_dim
    wanted = _meta_state(config)
    weights = {name: value for name, value in package.weights.items() if name in wanted or name != "logit_bias"}
    check_tensors(str(folder), wanted, weights)
    config.save_pretrained(folder)
    save_file(_plain(weights), folder / "model.safetensors", metadata={"format": "pt"})
    kind.processor(package.preprocessing).save_pretrained(folder)
    package.tokenizer.save(folder)


def write_open_clip(package: Package, folder: Path) -> None:
    """Write the config, weights and tokenizer in files that open_clip can load with `local-dir:`."""
    with torch.device("meta"):
        wanted = architecture(package.config, str(folder)).state_dict()
    check_tensors(str(folder), wanted, library().model.convert_to_custom_text_state_dict(package.weights))
    write_config(folder, package.config, package.preprocessing)
    save_file(_plain(package.weights), folder / "open_clip_model.safetensors", metadata={"format": "pt"})
    package.tokenizer.save(folder)


def _plain(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous copies of the tensors, as safetensors requires; convert floating-point tensors to float32."""
    return {
        name: (tensor.float() if tensor.is_floating_point() else tensor).contiguous().clone()
        for name, tensor in weights.items()
    }
