"""Build each method's config from a command line that several methods share."""

from collections.abc import Sequence

from neuclip_ds.config import Config
from neuclip_ds.losses.methods import find_method, method_of, reads_option
from neuclip_ds.recipe import load_recipe, parse

FULL = "full"  # value of --caption-tokens
# help of options
CAPTION_TOKENS = (
    "lengths of random captions in tokens: full (the context length), a mean, or a file with one length per line "
    "(default: full)"
)
STORED_WIDTH = "width of the stored features of a reference model and of teachers (default: read from their folders)"


def config_for(method: str | None, argv: Sequence[str]) -> Config:
    """Return the config of a recipe with options NAME=VALUE, omitting options that the method does not read.

    If `method` is None, the recipe's method is used. Raises `UserError` if the recipe, the method or an option is
    invalid.
    """
    recipe, *options = argv
    arguments = [recipe]
    if method is None:
        chosen = method_of(load_recipe(recipe).get("objective", {}))
    else:
        chosen = find_method(method)
        arguments.append(f"--objective.method={method}")
    for option in options:
        name = option.removeprefix("--").split("=")[0]
        if reads_option(chosen, name):
            arguments.append(option)
    return parse(arguments).config
