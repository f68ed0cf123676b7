"""Write models that were built from the config, tower by tower, in the formats of three libraries.

transformers: a VisionTextDualEncoderModel, whose image tower is timm's model in transformers' wrapper. open_clip: a
model with timm's image tower and either a transformers text encoder or open_clip's own text transformer.
sentence-transformers: a router with one route for texts and one for images, which supports all of our towers. If a
format cannot express a model's features exactly, UserError is raised. The logit bias is written only for open_clip, and
the temperature for all formats but sentence-transformers.
"""

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from timm.layers import AttentionPool2d, RotAttentionPool2d
from torch import Tensor, nn
from transformers import (
    AutoModel,
    PreTrainedConfig,
    TimmWrapperConfig,
    VisionTextDualEncoderConfig,
    VisionTextDualEncoderModel,
)

from neuclip_ds.errors import UserError
from neuclip_ds.files import expand_user
from neuclip_ds.models.image_models import names_by_image_size
from neuclip_ds.models.pretrained.base import (
    LibraryModel,
    TrainedTowers,
    check_tensors,
    logit_tensors,
    rename_prefixes,
    save_weights,
)
from neuclip_ds.models.pretrained.files import SENTENCE_TRANSFORMERS
from neuclip_ds.models.pretrained.text_encoder import PretrainedTextTower, TextEncoderTokenizer
from neuclip_ds.models.pretrained.transformers_models import MODEL_TYPES
from neuclip_ds.models.tokenizer import (
    CaptionTokenizer,
    add_special_tokens,
    make_readable_by_transformers_4,
    save_tokenizer,
)

_IMAGE = "vision.trunk."  # prefixes of our tensor names
_TEXT = "text.trunk."
_ANY_MODEL = (
    f"export the model with --format={SENTENCE_TRANSFORMERS}"  # a format for every model that is built from the config
)
_OPEN_CLIP_ENCODERS = ("bert", "roberta", "xlm-roberta")  # model types that open_clip's text tower can build
# BERT's pooler is tanh(W h + b) of the first hidden state h: with W = 2^-14 I and b = 0, it returns 2^-14 h, up to
# float32 rounding, and the projection multiplies by 2^14
_POOLER_SCALE = 2.0**-14


# transformers


def write_vision_text_model(towers: TrainedTowers, folder: Path) -> None:
    """Write a VisionTextDualEncoderModel, its image processor and its tokenizer to a folder.

    Raises:
        UserError: a projection is not linear or is part of the attention pooling; CLIP's text transformer has EOS id 2;
            or another text encoder does not pool at its first token or has no BERT pooler.
    """
    _require_linear_heads(towers, "VisionTextDualEncoderModel")
    if _attention_pool(towers) is not None:
        raise UserError(
            "VisionTextDualEncoderModel cannot express the bias of the projection in the attention pooling of timm's "
            f"{towers.config.vision.name!r}: {_ANY_MODEL}."
        )
    weights = rename_prefixes(
        towers.weights,
        {
            _IMAGE: "vision_model.timm_model.",
            _TEXT: "text_model.",
            "vision.projection.": "visual_projection.",
            "text.projection.": "text_projection.",
        },
    )
    text_config, pooler = _text_with_pooler(towers)
    if pooler:
        weights |= pooler
        weights["text_projection.weight"] = weights["text_projection.weight"] / _POOLER_SCALE
    weights |= logit_tensors(towers.logits._replace(bias=None), ())
    config = VisionTextDualEncoderConfig(
        vision_config=_timm_config(towers).to_dict(),
        text_config=text_config.to_dict(),
        projection_dim=towers.config.embed_dim,
        architectures=["VisionTextDualEncoderModel"],
        dtype="float32",
    )
    with torch.device("meta"):
        expected = VisionTextDualEncoderModel(config).state_dict()
    check_tensors(str(folder), expected, weights)
    config.save_pretrained(folder)
    save_weights(weights, folder / "model.safetensors")
    MODEL_TYPES["clip"].processor(towers.preprocessing).save_pretrained(folder)
    _save_tokenizer(towers, folder)


