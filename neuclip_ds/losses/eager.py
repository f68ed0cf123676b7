"""Keep functions out of torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def not_compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that runs without compilation, even when it is called from a compiled function.

    Compiling collectives, per-sample state and host waits would only split the caller's graph into many small ones.
    `torch.compiler.disable` as a decorator would import the compiler in every program, which takes about two seconds.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            eager: Callable[P, T] = torch.compiler.disable(function)
            return eager(*args, **kwargs)
        return function(*args, **kwargs)

    return call
