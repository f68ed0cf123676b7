"""LoRA adapters (Hu et al. 2022) of the peft library in a tower whose own weights are frozen.

peft replaces a linear layer by one that adds `alpha / rank * B A x`. Adapters are ordinary parameters: they are
trained, saved and resumed like others, and merged into the weights for an export.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from neuclip_ds.config import LoraConfig, ModelConfig
from neuclip_ds.errors import UserError
from neuclip_ds.models.layers import block_names


def has_adapters(config: ModelConfig) -> bool:
    """Whether a tower has adapters."""
    return bool(config.vision.lora.rank or config.text.lora.rank)


def without_adapters(config: ModelConfig) -> ModelConfig:
    """Return the config of the model into which the adapters are merged."""
    towers = {name: getattr(config, name).model_copy(update={"lora": LoraConfig()}) for name in ("vision", "text")}
    return config.model_copy(update=towers)


def add_adapters(tower: nn.Module, config: LoraConfig, name: str) -> None:
    """Insert adapters into frozen linear layers, in place; what trains of the tower still does.

    Args:
        tower: its weights have their values, and are frozen where adapters go.
        name: of the tower in messages.

    Raises:
        UserError: peft is not installed, or the tower has no such layers.
    """
    peft = _library()
    trained = [parameter for parameter in tower.parameters() if parameter.requires_grad]
    adapters = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=_targets(tower, config.targets, name),
    )
    peft.inject_adapter_in_model(adapters, tower)
    for parameter in trained:  # peft freezes everything else
        parameter.requires_grad_(True)


def merge_adapters(module: nn.Module) -> None:
    """Add all adapters to the weights that they adapt, and remove them, in place."""
    from peft.tuners.lora import LoraLayer

    for name, layer in list(module.named_modules()):
        if isinstance(layer, LoraLayer):
            layer.merge(safe_merge=True)
            module.set_submodule(name, layer.get_base_layer())


def _library() -> Any:
    try:
        import peft
    except ImportError as error:
        raise UserError("LoRA needs peft, which is not installed: pip install peft, or set lora.rank=0.") from error
    return peft


def _targets(tower: nn.Module, wanted: list[str], name: str) -> list[str]:
    """Return the names of the layers that get adapters: all in frozen blocks, or those with the wanted names."""
    linear = list(_frozen_linear_layers(tower))
    if not wanted:
        blocks = tuple(f"{block}." for block in block_names(tower))
        found = [layer for layer in linear if layer.startswith(blocks)]
        missing = [] if found else ["blocks with frozen linear layers"]
    else:
        chosen = {one: [layer for layer in linear if f".{layer}".endswith(f".{one}")] for one in wanted}
        found = sorted({layer for layers in chosen.values() for layer in layers})
        missing = [one for one, layers in chosen.items() if not layers]
    if missing:
        endings = ", ".join(dict.fromkeys(layer.rpartition(".")[2] for layer in linear)) or "none"
        raise UserError(
            f"The {name} tower has no {', '.join(missing)} for adapters (model.{name}.lora.targets); its frozen linear "
            f"layers end in: {endings}."
        )
    return found


def _frozen_linear_layers(tower: nn.Module) -> Iterator[str]:
    """Yield the names of layers that an adapter can replace."""
    for name, layer in tower.named_modules():
        if isinstance(layer, nn.Linear) and not layer.weight.requires_grad:
            parent = tower.get_submodule(name.rpartition(".")[0])
            if not _reads_weights(parent):
                yield name


def _reads_weights(parent: nn.Module) -> bool:
    """Whether a module computes with the weights of its linear layers instead of calling them.

    torch's attention does, which open_clip's transformers have, and that of timm's BEiT and EVA with separate biases.
    """
    return isinstance(parent, nn.MultiheadAttention) or getattr(parent, "q_bias", None) is not None
