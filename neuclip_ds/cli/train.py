"""Train a CLIP model from a recipe: a name in neuclip_ds/recipes/, or the path of a YAML file (default: demo).

Examples:
  neuclip-ds train demo --optimizer.lr=1e-3
  neuclip-ds train vitb32_tuneclip --model.pretrained=/weights/clip-vit-base-patch32 --data.train=/data/dfn12m
  neuclip-ds train cc12m_neuclip --data.train=manifests/cc12m --dry-run --hostfile=hostfiles/8node
  neuclip-ds train demo --plugin margin_loss.py --objective.method=margin
  deepspeed --num_gpus 8 --module neuclip_ds train cc12m_neuclip --data.train=manifests/cc12m
  torchrun --nproc-per-node 8 -m neuclip_ds train cc12m_neuclip --data.train=manifests/cc12m

The same command resumes a run that was stopped. In a clone of the repository, `train.py` does the same as
`neuclip-ds train`.
"""

import json
import logging
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from neuclip_ds.cli.early_checks import check_packages, check_run
from neuclip_ds.config import Config, dump
from neuclip_ds.distributed.environment import read_environment
from neuclip_ds.losses.methods import REGISTERED_OPTIONS
from neuclip_ds.recipe import (
    TrainCommand,
    import_named_plugins,
    option_fields,
    parse,
    with_dashes,
    with_registered_losses,
)
from neuclip_ds.reporting.log import configure_logging

log = logging.getLogger(__name__)

EVERYDAY = (  # options that `--help` lists
    "run.name",
    "run.output_dir",
    "run.seed",
    "run.checkpoint_every",
    "run.log_every",
    "run.evaluate_every",
    "run.best_metric",
    "run.wandb",
    "data.train",
    "data.val",
    "data.zero_shot",
    "data.evaluation_sets",
    "data.batch_size",
    "data.micro_batch",
    "data.workers",
    "data.captions",
    "model.pretrained",
    "model.vision.name",
    "model.vision.pretrained",
    "model.vision.image_size",
    "model.activation_checkpointing",
    "objective.method",
    "objective.temperature.initial",
    "optimizer.name",
    "optimizer.lr",
    "optimizer.schedule",
    "optimizer.warmup_steps",
    "optimizer.weight_decay",
    "epochs",
    "max_steps",
    "deepspeed",
)
_KINDS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH", bool: "true|false"}
_FOOT = """\
Dashes and underscores in options are equivalent; recipes use underscores. `=null` clears an option that may be empty,
such as --max-steps or --model.vision.options. `neuclip-ds recipes` lists the recipes.
Defaults are in parentheses; `neuclip-ds train RECIPE --print-config` prints the resolved config."""


def main(arguments: Sequence[str], hooks: Sequence[Any] = ()) -> None:
    """Run `neuclip-ds train`; `hooks` (`neuclip_ds.Hook` objects) are added to those that the config enables."""
    text = requested_help(arguments)
    if text is not None:
        print(text)
        return
    # docs: command
    command, config = parse(arguments)
    environment = read_environment()
    # docs: end
    if command.recipe is None and environment.rank == 0:
        log.warning(
            "No recipe is named, so the demo recipe is used, which only tests the machine or the cluster; "
            "`neuclip-ds recipes` lists the recipes."
        )
    if command.print_config:
        print(dump(config), end="")
        return
    if command.dry_run:
        check_packages(config)
        from neuclip_ds.planning.dry_run import print_dry_run

        print_dry_run(config, environment, command.hostfile, command.gpu_memory, command.measured)
        return
    # docs: command
    check_run(config)
    configure_logging(environment.rank)
    folder = config.run.output_dir / str(config.run.name)
    log.info("run %s: importing PyTorch and DeepSpeed, which takes several seconds", folder)
    # the config is checked before these imports
    from neuclip_ds.api import train

    train(config, hooks=hooks)
    # docs: end


def requested_help(arguments: Sequence[str]) -> str | None:
    """Return the help text that the arguments request (common or all options), or None if they do not request help."""
    for position, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name in ("-h", "--help"):
            next_argument = arguments[position + 1] if position + 1 < len(arguments) else ""
            if any(other.partition("=")[0] == "--plugin" for other in arguments):
                import_named_plugins([other for other in arguments if other not in (argument, "all")])
            return _help_text(every_option="all" in (value, next_argument))
    return None


def _help_text(every_option: bool) -> str:
    options = dict(option_fields(with_registered_losses(Config)))
    sections_of_plugins = tuple(f"objective.{name}." for name in REGISTERED_OPTIONS)
    everyday = [*EVERYDAY, *(name for name in options if name.startswith(sections_of_plugins))]
    listed = {}
    for name, field in TrainCommand.model_fields.items():
        if name not in Config.model_fields and name != "recipe":  # a switch, such as --dry-run
            listed[name] = field
    for name in options if every_option else everyday:
        listed[name] = options[name]

    # one block of lines per section; the options of all sections below `model` are one block unless all are listed
    sections: dict[str, list[str]] = {}
    for name in sorted(listed, key=lambda name: "." in name):  # general options first
        section = name.rpartition(".")[0]
        if not every_option:
            section = section.split(".")[0]
        title = with_dashes(section) or "general"
        lines = sections.setdefault(title, [f"{title}:"])
        lines.append(_option(name, listed[name]))

    blocks = ["usage: neuclip-ds train RECIPE [--OPTION=VALUE ...]", (__doc__ or "").rstrip()]
    blocks += ["\n".join(lines) for lines in sections.values()]
    if not every_option:
        blocks.append(f"`--help all` lists all {len(options)} options.")
    blocks.append(_FOOT)
    return "\n\n".join(blocks)


def _option(name: str, field: FieldInfo) -> str:
    """Return an option's help: a line with its name, accepted values and default, followed by its description."""
    default = field.get_default(call_default_factory=True)
    is_switch = name in TrainCommand.model_fields and field.annotation is bool
    values = "" if is_switch else f"={_kind(field.annotation)}"
    shown_default = ""
    if values and default not in (None, ""):
        text = default if isinstance(default, str | Path) else json.dumps(default)
        shown_default = f"  ({text})"
    width = min(120, shutil.get_terminal_size().columns)
    indent = " " * 6
    description = textwrap.fill(
        " ".join((field.description or "").split()),
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
    return f"  --{with_dashes(name)}{values}{shown_default}\n{description}"


def _kind(annotation: Any) -> str:
    """Describe the values that an option of this type accepts, such as `pad|drop` or `[TEXT,...]`."""
    origin = get_origin(annotation)
    parts = get_args(annotation)
    if origin is Literal:
        return "|".join("false" if value is False else str(value) for value in parts)
    if origin is list:
        return f"[{_kind(parts[0])},...]"
    if origin is tuple:
        return f"[{','.join(_kind(part) for part in parts)}]"
    if origin is dict:
        return "{...}"
    if parts:  # a union, or an annotated type
        return "|".join(_kind(part) for part in parts if part in _KINDS or get_origin(part))
    return "{...}" if issubclass(annotation, BaseModel) else _KINDS.get(annotation, "TEXT")
