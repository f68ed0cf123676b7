"""Build each method's config from a command line that several methods share."""

from collections.abc import Sequence

from neuclip_ds.config import Config
from neuclip_ds.losses.methods import find_method, method_of
from neuclip_ds.recipe import load_recipe, parse


def config_for(method: str | None, argv: Sequence[str]) -> Config:
    """Return the config of a recipe with options NAME=VALUE, omitting options that the method does not read.

    If `method` is None, the recipe's method is used.
    """
    recipe, *options = argv
    chosen = find_method(method) if method else method_of(load_recipe(recipe).get("objective", {}))
    arguments = [recipe]
    if method:
        arguments.append(f"--objective.method={method}")
    for option in options:
        name, _, _ = option.removeprefix("--").partition("=")
        if chosen.reads(name):
            arguments.append(option)
    return parse(arguments).config
