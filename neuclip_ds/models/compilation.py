"""Compile the towers with torch.compile, block by block or as a whole.

Blocks with the same structure and constants share one compiled graph, so compiling takes seconds per kind of block
instead of minutes per tower. Modules and parameters keep their names.
"""

import logging
import os
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from neuclip_ds.errors import UserError
from neuclip_ds.models.forward import replace_forward
from neuclip_ds.models.towers import DualEncoder
from neuclip_ds.models.trained_parts import block_names

log = logging.getLogger(__name__)

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


class Compiler:
    """Compiles functions with torch.compile at their first call; once a compiled call fails, all run uncompiled.

    A copied or unpickled compiler has not compiled anything yet.
    """

    def __init__(self) -> None:
        self._has_failed = False
        self._compiled: dict[tuple[Callable[..., Any], bool | None], Callable[..., Any]] = {}

    def __reduce__(self) -> tuple[type["Compiler"], tuple[()]]:
        return Compiler, ()

    def compiled(self, function: Callable[..., Any], dynamic: bool | None = None) -> Callable[..., Any]:
        """Return the compiled version of `function`; equal arguments give the same version.

        Args:
            function: the function; a module among its arguments may differ from call to call. Graphs are shared between
                modules of the same structure.
            dynamic: as in `torch.compile`: true compiles for all sizes from the start; None does so only after a size
                has changed, with a second compilation.
        """
        key = (function, dynamic)
        if key not in self._compiled:
            self._compiled[key] = self._with_fallback(function, dynamic)
        return self._compiled[key]

    def _with_fallback(self, function: Callable[..., Any], dynamic: bool | None) -> Callable[..., Any]:
        compiled = torch.compile(function, dynamic=dynamic)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._has_failed:
                return function(*args, **kwargs)
            try:
                return compiled(*args, **kwargs)
            except Exception as error:  # the compiler's exceptions differ between versions
                self._has_failed = True
                reason = " ".join(str(error).strip().splitlines()[:2])  # the first may name only the compiler's backend
                log.warning("torch.compile failed, so the towers run uncompiled and slower: %s", reason)
            return function(*args, **kwargs)

        return call


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
    compiler = Compiler()
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
