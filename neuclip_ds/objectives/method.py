"""The description of a method that its file holds; free of torch, so that `--help` can read every method."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from neuclip_ds.section import Section

if TYPE_CHECKING:
    from neuclip_ds.objectives.base import Context, Objective
    from neuclip_ds.objectives.config import ObjectiveConfig
else:  # names for the annotations of a method's file; these modules import torch, or the methods
    Context = Objective = ObjectiveConfig = Any

Options = Mapping[str, Any]
"""Options below `objective.`, as a recipe nests them."""


class Search(NamedTuple):
    """A method's part in the miniature study (docs/reference/reproduction.md); names are dotted, below `objective.`."""

    fixed: Mapping[str, Any] = {}  # set in every run of the method
    # searched together with the learning rate: where tau starts, since rho moves nothing in a few hundred steps
    option: str = "temperature.initial"
    values: tuple[Any, Any] = (0.07, 0.03)
    rates: tuple[float, float] = (2e-3, 4e-3)  # learning rates that it starts with


@dataclass(frozen=True, kw_only=True)
class Method:
    """One method: how its objective is composed, the options that it reads, and how it is tested and documented."""

    source: str
    """Paper and equation."""
    pair_loss: str = "identity"
    """Pair loss l, for the table in the docs; likewise the next three."""
    normalizer: str | None
    """Where the weights w_i come from; None for a loss without normalisers."""
    scale: str = "tau"
    temperature: str
    compose: Callable[[ObjectiveConfig, Context], Objective]
    """Build the objective. Import its parts inside this function: they import torch."""
    sections: Mapping[str, type[Section]] = field(default_factory=dict)
    """Config sections that the method reads, by name below `objective.`; several methods may share one."""
    has_temperature_rule: bool = False
    """Whether the method reads `temperature.rule` (global_loss.py), since it has more than one."""
    defaults: Options = field(default_factory=dict)
    """Published settings where they differ from the sections' defaults."""
    starts: Options = field(default_factory=dict)
    """Likewise for scalars that a pretrained checkpoint brings along; these defaults hold without a checkpoint."""
    test_options: Mapping[str, Options] = field(default_factory=lambda: {"": {}})
    """Variant -> options with which every test of the table runs the method."""
    slips: Callable[[ObjectiveConfig], list[str]] = lambda config: []
    """A sentence for each setting of the method's sections that training survives but that hardly anybody means."""
    float32_options: Options = field(default_factory=dict)
    """On top of these for the comparison of float32 with float64: what keeps an inner optimizer still."""
    search: Search | None = None
    """Part in the miniature study; None leaves the method out."""

    def reads(self, option: str) -> bool:
        """Whether the method reads a dotted option; options outside methods' sections are read by all."""
        from neuclip_ds.objectives.methods import SECTIONS

        parts = option.split(".")
        return parts[0] != "objective" or parts[1] in self.sections or parts[1] not in SECTIONS
