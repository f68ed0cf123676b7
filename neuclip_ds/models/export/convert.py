"""Convert CLIP weights and configs between transformers' CLIPModel, open_clip's ViT and timm's ViT.

The tables map names; one tensor may be several of transformers' (q, k and v), and open_clip transposes projections.
Both directions use the same table.
"""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any, NamedTuple

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from transformers import CLIPTextModel

from neuclip_ds.errors import UserError
from neuclip_ds.models.pretrained.base import Package, rename_prefixes
from neuclip_ds.models.pretrained.open_clip_models import config_names, custom_text_names, library
from neuclip_ds.models.pretrained.text_encoders import PooledTextTower
from neuclip_ds.models.pretrained.transformers_models import MODEL_TYPES
from neuclip_ds.models.towers import Encoder, TextTower, VisionTower

_ACTIVATIONS = {"quick_gelu": True, "gelu": False}  # transformers' name -> open_clip's `quick_gelu`
_DEFAULT_EPS = 1e-5
_LEGACY_EOS = 2  # for which CLIPModel reads the feature at the largest id, as old configs mean it
_LOGITS = {"logit_scale": "logit_scale", "logit_bias": "logit_bias"}


class TensorNames(NamedTuple):
    """The name of a tensor in another library and in transformers."""

    name: str
    clip: tuple[str, ...]  # transformers' names; their tensors are concatenated along the first dimension
    transposed: bool = False


def _blocks(clip: str, other: str, layers: int, names: Mapping[str, str], qkv: str) -> Iterator[TensorNames]:
    """Yield the names of the tensors of a transformer's blocks.

    Args:
        clip, other: prefix of transformers' names, and of the other library's.
        names: modules of a block, the other library's name -> transformers'.
        qkv: the other library's name of the joint projection, to which weight and bias are appended.
    """
    for layer in range(layers):
        ours, theirs = f"{clip}encoder.layers.{layer}.", f"{other}{layer}."
        for kind in ("weight", "bias"):
            for part, name in names.items():
                yield TensorNames(f"{theirs}{part}.{kind}", (f"{ours}{name}.{kind}",))
            heads = tuple(f"{ours}self_attn.{letter}_proj.{kind}" for letter in "qkv")
            yield TensorNames(f"{theirs}{qkv}{kind}", heads)


_OPEN_CLIP_BLOCK = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
    "attn.out_proj": "self_attn.out_proj",
}
_TIMM_BLOCK = {
    "norm1": "layer_norm1",
    "norm2": "layer_norm2",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
    "attn.proj": "self_attn.out_proj",
}


def open_clip_vision(layers: int) -> Iterator[TensorNames]:
    """Yield the tensor names of open_clip's image tower."""
    yield TensorNames("visual.class_embedding", ("vision_model.embeddings.class_embedding",))
    yield TensorNames("visual.conv1.weight", ("vision_model.embeddings.patch_embedding.weight",))
    yield TensorNames("visual.positional_embedding", ("vision_model.embeddings.position_embedding.weight",))
    for kind in ("weight", "bias"):
        yield TensorNames(f"visual.ln_pre.{kind}", (f"vision_model.pre_layrnorm.{kind}",))
        yield TensorNames(f"visual.ln_post.{kind}", (f"vision_model.post_layernorm.{kind}",))
    yield from _blocks("vision_model.", "visual.transformer.resblocks.", layers, _OPEN_CLIP_BLOCK, "attn.in_proj_")
    yield TensorNames("visual.proj", ("visual_projection.weight",), transposed=True)


def open_clip_text(layers: int) -> Iterator[TensorNames]:
    """Yield the tensor names of open_clip's text tower."""
    yield TensorNames("text.token_embedding.weight", ("text_model.embeddings.token_embedding.weight",))
    yield TensorNames("text.positional_embedding", ("text_model.embeddings.position_embedding.weight",))
    for kind in ("weight", "bias"):
        yield TensorNames(f"text.ln_final.{kind}", (f"text_model.final_layer_norm.{kind}",))
    yield from _blocks("text_model.", "text.transformer.resblocks.", layers, _OPEN_CLIP_BLOCK, "attn.in_proj_")
    yield TensorNames("text.text_projection", ("text_projection.weight",), transposed=True)


