"""Build a validated config from a recipe's name and `--dotted.name=value` overrides, without importing torch.

A recipe is a YAML file with the structure of `neuclip_ds.config.Config`. `include:` lists other recipes (names in
`neuclip_ds/recipes/`, or paths relative to the file), which are merged in order and then overridden by the recipe's
options. `other_methods:` under `objective:` contains sections that apply only if the run's method uses them. Plugins in
`run.plugins` are imported as soon as a recipe is read, so that the options of their losses are known.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_origin

from pydantic import BaseModel, Field, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, CliImplicitFlag, CliPositionalArg, CliSettingsSource, SettingsError

from neuclip_ds.config import (
    CONFIG,
    REPLACED_BY_CHECKPOINT,
    REPLACED_BY_TEXT_ENCODER,
    SIZES,
    Config,
    LocalPath,
    without_replaced,
)
from neuclip_ds.errors import UserError, counted
from neuclip_ds.files import expand_user
from neuclip_ds.losses.methods import METHODS, REGISTERED_OPTIONS, find_method, method_of, method_sections
from neuclip_ds.losses.options import ObjectiveConfig, objective_config
from neuclip_ds.losses.plugins import import_plugin
from neuclip_ds.section import merge, read_options

RECIPES = Path(__file__).parent / "recipes"
DEMO = "demo"
M = TypeVar("M", bound=BaseModel)
_PROFILED_STEPS = 10  # steps that --profile records
_OTHER_METHODS = "other_methods"
_NULL = "null"  # value of an option on the command line that removes the recipe's value
_EMPTY_MAPPING = "{}"
_MAX_PROBLEMS = 5  # problems that a message lists
_MAX_SHOWN = 120  # characters of a value in a message
_SEE_HELP = "`neuclip-ds train --help all` lists all options."


class TrainCommand(Config):
    """Arguments of `neuclip-ds train`: a recipe, the options of `Config`, and switches."""

    recipe: CliPositionalArg[str | None] = None
    """Name of a recipe in neuclip_ds/recipes/, or the path of a YAML file. By default, demo."""
    plugin: list[str] = Field([])
    """Module that registers losses: the name of a module, or the path of a .py file; may be repeated. It is imported on
    all ranks before the config is read, and added to run.plugins."""
    print_config: CliImplicitFlag[bool] = False
    """Print the resolved config as YAML and stop."""
    dry_run: CliImplicitFlag[bool] = False
    """Check the config, the model and the data without training, print the sizes of the model and the data and the
    estimated memory and traffic, and stop."""
    hostfile: LocalPath | None = None
    """With --dry-run: plan for the nodes in this hostfile instead of the ranks of this launch."""
    gpu_memory: float | None = Field(None, gt=0)
    """With --dry-run: memory of one GPU in GB; the lowest ZeRO stage that fits is printed."""
    measured: LocalPath | None = None
    """With --dry-run: folder of a run of at least 20 steps with the same model, DeepSpeed config and method, from whose
    speed the hours of this run are estimated."""
    profile: CliImplicitFlag[bool] = False
    """Profile ten steps of the run, as --run.profile-steps=10 does."""


class Invocation(NamedTuple):
    """The parsed command line."""

    command: TrainCommand  # its switches and its recipe (None: demo); its other options have their defaults
    config: Config  # the recipe with all options of the command line


def parse(argv: Sequence[str]) -> Invocation:
    """Parse a command line; dashes and underscores in options are equivalent.

    Raises `UserError` if an option is unknown, invalid or contradicts another one, if a recipe does not exist or cannot
    be read, or if a plugin cannot be imported. For an unknown name, the message suggests a similar one, if any.
    """
    import_named_plugins(argv)
    options = _command_line(argv)
    switches = {key: value for key, value in options.items() if key not in Config.model_fields}
    overrides = {key: value for key, value in options.items() if key in Config.model_fields}
    command = _validate(TrainCommand, switches)
    if (command.hostfile or command.gpu_memory or command.measured) and not command.dry_run:
        raise UserError(
            "--hostfile, --gpu-memory and --measured work only with --dry-run: add --dry-run, or omit them. To train "
            "on several hosts, pass the hostfile to the launcher."
        )
    if command.profile:
        overrides = {"run.profile_steps": _PROFILED_STEPS, **overrides}
    return Invocation(command, recipe_config(command.recipe or DEMO, overrides, command.plugin))


def import_named_plugins(argv: Sequence[str]) -> None:
    """Import the plugins that a command line and its recipe name.

    Raises `UserError` as `load_recipe` does, or if the command line cannot be parsed.
    """
    options = _command_line(argv, ignore_unknown=True)  # the plugins define options
    for plugin in options.get("plugin", []):
        import_plugin(plugin)
    _import_plugins(options)
    load_recipe(options.get("recipe") or DEMO)  # imports the plugins that the recipe and its includes name


def recipe_config(recipe: str, options: Mapping[str, Any], plugins: Sequence[str] = ()) -> Config:
    """Return a recipe's config with `options` (nested or dotted) applied and `plugins` added to `run.plugins`.

    Raises the same errors as `parse`.
    """
    overrides: dict[str, Any] = {}
    for name, value in options.items():
        for key in reversed(name.split(".")):
            value = {key: value}
        overrides = merge(overrides, value)
    _import_plugins(overrides)
    tree = override(load_recipe(recipe), overrides)
    run = {} if tree.get("run") is None else tree["run"]
    if isinstance(run, dict) and run.get("name") is None:
        tree["run"] = {**run, "name": Path(recipe).stem}
    config = validate(tree)
    for plugin in plugins:
        if plugin not in config.run.plugins:
            config.run.plugins.append(plugin)
    return config


def with_registered_losses(model: type[M]) -> type[M]:
    """Return a class of options, `Config` or `TrainCommand`, with the options of registered losses as fields."""
    if not REGISTERED_OPTIONS:
        return model
    objective = objective_config()
    fields: dict[str, Any] = {"objective": (objective, Field(default_factory=objective))}
    return create_model(model.__name__, __base__=model, __module__=__name__, **fields)


def recipe_names() -> list[str]:
    """Return the names of complete recipes; those in subfolders, for `include:`, set only some options of a run."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def recipe_summary(name: str) -> str:
    """Return the first sentence of the comment at the top of a recipe, or "" if the recipe begins without a comment.

    Raises `UserError` if the recipe does not exist.
    """
    comment = []
    for line in _find_recipe(name, None).read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.removeprefix("#").strip())
    # the period of an abbreviation, as in "et al. 2022" and "App. D", does not end a sentence
    first, *_ = re.split(r"(?<=\.)(?<!\bApp\.) (?=[A-Z])", " ".join(comment))
    return first


