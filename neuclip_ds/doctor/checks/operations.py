"""DeepSpeed's own ops, and the compiler that builds them and what torch.compile makes."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.doctor.finding import Finding, fine, warning
from neuclip_ds.doctor.request import Request
from neuclip_ds.engine.ops import Ops, list_ops


def examine(request: Request, communicator: Communicator) -> Iterator[Finding]:
    missing = missing_tools()
    if missing:
        yield warning(
            f"{' and '.join(missing)} not found: model.compile, and ops that DeepSpeed builds at first use, fail.",
            "apt install g++ ninja-build, or load the module of a compiler.",
        )
    yield fine(facts={"DeepSpeed ops": describe(list_ops())})


def missing_tools() -> list[str]:
    """Return what is missing to build an op."""
    ninja = shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))
    found = {"c++": shutil.which("c++") or shutil.which("g++"), "ninja": ninja}
    return [name for name, there in found.items() if not there]


def describe(ops: Ops) -> str:
    """Return which ops are there."""
    parts = {"built": ops.built, "to be built when used": ops.buildable}
    return ", ".join(f"{len(names)} {state} ({', '.join(names)})" for state, names in parts.items() if names) or "none"
