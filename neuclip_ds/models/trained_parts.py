"""Freeze parameters of a dual encoder, scale learning rates by layer, and add LoRA adapters.

The layers of any library's tower are derived from its module structure. Blocks are the elements of the outermost lists
of same-class modules: transformer blocks, ResNet's residual blocks, ConvNeXt's or Swin's stages. The first layer has
the parameters before the blocks (embeddings, stem), and the last has those after them (norm, pooling, projection).

LoRA (Hu et al. 2022) is implemented with peft, which replaces a linear layer with one that adds `alpha / rank * B A x`.
Adapters are ordinary parameters that are trained, saved and resumed as usual; export merges them into the weights.
"""

from collections.abc import Iterator, Mapping
from itertools import chain
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
        frozen = sum(p.numel() for p in module.parameters() if not p.requires_grad)
        return Parameters(tuple(p.numel() for p in module.parameters() if p.requires_grad), frozen)

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

    Raises:
        UserError: a tower has fewer blocks than the option requests.
    """
    for name in TOWERS:
        tower, trained = model.get_submodule(name), config.trained(name)
        if trained == "frozen":
            tower.requires_grad_(False)
        elif trained != "all":
            layers = parameter_layers(tower, name)
            blocks = len(layers) - 2
            if trained > blocks:
                raise UserError(
                    f"model.{name}.trainable={trained}, but the tower has {blocks} blocks; use at most {blocks}, or "
                    "all."
                )
            for parameter in chain.from_iterable(layers[: blocks + 1 - trained]):
                tower.get_parameter(parameter).requires_grad_(False)


def lock_projection(tower: nn.Module) -> None:
    """Set the new projection of a frozen, pretrained image tower to the identity, so that features do not change (LiT).

    Raises:
        UserError: the projection is not a square linear layer, so its random weights would be frozen.
    """
    projection = tower.get_submodule("projection")
    if not isinstance(projection, nn.Linear) or projection.in_features != projection.out_features:
        width = f"={projection.in_features}" if isinstance(projection, nn.Linear) else " to the tower's width"
        raise UserError(
            "model.vision.trainable=frozen would freeze the random projection of the image tower: set "
            f"model.vision.trainable=0 to train it, or model.embed_dim{width}."
        )
    nn.init.eye_(projection.weight)


def learning_rate_scales(model: nn.Module, config: OptimizerConfig) -> dict[str, float]:
    """Return learning-rate factors by parameter name; the factor of a parameter that is not listed is 1.

    Args:
        model: must have the towers `vision` and `text` if the config sets per-tower learning rates or a layer decay.
    """
    scales: dict[str, float] = {}
    for name, own in zip(TOWERS, (config.vision_lr, config.text_lr), strict=True):
        rate = own / config.lr if own else 1.0
        if rate == config.layer_decay == 1:
            continue
        tower = model.get_submodule(name)
        trained = [parameter for parameter, weight in tower.named_parameters() if weight.requires_grad]
        scales |= {f"{name}.{parameter}": rate for parameter in trained}
        if trained and config.layer_decay < 1:
            for distance, layer in enumerate(reversed(parameter_layers(tower, name))):  # from the end of the tower
                scales |= dict.fromkeys((f"{name}.{one}" for one in layer), rate * config.layer_decay**distance)
    return scales


def parameter_layers(tower: nn.Module, name: str) -> list[list[str]]:
    """Return the names of a tower's parameters by layer: before the blocks, in each block, and after the blocks.

    Raises:
        UserError: the tower (`name` in the message) has no blocks.
    """
    blocks = list(block_names(tower))
    if not blocks:
        raise UserError(
            f"The {name} tower has no list of blocks to count: set model.{name}.trainable to all or frozen, and "
            f"optimizer.layer_decay to 1."
        )
    layers: list[list[str]] = [[] for _ in range(len(blocks) + 2)]
    seen = 0
    for parameter, _ in tower.named_parameters():
        own = next((i for i, block in enumerate(blocks, 1) if parameter.startswith(f"{block}.")), None)
        seen = own or seen
        after = own is None and (seen == len(blocks) or parameter.rpartition(".")[2] in _AFTER_BLOCKS)
        layers[-1 if after else seen].append(parameter)
    return layers


def block_names(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Yield the names of a module's blocks in order."""
    for name, child in module.named_children():
        if _is_list_of_blocks(child):
            yield from (f"{prefix}{name}.{number}" for number, _ in child.named_children())
        else:
            yield from block_names(child, f"{prefix}{name}.")


def _is_list_of_blocks(module: nn.Module) -> bool:
    """Return whether a module is a container of same-class modules that each consist of several modules."""
    children = list(module.children())
    alike = isinstance(module, nn.ModuleList | nn.Sequential) and len({type(child) for child in children}) == 1
    return alike and len(list(children[0].modules())) > 2


def add_adapters(towers: Mapping[str, nn.Module], config: LoraConfig) -> None:
    """Add LoRA adapters in place to frozen linear layers in the towers' blocks; trainable parameters stay trainable.

    Args:
        towers: maps the names used in messages to the towers; load weights and freeze layers before the call.

    Raises:
        UserError: peft is not installed, or no tower has blocks with frozen linear layers.
    """
    require_package("peft", "model.lora.rank", "lora")
    import peft

    found = {name: layers for name, tower in towers.items() if (layers := list(_frozen_linear_layers(tower)))}
    if not found:
        raise UserError("No tower has blocks with frozen linear layers that adapters could be added to (model.lora).")
    for name, layers in found.items():
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

    An adapter cannot replace a layer whose weights are read directly by its parent module. Such parents are torch's
    attention (in open_clip's transformers) and the attention with separate biases in timm's BEiT and EVA.
    """
    blocks = tuple(f"{block}." for block in block_names(tower))
    for name, layer in tower.named_modules():
        if name.startswith(blocks) and isinstance(layer, nn.Linear) and not layer.weight.requires_grad:
            parent = tower.get_submodule(name.rpartition(".")[0])
            if not isinstance(parent, nn.MultiheadAttention) and getattr(parent, "q_bias", None) is None:
                yield name
