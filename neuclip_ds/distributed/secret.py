"""The launch's key: from a variable that the launcher passes on, or from a file of rank 0 in a shared folder."""

import hashlib
import hmac
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from neuclip_ds.distributed.authentication import CHANGED
from neuclip_ds.errors import UserError

VARIABLE = "NEUCLIP_DS_SECRET"
SEEN_WITHIN = 15.0  # seconds until a network file system shows a file that another node has written
_SHORTEST = 16  # characters of the variable
_ABANDONED = 3600.0  # seconds after which a file is that of a start that was killed


@contextmanager
def launch_key(store: dist.Store, rank: int, folder: Path) -> Iterator[bytes]:
    """Yield a key that all ranks of this launch share and that nothing on the network shows.

    The store names the launch, hence the file, so no rank takes that of an earlier start. Rank 0 removes the file at
    the end of the block. Raises `UserError` if the folder cannot be used or is not the same on all nodes.
    """
    if rank == 0:
        launch, given = secrets.token_hex(16), VARIABLE in os.environ
        path = _path(folder, launch)
        try:
            secret = _variable() if given else _write(path)
            store.set("launch", json.dumps([launch, given]))
            yield _key(secret, launch)
        finally:
            path.unlink(missing_ok=True)
        return
    try:
        launch, given = json.loads(store.get("launch"))
    except dist.DistError as error:
        raise UserError(f"Rank {rank} reached rank 0, which ended at once: check the log of its node.") from error
    yield _key(_variable() if given else _read(_path(folder, launch), store, rank), launch)


def not_shared(folder: Path) -> str:
    """Return the message of a rank that does not see what rank 0 has written to a folder."""
    return (
        f"{folder.absolute()} is not rank 0's folder of that name, but all nodes must share it: put "
        "--run.folder on a file system that they have in common, and start in the same folder on each."
    )


def without_secret(store: dist.Store) -> str:
    """Return the message about a rank that has reported that it cannot read the secret, or an empty string."""
    if not store.check(["without secret"]):
        return ""
    who = re.sub(r"[^\w .-]", "", store.get("without secret").decode(errors="replace"))[:100]  # anyone may write it
    return (
        f"{who} does not see what rank 0 writes to --run.folder, but all nodes must share it: put it on a file system "
        "that they have in common, and start in the same folder on each."
    )


def _path(folder: Path, launch: str) -> Path:
    if not re.fullmatch("[0-9a-f]{32}", launch):  # anyone may have written it
        raise UserError(CHANGED)
    return folder / f".secret-{launch}"


def _key(secret: str, launch: str) -> bytes:
    return hmac.new(secret.encode(), launch.encode(), hashlib.sha256).digest()


def _variable() -> str:
    secret = os.environ.get(VARIABLE, "")
    if len(secret) < _SHORTEST:
        raise UserError(
            f"{VARIABLE} has {len(secret)} characters on {socket.gethostname()}: set the same {_SHORTEST} or more on "
            "every node, or on none."
        )
    return secret


def _write(path: Path) -> str:
    """Make the file, which only this user can read, and remove those of starts that were killed."""
    secret = secrets.token_hex(32)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for old in path.parent.glob(".secret-*"):
            if time.time() - old.stat().st_mtime > _ABANDONED:
                old.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secret)
    except OSError as error:
        raise UserError(
            f"Rank 0 cannot write the launch's secret to {path.parent.absolute()} ({error.strerror}): make that folder "
            f"writable, or set {VARIABLE} on every node."
        ) from error
    return secret


def _read(path: Path, store: dist.Store, rank: int) -> str:
    """Wait until this node sees the file and the whole of it; tell rank 0 if it does not."""
    deadline = time.monotonic() + SEEN_WITHIN
    while time.monotonic() < deadline:
        try:
            secret = path.read_text(encoding="ascii")
        except OSError:
            secret = ""
        if len(secret) == 64:
            return secret
        time.sleep(0.1)
    store.set("without secret", f"rank {rank} on {socket.gethostname()}")
    raise UserError(not_shared(path.parent))
