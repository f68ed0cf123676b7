"""The base class of all config sections, and how trees of options are merged; free of torch."""

import math
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from neuclip_ds.redaction import redact

_DEEPEST = 32  # levels of a tree of options
_MOST = 10_000  # values in it, each alias of YAML counted


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, and the string under a field is its help text."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True)
    follows_epochs: ClassVar[bool] = False  # whether it holds schedules by epochs of the data

    @model_validator(mode="before")
    @classmethod
    def _empty_is_default(cls, tree: Any) -> Any:
        """Take `data:` with nothing below as a section without options."""
        return {} if tree is None else tree

    @field_validator("*", mode="after")
    @classmethod
    def _is_plain(cls, value: Any) -> Any:
        check_plain(value)
        if redact(str(value)) != str(value):
            raise ValueError(
                "it holds a secret, which the run would store: put it into a variable that the store's library reads"
            )
        return value


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `over` on top, section by section; an empty section changes nothing."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, Mapping):
            value = merge(old, value) if isinstance(value, Mapping) else old if value is None else value
        merged[key] = value
    return merged


def check_plain(tree: Any) -> None:
    """Raise `ValueError` unless all values are such that every part of a run, and YAML, can hold them."""
    for number, (name, value) in enumerate(_values(tree, _DEEPEST)):
        if number == _MOST:
            raise ValueError(f"it holds more than {_MOST} values")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name}{value} is not a finite number")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"{name}a number is beyond 64 bits")
        if isinstance(value, (str, PurePath)) and any(c == "\0" or "\ud800" <= c <= "\udfff" for c in str(value)):
            raise ValueError(f"{name}{str(value)[:50]!r} holds a character that no text can hold")
        if not isinstance(value, (type(None), float, int, str, PurePath, BaseModel)):
            raise ValueError(f"{name}{str(value)[:50]} is a {type(value).__name__}; write it in quotes")


def _values(tree: Any, levels: int, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all keys and values of a tree that are no containers, each with the key that it belongs to."""
    if not isinstance(tree, (dict, list, tuple)):
        yield name, tree
        return
    if not levels:
        raise ValueError(f"it is nested deeper than {_DEEPEST} levels")
    items = tree.items() if isinstance(tree, dict) else ((name, value) for value in tree)
    for key, value in items:
        if isinstance(tree, dict):
            if not isinstance(key, str):
                raise ValueError(f"the key {str(key)[:50]} is not a word; write it in quotes")
            yield name, key
            key = f"{key[:50]}="
        yield from _values(value, levels - 1, key)
