"""Activation checkpointing: recompute the activations of blocks in the backward pass instead of storing them."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from neuclip_ds.errors import UserError
from neuclip_ds.losses.batch_norm import batch_norms, kept_statistics
from neuclip_ds.models.forward import Forward, replace_forward
from neuclip_ds.models.trained_parts import block_names


def checkpointed_blocks(tower: nn.Module, name: str, activation_checkpointing: bool | int) -> list[str]:
    """Return the names of a tower's blocks to checkpoint.

    If only some blocks are checkpointed, they are the first ones: the backward pass frees the activations of the last
    blocks before it recomputes earlier ones.

    Args:
        tower: a tower from any library.
        name: name of the tower in messages.
        activation_checkpointing: value of the model option: true for all blocks, or a number of blocks.

    Raises:
        UserError: blocks are to be checkpointed, but the tower has no list of blocks.
    """
    blocks = list(block_names(tower)) if activation_checkpointing else []
    if activation_checkpointing and not blocks:
        raise UserError(
            f"The {name} tower has no list of blocks to recompute; set model.activation_checkpointing=false."
        )
    if activation_checkpointing is True:
        return blocks
    return blocks[:activation_checkpointing]


def checkpoint_activations(tower: nn.Module, name: str, activation_checkpointing: bool | int) -> None:
    """Enable activation checkpointing, in place, for the blocks that `checkpointed_blocks` names.

    Parameters keep their names. The arguments and errors are those of `checkpointed_blocks`.
    """
    for block_name in checkpointed_blocks(tower, name, activation_checkpointing):
        replace_forward(tower.get_submodule(block_name), _checkpointed)


def _checkpointed(forward: Forward) -> Forward:
    """Return a forward method that runs the given one, and runs it again in the backward pass."""

    def checkpointed_forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(block, *args, **kwargs)
        norms = batch_norms(block)
        if norms and not torch.compiler.is_compiling():  # torch.compile updates running statistics only once
            kwargs["context_fn"] = lambda: (nullcontext(), kept_statistics(norms))
        return checkpoint(partial(forward, block), *args, use_reentrant=False, **kwargs)

    return checkpointed_forward
