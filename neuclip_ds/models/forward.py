"""Replace the forward methods of modules without renaming their parameters."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

Forward = Callable[..., Any]
"""A forward method: a function of the module and of its inputs."""
Replace = Callable[[Forward], Forward]
"""A function that takes a forward method and returns a new one, which may call the given one."""


class ReplacedForward:
    """A forward method for one module, which replaces the method of the module's class.

    It can be copied and pickled with its module if the replacements can be pickled, such as functions at the top level
    of a Python file and `partial` objects of these functions. The methods that the replacements return need not be
    picklable, because a copy calls the replacements again. (A bound method would be pickled as its name, which would
    then refer to the method of the class.)

    Args:
        module: the module.
        original: the forward method of its class.
        replacements: functions that are applied to `original` one after another.
    """

    def __init__(self, module: nn.Module, original: Forward, replacements: Sequence[Replace]) -> None:
        self.module = module
        self.original = original
        self.replacements = replacements
        self._set_function()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self.module, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_function"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._set_function()

    def _set_function(self) -> None:
        self._function = self.original
        for replace in self.replacements:
            self._function = replace(self._function)


def replace_forward(module: nn.Module, replace: Replace) -> None:
    """Replace a module's forward method with `replace(method)`; the method may itself be a replacement.

    Modules of the same class share one function if `replace` returns the same function for equal arguments. Deep copies
    of the module keep the replacement, even copies made by pickling.
    """
    current: Any = module.forward
    if isinstance(current, ReplacedForward):
        module.forward = ReplacedForward(module, current.original, [*current.replacements, replace])
    else:
        module.forward = ReplacedForward(module, current.__func__, [replace])
