"""Freeze parameters of a dual encoder, scale learning rates by layer, and add LoRA adapters.

The layers of any library's tower are derived from its module structure. Blocks are the elements of the outermost lists
of same-class modules: transformer blocks, ResNet's residual blocks, ConvNeXt's or Swin's stages. The first layer
contains the parameters before the blocks (embeddings, stem), and the last layer contains those after them (norm,
pooling, projection).

LoRA (Hu et al. 2022) is implemented with peft, which replaces a linear layer with one that adds `alpha / rank * B A x`.
Adapters are ordinary parameters that are trained, saved and resumed as usual; export merges them into the weights.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from torch import nn

from neuclip_ds.config import LoraConfig, ModelConfig, OptimizerConfig
from neuclip_ds.errors import UserError, require_package

TOWERS: tuple[Literal["vision", "text"], ...] = ("vision", "text")
# projections that open_clip's towers register as bare parameters, before the blocks
_AFTER_BLOCKS = {"proj", "text_projection"}


class Parameters(NamedTuple):
    """Numbers of elements in a module's trained and frozen parameters."""

    sizes: tuple[int, ...]  # sizes of the trained parameters
    frozen: int  # total size of the other parameters

    @staticmethod
    def of(module: nn.Module) -> "Parameters":
        """Count the elements of a module's trained and frozen parameters."""
        trained_sizes = []
        frozen = 0
        for parameter in module.parameters():
            if parameter.requires_grad:
                trained_sizes.append(parameter.numel())
            else:
                frozen += parameter.numel()
        return Parameters(tuple(trained_sizes), frozen)

    @property
    def trained(self) -> int:
        """Total number of elements in the trained parameters."""
        return sum(self.sizes)

    @property
    def total(self) -> int:
        """Total number of elements in all parameters."""
        return self.trained + self.frozen


def freeze(model: nn.Module, config: ModelConfig) -> None:
    """Freeze the parameters that `model.vision.trainable` and `model.text.trainable` exclude.

    Args:
        model: model with the towers `vision` and `text`.
        config: model config with the two options.

    Raises:
        UserError: an option is a number of blocks, but its tower has fewer blocks or no list of blocks; or an option is
            `projection`, but its tower has no separate projection.
    """
    for name in TOWERS:
        tower = model.get_submodule(name)
        trained = config.trained(name)
        if trained == "frozen":
            tower.requires_grad_(False)
        elif trained == "projection":
            check_separate_projection(tower, f"model.{name}.trainable=projection", f"set model.{name}.trainable=0")
            tower.get_submodule("trunk").requires_grad_(False)
        elif trained != "all":
            layers = parameter_layers(tower, name)
            blocks = len(layers) - 2
            if trained > blocks:
                raise UserError(
                    f"model.{name}.trainable={trained}, but the tower has {blocks} blocks; use at most {blocks}, or "
                    "all."
                )
            for layer in layers[: blocks + 1 - trained]:
                for parameter in layer:
                    tower.get_parameter(parameter).requires_grad_(False)


def check_separate_projection(tower: nn.Module, option: str, fix: str) -> None:
    """Raise UserError, naming `option` and `fix`, if a tower's trunk itself projects to the joint space."""
    if isinstance(tower.get_submodule("projection"), nn.Identity):
        kind = type(tower.get_submodule("trunk")).__name__
        raise UserError(f"{option} needs a separate projection to the joint space, which {kind} does not have: {fix}.")


def projection_width(tower: nn.Module) -> int:
    """Return the input width of a tower's projection, which must be separate from the trunk."""
    layers = [layer for layer in tower.get_submodule("projection").modules() if isinstance(layer, nn.Linear)]
    return layers[0].in_features


def lock_projection(tower: nn.Module, name: str) -> None:
    """Set the new projection of a frozen, pretrained tower to the identity, so that features do not change (LiT).

    Args:
        tower: the tower.
        name: its name in the config and in messages, `vision` or `text`.

    Raises:
        UserError: the projection is not a square linear layer, so its random weights would be frozen.
    """
    projection = tower.get_submodule("projection")
    if not isinstance(projection, nn.Linear) or projection.in_features != projection.out_features:
        fix = f"model.{name}.projection=linear and model.embed_dim to the tower's width"
        if isinstance(projection, nn.Linear):
            fix = f"model.embed_dim={projection.in_features}"
        raise UserError(
            f"model.{name}.trainable=frozen (the default with LoRA) would freeze the random projection of the {name} "
            f"tower: to train the projection, set model.{name}.trainable=projection (0 with LoRA, or if the trunk "
            f"contains the projection); otherwise, set {fix}, which makes a separate projection the identity."
        )
    nn.init.eye_(projection.weight)