def _text_with_pooler(towers: TrainedTowers) -> tuple[PreTrainedConfig, dict[str, Tensor]]:
    """Return the text tower's config for transformers, and the weights of BERT's pooler (none for CLIP's transformer).

    Raises UserError if VisionTextDualEncoderModel cannot express the pooling.
    """
    tower = towers.model.text
    config = _text_config(towers)
    if not isinstance(tower, PretrainedTextTower):
        if tower.eos_id == 2:
            raise UserError(
                "This model cannot be exported as a VisionTextDualEncoderModel, whose CLIPTextModel cannot pool at EOS "
                f"id 2: {_ANY_MODEL}."
            )
        return config, {}
    with torch.device("meta"):
        pooler = getattr(AutoModel.from_config(config), "pooler", None)
    has_pooler = isinstance(getattr(pooler, "dense", None), nn.Linear) and isinstance(
        getattr(pooler, "activation", None), nn.Tanh
    )
    if tower.pooling != "cls" or not has_pooler:
        raise UserError(
            "VisionTextDualEncoderModel can express only model.text.pooling=cls of an encoder with BERT's pooler, not "
            f"model.text.pooling={tower.pooling} of {type(tower.trunk).__name__}: {_ANY_MODEL}."
        )
    width = tower.trunk.config.hidden_size
    return config, {
        "text_model.pooler.dense.weight": _POOLER_SCALE * torch.eye(width),
        "text_model.pooler.dense.bias": torch.zeros(width),
    }


def _timm_config(towers: TrainedTowers) -> TimmWrapperConfig:
    """Return the config of transformers' wrapper for the image tower."""
    vision = towers.config.vision
    arguments = dict(vision.options)
    if timm.get_pretrained_cfg(vision.name).fixed_input_size:
        arguments["img_size"] = towers.preprocessing.size
    width = _image_width(towers)
    return TimmWrapperConfig(
        architecture=vision.name,
        model_args=arguments or None,
        hidden_size=width,  # read by VisionTextDualEncoderModel
        num_features=width,  # read by sentence-transformers
        architectures=["TimmWrapperModel"],
        dtype="float32",
    )


def _text_config(towers: TrainedTowers) -> PreTrainedConfig:
    """Return the config of the text tower's trunk, without local paths."""
    trunk = towers.model.text.trunk
    config = deepcopy(trunk.config)
    config.name_or_path = ""
    config.architectures = [type(trunk).__name__]
    config.dtype = "float32"
    return config


# open_clip


def to_open_clip(
    towers: TrainedTowers, clip_text: Mapping[str, Any], clip_weights: Mapping[str, Tensor]
) -> LibraryModel:
    """Convert a model to open_clip's config and weights, with timm's image tower.

    Args:
        towers: the model.
        clip_text: entries of `text_cfg` for CLIP's text transformer, plus the key `quick_gelu`, which applies to the
            whole model; unused for other encoders.
        clip_weights: the tensors of CLIP's text transformer under open_clip's names; unused for other encoders.

    Raises:
        UserError: open_clip cannot express the image tower, a projection, the text encoder, its pooling or its
            tokenizer's padding.
    """
    vision_config, weights = _open_clip_image(towers)
    if isinstance(towers.model.text, PretrainedTextTower):
        text_config, text_weights = _open_clip_text_encoder(towers)
        quick_gelu = False
    else:
        if towers.config.text.projection != "linear":
            raise UserError(f"open_clip's text transformer cannot express model.text.projection=mlp: {_ANY_MODEL}.")
        text_config = dict(clip_text)
        quick_gelu = text_config.pop("quick_gelu")
        text_weights = dict(clip_weights)
    weights |= text_weights | logit_tensors(towers.logits, ())
    config = {
        "embed_dim": towers.config.embed_dim,
        "quick_gelu": quick_gelu,
        "custom_text": True,
        "vision_cfg": vision_config,
        "text_cfg": text_config,
    }
    if towers.logits.bias is not None:
        config["init_logit_bias"] = towers.logits.bias
    return LibraryModel(
        library="open_clip",
        config=config,
        weights=weights,
        preprocessing=towers.preprocessing,
        tokenizer=towers.tokenizer,
    )


