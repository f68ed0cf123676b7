"""Compile functions with torch.compile, and run them uncompiled where it fails."""

import logging
from collections.abc import Callable
from typing import Any

import torch

log = logging.getLogger(__name__)


class Compiler:
    """Compiles functions with torch.compile at their first call; once a compiled call fails, all run uncompiled.

    The first failure is logged as a warning. A copied or unpickled compiler has not compiled anything yet.

    Args:
        consequence: effect of a failure, as a clause for the warning, such as `the towers run uncompiled and slower`.
    """

    def __init__(self, consequence: str) -> None:
        self._consequence = consequence
        self._has_failed = False
        self._compiled: dict[tuple[Callable[..., Any], bool | None], Callable[..., Any]] = {}

    def __reduce__(self) -> tuple[type["Compiler"], tuple[str]]:
        return Compiler, (self._consequence,)

    def compiled(self, function: Callable[..., Any], dynamic: bool | None = None) -> Callable[..., Any]:
        """Return the compiled version of `function`; equal arguments give the same version.

        Args:
            function: the function. It must not change its arguments, because after a failure it is called with them
                again. A module among its arguments may differ from call to call; modules of the same structure share
                graphs.
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
                log.warning("torch.compile failed, so %s: %s", self._consequence, reason)
            return function(*args, **kwargs)

        return call
