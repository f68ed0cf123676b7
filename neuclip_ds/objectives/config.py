"""Options of an objective: those that all methods share, and one section for each that a method's file brings."""

from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import Field, SerializerFunctionWrapHandler, create_model, model_serializer, model_validator

from neuclip_ds.errors import UserError
from neuclip_ds.objectives.methods import DEFAULT, METHODS, SECTIONS, find_method, method_of
from neuclip_ds.objectives.temperature_config import TemperatureConfig
from neuclip_ds.section import Section, merge

S = TypeVar("S", bound=Section)


class _ObjectiveConfig(Section):
    """The options that all methods share."""

    method: str = DEFAULT
    """Method to train with: a name in the table of docs/reference/methods.md."""
    eps: float = Field(1e-14, gt=0)
    """Added to every normaliser (FastCLIP App. D: 1e-6 beyond about 100M samples)."""
    chunk: int | None = Field(None, ge=1)
    """Columns of the similarity matrix that are computed at once. By default as suits the device; rows are limited so
    that a block has at most 64 MiB on a GPU, 1 MiB per thread on a CPU."""
    similarity_budget_mb: float = Field(1024, ge=0)
    """Memory per rank, in MB, for keeping similarities between the two passes; larger ones are recomputed."""
    compile: bool = False
    """Fuse the operations between the loss's matrix products with torch.compile. Meant for GPUs, where they wait for
    memory; the first steps compile for up to half a minute. On a CPU it saves nothing."""
    comm_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision in which features travel between ranks; `auto` is the towers' precision."""
    scale: Literal["paper", "released_code"] = "paper"
    """Leading factor of losses with constant or individual tau: tau in the papers, 1 in FastCLIP's released code."""
    temperature: TemperatureConfig = Field(default_factory=TemperatureConfig)

    @model_validator(mode="before")
    @classmethod
    def _lay_over_the_methods_defaults(cls, tree: Any) -> Any:
        """Refuse sections that the method does not read, and put the method's defaults under the rest."""
        if not isinstance(tree, dict):
            return tree
        method = method_of(tree)
        for section in SECTIONS:
            if section in tree and section not in method.sections:
                raise UserError(_unread(tree.get("method", DEFAULT), section, tree[section]))
        return merge(merge(method.defaults, method.starts), tree)

    @model_serializer(mode="wrap")
    def _without_unread_sections(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        read = find_method(self.method).sections
        return {name: value for name, value in whole(self).items() if name not in SECTIONS or name in read}

    def section(self, kind: type[S]) -> S:
        """Return the options of a method's section, by its class."""
        return next(value for _, value in self if isinstance(value, kind))


def _unread(method: str, section: str, options: Any) -> str:
    given = [f"objective.{section}.{key}" for key in options] if isinstance(options, dict) else []
    readers = ", ".join(name for name, other in METHODS.items() if section in other.sections)
    reads = " and ".join(f"objective.{name}" for name in METHODS[method].sections) or "no section of its own"
    return (
        f"{', '.join(given) or f'objective.{section}'} is read by {readers} only; objective.method={method} reads "
        f"{reads}: remove it, or choose one of those methods."
    )


if TYPE_CHECKING:
    ObjectiveConfig = _ObjectiveConfig
else:  # with a field for each section, which `section` finds
    ObjectiveConfig = create_model(
        "ObjectiveConfig",
        __base__=_ObjectiveConfig,
        __module__=__name__,
        **{name: (kind, Field(default_factory=kind)) for name, kind in SECTIONS.items()},
    )
