"""Check paths and packages in under a second, before the import of torch and DeepSpeed, which takes several seconds.

Every rank runs these checks, so a mistake in the config makes all ranks exit. Later checks find other mistakes, such as
a model that is not on the hub.
"""

import re
from pathlib import Path

import fsspec

from neuclip_ds.config import TOKENIZER, Config
from neuclip_ds.data.shards import is_local
from neuclip_ds.errors import UserError, explained, install_command, require_package
from neuclip_ds.files import exists, expand_user
from neuclip_ds.limits import low_limit

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://")
_NOT_A_PATH = re.compile(r"^demo:|[*?[{]")  # the demo data, or a pattern
_OPEN_CLIP = "open_clip:"


def check_run(config: Config) -> None:
    """Raise UserError if a local model or dataset in the config does not exist, or if a required package is missing.

    Also raise UserError if the scheme of a URL is unknown, or if a limit of this machine is too low for loader
    processes. Other paths, such as `data.image_features` and `recovery.reuse`, are checked later.
    """
    run = config.run
    data = config.data
    problem = low_limit()
    if data.workers and problem:
        raise UserError(problem)
    check_packages(config)
    model = config.model
    check_model("model.pretrained", model.pretrained)
    _check_if_path("model.vision.pretrained", model.vision.pretrained)
    _check_if_path("model.text.pretrained", model.text.pretrained)
    if not exists(run.output_dir / str(run.name) / TOKENIZER):  # otherwise, the run resumes with this tokenizer
        _check_if_path("model.text.tokenizer", model.text.tokenizer or "")
    for path in data.train_paths:
        check_path("data.train", path)
    if isinstance(data.val, str) and data.val != "auto":
        check_path("data.val", data.val)
    if data.zero_shot != "auto":
        check_path("data.zero_shot", data.zero_shot)
    if data.evaluation_sets is not None:
        check_path("data.evaluation_sets", str(data.evaluation_sets))
    if config.objective.reference_model is not None:
        check_path("objective.reference_model", config.objective.reference_model)
    for folder in config.objective.distill.folders:
        check_path("objective.distill.features", folder)


def check_packages(config: Config) -> None:
    """Raise UserError if `run.wandb`, `model.lora.rank` or `run.remote` needs a package that is not installed.

    Also raises it if the scheme of `run.remote` is unknown.
    """
    run = config.run
    if run.wandb is not None:
        require_package("wandb", "run.wandb", "wandb")
    if config.model.lora.rank:
        require_package("peft", "model.lora.rank", "lora")
    url = _URL.match(run.remote or "")
    if url:
        _require_store(f"run.remote={run.remote}", url[1])


def check_model(option: str, name: str) -> None:
    """Raise UserError if `name`, a value of `model.pretrained`, is neither an existing path nor of the form OWNER/NAME.

    OWNER/NAME counts as a path if OWNER is a local folder. Names that start with `open_clip:` need the open_clip
    package instead, and an empty name is valid.
    """
    if name.startswith(_OPEN_CLIP):
        require_package("open_clip", f"{option}={name}", "open_clip")
        return
    owner = name.split("/")[0]
    is_on_hub = re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}", name, re.ASCII) and not Path(owner).is_dir()
    if name and not is_on_hub and not exists(expand_user(name)):
        raise UserError(
            f"{option}={name} does not exist: pass an existing folder, a model on the hub (OWNER/NAME) or "
            "open_clip:ARCHITECTURE/TAG_OR_FILE."
        )


def check_path(option: str, path: str) -> None:
    """Raise UserError if a local path does not exist, or if a URL's scheme is unknown or needs a missing package.

    The path may have any form that `data.train` accepts; patterns are checked later, when they are expanded.
    """
    for part in path.split("::"):
        url = _URL.match(part)
        if url:
            _require_store(f"{option}={part}", url[1])
        elif part and is_local(part) and not _NOT_A_PATH.search(part) and not exists(expand_user(part)):
            where = f"{option}={path}" if part == path else f"{option}={path}: {part}"
            raise UserError(f"{where} does not exist; correct the path.")


def _check_if_path(option: str, name: str) -> None:
    """Raise UserError if `name` starts with /, ./, ../ or ~ but does not exist.

    Other names are not checked, because they may be tags or names on the hub.
    """
    if name.startswith(("/", "./", "../", "~")):
        check_path(option, name)


def _require_store(option: str, scheme: str) -> None:
    with explained(f"{option} cannot be opened", f"run {install_command('remote')}, or correct the URL"):
        fsspec.get_filesystem_class(scheme)
