"""The table of methods: one file in this folder and one name below for each."""

import difflib
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from neuclip_ds.errors import UserError
from neuclip_ds.objectives.method import Method
from neuclip_ds.section import Section

_NAMES = (
    "openclip",
    "siglip",
    "sogclr",
    "isogclr",
    "fastclip_v0",
    "fastclip_v1",
    "fastclip_v2",
    "fastclip_v3",
    "amorlip",
    "neuclip",
    "neuclip_queue",
    "gcl",
    "tuneclip",
)
DEFAULT = "neuclip"
METHODS: dict[str, Method] = {name: import_module(f"{__name__}.{name}").METHOD for name in _NAMES}
SECTIONS: dict[str, type[Section]] = {name: kind for m in METHODS.values() for name, kind in m.sections.items()}
"""Every section that some method reads, by its name below `objective.`."""


def find_method(name: str) -> Method:
    """Return the method of that name; raise `UserError` that names the nearest if there is none."""
    if not isinstance(name, str) or name not in METHODS:
        name = " ".join(str(name).split())[:80]
        nearest = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else "choose one."
        raise UserError(f"objective.method={name} is unknown; the methods are {', '.join(METHODS)}; {hint}")
    return METHODS[name]


def method_of(options: Mapping[str, Any]) -> Method:
    """Return the method that a tree of options below `objective.` names, or the default."""
    return find_method(options.get("method", DEFAULT))
