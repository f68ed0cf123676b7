"""The base class of all config sections, and how trees of options are merged; free of torch."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, and the string under a field is its help text."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True)
    follows_epochs: ClassVar[bool] = False  # whether it holds schedules by epochs of the data


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `over` on top, section by section."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged
