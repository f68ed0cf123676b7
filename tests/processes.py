"""The processes below a process, and whether one is alive."""

from contextlib import suppress

import psutil


def children_of(parent: int, name: str | None = None) -> list[int]:
    """Return the living descendants of a process, or those of a name."""
    found = []
    with suppress(psutil.NoSuchProcess):  # one may end meanwhile
        for child in psutil.Process(parent).children(recursive=True):
            if alive(child.pid) and name in (None, child.name()):
                found.append(child.pid)
    return found


def alive(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
