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
    named = [f"--objective.method={method}"] if method else []
    read = [option for option in options if chosen.reads(option.removeprefix("--").split("=")[0])]
    return parse([recipe, *named, *read]).config
