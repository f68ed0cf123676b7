"""Tell which folders lie on file systems that nodes share, where random reads are slow or disturb others."""

import re
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_SHARED = re.compile(r"lustre|gpfs|beegfs|nfs4?|ceph|wekafs|panfs|pvfs2|afs|cifs|smb3|fuse\..+")
_ESCAPED = re.compile(r"\\([0-7]{3})")  # white space in a path, as in \040


def shared_file_system(path: str | Path) -> str | None:
    """Return the type of the network or parallel file system that holds a path, such as lustre; None for other ones.

    None too where the system does not list its mounts.
    """
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    real, kind, depth = Path(path).resolve(), "", -1
    for line in lines:
        before, _, after = line.partition(" - ")
        point = Path(_ESCAPED.sub(lambda code: chr(int(code[1], 8)), before.split()[4]))
        if real.is_relative_to(point) and len(point.parts) >= depth:  # a later mount hides an earlier one
            kind, depth = after.split()[0], len(point.parts)
    return kind if _SHARED.fullmatch(kind) else None
