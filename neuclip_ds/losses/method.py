"""The description of a method: the function that builds it, the options that it reads, and its default options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neuclip_ds.losses.base import LossContext, LossFunction
    from neuclip_ds.losses.options import ObjectiveConfig

LossBuilder = Callable[["ObjectiveConfig", "LossContext"], "LossFunction"]
"""Function that builds a loss from the options under `objective` and the sizes of the run."""

Options = Mapping[str, Any]
"""Options under `objective`, nested as in a recipe."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A row of the table of methods (methods.py)."""

    builder: str | LossBuilder
    """The function that builds the loss. A string MODULE.FUNCTION names a function in `neuclip_ds.losses`; because the
    module imports torch, it is imported only when a loss is built."""
    sections: tuple[str, ...] = ()
    """Sections and options under `objective` that this method reads but some other methods do not."""
    defaults: Options = field(default_factory=dict)
    """This method's default options, where they differ from the defaults of the sections."""
    state_options: tuple[str, ...] = ()
    """Dotted options under `objective` on which the tensors of the loss's state, or their shapes, depend. A resumed run
    must keep these options."""
    estimates_normalizers: bool = True
    """Whether the method is known to estimate normalizers; False for SigLIP, which has none, and for registered
    losses."""
    has_temperature_rule: bool = False
    """Whether the method reads `objective.temperature.rule`."""
    has_individual_temperatures: bool = False
    """Whether each sample has its own temperatures."""
    refuses_reference: bool = False
    """Whether a config with a reference model is rejected before the loss is built, because the loss cannot use it.
    False for registered losses, even for those that reject a reference model when they are built."""

    @property
    def keeps_u(self) -> bool:
        """Whether the method keeps the moving average u for each sample."""
        return "moving_average" in self.sections

    def build(self, config: ObjectiveConfig, context: LossContext) -> LossFunction:
        """Build the loss; raise `UserError` if an option or a size is missing or cannot be used."""
        if not isinstance(self.builder, str):
            return self.builder(config, context)
        module, function = self.builder.split(".")
        build: LossBuilder = getattr(import_module(f"neuclip_ds.losses.{module}"), function)
        return build(config, context)


def initial_temperature(tau: float) -> Options:
    """Return options that set tau at step 0, for use in `Method.defaults`."""
    return {"temperature": {"initial": tau}}