def _open_clip_image(towers: TrainedTowers) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return open_clip's `vision_cfg` for timm's model, and the image tower's tensors under open_clip's names.

    Raises UserError if open_clip cannot express the tower.
    """
    vision = towers.config.vision
    size = towers.preprocessing.size
    timm_names = names_by_image_size(vision.name)
    problem = ""
    if vision.options:
        problem = f"model.vision.options={vision.options}"
    elif timm_names and size not in timm_names:
        problem = f"images of {size} instead of {' or '.join(map(str, sorted(timm_names)))} pixels"
    elif _attention_pool(towers) is not None:
        problem = "a projection in its attention pooling"
    if problem:
        raise UserError(f"open_clip cannot express timm's image model {vision.name!r} with {problem}: {_ANY_MODEL}.")
    names = {_IMAGE: "visual.trunk.", "vision.projection.weight": "visual.head.proj.weight"}
    weights = rename_prefixes(towers.weights, names)
    if vision.projection == "mlp":
        weights |= _open_clip_mlp(towers)
    return {
        "timm_model_name": timm_names.get(size, vision.name),
        "timm_model_pretrained": False,
        "timm_pool": "",  # the model's own
        "timm_proj": vision.projection,
        "image_size": size,
    }, weights


def _open_clip_mlp(towers: TrainedTowers) -> dict[str, Tensor]:
    """Return the image tower's MLP in open_clip's form, padded with zeros to 2 embed_dim hidden units and a bias.

    Raises UserError if the MLP has more than 2 embed_dim hidden units.
    """
    first = towers.weights["vision.projection.0.weight"]
    second = towers.weights["vision.projection.2.weight"]
    hidden = 2 * towers.config.embed_dim
    additional = hidden - first.shape[0]
    if additional < 0:
        raise UserError(
            f"This model cannot be exported to open_clip: the MLP head of open_clip's image tower would have {hidden} "
            f"hidden units, fewer than this model's {first.shape[0]}; {_ANY_MODEL}."
        )
    return {
        "visual.head.mlp.fc1.weight": nn.functional.pad(first, (0, 0, 0, additional)),
        "visual.head.mlp.fc1.bias": torch.zeros(hidden),
        "visual.head.mlp.fc2.weight": nn.functional.pad(second, (0, additional)),
    }


def _open_clip_text_encoder(towers: TrainedTowers) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return open_clip's `text_cfg` for a transformers encoder, and the encoder's tensors under open_clip's names.

    Raises UserError if open_clip cannot express the encoder, its pooling or its tokenizer's padding.
    """
    tower: Any = towers.model.text
    config = _text_config(towers)
    name = towers.config.text.pretrained
    poolers = {"mean": "mean_pooler", "cls": "cls_last_hidden_state_pooler"}
    tokenizer = _tokenizer_of(towers)
    problem = ""
    if config.model_type not in _OPEN_CLIP_ENCODERS:
        problem = f"transformers' {config.model_type} as the text encoder"
    elif tower.pooling not in poolers:
        problem = f"model.text.pooling={tower.pooling}"
    elif Path(expand_user(name)).exists() or name.count("/") > 1 or name.startswith(("~", ".", "/")):
        problem = f"the text encoder in the folder {Path(name).name}: the exported config must name a hub encoder"
    elif tokenizer.pad_token_id is None or tokenizer.pad_token_id != config.pad_token_id:
        problem = "a tokenizer whose padding token is missing or differs from pad_token_id in config.json"
    if problem:
        raise UserError(f"open_clip cannot express {problem}. Instead, {_ANY_MODEL}.")
    names = {_TEXT: "text.transformer.", "text.projection.": "text.proj."}
    return {
        "hf_model_name": name,
        "hf_model_pretrained": False,
        "hf_tokenizer_name": "tokenizer",  # open_clip reads the tokenizer from the local folder
        "hf_proj_type": towers.config.text.projection,
        "hf_pooler_type": poolers[tower.pooling],
        "context_length": towers.tokenizer.context_length,
    }, rename_prefixes(towers.weights, names)


# sentence-transformers


class _Module(NamedTuple):
    """A module of sentence-transformers: its class in the package, and the contents of its folder."""

    kind: str
    config: dict[str, Any]
    weights: dict[str, Tensor]


