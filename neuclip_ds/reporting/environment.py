"""environment.json of a run: command, machines, and versions of code and libraries."""

import json
import platform
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import torch

from neuclip_ds.data.disk import best_effort
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.redaction import redact

_PACKAGES = ("torch", "deepspeed", "transformers", "timm", "webdataset", "numpy", "pillow")


def record_environment(folder: Path, communicator: Communicator) -> None:
    """Write FOLDER/environment.json; called on all ranks, at every start."""
    nodes = communicator.gather_objects((platform.node(), _device()))
    if communicator.rank > 0:
        return
    found = {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": redact(" ".join(sys.argv)),
        "ranks": communicator.world_size,
        "nodes": ", ".join(sorted({f"{host} ({device})" for host, device in nodes})),
        "python": platform.python_version(),
        "system": platform.platform(),
        "commit": _commit(),
        **{package: version(package) for package in _PACKAGES},
    }
    with best_effort(folder / "environment.json") as path:
        path.write_text(json.dumps(found, indent=1), encoding="utf-8")


def _device() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} threads per rank"


def _commit() -> str:
    """Return the program's git commit, if it runs from a checkout."""
    call = ["git", "describe", "--always", "--dirty"]
    found = subprocess.run(call, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