def learning_rate_scales(model: nn.Module, config: OptimizerConfig) -> dict[str, float]:
    """Return the factors by which to multiply `optimizer.lr`, by parameter name; 1 for parameters that are not listed.

    Args:
        model: module, with the towers `vision` and `text` if the config sets per-tower learning rates or a layer decay.
        config: optimizer config.

    Raises:
        UserError: the config sets a layer decay, but a tower with trained parameters has no list of blocks.
    """
    scales: dict[str, float] = {}
    tower_rates = {"vision": config.vision_lr, "text": config.text_lr}
    for name in TOWERS:
        tower_rate = tower_rates[name]
        scale = tower_rate / config.lr if tower_rate else 1.0
        if scale == config.layer_decay == 1:
            continue
        tower = model.get_submodule(name)
        trained = [parameter for parameter, weight in tower.named_parameters() if weight.requires_grad]
        for parameter in trained:
            scales[f"{name}.{parameter}"] = scale
        if trained and config.layer_decay < 1:
            for distance, layer in enumerate(reversed(parameter_layers(tower, name))):  # from the end of the tower
                for parameter in layer:
                    scales[f"{name}.{parameter}"] = scale * config.layer_decay**distance
    return scales


def parameter_layers(tower: nn.Module, name: str) -> list[list[str]]:
    """Return the names of a tower's parameters by layer: before the blocks, in each block, and after the blocks.

    Raises:
        UserError: the tower (`name` in the message) has no blocks.
    """
    blocks = list(block_names(tower))
    if not blocks:
        raise UserError(
            f"The {name} tower has no list of blocks, so its blocks cannot be counted: set model.{name}.trainable to "
            f"all, projection or frozen, and optimizer.layer_decay to 1."
        )
    layers: list[list[str]] = [[] for _ in range(len(blocks) + 2)]
    current = 0  # layer of the last parameter in a block; parameters between two blocks belong to the first of them
    for parameter, _ in tower.named_parameters():
        block_layer = _layer_of_block(parameter, blocks)
        if block_layer is not None:
            current = block_layer
            layers[block_layer].append(parameter)
        elif current == len(blocks) or parameter.rpartition(".")[2] in _AFTER_BLOCKS:
            layers[-1].append(parameter)
        else:
            layers[current].append(parameter)
    return layers


def _layer_of_block(parameter: str, blocks: Sequence[str]) -> int | None:
    """Return the layer number (from 1) of the block that contains a parameter, or None if it is not in a block."""
    for layer, block in enumerate(blocks, start=1):
        if parameter.startswith(f"{block}."):
            return layer
    return None


def block_names(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Yield the names of a module's blocks in order."""
    for name, child in module.named_children():
        if _is_list_of_blocks(child):
            yield from (f"{prefix}{name}.{number}" for number, _ in child.named_children())
        else:
            yield from block_names(child, f"{prefix}{name}.")


def _is_list_of_blocks(module: nn.Module) -> bool:
    """Return whether a module is a container of same-class modules that each consist of several modules."""
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return False
    children = list(module.children())
    classes = {type(child) for child in children}
    return len(classes) == 1 and len(list(children[0].modules())) > 2


def add_adapters(towers: Mapping[str, nn.Module], config: LoraConfig) -> None:
    """Add LoRA adapters in place to frozen linear layers in the towers' blocks; trainable parameters stay trainable.

    Args:
        towers: the towers by name; load weights and freeze layers before the call.
        config: rank, scale and dropout of the adapters.

    Raises:
        UserError: peft is not installed, or no tower has blocks with frozen linear layers.
    """
    require_package("peft", "model.lora.rank", "lora")
    import peft

    layers_of_towers = {name: list(_frozen_linear_layers(tower)) for name, tower in towers.items()}
    if not any(layers_of_towers.values()):
        raise UserError(
            "No tower has blocks with frozen linear layers, which adapters need: freeze a tower with blocks, or set "
            "model.lora.rank=0."
        )
    for name, layers in layers_of_towers.items():
        if not layers:
            continue
        trained = [parameter for parameter in towers[name].parameters() if parameter.requires_grad]
        adapters = peft.LoraConfig(
            r=config.rank, lora_alpha=config.alpha, lora_dropout=config.dropout, target_modules=layers
        )
        peft.inject_adapter_in_model(adapters, towers[name])
        for parameter in trained:  # peft freezes everything else
            parameter.requires_grad_(True)


def merge_adapters(module: nn.Module) -> None:
    """Merge all LoRA adapters into the weights that they adapt and remove the adapters, in place."""
    from peft.tuners.lora import LoraLayer

    for name, layer in list(module.named_modules()):
        if isinstance(layer, LoraLayer):
            layer.merge(safe_merge=True)
            module.set_submodule(name, layer.get_base_layer())


def _frozen_linear_layers(tower: nn.Module) -> Iterator[str]:
    """Yield the names of the frozen linear layers in a tower's blocks that an adapter can replace.

    An adapter cannot replace a layer whose weights are read directly by its parent module. Such parents are
    `nn.MultiheadAttention` (in open_clip's transformers) and the attention with separate q and v biases in timm's BEiT
    and EVA.
    """
    blocks = tuple(f"{block}." for block in block_names(tower))
    for name, layer in tower.named_modules():
        if name.startswith(blocks) and isinstance(layer, nn.Linear) and not layer.weight.requires_grad:
            parent = tower.get_submodule(name.rpartition(".")[0])
            if not isinstance(parent, nn.MultiheadAttention) and getattr(parent, "q_bias", None) is None:
                yield name