def write_sentence_transformers(towers: TrainedTowers, folder: Path) -> None:
    """Write a model for sentence-transformers (tested with version 6.2) that encodes both texts and images.

    Raises:
        UserError: the tokenizer cannot be made to end captions with EOS.
    """
    routes: dict[str, list[str]] = {}
    types: dict[str, str] = {}
    pooling = _Module(
        "sentence_transformer.modules.pooling.Pooling",
        {"embedding_dimension": _text_width(towers), "pooling_mode": _pooling_mode(towers), "include_prompt": True},
        {},
    )
    normalize = _Module("base.modules.normalize.Normalize", _between("sentence_embedding"), {})
    heads = {
        "text": [pooling, *_dense(towers, "text"), normalize],
        "image": [*_dense(towers, "vision"), normalize],
    }
    for route, modules in heads.items():
        first = f"{route}_0_Transformer"
        (folder / first).mkdir()
        types[first] = "sentence_transformers.base.modules.transformer.Transformer"
        routes[route] = [first]
        for number, module in enumerate(modules, start=1):
            name = f"{route}_{number}_{module.kind.rpartition('.')[2]}"
            types[name] = f"sentence_transformers.{module.kind}"
            routes[route].append(name)
            (folder / name).mkdir()
            _write_json(folder / name / "config.json", module.config)
            if module.weights:
                save_weights(module.weights, folder / name / "model.safetensors")
    _write_text_transformer(towers, folder / "text_0_Transformer")
    _write_image_transformer(towers, folder / "image_0_Transformer")
    parameters: dict[str, Any] = {"default_route": None, "allow_empty_key": False, "route_mappings": {}}
    _write_json(folder / "router_config.json", {"types": types, "structure": routes, "parameters": parameters})
    router = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.router.Router"}
    _write_json(folder / "modules.json", [router])
    settings = {"model_type": "SentenceTransformer", "prompts": {}, "similarity_fn_name": "cosine"}
    _write_json(folder / "config_sentence_transformers.json", settings)


def _write_text_transformer(towers: TrainedTowers, folder: Path) -> None:
    """Write the text trunk and its tokenizer."""
    weights = rename_prefixes(towers.weights, {_TEXT: ""})
    config = _text_config(towers)
    if config.architectures[0].endswith("Stack"):  # T5's encoder: the module around it has the embeddings
        weights = {f"encoder.{name}": value for name, value in weights.items()}
        weights["shared.weight"] = weights.pop("encoder.embed_tokens.weight")
        config.architectures = [config.architectures[0].replace("Stack", "EncoderModel")]
    config.save_pretrained(folder)
    save_weights(weights, folder / "model.safetensors")
    _save_tokenizer(towers, folder)
    settings = _transformer_settings("text", "last_hidden_state", "token_embeddings")
    _write_json(folder / "sentence_bert_config.json", settings)


def _write_image_transformer(towers: TrainedTowers, folder: Path) -> None:
    """Write the image trunk in transformers' wrapper, and its image processor."""
    weights = rename_prefixes(towers.weights, {_IMAGE: "timm_model."})
    if _attention_pool(towers) is not None:
        weights = {name: value for name, value in weights.items() if not name.startswith("timm_model.head.proj.")}
    _timm_config(towers).save_pretrained(folder)
    save_weights(weights, folder / "model.safetensors")
    MODEL_TYPES["clip"].processor(towers.preprocessing).save_pretrained(folder)
    settings = _transformer_settings("image", "pooler_output", "sentence_embedding")
    _write_json(folder / "sentence_bert_config.json", settings)


def _transformer_settings(modality: str, output: str, feature: str) -> dict[str, Any]:
    """Return settings with which sentence-transformers' Transformer module returns a model's output as the feature."""
    return {
        "transformer_task": "feature-extraction",
        "modality_config": {modality: {"method": "forward", "method_output_name": output}},
        "module_output_name": feature,
    }


def _dense(towers: TrainedTowers, tower: str) -> list[_Module]:
    """Return a tower's head as sentence-transformers modules."""
    weights = rename_prefixes(towers.weights, {f"{tower}.projection.": ""})
    if tower == "vision" and _attention_pool(towers) is not None:
        weights = rename_prefixes(towers.weights, {f"{_IMAGE}head.proj.": ""})
    if "weight" in weights:
        return [_linear(weights["weight"], weights.get("bias"), "torch.nn.modules.linear.Identity")]
    first = _linear(weights["0.weight"], None, "torch.nn.modules.activation.GELU")
    return [first, _linear(weights["2.weight"], None, "torch.nn.modules.linear.Identity")]


