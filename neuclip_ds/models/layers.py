"""The layers of a tower, from its input to its feature, found in the structure of any library's model.

Blocks are the elements of its outermost lists of equal modules: transformer blocks, residual blocks of a ResNet, stages
of ConvNeXt or Swin. What is registered before them is the first layer (embeddings, stem), what follows them the last
(final norm, pooling, projection).
"""

from collections.abc import Iterator

from torch import nn

from neuclip_ds.errors import UserError

# projections that open_clip keeps as parameters of its towers, which come first in the order of registration
_AFTER_BLOCKS = {"proj", "text_projection"}


def parameter_layers(tower: nn.Module, name: str) -> list[list[str]]:
    """Return the names of a tower's parameters by layer: before the blocks, of each block, after the blocks.

    Raises:
        UserError: the tower, called `name` in the message, has no blocks.
    """
    blocks = list(block_names(tower))
    if not blocks:
        raise UserError(
            f"The {name} tower has no list of blocks to count: set model.{name}.train to all or frozen, and "
            f"optimizer.{name}.layer_decay to 1."
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
    """Yield the names of a module's blocks in their order."""
    for name, child in module.named_children():
        if _is_list_of_blocks(child):
            yield from (f"{prefix}{name}.{number}" for number, _ in child.named_children())
        else:
            yield from block_names(child, f"{prefix}{name}.")


def _is_list_of_blocks(module: nn.Module) -> bool:
    """Whether a container's elements are of one class, and more than single operations."""
    children = list(module.children())
    alike = isinstance(module, nn.ModuleList | nn.Sequential) and len({type(child) for child in children}) == 1
    return alike and len(list(children[0].children())) > 1
