"""Build image towers from timm's models, check their options, and locate pretrained weights (timm tags or files)."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import snapshot_download
from timm.layers import AttentionPool2d, PatchEmbed, RotAttentionPool2d
from torch import Tensor, nn

from neuclip_ds.config import Channels, VisionConfig
from neuclip_ds.errors import UserError, counted, explained
from neuclip_ds.files import expand_user
from neuclip_ds.models.towers import VisionTower, new_projection

_OPTION_OF_SIZE = "(model.vision.image_size, or --image-size of `neuclip-ds embed`)"
# arguments of timm's models that model.vision.options may not contain
SET_ELSEWHERE = {"img_size", "num_classes", "pretrained", "checkpoint_path"}
_FIX_OF_WEIGHTS = "pass weights of this model (in model.vision.pretrained, or in MODEL of `neuclip-ds embed`)"


def new_vision_tower(config: VisionConfig, embed_dim: int, weights: Mapping[str, Tensor] | None = None) -> VisionTower:
    """Build an image tower from a timm model, followed by the projection that the config names.

    Models whose head is 2-dimensional attention pooling (CLIP's ResNets) instead use the projection in that head, which
    has a bias (Radford et al. 2021, sec. 2.4).

    Args:
        config: name and options of the timm model.
        embed_dim: width of the joint embedding space.
        weights: initial weights, trained at any image resolution; random by default.

    Raises:
        UserError: as in `pretrained_trunk`, or the config asks for an MLP although the model has its own projection.
    """
    width = _checked_width(config)
    mean, std = config.statistics()
    trunk = _create(config) if weights is None else _create_with_weights(config, weights)
    if not isinstance(getattr(trunk, "head", None), AttentionPool2d | RotAttentionPool2d):
        return VisionTower(trunk, new_projection(width, embed_dim, config.projection), mean, std)
    if config.projection != "linear":
        raise UserError(
            f"model.vision.projection={config.projection} has no effect on {config.name!r}, whose attention pooling "
            "projects by itself: omit the option."
        )
    trunk.reset_classifier(embed_dim)
    nn.init.zeros_(trunk.head.proj.bias)
    nn.init.normal_(trunk.head.proj.weight, std=width**-0.5)
    return VisionTower(trunk, None, mean, std)


def pretrained_trunk(config: VisionConfig, weights: Mapping[str, Tensor]) -> nn.Module:
    """Build a timm model without a classifier, and load weights that may have been trained at another resolution.

    Raises:
        UserError: the model's name or options are invalid, the image size or the weights do not fit the model, or the
            model returns no pooled feature or has 0-dimensional parameters, which DeepSpeed does not support.
    """
    _checked_width(config)
    trunk: nn.Module = _create_with_weights(config, weights)
    return trunk


def _create(config: VisionConfig, **options: Any) -> Any:
    """Create the timm model without a classifier; `options` are passed to `timm.create_model`."""
    arguments: dict[str, Any] = {}
    if timm.get_pretrained_cfg(config.name).fixed_input_size:
        arguments["img_size"] = config.resolved_image_size()
    if config.patch_drop:
        arguments["patch_drop_rate"] = config.patch_drop
    return timm.create_model(_weights_name(config), num_classes=0, **arguments, **config.options, **options)


def _weights_name(config: VisionConfig) -> str:
    """Return timm's name for the image model, including the weight tag if `pretrained` is one."""
    tagged = f"{config.name}.{config.pretrained}"
    return tagged if timm.models.is_model_pretrained(tagged) else config.name


def _create_with_weights(config: VisionConfig, weights: Mapping[str, Tensor]) -> Any:
    """Create the image model without a classifier and load its weights; timm resamples the position embeddings.

    Raises UserError if the weights do not fit the model, or if a tensor still has its random initial value: timm does
    not always reject weights that lack a tensor.
    """
    with torch.random.fork_rng(devices=[]):  # the models are created on the CPU
        torch.manual_seed(0)
        random_values = dict(_create(config).named_parameters())
        torch.manual_seed(0)
        try:
            overlay = {"state_dict": dict(weights), "custom_load": False, "source": ""}
            trunk = _create(config, pretrained=True, pretrained_cfg_overlay=overlay)
        except (RuntimeError, KeyError, ValueError, TypeError, AttributeError) as error:  # raised by timm's converters
            raise UserError(
                f"The weights {config.pretrained} do not fit timm's {config.name!r} "
                f"({str(error).strip().splitlines()[-1].strip()}); {_FIX_OF_WEIGHTS}."
            ) from error
    trunk.pretrained_cfg.pop("state_dict", None)  # it would keep a second copy of the weights
    unchanged = []
    for name, value in trunk.named_parameters():
        if value.requires_grad and value.equal(random_values[name]):
            # the weights may contain the same constant, such as a bias of zeros
            is_constant = (value == value.flatten()[0]).all()
            if not is_constant:
                unchanged.append(name)
    if unchanged:
        raise UserError(
            f"The weights {config.pretrained} lack {counted(len(unchanged), 'tensor')} of timm's {config.name!r} "
            f"(first: {unchanged[0]}); {_FIX_OF_WEIGHTS}."
        )
    return trunk


def _checked_width(config: VisionConfig) -> int:
    """Return the pooled feature's width, found on the meta device; raise UserError if the model is unusable."""
    _check_names(config)
    drop = f" and patch_drop={config.patch_drop}" if config.patch_drop else ""
    size = config.resolved_image_size()
    attempt = f"{config.name!r} for images of {size} pixels with options={config.options}{drop}"
    with (
        explained(f"timm cannot build {attempt}", "correct the options or the size of the images"),
        torch.device("meta"),
    ):
        trial = _create(config).eval()
        _check_size(size, trial)
        feature = trial(torch.empty(2, 3, size, size))
    if any(parameter.ndim == 0 for parameter in trial.parameters()):
        raise UserError(
            f"{config.name!r} has 0-dimensional parameters, which DeepSpeed does not support; choose another model "
            "(model.vision.name, or MODEL of `neuclip-ds embed`)."
        )
    if not isinstance(feature, Tensor) or feature.ndim != 2:
        raise UserError(
            f"{config.name!r} with options={config.options} returns no pooled feature (batch, width); omit the options "
            "that change the pooling or the output (model.vision.options), or choose another model (model.vision.name, "
            "or MODEL of `neuclip-ds embed`)."
        )
    return feature.shape[1]


def _check_names(config: VisionConfig) -> None:
    architecture, _, tag = config.name.partition(".")
    if not timm.is_model(architecture):
        nearest = difflib.get_close_matches(architecture, timm.list_models(), n=3, cutoff=0.4)
        hint = "timm.list_models() lists all models."
        if nearest:
            hint = f"did you mean {', '.join(nearest)}?"
        raise UserError(
            f"timm has no model {config.name!r} (model.vision.name, or MODEL of `neuclip-ds embed`); {hint}"
        )
    if tag:
        raise UserError(
            f"model.vision.name={config.name!r} also names pretrained weights ({tag!r}); set "
            f"model.vision.name={architecture} and model.vision.pretrained={tag}."
        )
    reserved = SET_ELSEWHERE & set(config.options)
    if reserved:
        raise UserError(
            f"model.vision.options must not set {', '.join(sorted(reserved))}: set the size with "
            "model.vision.image_size and the weights with model.vision.pretrained; the tower has no classifier."
        )


def _check_size(size: int, model: Any) -> None:
    """Raise UserError if images are smaller than the model's stride or if timm would crop them to whole patches."""
    reduction = model.feature_info[-1]["reduction"] if getattr(model, "feature_info", None) else 1
    if size < reduction:
        raise UserError(
            f"An image size of {size} pixels {_OPTION_OF_SIZE} is smaller than the model's stride of {reduction} "
            f"pixels; use {reduction} or more."
        )
    if isinstance(getattr(model, "patch_embed", None), PatchEmbed):
        for patch in model.patch_embed.patch_size:  # height and width
            check_patches(size, patch)


def check_patches(size: int, patch: int) -> None:
    """Raise UserError if images with sides of `size` pixels are not divisible into patches of `patch` pixels."""
    if size % patch:
        next_smaller = size // patch * patch
        sizes = f"{next_smaller} or {next_smaller + patch}" if next_smaller else f"{patch}"
        raise UserError(
            f"An image size of {size} pixels {_OPTION_OF_SIZE} is not divisible into patches of {patch} pixels; use "
            f"{sizes}."
        )


def fixed_image_size(name: str) -> int | None:
    """Return the image size, in pixels, of a timm model that is built for one size, or None for other models."""
    config = timm.get_pretrained_cfg(name)
    if config is None or not config.fixed_input_size:
        return None
    return int(config.input_size[-1])


def names_by_image_size(name: str) -> dict[int, str]:
    """Return the names of the timm models that differ from a model only in image size, keyed by that size in pixels.

    Such names end with the size, for example vit_base_patch16_siglip_384. The model itself is included. For a model
    that takes images of any size, the result is empty.
    """
    own_size = fixed_image_size(name)
    if own_size is None:
        return {}
    names = {own_size: name}
    stem = name.removesuffix(f"_{own_size}")
    if stem != name:
        for other in timm.list_models(f"{stem}_*"):
            size = fixed_image_size(other)
            if size is not None and other == f"{stem}_{size}":
                names[size] = other
    return names


@dataclass(frozen=True, kw_only=True)
class ImageWeights:
    """Location of an image tower's weights, and its preprocessing; can be sent to other ranks."""

    path: str  # the weights file; empty if only the preprocessing is needed
    mean: Channels  # per channel, of the pixels that the weights were trained on
    std: Channels
    squash: bool = False  # as in `Preprocessing`


def locate_image_weights(vision: VisionConfig, setting: str = "", file_setting: str = "") -> ImageWeights:
    """Locate an image tower's pretrained weights, downloading them from the hub if needed; call on one rank only.

    Args:
        vision: the tower's options.
        setting: the setting that names the weights, for messages; by default, model.vision.pretrained and its value.
        file_setting: the setting that would name a file of weights, for messages; by default,
            model.vision.pretrained=FILE.

    Raises:
        UserError: `vision.pretrained` is neither a file nor a tag of the timm model, or the weights cannot be
            downloaded.
    """
    pretrained_cfg = timm.get_pretrained_cfg(_weights_name(vision))
    path = Path(expand_user(vision.pretrained))
    if not path.is_file():
        setting = setting or f"model.vision.pretrained={vision.pretrained}"
        path = _download(vision, pretrained_cfg, setting, file_setting or "model.vision.pretrained=FILE")
    default_mean, default_std = vision.statistics()
    if pretrained_cfg is not None:
        default_mean = tuple(pretrained_cfg.mean)
        default_std = tuple(pretrained_cfg.std)
    return ImageWeights(
        path=str(path.resolve()),
        mean=vision.mean or default_mean,
        std=vision.std or default_std,
        squash=pretrained_cfg is not None and pretrained_cfg.crop_mode == "squash",
    )


def _download(vision: VisionConfig, pretrained_cfg: Any, setting: str, file_setting: str) -> Path:
    """Download the weights that a timm tag names, and return the file's path.

    `pretrained_cfg` is timm's config of the weights, or None if timm has none. The settings and errors are as in
    `locate_image_weights`.
    """
    tagged = _weights_name(vision)
    if pretrained_cfg is None or tagged == vision.name:
        tags = ", ".join(name.partition(".")[2] for name in timm.list_pretrained(f"{vision.name}.*"))
        fix = f"use one of {tags}"
        if not tags:
            fix = f"timm lists no weights for this model, so pass a file of weights as {file_setting}"
        raise UserError(f"{setting} names neither a file nor a tag of timm's {vision.name}: {fix}.")
    if not pretrained_cfg.hf_hub_id:
        raise UserError(
            f"timm's {tagged} is not on the hub: download {pretrained_cfg.url}, and pass the file as {file_setting} (a "
            "file gets the preprocessing of timm's default weights)."
        )
    file = pretrained_cfg.hf_hub_filename or "model.safetensors"
    with explained(
        f"{setting} names no local file, and timm's {tagged} cannot be downloaded from the hub",
        f"download {file} from {pretrained_cfg.hf_hub_id} on a machine with network access, and pass it as "
        f"{file_setting} (a file gets the preprocessing of timm's default weights), or copy the repository into this "
        "machine's hub cache (HF_HOME/hub)",
    ):
        return Path(snapshot_download(pretrained_cfg.hf_hub_id, allow_patterns=[file])) / file
