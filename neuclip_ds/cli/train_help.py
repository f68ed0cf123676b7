"""`neuclip-ds train --help`: the everyday options; `--help all` or `--help SECTION` lists the others."""

import json
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from neuclip_ds.config import Config
from neuclip_ds.errors import UserError
from neuclip_ds.recipe import TrainCommand, nearest, option_fields, option_names, with_dashes

EVERYDAY = (
    *("run.name", "run.folder", "run.seed", "run.checkpoint_every", "run.log_every", "run.evaluate_every"),
    *("run.best_metric", "run.wandb"),
    *("data.train", "data.val", "data.zero_shot", "data.evaluation_sets", "data.batch_size", "data.micro_batch"),
    *("data.workers", "data.captions"),
    *("model.pretrained", "model.vision.name", "model.vision.pretrained", "model.vision.image_size"),
    *("model.text.pretrained", "model.activation_checkpointing"),
    *("objective.method", "objective.temperature.initial"),
    *("optimizer.name", "optimizer.lr", "optimizer.schedule", "optimizer.warmup_steps", "optimizer.weight_decay"),
    *("budget.epochs", "budget.steps", "deepspeed"),
)
_KINDS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH", bool: "true|false"}
_FOOT = """\
Dashes and underscores in options are alike; a recipe spells them with underscores. `=null` removes a value.
Defaults are in parentheses; `neuclip-ds train RECIPE --print-config` prints what a recipe makes of them."""


def requested_help(arguments: Sequence[str], description: str) -> str | None:
    """Return the help that the arguments request, if they do.

    Raises:
        UserError: `--help` names a section that does not exist.
    """
    place = next((i for i, argument in enumerate(arguments) if argument.split("=")[0] in ("-h", "--help")), None)
    if place is None:
        return None
    after = [*arguments[place].split("=")[1:], *arguments[place + 1 :]]
    return help_text(after[0] if after and not after[0].startswith("-") else "", description)


def help_text(topic: str, description: str) -> str:
    """Return the help on a topic: "" for the everyday options, "all", or a section such as objective.npn.

    Raises:
        UserError: there is no such section.
    """
    fields = dict(option_fields(Config))
    if topic in ("", "all"):
        own = TrainCommand.model_fields
        switches = {name: own[name] for name in own if name not in Config.model_fields and name != "recipe"}
        chosen = fields if topic else {name: fields[name] for name in EVERYDAY}
        blocks = ["usage: neuclip-ds train RECIPE [--OPTION=VALUE ...]", description.rstrip()]
        general_first = sorted({**switches, **chosen}.items(), key=lambda item: "." in item[0])
        blocks += _blocks(dict(general_first), None if topic else 1)
        return "\n\n".join([*blocks, *([] if topic else [_more(fields)]), _FOOT])
    section = topic.replace("-", "_")
    chosen = {name: fields[name] for name in fields if name == section or name.startswith(f"{section}.")}
    if not chosen:
        raise UserError(
            f"--help knows no section {topic}{nearest(section, option_names(Config)) or '.'} See --help all."
        )
    return "\n\n".join([*_blocks(chosen), _FOOT])


def _more(fields: Iterable[str]) -> str:
    names = list(fields)
    sections = ", ".join(dict.fromkeys(with_dashes(name.rpartition(".")[0]) for name in names if "." in name))
    return f"`--help all` lists all {len(names)} options, `--help SECTION` those of one section:\n" + _wrapped(sections)


def _blocks(fields: dict[str, FieldInfo], depth: int | None = None) -> Iterator[str]:
    """Yield the options of each section under its name, cut to so many parts."""
    sections: dict[str, list[str]] = {}
    for name in fields:
        sections.setdefault(".".join(name.split(".")[:-1][:depth]), []).append(name)
    for section, names in sections.items():
        title = with_dashes(section) or "general"
        yield "\n".join([f"{title}:", *(_option(name, fields[name]) for name in names)])


def _option(name: str, field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    kind = "" if name in TrainCommand.model_fields and field.annotation is bool else f"={_kind(field.annotation)}"
    value = default if isinstance(default, str | Path) else json.dumps(default)
    shown = f"  ({value})" if kind and default not in (None, "") else ""
    return f"  --{with_dashes(name)}{kind}{shown}\n{_wrapped(' '.join((field.description or '').split()))}"


def _kind(annotation: Any) -> str:
    """Return the values that an option of this type takes, such as `pad|drop` or `[TEXT,...]`."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "|".join(map(str, parts))
    if origin is list:
        return f"[{_kind(parts[0])},...]"
    if origin is tuple:
        return f"[{','.join(map(_kind, parts))}]"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "{...}"
    if parts:  # a union, or an annotated type
        return "|".join(_kind(part) for part in parts if part in _KINDS or get_origin(part))
    return "{...}" if issubclass(annotation, BaseModel) else _KINDS[annotation]


def _wrapped(text: str) -> str:
    width = min(120, shutil.get_terminal_size().columns)
    return textwrap.fill(text, width, initial_indent="      ", subsequent_indent="      ", break_on_hyphens=False)