def _linear(weight: Tensor, bias: Tensor | None, activation: str) -> _Module:
    weights = {"linear.weight": weight}
    if bias is not None:
        weights["linear.bias"] = bias
    config = {
        "in_features": weight.shape[1],
        "out_features": weight.shape[0],
        "bias": bias is not None,
        "activation_function": activation,
        **_between("sentence_embedding"),
    }
    return _Module("base.modules.dense.Dense", config, weights)


def _between(feature: str) -> dict[str, str]:
    """Return options with which a module replaces a feature in the dict of features with its output."""
    return {"module_input_name": feature, "module_output_name": feature}


def _pooling_mode(towers: TrainedTowers) -> str:
    """Return sentence-transformers' name for the pooling; for EOS, `lasttoken`, because EOS ends each caption."""
    tower = towers.model.text
    if isinstance(tower, PretrainedTextTower) and tower.pooling in ("cls", "mean"):
        return tower.pooling
    return "lasttoken"


# shared


def _save_tokenizer(towers: TrainedTowers, folder: Path) -> None:
    """Save the tokenizer so that it returns attention masks and, if the text tower pools at EOS, ends captions with it.

    Raises UserError if it cannot be made to end captions with EOS.
    """
    tokenizer = _tokenizer_of(towers)
    text = towers.model.text
    if not isinstance(text, PretrainedTextTower) or text.pooling == "eos":
        _end_with_eos(tokenizer)
    tokenizer.model_max_length = towers.tokenizer.context_length
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    names = [name for name in tokenizer.model_input_names if name != "attention_mask"]
    tokenizer.model_input_names = [*names, "attention_mask"]
    tokenizer.init_kwargs["model_input_names"] = tokenizer.model_input_names
    if tokenizer.is_fast:
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    save_tokenizer(tokenizer, folder)
    make_readable_by_transformers_4(tokenizer, folder)


def _tokenizer_of(towers: TrainedTowers) -> Any:
    """Return a copy of the transformers tokenizer."""
    tokenizer = towers.tokenizer
    assert isinstance(tokenizer, TextEncoderTokenizer | CaptionTokenizer)  # of models that are built from the config
    return deepcopy(tokenizer.inner)


def _end_with_eos(tokenizer: Any) -> None:
    """Make a transformers tokenizer end captions with EOS (or BERT's SEP), in place; raise UserError if it cannot."""
    eos_id = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    ids = tokenizer("a")["input_ids"]
    if ids[-1] == eos_id:
        return
    if not tokenizer.is_fast:
        raise UserError(
            f"This model cannot be exported, because its tokenizer ({type(tokenizer).__name__}) cannot be made to end "
            "captions with EOS, at which the model pools: train with another model.text.pooling."
        )
    caption = tokenizer("a", add_special_tokens=False)["input_ids"]
    start = ids[: len(ids) - len(caption)]
    add_special_tokens(tokenizer, start, eos_id)


def _require_linear_heads(towers: TrainedTowers, format_name: str) -> None:
    for name, tower in (("vision", towers.config.vision), ("text", towers.config.text)):
        if tower.projection != "linear":
            raise UserError(f"{format_name} cannot express model.{name}.projection={tower.projection}: {_ANY_MODEL}.")


def _attention_pool(towers: TrainedTowers) -> nn.Module | None:
    """Return an image tower's attention pooling, which projects to the joint space as in CLIP's ResNets, or None."""
    head = getattr(towers.model.vision.trunk, "head", None)
    return head if isinstance(head, AttentionPool2d | RotAttentionPool2d) else None


def _image_width(towers: TrainedTowers) -> int:
    """Return the width of the image trunk's feature."""
    return int(_dense(towers, "vision")[0].config["in_features"])


def _text_width(towers: TrainedTowers) -> int:
    """Return the width of the text trunk's feature."""
    return int(_dense(towers, "text")[0].config["in_features"])


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
