"""Replace the forward methods of modules without renaming their parameters."""

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

Forward = Callable[..., Any]
"""A forward method: a function of the module and of its inputs."""


def replace_forward(module: nn.Module, replace: Callable[[Forward], Forward]) -> None:
    """Replace a module's forward method by `replace` of the current one, which may itself be a replacement.

    Modules of the same class get the same function if `replace` returns it for the same argument. Copies of the module
    keep the replacement.
    """
    method: Any = module.forward
    module.forward = MethodType(replace(method.__func__), module)
