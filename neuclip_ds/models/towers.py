"""The two towers: a timm image model and transformers' CLIP text model, each with a projection to the joint space.

DeepSpeed's ZeRO requires that a parameter is used only in the forward of its module, and that none is 0-dimensional.
"""

import difflib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import timm
import torch
from timm.layers import AttentionPool2d, PatchDropout, PatchDropoutWithIndices, PatchEmbed, RotAttentionPool2d
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel

from neuclip_ds.config import TextConfig, VisionConfig
from neuclip_ds.errors import UserError
from neuclip_ds.models.positions import check_patches
from neuclip_ds.models.tokenizer import CaptionTokenizer


def normalize_pixels(image: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Normalize (b, 3, H, W) uint8 pixels to float32: divide by 255, then by channel subtract mean, divide by std."""
    if image.dtype != torch.uint8:
        raise TypeError(f"images are uint8 pixels, not {image.dtype}: the tower normalizes them itself")
    pixels = image.float()
    for channel, (center, width) in enumerate(zip(mean, std, strict=True)):
        pixels[:, channel].sub_(255 * center).div_(255 * width)
    return pixels


class Encoder(nn.Module, ABC):
    """A tower, which maps images or tokens to features of the joint space.

    Image towers take uint8 pixels (b, 3, H, W), text towers int64 ids (b, T); both return (b, d) in the weights' dtype.
    """

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(self.normalize(x))

    def normalize(self, x: Tensor) -> Tensor:
        """Return what `encode` takes: float32 normalized pixels of uint8 ones; ids as they are."""
        return x

    @abstractmethod
    def encode(self, x: Tensor) -> Tensor:
        """Return (b, d) features of normalized pixels, or of ids."""

    def train(self, mode: bool = True) -> "Encoder":
        """Set training mode, in which modules of frozen weights stay in evaluation mode.

        They have no dropout, keep the statistics of batch norm, and need no activation checkpointing.
        """
        super().train(mode)
        for module in self.modules() if mode else ():
            weights = list(module.parameters())
            if weights and not any(weight.requires_grad for weight in weights):
                module.eval()
        return self

    @property
    def frozen(self) -> bool:
        """Whether nothing of the tower trains."""
        return not any(weight.requires_grad for weight in self.parameters())

    @abstractmethod
    def checkpoint_activations(self) -> None:
        """Make the blocks recompute activations in the backward pass; raise UserError if the model cannot."""


class VisionTower(Encoder):
    """A timm model's pooled feature, projected: uint8 (b, 3, H, W) to (b, embed_dim) in the weights' dtype.

    The projection is linear without bias. Models with attention pooling (CLIP's ResNets) end in their own projection,
    with bias, which replaces it (Radford et al. 2021, sec. 2.4).

    Args:
        weights: tensors that the trunk starts from, of any resolution; random ones by default.

    Raises:
        UserError: timm does not have the model or refuses the options, or the image size or the weights do not fit it.
    """

    def __init__(self, config: VisionConfig, embed_dim: int, weights: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        width = _checked_width(config)
        self._mean, self._std = config.statistics()  # not buffers, which DeepSpeed may cast to bf16
        self.trunk = _create(config) if weights is None else _create_from(config, weights)
        self.projection: nn.Module = nn.Identity()
        if isinstance(getattr(self.trunk, "head", None), AttentionPool2d | RotAttentionPool2d):
            self.trunk.reset_classifier(embed_dim)
            nn.init.zeros_(self.trunk.head.proj.bias)
            nn.init.normal_(self.trunk.head.proj.weight, std=width**-0.5)
        else:
            self.projection = new_projection(width, embed_dim)

    def normalize(self, x: Tensor) -> Tensor:
        return normalize_pixels(x, self._mean, self._std)

    def encode(self, x: Tensor) -> Tensor:
        return self.projection(self.trunk(x.to(next(self.parameters()).dtype)))

    def checkpoint_activations(self) -> None:
        try:
            self.trunk.set_grad_checkpointing(True)
        except (AssertionError, AttributeError) as error:
            raise UserError(
                f"timm's {type(self.trunk).__name__} has no activation checkpointing ({error}); set "
                "model.activation_checkpointing=false."
            ) from error


class TextTower(Encoder):
    """CLIP's causal text transformer: int64 (b, T) to (b, embed_dim), read at the first EOS, in the weights' dtype.

    Args:
        tokenizer: of captions, with rows of at most `config.context_length` tokens.
        activation: activation of the MLPs; `quick_gelu` is OpenAI's x sigmoid(1.702 x).
    """

    def __init__(
        self, config: TextConfig, tokenizer: CaptionTokenizer, embed_dim: int, activation: str = "gelu"
    ) -> None:
        super().__init__()
        assert tokenizer.eos_id is not None  # as `CaptionTokenizer.closed` makes sure
        self.eos_id = tokenizer.eos_id
        self.trunk = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=config.vocab_size if config.tokenizer is None else tokenizer.vocab_size,
                hidden_size=config.width,
                intermediate_size=4 * config.width,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                max_position_embeddings=config.context_length,
                hidden_act=activation,
                bos_token_id=tokenizer.bos_id,
                eos_token_id=tokenizer.eos_id,
                pad_token_id=tokenizer.pad_id,
                attn_implementation="sdpa",
            )
        )
        _init_attention(self.trunk)
        self.projection = new_projection(config.width, embed_dim)

    def encode(self, x: Tensor) -> Tensor:
        hidden = self.trunk(input_ids=x).last_hidden_state  # (b, T, width)
        # Not the trunk's pooled output, which is read at the largest id if EOS is 2, to support old files.
        first_eos = (x == self.eos_id).int().argmax(dim=1)
        return self.projection(hidden[torch.arange(hidden.shape[0], device=hidden.device), first_eos])

    def checkpoint_activations(self) -> None:
        self.trunk.activation_checkpointing_enable({"use_reentrant": False})


def new_projection(width: int, embed_dim: int) -> nn.Linear:
    """Return a projection to the joint space with random weights, as CLIP initializes it."""
    projection = nn.Linear(width, embed_dim, bias=False)
    nn.init.normal_(projection.weight, std=width**-0.5)
    return projection


@torch.no_grad()
def _init_attention(model: Any) -> None:
    """Initialize attention as CLIP does: std width^-1/2 for q, k, v and (2 layers width)^-1/2 for the output.

    Transformers exchanges the two, unlike OpenAI's code and open_clip.
    """
    inwards = model.config.hidden_size**-0.5
    outwards = inwards * (2 * model.config.num_hidden_layers) ** -0.5
    for layer in model.encoder.layers:
        attention = layer.self_attn
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            nn.init.normal_(projection.weight, std=inwards)
        nn.init.normal_(attention.out_proj.weight, std=outwards)


def set_patch_drop(model: nn.Module, share: float) -> None:
    """Set the share of patches that a tower with `patch_drop` leaves out in training."""
    for module in model.modules():
        if isinstance(module, PatchDropout | PatchDropoutWithIndices):
            module.prob = share


def taking_other_sizes(config: VisionConfig) -> VisionConfig:
    """Return the config of the same tower that takes smaller images too, to which it resamples position embeddings."""
    if not _has_fixed_size(config):
        return config
    return config.model_copy(update={"options": {**config.options, "dynamic_img_size": True}})


def check_image_size(config: VisionConfig, size: int) -> None:
    """Raise `UserError` unless the tower can take images of another size."""
    _checked_width(taking_other_sizes(config).model_copy(update={"image_size": size}))


def _has_fixed_size(config: VisionConfig) -> bool:
    _check_names(config)
    return bool(timm.get_pretrained_cfg(config.name).fixed_input_size)


def _create(config: VisionConfig, **options: Any) -> Any:
    size = {"img_size": config.image_size} if _has_fixed_size(config) else {}
    drop = {"patch_drop_rate": config.patch_drop} if config.patch_drop else {}
    return timm.create_model(weights_name(config), num_classes=0, **size, **drop, **config.options, **options)


def weights_name(config: VisionConfig) -> str:
    """Return timm's name of the image model with the tag of its weights, if `pretrained` is one."""
    tagged = f"{config.name}.{config.pretrained}"
    return tagged if timm.models.is_model_pretrained(tagged) else config.name


def _create_from(config: VisionConfig, weights: Mapping[str, Tensor]) -> Any:
    """Create the image model with weights, without a classifier; timm resamples position embeddings.

    timm loads what fits and keeps random values elsewhere, which is found out by comparing it with these.
    """
    with torch.random.fork_rng(devices=[]):  # the weights are made on the CPU
        torch.manual_seed(0)
        random = dict(_create(config).named_parameters())
        torch.manual_seed(0)
        try:
            overlay = {"state_dict": dict(weights), "custom_load": False, "source": ""}
            trunk = _create(config, pretrained=True, pretrained_cfg_overlay=overlay)
        except (RuntimeError, KeyError, ValueError, TypeError, AttributeError) as error:  # of timm's converters
            raise UserError(
                f"The weights model.vision.pretrained={config.pretrained} do not fit timm's {config.name!r} "
                f"({str(error).strip().splitlines()[-1].strip()}); name weights of this model."
            ) from error
    trunk.pretrained_cfg.pop("state_dict", None)  # a second copy of the weights
    left = [
        name
        for name, value in trunk.named_parameters()
        if value.requires_grad and value.equal(random[name]) and (value != value.flatten()[0]).any()
    ]
    if left:
        raise UserError(
            f"The weights model.vision.pretrained={config.pretrained} lack {len(left)} tensors of timm's "
            f"{config.name!r} (first {left[0]}); name weights of this model."
        )
    return trunk


def _checked_width(config: VisionConfig) -> int:
    """Return the width of the pooled feature, from a trial run on the meta device."""
    _check_names(config)
    drop = f", patch_drop={config.patch_drop}" if config.patch_drop else ""
    attempt = f"{config.name!r} with model.vision.image_size={config.image_size}{drop} and options={config.options}"
    try:
        with torch.device("meta"):
            trial = _create(config).eval()
            _check_image_size(config, trial)
            feature = trial(torch.empty(2, 3, config.image_size, config.image_size))
    except UserError:
        raise
    except Exception as error:  # timm's constructors raise many types
        raise UserError(
            f"timm cannot build {attempt} ({type(error).__name__}: {error}); correct these options."
        ) from error
    if any(parameter.ndim == 0 for parameter in trial.parameters()):
        raise UserError(
            f"{config.name!r} has 0-dimensional parameters, which DeepSpeed does not support; use another model."
        )
    if not isinstance(feature, Tensor) or feature.ndim != 2:
        raise UserError(
            f"{attempt} gives no pooled feature (batch, width); omit the options that change pooling or output."
        )
    return feature.shape[1]


def _check_names(config: VisionConfig) -> None:
    architecture, _, tag = config.name.partition(".")
    if not timm.is_model(architecture):
        nearest = difflib.get_close_matches(architecture, timm.list_models(), n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(nearest)}?" if nearest else "see timm.list_models()."
        raise UserError(f"timm has no model {config.name!r} (model.vision.name); {hint}")
    if tag:
        raise UserError(
            f"model.vision.name={config.name!r} names pretrained weights ({tag!r}); set "
            f"model.vision.name={architecture} and model.vision.pretrained={tag}."
        )
    taken = {"img_size", "num_classes", "pretrained", "checkpoint_path"} & set(config.options)
    if taken:
        raise UserError(
            f"model.vision.options must not set {', '.join(sorted(taken))}: set the size with "
            "model.vision.image_size and the weights with model.vision.pretrained; the tower has no classes."
        )


def _check_image_size(config: VisionConfig, model: Any) -> None:
    """Raise UserError for image sizes that timm silently crops to whole patches or reduces below one position."""
    size = config.image_size
    reduction = model.feature_info[-1]["reduction"] if getattr(model, "feature_info", None) else 1
    if size < reduction:
        raise UserError(
            f"model.vision.image_size={size} is smaller than the {reduction} pixels that {config.name!r} reduces to "
            f"one position; use {reduction} or more."
        )
    if isinstance(getattr(model, "patch_embed", None), PatchEmbed):
        check_patches(size, model.patch_embed.patch_size[0], "model.vision.image_size")
