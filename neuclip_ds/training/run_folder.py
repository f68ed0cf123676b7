"""The folder of a run, in which a launch trains only after all checks have passed.

Until then, the folder contains only the lock, files of earlier launches, and files fetched from the remote copy. A
launch writes the manifests, the tokenizer and the model description to a staging folder next to the run's folder.
These files are moved into the run's folder when all ranks are ready to train, and deleted if a check fails.
"""

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml

from neuclip_ds.checkpoint.saved_model import MODEL
from neuclip_ds.config import CONFIG, TOKENIZER, Config, dump, without_replaced
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.launch import check_shared
from neuclip_ds.errors import redact
from neuclip_ds.files import atomic_write, best_effort, explain_disk, link_or_copy
from neuclip_ds.reporting.history import Changes, changed_options
from neuclip_ds.section import read_yaml

_PACKAGES = ("torch", "deepspeed", "transformers", "timm", "webdataset", "numpy", "pillow")

# names in the run's folder
MANIFESTS = "manifests"
COMPLETE = "complete.json"
RECOVERY = "recovery"  # subfolder of the recovery of statistics, with its own checkpoints


@contextmanager
def staging_folder(folder: Path, communicator: Communicator) -> Iterator[Path]:
    """Yield a staging folder that all ranks share, with earlier launches' manifests; delete the folder at the end.

    Raises `UserError` if the folder cannot be written, or if the nodes do not share it.
    """
    staged = folder.with_name(f".{folder.name}.starting")

    def make() -> None:
        with explain_disk(folder):
            shutil.rmtree(staged, ignore_errors=True)  # left by a launch that was killed
            staged.mkdir(parents=True)
            if (folder / MANIFESTS).is_dir():
                shutil.copytree(folder / MANIFESTS, staged / MANIFESTS, copy_function=link_or_copy)

    communicator.on_rank_zero(make)
    try:
        check_shared(staged, communicator)
        yield staged
    finally:
        if communicator.rank == 0:
            shutil.rmtree(staged, ignore_errors=True)


def move_staged_files(staged: Path, folder: Path, config: Config) -> Changes:
    """Move a launch's staged files into the run's folder, and write the config; called on one rank.

    Returns the options that differ from the previous launch; an empty mapping if there was no previous launch or its
    config is damaged. Raises `UserError` if the folder cannot be written.
    """
    text = dump(config)
    before = None
    with suppress(OSError, ValueError, yaml.YAMLError):
        before = read_yaml((folder / CONFIG).read_bytes())
    changes: Changes = {}
    if isinstance(before, dict):
        changes = changed_options(without_replaced(before), read_yaml(text))
    with explain_disk(folder):
        folder.mkdir(exist_ok=True)
        for path in sorted(staged.iterdir()):
            target = folder / path.name
            if target.exists():
                target.rename(staged / f"former-{path.name}")
            path.rename(target)
        with atomic_write(folder / CONFIG) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return changes


def write_complete(folder: Path, step: int) -> None:
    """Record that a run is complete and how many steps it took; raise `UserError` if the file cannot be written."""
    with explain_disk(folder), atomic_write(folder / COMPLETE) as temporary:
        temporary.write_text(json.dumps({"step": step}), encoding="utf-8")


def read_complete(folder: Path) -> int | None:
    """Return the step that `write_complete` recorded, or None if the file is missing or damaged."""
    try:
        return int(json.loads((folder / COMPLETE).read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def checkpoint_extras(staged: Path, folder: Path, config: Config) -> dict[str, bytes]:
    """Return the config, tokenizer and model description that a checkpoint stores, as a map from path to content."""
    content = {CONFIG: dump(config).encode()}
    for name in (MODEL, TOKENIZER):
        source = staged / name
        if not source.is_dir():  # this launch keeps the files in the run's folder
            source = folder / name
        for path in sorted(source.rglob("*")):
            if path.is_file():
                content[f"{name}/{path.relative_to(source).as_posix()}"] = path.read_bytes()
    return content


def record_environment(folder: Path, communicator: Communicator) -> dict[str, Any]:
    """Write FOLDER/environment.json; all ranks call this together.

    Returns the file's content on rank 0, and an empty dict on the other ranks.
    """
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        device = f"CPU, {torch.get_num_threads()} threads per rank"
    nodes = communicator.gather_objects(f"{platform.node()} ({device})")
    if communicator.rank > 0:
        return {}
    command = ["git", "describe", "--always", "--dirty"]  # the commit of a checkout
    git = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    environment = {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": redact(" ".join(sys.argv)),
        "ranks": communicator.world_size,
        "nodes": ", ".join(sorted(set(nodes))),
        "python": platform.python_version(),
        "system": platform.platform(),
        "commit": git.stdout.strip() or "unknown",
        **{package: version(package) for package in _PACKAGES},
    }
    with best_effort(folder / "environment.json") as path:
        path.write_text(json.dumps(environment, indent=1), encoding="utf-8")
    return environment