def timm_vision(layers: int) -> Iterator[TensorNames]:
    """Yield the tensor names of timm's CLIP ViTs in our `VisionTower`."""
    trunk = "vision.trunk."
    yield TensorNames(f"{trunk}cls_token", ("vision_model.embeddings.class_embedding",))
    yield TensorNames(f"{trunk}pos_embed", ("vision_model.embeddings.position_embedding.weight",))
    yield TensorNames(f"{trunk}patch_embed.proj.weight", ("vision_model.embeddings.patch_embedding.weight",))
    for kind in ("weight", "bias"):
        yield TensorNames(f"{trunk}norm_pre.{kind}", (f"vision_model.pre_layrnorm.{kind}",))
        yield TensorNames(f"{trunk}norm.{kind}", (f"vision_model.post_layernorm.{kind}",))
    yield from _blocks("vision_model.", f"{trunk}blocks.", layers, _TIMM_BLOCK, "attn.qkv.")
    yield TensorNames("vision.projection.weight", ("visual_projection.weight",))


def from_clip(pairs: Iterator[TensorNames], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return transformers' tensors under the other library's names."""
    result = {}
    for pair in pairs:
        tensor = torch.cat([weights[name] for name in pair.clip])
        result[pair.name] = tensor.T.contiguous() if pair.transposed else tensor
    return result


def to_clip(pairs: Iterator[TensorNames], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the other library's tensors under transformers' names."""
    result: dict[str, Tensor] = {}
    for pair in pairs:
        tensor = weights[pair.name].T if pair.transposed else weights[pair.name]
        result.update(zip(pair.clip, tensor.chunk(len(pair.clip)), strict=True))
    return {name: tensor.contiguous() for name, tensor in result.items()}


def clip_to_open_clip(package: Package) -> Package:
    """Convert transformers' CLIPModel or MetaClip2Model to open_clip.

    Raises:
        UserError: it is a SiglipModel or Siglip2Model, or has an unknown activation.
    """
    tree = package.config
    if tree["model_type"] not in ("clip", "metaclip_2"):
        raise UserError(
            f"A {tree['model_type']} model of transformers has tanh GELUs, which open_clip's config cannot set for its "
            "timm tower; export it with --format=transformers."
        )
    vision, text = tree["vision_config"], tree["text_config"]
    acts = {part["hidden_act"] for part in (vision, text)}
    if len(acts) != 1 or not acts <= _ACTIVATIONS.keys():
        raise UserError(
            f"open_clip has one GELU or quick GELU for both towers, not {' and '.join(sorted(acts))}; export with "
            "--format=transformers."
        )
    config = {
        "embed_dim": tree["projection_dim"],
        "quick_gelu": _ACTIVATIONS[acts.pop()],
        "vision_cfg": {
            "image_size": vision["image_size"],
            "patch_size": vision["patch_size"],
            "head_width": vision["hidden_size"] // vision["num_attention_heads"],
            **_open_clip_sizes(vision),
        },
        "text_cfg": _open_clip_text_cfg(text, _open_clip_pooling(tree)),
    }
    weights = {
        **from_clip(open_clip_vision(vision["num_hidden_layers"]), package.weights),
        **from_clip(open_clip_text(text["num_hidden_layers"]), package.weights),
        **rename_prefixes(package.weights, _LOGITS),
    }
    return Package("open_clip", config, config_names(config, weights), package.preprocessing, package.tokenizer)


def open_clip_to_clip(package: Package) -> Package:
    """Convert open_clip's ViT and text transformer to CLIPModel; raise UserError for options that CLIPModel lacks."""
    tree = package.config
    vision, text = dict(tree["vision_cfg"]), dict(tree["text_cfg"])
    _refuse_extras("vision_cfg", vision, library().CLIPVisionCfg, _VISION_PARTS)
    _refuse_extras("text_cfg", text, library().CLIPTextCfg, _TEXT_PARTS)
    act = "quick_gelu" if tree.get("quick_gelu", False) else "gelu"
    width = vision.get("width", 768)
    specials = package.tokenizer.special_ids
    if text.get("pool_type") == "eos" and text["eos_id"] != specials["eos_token_id"]:
        raise UserError(
            f"The text tower is read at token {text['eos_id']}, which is not the tokenizer's EOS; correct "
            "text_cfg.eos_id."
        )
    kind = _read_at_eos(text["eos_id"] if text.get("pool_type") == "eos" else None)
    config = kind(
        projection_dim=tree["embed_dim"],
        vision_config={
            "image_size": package.preprocessing.size,
            "patch_size": vision.get("patch_size", 16),
            "num_attention_heads": width // vision.get("head_width", 64),
            "hidden_act": act,
            **_clip_sizes(vision, width),
        },
        text_config={
            "max_position_embeddings": text.get("context_length", 77),
            "vocab_size": text.get("vocab_size", 49408),
            "num_attention_heads": text.get("heads", 8),
            "hidden_act": act,
            **_clip_sizes(text, text.get("width", 512)),
            **specials,
        },
    )
    named = custom_text_names(package.weights)
    weights = {
        **to_clip(open_clip_vision(config.vision_config.num_hidden_layers), named),
        **to_clip(open_clip_text(config.text_config.num_hidden_layers), named),
        **rename_prefixes(named, {"logit_scale": "logit_scale"}),
    }
    return Package("transformers", config.to_dict(), weights, package.preprocessing, package.tokenizer)


_SIZES = {"layers", "width", "mlp_ratio", "norm_kwargs"}
_VISION_PARTS = _SIZES | {"image_size", "head_width", "patch_size", "timm_model_pretrained"}
_TEXT_PARTS = _SIZES | {"context_length", "vocab_size", "heads", "eos_id", "pad_id", "hf_tokenizer_name"}


def _refuse_extras(where: str, config: Mapping[str, Any], kind: Any, known: set[str]) -> None:
    defaults = {field.name: None if field.default is MISSING else field.default for field in fields(kind)}
    extras = [name for name, value in config.items() if name not in known and value != defaults.get(name)]
    if config.get("pool_type") == "eos":
        extras.remove("pool_type")
    if not isinstance(config.get("layers", 12), int):
        extras.append("layers")
    if extras:
        raise UserError(
            f"transformers' CLIPModel cannot express {', '.join(f'{where}.{name}={config[name]}' for name in extras)} "
            "of open_clip; export with --format=open_clip."
        )


def _open_clip_text_cfg(text: Mapping[str, Any], pooling: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "context_length": text["max_position_embeddings"],
        "vocab_size": text["vocab_size"],
        "heads": text["num_attention_heads"],
        **_open_clip_sizes(text),
        **pooling,
        "hf_tokenizer_name": "tokenizer",  # open_clip looks for it in the local folder
    }


def _open_clip_sizes(part: Mapping[str, Any]) -> dict[str, Any]:
    width, inner = part["hidden_size"], part["intermediate_size"]
    exact = int(width * (inner / width)) == inner  # as open_clip computes it
    sizes = {
        "width": width,
        "layers": part["num_hidden_layers"],
        "mlp_ratio": (inner if exact else inner + 0.5) / width,
    }
    eps = part["layer_norm_eps"]
    return sizes if eps == _DEFAULT_EPS else {**sizes, "norm_kwargs": {"eps": eps}}


def _open_clip_pooling(tree: Mapping[str, Any]) -> dict[str, Any]:
    eos = tree["text_config"]["eos_token_id"]
    legacy = tree["model_type"] == "clip" and eos == _LEGACY_EOS  # feature at the largest id
    return {"pool_type": "argmax"} if legacy else {"pool_type": "eos", "eos_id": eos}


def _read_at_eos(eos: int | None) -> Any:
    """Return the configs' class of a CLIP model that reads its feature at the EOS: CLIPModel does not if that is 2."""
    return MODEL_TYPES["metaclip_2" if eos == _LEGACY_EOS else "clip"].config


def _clip_sizes(part: Mapping[str, Any], width: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "num_hidden_layers": part.get("layers", 12),
        "intermediate_size": int(width * part.get("mlp_ratio", 4.0)),
        "layer_norm_eps": (part.get("norm_kwargs") or {}).get("eps", _DEFAULT_EPS),
    }


def timm_to_clip(package: Package) -> Package:
    """Convert a model trained from scratch with a CLIP ViT of timm to CLIPModel; raise UserError for another one."""
    tree = package.config
    if tree["clip_vision"] is None:
        other = "" if _not_by_name(tree["vision"], tree) else ", or export with --format=open_clip"
        raise UserError(
            f"transformers' CLIPModel cannot express the image model {tree['vision']['name']!r} of timm; train one of "
            f"timm's vit_*_clip_* models, which may have options{other}."
        )
    if tree["text"] is None:
        raise UserError(_text_refusal("transformers' CLIPModel", tree))
    config = _read_at_eos(tree["text"]["eos_token_id"])(
        projection_dim=tree["embed_dim"], vision_config=tree["clip_vision"], text_config=tree["text"]
    )
    vision = to_clip(timm_vision(tree["clip_vision"]["num_hidden_layers"]), package.weights)
    for name in ("class_embedding", "position_embedding.weight"):
        key = f"vision_model.embeddings.{name}"
        vision[key] = vision[key].flatten(0, -2).squeeze(0)  # timm's have a leading dimension of 1
    weights = {**vision, **rename_prefixes(package.weights, _TEXT_TOWER), **rename_prefixes(package.weights, _LOGITS)}
    return Package("transformers", config.to_dict(), weights, package.preprocessing, package.tokenizer)


_TEXT_TOWER = {"text.trunk.": "text_model.", "text.projection.": "text_projection."}


def timm_to_open_clip(package: Package) -> Package:
    """Convert a model trained from scratch to open_clip: its ViT if it is CLIP's, else timm's image model by name.

    Raises:
        UserError: the image model has options, an image size or a head that open_clip's config cannot express.
    """
    tree = package.config
    if tree["text"] is None:
        raise UserError(_text_refusal("open_clip's config", tree))
    if tree["clip_vision"] is not None:
        return clip_to_open_clip(timm_to_clip(package))
    vision = tree["vision"]
    problem = _not_by_name(vision, tree)
    if problem:
        raise UserError(
            f"open_clip's config cannot express {problem} of the image model {vision['name']!r}; train one of timm's "
            "models without options, or one of its vit_*_clip_* models, which may have options."
        )
    text = MODEL_TYPES["clip"].config(text_config=tree["text"]).text_config.to_dict()
    named = {**package.weights, **rename_prefixes(package.weights, _TEXT_TOWER)}
    config = {
        "embed_dim": tree["embed_dim"],
        "custom_text": True,
        "quick_gelu": _ACTIVATIONS[text["hidden_act"]],
        "vision_cfg": {
            "timm_model_name": vision["name"],
            "timm_model_pretrained": False,
            "timm_pool": "",
            "timm_proj": "linear",
            "image_size": vision["image_size"],
        },
        "text_cfg": _open_clip_text_cfg(text, {"pool_type": "eos", "eos_id": text["eos_token_id"]}),
    }
    weights = {
        **rename_prefixes(
            package.weights, {"vision.trunk.": "visual.trunk.", "vision.projection.": "visual.head.proj."}
        ),
        **from_clip(open_clip_text(text["num_hidden_layers"]), named),
        **rename_prefixes(package.weights, _LOGITS),
    }
    return Package("open_clip", config, weights, package.preprocessing, package.tokenizer)


def _text_refusal(what: str, tree: Mapping[str, Any]) -> str:
    return (
        f"{what} cannot express the text encoder model.text.pretrained={tree['text_encoder']} with its pooling; export "
        "with --format=onnx."
    )


def _not_by_name(vision: Mapping[str, Any], tree: Mapping[str, Any]) -> str | None:
    if vision["options"]:
        return f"the options {vision['options']}"
    if vision["image_size"] != tree["default_image_size"]:
        return f"the image size {vision['image_size']} (it has {tree['default_image_size']})"
    return None if tree["linear_projection"] else "the attention pool"


def clip_text_config(tower: Encoder) -> dict[str, Any] | None:
    """Return the tower as transformers' CLIPTextConfig, or None if it is not CLIP's text transformer."""
    if not isinstance(tower, TextTower | PooledTextTower) or not isinstance(tower.trunk, CLIPTextModel):
        return None
    if isinstance(tower, PooledTextTower) and tower.pooling != "eos":
        return None
    config = {**tower.trunk.config.to_dict(), "eos_token_id": tower.eos_id}
    return {name: value for name, value in config.items() if name != "model_type"}


def clip_vision_config(tower: VisionTower, image_size: int) -> dict[str, Any] | None:
    """Return the tower as transformers' CLIPVisionConfig, or None if it is not CLIP's vision transformer."""
    trunk = tower.trunk
    if not isinstance(trunk, VisionTransformer) or trunk.global_pool != "token":
        return None
    wanted = {pair.name for pair in timm_vision(len(trunk.blocks))}
    if {f"vision.{name}" for name in tower.state_dict()} != wanted:
        return None
    block = trunk.blocks[0]
    activation = {"GELU": "gelu", "QuickGELU": "quick_gelu"}.get(type(block.mlp.act).__name__)
    if activation is None or trunk.pos_embed.shape[1] != trunk.patch_embed.num_patches + 1:
        return None
    return {
        "hidden_size": trunk.embed_dim,
        "num_hidden_layers": len(trunk.blocks),
        "num_attention_heads": block.attn.num_heads,
        "intermediate_size": block.mlp.fc1.out_features,
        "patch_size": trunk.patch_embed.patch_size[0],
        "image_size": image_size,
        "hidden_act": activation,
        "layer_norm_eps": trunk.norm.eps,
    }
