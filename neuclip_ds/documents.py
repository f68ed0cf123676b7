"""Read YAML and JSON files that a user has written: plain values without surprises, or one sentence."""

import json
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import yaml

from neuclip_ds.errors import UserError
from neuclip_ds.section import check_plain

_LARGEST = 1 << 20  # bytes of a file
_MOST_KEYS = 1000  # of one mapping, which `<<` could double with each line


def read_yaml(path: Path) -> Any:
    """Return what a YAML file holds, in UTF-8 or UTF-16; raise `UserError` if it is not valid or not plain."""
    return _read(path, "YAML", lambda data: yaml.load(data, _Loader))


def read_json(path: Path) -> Any:
    """Return what a JSON file holds; raise `UserError` if it is not valid or not plain."""
    return _read(path, "JSON", lambda data: json.loads(data, object_pairs_hook=_unique))


def _read(path: Path, kind: str, parse: Callable[[bytes], Any]) -> Any:
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST + 1)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
    if len(data) > _LARGEST:
        raise UserError(f"{path} is larger than {_LARGEST >> 20} MB, too large for a file of options.")
    try:
        tree = parse(data)
        check_plain(tree)
    except RecursionError as error:
        raise UserError(f"{path} is not valid {kind}: it is nested too deeply.") from error
    except Exception as error:  # PyYAML's constructors raise errors of every kind
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{path} is not valid {kind}: {reason[:300]}.") from error
    return tree


class _Loader(yaml.SafeLoader):
    """YAML in which no key stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        _unique([(key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > _MOST_KEYS:
            raise ValueError(f"a mapping has more than {_MOST_KEYS} keys")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice} stands twice in one section")
    return found
