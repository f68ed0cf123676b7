"""Compile the towers with torch.compile, block by block or as a whole.

Blocks with the same structure and constants share one compiled graph, so compiling takes seconds per kind of block
instead of minutes per tower. Modules and parameters keep their names.
"""

import os
import shutil
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from neuclip_ds.compiler import Compiler
from neuclip_ds.errors import UserError
from neuclip_ds.models.forward import replace_forward
from neuclip_ds.models.towers import DualEncoder
from neuclip_ds.models.trained_parts import block_names

Compilation = Literal["blocks", "towers", "false"]
"""Parts to compile: each block, each tower as a whole, or nothing."""

_GRAPHS_PER_BLOCK = 4  # without gradients, with gradients, in evaluation, and for batches of another size


def resolve_compilation(
    option: Literal["auto", "blocks", "towers"] | bool, device_type: str, zero_stage: int
) -> Compilation:
    """Return the parts of the model that the option `model.compile` compiles.

    `auto` compiles blocks on GPUs of machines with a C++ compiler, except under ZeRO 3, which fetches weights inside
    modules.
    """
    if option == "auto":
        has_compiler = shutil.which(os.environ.get("CXX", "g++")) is not None
        return "blocks" if device_type == "cuda" and has_compiler and zero_stage < 3 else "false"
    if option in ("blocks", "towers"):
        return option
    return "false"


def compile_towers(model: DualEncoder, compilation: Compilation) -> None:
    """Set up both towers, in place, to be compiled at their first call; call this after all other module changes.

    If anything is compiled, a text tower that packs captions only on CPUs (`auto`) stops packing them.

    Args:
        model: the dual encoder.
        compilation: parts to compile.

    Raises:
        UserError: a tower has no list of blocks, but blocks are to be compiled.
    """
    # on a CPU, attention is called once for each length that occurs in a batch, which interrupts compiled code
    if compilation != "false" and model.text.packed == "auto":
        model.text.packed = False
    compiler = Compiler("the towers run uncompiled and slower")
    if compilation == "towers":
        for tower in (model.vision, model.text):
            replace_forward(tower, compiler.compiled)
    elif compilation == "blocks":
        image_blocks = _blocks(model.vision, "vision")
        text_blocks = _blocks(model.text, "text")
        for block in image_blocks:
            replace_forward(block, compiler.compiled)
        # the number of tokens varies between batches of captions
        for block in text_blocks:
            replace_forward(block, partial(compiler.compiled, dynamic=True))
        # blocks that differ in a constant, such as the rate of stochastic depth, share code but no graph; beyond the
        # limit (8 by default), torch would run them uncompiled
        graphs = _GRAPHS_PER_BLOCK * max(len(image_blocks), len(text_blocks))
        dynamo_config: Any = torch._dynamo.config
        dynamo_config.cache_size_limit = max(dynamo_config.cache_size_limit, graphs)


def _blocks(tower: nn.Module, name: str) -> list[nn.Module]:
    names = list(block_names(tower))
    if not names:
        raise UserError(f"The {name} tower has no list of blocks to compile; set model.compile to towers or false.")
    return [tower.get_submodule(block_name) for block_name in names]
