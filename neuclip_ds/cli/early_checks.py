"""Check paths and packages in under a second, before the ten-second import of torch and DeepSpeed.

All ranks run these checks, so all of them exit with the same message. Later checks find other mistakes, such as a
model that is not on the hub.
"""

import re
from pathlib import Path

import fsspec

from neuclip_ds.config import Config
from neuclip_ds.data.shards import is_local
from neuclip_ds.errors import UserError, explained, install_command, require_package

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://")
_NOT_A_PATH = re.compile(r"^demo:|[*?[{]")  # the demo data, or a pattern
_OPEN_CLIP = "open_clip:"


def check_run(config: Config) -> None:
    """Raise UserError if a run would read a path that does not exist, or use a package that is not installed."""
    run, data, model = config.run, config.data, config.model
    if run.wandb is not None:
        require_package("wandb", "run.wandb", "wandb")
    if model.lora.rank:
        require_package("peft", "model.lora.rank", "lora")
    check_model("model.pretrained", model.pretrained)
    names = {"vision.pretrained": model.vision.pretrained, "text.tokenizer": model.text.tokenizer or ""}
    for option, name in names.items():
        if name.startswith(("/", "./", "../", "~")):
            check_path(f"model.{option}", name)
    sets = {"val": data.val, "zero_shot": data.zero_shot, "evaluation_sets": str(data.evaluation_sets or "")}
    for option, path in [*(("train", path) for path in data.train_paths), *sets.items()]:
        if isinstance(path, str) and path != "auto":
            check_path(f"data.{option}", path)
    if url := _URL.match(run.remote or ""):
        _require_store(f"run.remote={run.remote}", url[1])


def check_model(option: str, name: str) -> None:
    """Raise UserError if `name`, a value of `model.pretrained`, is neither an existing path nor a valid hub name."""
    if name.startswith(_OPEN_CLIP):
        require_package("open_clip", f"{option}={name}", "open_clip")
        return
    owner, *rest = name.split("/")
    is_on_hub = len(rest) == 1 and re.fullmatch(r"[\w.-]+", owner) and not Path(owner).is_dir()
    if name and not is_on_hub and not Path(name).expanduser().exists():
        raise UserError(f"{option}={name} does not exist: name an existing folder, or a model on the hub (OWNER/NAME).")


def check_path(option: str, path: str) -> None:
    """Raise UserError if a local path does not exist, or if a package needed to read a remote path is missing.

    The path may have any form that `data.train` accepts; patterns are checked later, when they are expanded.
    """
    for part in filter(None, path.split("::")):
        if url := _URL.match(part):
            _require_store(f"{option}={part}", url[1])
        elif is_local(part) and not _NOT_A_PATH.search(part) and not Path(part).expanduser().exists():
            raise UserError(f"{option}={path}: {part} does not exist; correct the path.")


def _require_store(option: str, scheme: str) -> None:
    with explained(f"{option} cannot be opened", f"run {install_command('remote')}, or correct the URL"):
        fsspec.get_filesystem_class(scheme)
