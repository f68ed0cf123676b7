"""List the recipes of `neuclip-ds train`, each with a short description.

Examples:
  neuclip-ds recipes
  neuclip-ds recipes neuclip

A recipe is a YAML file of options; `neuclip-ds train RECIPE --print-config` prints all options that apply, with their
values. Your own recipe can include these recipes; to use it, pass its path instead of a name.
"""

from collections.abc import Sequence

from neuclip_ds.cli.program import Parser
from neuclip_ds.errors import UserError
from neuclip_ds.recipe import recipe_names, recipe_summary


def main(arguments: Sequence[str]) -> None:
    parser = Parser(prog="neuclip-ds recipes", description=__doc__)
    parser.add_argument("text", nargs="?", default="", help="list only recipes whose name contains this text")
    options = parser.parse(arguments)
    names = [name for name in recipe_names() if options.text in name]
    if not names:
        raise UserError(f"No recipe's name contains {options.text}; `neuclip-ds recipes` lists all recipes.")
    width = max(map(len, names))
    for name in names:
        print(f"{name:<{width}}  {recipe_summary(name)}")