def load_recipe(name: str, within: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return a recipe as a tree with its includes merged in; `within` lists the files that include the recipe.

    Also imports the plugins that the recipe and its includes name. Raises `UserError` if a file is missing, invalid or
    includes itself, or a plugin cannot be imported.
    """
    path = _find_recipe(name, within[-1] if within else None)
    file = path.resolve()
    chain = (*within, file)
    if file in within:
        names = " includes ".join(link.name for link in chain)
        raise UserError(f"The recipe {path} includes itself ({names}): remove one of these includes.")
    tree = read_options(path) or {}
    if not isinstance(tree, dict):
        raise UserError(f"The recipe {path} must be a mapping of sections such as `data:` and `model:`.")
    if path.name == CONFIG:  # a run's config, perhaps saved by an earlier version
        tree = without_replaced(tree)
    included = tree.pop("include", None) or []
    if not (isinstance(included, list) and all(isinstance(name, str) for name in included)):
        raise UserError(f"{path}: include={_shown(included)} is not a list of recipes; write include: [NAME].")
    _import_plugins(tree)
    merged: dict[str, Any] = {}
    for included_name in included:
        merged = override(merged, load_recipe(included_name, chain))
    return override(merged, tree)


def override(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return `base` overridden by the values of `over`.

    If `over` names a method, sections of `base` that this method does not use are moved to `other_methods`. If `over`
    names a checkpoint or a text encoder, the options of `base` that the checkpoint or the encoder replaces are dropped.
    A checkpoint in `over` also drops the image size and the context length of `base`, unless `base` names a checkpoint
    too. An option that is a mapping, such as `model.vision.options`, is merged, unless `over` clears it with null or
    {}. Raises `UserError` if `over` names an unknown method.
    """
    base, over = _cleared(base, over)
    model = _mapping(over, "model")
    if model.get("pretrained"):
        base = _without_architecture(base, keep_sizes=bool(_mapping(base, "model").get("pretrained")))
    if _mapping(model, "text").get("pretrained"):
        base = _without_replaced_options(base)
    objective = _mapping(base, "objective")
    method = _mapping(over, "objective").get("method")
    if method is None or not objective:
        return merge(base, over)
    used: dict[str, Any] = {}
    unused: dict[str, Any] = {}
    for name, section in objective.items():
        if name in method_sections() and name not in find_method(method).sections:
            unused[name] = section
        else:
            used[name] = section
    used[_OTHER_METHODS] = merge(_mapping(objective, _OTHER_METHODS), unused)
    return merge({**base, "objective": used}, over)


def _cleared(base: dict[str, Any], over: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return both trees without the mappings that `over` sets to null or {}."""
    for name in _mapping_options():
        *sections, key = name.split(".")
        section: Any = over
        for part in sections:
            section = _mapping(section, part)
        if key in section and section[key] in (None, {}):
            base = _without(base, sections, key)
            over = _without(over, sections, key)
    return base, over


def _without(tree: dict[str, Any], sections: Sequence[str], key: str) -> dict[str, Any]:
    """Return a tree without `key`, if the tree has it, in the section at the path `sections`."""
    if not sections:
        return {name: value for name, value in tree.items() if name != key}
    first, *others = sections
    if not isinstance(tree.get(first), dict):
        return tree
    return {**tree, first: _without(tree[first], others, key)}


def _mapping_options() -> list[str]:
    """Return the dotted names of the options that are mappings."""
    fields = option_fields(with_registered_losses(Config))
    return [name for name, field in fields if get_origin(field.annotation) is dict]


def _without_replaced_options(base: dict[str, Any]) -> dict[str, Any]:
    """Return a tree without the options of `model.text` that a pretrained text encoder replaces."""
    model = _mapping(base, "model")
    text = {name: value for name, value in _mapping(model, "text").items() if name not in REPLACED_BY_TEXT_ENCODER}
    return {**base, "model": {**model, "text": text}}


def _without_architecture(base: dict[str, Any], keep_sizes: bool) -> dict[str, Any]:
    """Return a tree without the options of `model` that a checkpoint replaces.

    Unless `keep_sizes` is true, the image size and the context length are omitted too.
    """
    if "model" not in base:
        return base
    model = {name: value for name, value in _mapping(base, "model").items() if name != "embed_dim"}
    for tower, names in REPLACED_BY_CHECKPOINT.items():
        dropped = names if keep_sizes else (*names, SIZES[tower])
        if tower in model:
            model[tower] = {name: value for name, value in _mapping(model, tower).items() if name not in dropped}
    return {**base, "model": model}


def validate(tree: dict[str, Any]) -> Config:
    """Build a config from a tree; if options are unknown or invalid, raise a `UserError` that names them."""
    return _validate(Config, _with_other_methods(tree))


def _validate(model: type[M], tree: dict[str, Any]) -> M:
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        problems = [_explain(problem) for problem in error.errors()[:_MAX_PROBLEMS]]
        if error.error_count() > len(problems):
            problems.append(f"and {counted(error.error_count() - len(problems), 'more problem')}")
        raise UserError(f"The config is invalid: {'; '.join(problems)}") from error


def load_saved(path: Path) -> Config:
    """Read the config.yaml of a run in order to use the run's model; the plugin of its loss need not be imported.

    Raises `UserError` if the file cannot be read or is not the config of a run.
    """
    tree = read_options(path)
    if not (isinstance(tree, dict) and _mapping(tree, "objective")):
        raise UserError(f"{path} is not the config of a run: restore it from a copy.")
    tree = without_replaced(tree)  # earlier versions ignored these options
    objective = tree["objective"]
    method = objective.get("method")
    if isinstance(method, str) and method not in METHODS:  # a method of a plugin, which is not imported
        shared = {name: value for name, value in objective.items() if name in ObjectiveConfig.model_fields}
        del shared["method"]
        options = _validate(ObjectiveConfig, shared)
        tree = {**tree, "objective": options.model_copy(update={"method": method})}
    return validate(tree)


def _import_plugins(tree: Mapping[str, Any]) -> None:
    """Import the plugins in `run.plugins` of an unvalidated tree; values that are not names are rejected later."""
    plugins = _mapping(tree, "run").get("plugins")
    if isinstance(plugins, list):
        for plugin in plugins:
            if isinstance(plugin, str):
                import_plugin(plugin)


def _with_other_methods(tree: dict[str, Any]) -> dict[str, Any]:
    """Move the sections of `other_methods` that the chosen method uses into `objective`, and drop the others.

    Options that `objective` itself sets take precedence. All sections of `other_methods` are validated; an unknown or
    invalid one raises `UserError`.
    """
    objective = tree.get("objective")
    if not isinstance(objective, dict) or _OTHER_METHODS not in objective:
        return tree
    sections = objective[_OTHER_METHODS] or {}
    if not isinstance(sections, dict):
        raise UserError(f"objective.{_OTHER_METHODS}={_shown(sections)} must map sections of methods to their options.")
    for name, options in sections.items():
        if name not in method_sections():
            hint = nearest(name, method_sections()) or f"; the sections are {', '.join(method_sections())}."
            raise UserError(f"The config is invalid: unknown key objective.{_OTHER_METHODS}.{name}{hint}")
        reader = next(method for method in METHODS if name in METHODS[method].sections)
        _validate(objective_config(), {"method": reader, name: options})
    used = {name: options for name, options in sections.items() if name in method_of(objective).sections}
    without_others = {key: value for key, value in objective.items() if key != _OTHER_METHODS}
    return {**tree, "objective": merge(used, without_others)}


def _mapping(tree: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return a section of an unvalidated tree, or an empty section if the value is not a mapping."""
    section = tree.get(key)
    return section if isinstance(section, dict) else {}


def _command_line(argv: Sequence[str], ignore_unknown: bool = False) -> dict[str, Any]:
    """Parse options into a tree of their values.

    A later NAME=VALUE replaces an earlier one, even for lists, except for `--plugin`, whose values are collected.
    Raises `UserError` if an option is unknown or the command line cannot be parsed.
    """
    last: dict[str | int, str] = {}  # by option name, or by position for other arguments
    for position, argument in enumerate(argv):
        spelled = respell(argument, "-", "_")
        name, has_value, value = spelled.partition("=")
        if value == _NULL and name.removeprefix("--") in _mapping_options():
            spelled = f"{name}={_EMPTY_MAPPING}"  # the parser accepts no null for a mapping
        last[name if has_value and name != "--plugin" else position] = spelled
    command = with_registered_losses(TrainCommand)
    try:
        source = CliSettingsSource[BaseSettings](
            command,  # type: ignore[arg-type]
            cli_parse_args=list(last.values()),
            cli_exit_on_error=False,
            cli_hide_none_type=True,
            cli_avoid_json=True,
            cli_parse_none_str=_NULL,
            cli_ignore_unknown_args=ignore_unknown,
        )
        return _with_null_lists(source())
    except SettingsError as error:
        known = {f"--{with_dashes(name)}" for name in option_names(command)}
        for argument in argv:
            option = with_dashes(argument.split("=")[0])
            if argument.startswith("--") and option not in known:
                hint = nearest(option, known) or "; --help all lists all options."
                raise UserError(f"Unknown option {_shown(option, str)}{hint}") from error
        reason = _shown(str(error).removeprefix("error parsing CLI: "), str)
        raise UserError(f"The command line is invalid: {reason}. {_SEE_HELP}") from error


def _with_null_lists(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a tree from the command line in which None replaces [None], the parser's result for LIST=null."""
    replaced: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            replaced[key] = _with_null_lists(value)
        elif value == [None]:
            replaced[key] = None
        else:
            replaced[key] = value
    return replaced


def option_fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted name and the field of each option in a pydantic model."""
    for key, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from option_fields(field.annotation, f"{prefix}{key}.")
        else:
            yield prefix + key, field


def option_names(model: type[BaseModel]) -> list[str]:
    """Return the dotted names of all options and sections in a pydantic model, spelled as in YAML."""
    options = [name for name, _ in option_fields(model)]
    sections: list[str] = []
    for name in options:
        section = name.rpartition(".")[0]
        if section and section not in sections:
            sections.append(section)
    return options + sections


def with_dashes(name: str) -> str:
    """Return an option's name as it is spelled in help texts and messages."""
    return name.replace("_", "-")


def respell(argument: str, old: str, new: str) -> str:
    """Return an argument --NAME=VALUE with every occurrence of `old` in NAME replaced by `new`."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.removeprefix("--").partition("=")
    return f"--{name.replace(old, new)}{equals}{value}"


def _find_recipe(name: str, including: Path | None) -> Path:
    """Return the file of a recipe, given by name, by path, or relative to the folder of the file that includes it.

    Raises `UserError` if there is none.
    """
    name = expand_user(name)
    candidates = [RECIPES / f"{name}.yaml", Path(name)]
    if including is not None:
        candidates = [including.parent / name, including.parent / f"{name}.yaml", *candidates]
    for path in candidates:
        with suppress(OSError):  # a name that is too long for a file
            if path.is_file():
                return path
    hint = nearest(name, recipe_names()) or ". `neuclip-ds recipes` lists the recipes."
    where = "" if including is None else f" ({including} includes it)"
    raise UserError(f"No recipe or file {_shown(name, str)}{where}{hint}")


def _explain(problem: Any) -> str:
    # pydantic also lists the alternative of a union that does not fit, such as `function-after[_usable(), str]`
    *sections, last = [str(part) for part in problem["loc"]] or [""]
    parts = [part for part in sections if "[" not in part]
    is_unknown = problem["type"] == "extra_forbidden"  # `last` is then the user's word, which may contain anything
    if is_unknown or "[" not in last:
        parts.append(last)
    name = ".".join(parts)
    if is_unknown:
        return f"unknown key {name}{nearest(name, option_names(with_registered_losses(Config)))}"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"{name}: {message}"
    return f"{name}={_shown(problem['input'])}: {message}"


def _shown(value: Any, as_text: Callable[[Any], str] = repr) -> str:
    """Return a value as one line of limited length, for use in a message."""
    line = " ".join(as_text(value).split())
    return line if len(line) <= _MAX_SHOWN else f"{line[:_MAX_SHOWN]}..."


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint that suggests a known name, or "".

    The suggestion is the first of these that exists: a name in the same section that abbreviates `name` by the initials
    of its words, or that `name` abbreviates (lr and learning_rate); the most similar name; the least nested name with
    the same last component.
    """

    def last_component(option: str) -> str:
        return option.lstrip("-").split(".")[-1].replace("-", "_")

    def abbreviates(short: str, long: str) -> bool:
        """Return whether `short` consists of the initials of the words of `long`, of which there are at least two."""
        initials = "".join(word[:1] for word in last_component(long).split("_"))
        return len(initials) > 1 and last_component(short) == initials

    names = sorted(known, key=lambda other: (other.count("."), other))
    section = name.rpartition(".")[0]
    suggestions = []
    for other in names:
        is_in_section = other.rpartition(".")[0] == section
        if is_in_section and (abbreviates(other, name) or abbreviates(name, other)):
            suggestions.append(other)
    suggestions = suggestions or difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    if not suggestions:
        suggestions = [other for other in names if last_component(other) == last_component(name)]
    return f"; did you mean {suggestions[0]}?" if suggestions else ""
