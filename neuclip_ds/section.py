"""Base class of all config sections, and functions that read and merge options; this module does not import torch."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator

from neuclip_ds.errors import UserError, redact

_MAX_YAML_VALUES = 100_000  # values of a YAML file after its aliases are expanded; recipes have about 100
_YAML_MERGE = "tag:yaml.org,2002:merge"  # the key <<, which may occur several times


class Section(BaseModel):
    """Base of all sections of a config: unknown keys are errors, and the string under a field is its help text.

    Subclass it for the options of your own loss (`register_loss`). A section is a pydantic model; an invalid value
    raises pydantic's `ValidationError`, which is a `ValueError`.

    Example:
        import neuclip_ds
        from pydantic import Field


        class MarginOptions(neuclip_ds.Section):
            margin: float = Field(0.1, ge=0, lt=1)
            "Margin subtracted from the cosine of each pair."


        print(MarginOptions(margin=0.2))
    """

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _empty_is_default(cls, tree: Any) -> Any:
        """Treat a section that is empty in YAML, such as `data:`, as a section without options."""
        return {} if tree is None else tree

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject YAML's `yes`, `on` and `true`, which pydantic would read as 1; `no`, `off` and `false` remain 0."""
        if value is True and info.field_name is not None:
            annotation = cls.model_fields[info.field_name].annotation
            if not _accepts_switch(annotation):
                raise ValueError(
                    "true is not a value of this option (YAML reads yes and on as true); `neuclip-ds train --help all` "
                    "shows its type"
                )
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _is_plain(cls, value: Any) -> Any:
        """Reject secrets, which a run would store, and values that a config cannot contain.

        These are non-finite numbers, integers of more than 64 bits, YAML's dates and binary data, and texts with NUL
        characters or surrogates.
        """
        for leaf in _leaves(value):
            text = str(leaf)
            if isinstance(leaf, float) and not math.isfinite(leaf):
                raise ValueError(f"{text} is not a finite number")
            if isinstance(leaf, int) and not -(2**63) <= leaf < 2**63:
                raise ValueError(f"the number {text[:50]} does not fit in 64 bits")
            if not isinstance(leaf, (type(None), float, int, str, PurePath, BaseModel)):
                raise ValueError(f"{text[:50]} is a {type(leaf).__name__}; write it in quotes")
            if re.search("[\0\ud800-\udfff]", text):
                raise ValueError(f"{text[:50]!r} contains a NUL character or a surrogate")
            if redact(text) != text:
                raise ValueError(
                    "the value contains a secret; remove the secret here, and set it in an environment variable that "
                    "the store's library reads"
                )
        return value


def _accepts_switch(annotation: Any) -> bool:
    """Return whether a type includes true or false, such as `bool`, `int | bool` or `Literal["auto", False]`."""
    if annotation in (bool, Any) or isinstance(annotation, bool):
        return True
    return any(map(_accepts_switch, get_args(annotation)))


def is_given(section: Section, name: str) -> bool:
    """Return whether an option was set, even if to its default; null clears an option and does not count as a value."""
    return name in section.model_fields_set and getattr(section, name) is not None


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` overridden, section by section, by the values of `over`; an empty section changes nothing."""
    merged = dict(base)
    for key, value in over.items():
        base_value = merged.get(key)
        if not isinstance(base_value, Mapping):
            merged[key] = value
        elif isinstance(value, Mapping):
            merged[key] = merge(base_value, value)
        elif value is not None:
            merged[key] = value
    return merged


def read_options(path: Path) -> Any:
    """Return the content of a YAML or .json file of options; raise `UserError` if it cannot be read or is invalid."""
    try:
        text = path.read_bytes()
        return json.loads(text, object_pairs_hook=_without_repeats) if path.suffix == ".json" else read_yaml(text)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}; check the path and permissions.") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:  # RecursionError: deeply nested JSON
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{path} is not valid YAML or JSON: {reason[:300]}.") from error


def read_yaml(text: bytes | str) -> Any:
    """Return the content of a YAML document; None if it is empty.

    Raises `ValueError` or `yaml.YAMLError` if the document is invalid. This includes a key that a mapping contains
    twice. It also includes aliases that contain themselves, and more than 100,000 values after all aliases are
    expanded, because merging and validating such options would take too long or never end.
    """
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        sizes: dict[yaml.Node, int | None] = {}
        if _expanded_size(node, sizes) > _MAX_YAML_VALUES:
            raise ValueError(f"it contains more than {_MAX_YAML_VALUES} values, with its aliases (*NAME) expanded")
        for visited in sizes:
            _check_keys(visited)
        return loader.construct_document(node)
    except (ValueError, yaml.YAMLError):
        raise
    except Exception as error:  # PyYAML's constructors raise many types of errors
        raise ValueError(str(error) or type(error).__name__) from error
    finally:
        loader.dispose()


def _expanded_size(node: yaml.Node, sizes: dict[yaml.Node, int | None]) -> int:
    """Return the number of values in a node with its aliases expanded; `sizes` maps visited nodes to their results."""
    if node in sizes:
        size = sizes[node]
        if size is None:  # not known yet, so the node contains itself
            raise ValueError("an alias (*NAME) refers to a value that contains the alias itself")
        return size
    sizes[node] = None
    parts: list[yaml.Node] = []
    if isinstance(node, yaml.SequenceNode):
        parts = node.value
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            parts += [key, value]
    size = 1 + sum(_expanded_size(part, sizes) for part in parts)
    sizes[node] = size
    return size


def _check_keys(node: yaml.Node) -> None:
    """Raise `ValueError` if a node is a mapping that contains a key twice; PyYAML would drop the first value."""
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[tuple[str, str], int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == _YAML_MERGE:
            continue
        line = key.start_mark.line + 1
        name = (key.tag, key.value)
        if name in lines:
            raise ValueError(
                f"the key {key.value!r} occurs twice, in lines {lines[name]} and {line}; keep one of them, with all "
                "options if it is a section"
            )
        lines[name] = line


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the keys and values of a JSON object as a dict; raise `ValueError` if a key occurs twice."""
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(
                f"the key {key!r} occurs twice in an object; keep one of them, with all options if it is a section"
            )
        content[key] = value
    return content


def _leaves(tree: Any) -> Iterator[Any]:
    """Yield all keys and leaf values of a tree."""
    if isinstance(tree, dict):
        yield from _leaves([*tree.keys(), *tree.values()])
    elif isinstance(tree, (list, tuple)):
        for element in tree:
            yield from _leaves(element)
    else:
        yield tree
