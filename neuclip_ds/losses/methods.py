"""The table of methods. Importing this module does not import torch, because `--help` reads the table.

A method's row is in the options file of its paper, such as `fastclip_options.py`. The file next to it, such as
`fastclip.py`, contains the equations, the function that builds the loss and, if the method has its own, the estimator.
`register_loss` in plugins.py adds a row for a loss that is not in this package.
"""

import difflib

from neuclip_ds.errors import UserError
from neuclip_ds.losses import (
    amorlip_options,
    fastclip_options,
    infonce_options,
    neuclip_options,
    neuclip_queue_options,
    siglip_options,
    tuneclip_options,
)
from neuclip_ds.losses.method import Method, Options
from neuclip_ds.section import Section

DEFAULT = "openclip"  # it has no settings that need tuning on a new dataset

METHODS: dict[str, Method] = {
    **infonce_options.METHODS,
    **siglip_options.METHODS,
    **fastclip_options.METHODS,
    **amorlip_options.METHODS,
    **neuclip_options.METHODS,
    **neuclip_queue_options.METHODS,
    **tuneclip_options.METHODS,
}

REGISTERED_OPTIONS: dict[str, type[Section]] = {}
"""Option sections of the losses that `register_loss` added, by name."""


def method_sections() -> list[str]:
    """Return every section or option under `objective` that some methods read and others do not."""
    sections: list[str] = []
    for method in METHODS.values():
        for section in method.sections:
            if section not in sections:
                sections.append(section)
    return sections


def reads_option(method: Method, option: str) -> bool:
    """Return False for a dotted option that only other methods read, such as `objective.npn.lr` for `openclip`.

    These are the sections and options of other methods (`method_sections`). The result is True for all shared options,
    even for those that the method ignores, such as `objective.eps` for `openclip`, or rejects, such as
    `objective.temperature.rule` for `openclip`.
    """
    parts = option.split(".")
    if parts[0] != "objective":
        return True
    return parts[1] in method.sections or parts[1] not in method_sections()


def find_method(name: str) -> Method:
    """Return the method with this name; if there is none, raise a `UserError` that lists all names."""
    if isinstance(name, str) and name in METHODS:
        return METHODS[name]
    shown = " ".join(str(name).split())[:80]
    nearest = difflib.get_close_matches(shown, METHODS, n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else "choose one."
    raise UserError(
        f"objective.method={shown} is unknown; the methods are {', '.join(METHODS)}; {hint} If a plugin registers this "
        "loss, add --plugin=MODULE (the name of a module, or the path of a .py file) or, in Python, import the plugin "
        "first."
    )


def method_of(options: Options) -> Method:
    """Return the method named in a tree of options under `objective`, or the default method."""
    return find_method(options.get("method", DEFAULT))
