"""Copy a run to and from a store that fsspec supports (S3, GCS, Azure, SFTP, a mounted folder).

    URL/checkpoints/step_000000100/    the files of the checkpoint with that name; meta.json is written last
    URL/checkpoints/best.json          as in the run's folder
    URL/metrics.jsonl, log.txt ...     the other files in the run's folder, but neither its subfolders nor its lock

A folder without meta.json is not a checkpoint: it is being written, or a write was interrupted. The only file
that copying deletes is the meta.json of an old checkpoint, when a new checkpoint of the same step replaces it.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from neuclip_ds.data.children import end_with_parent

_ROOT = Path(__file__).parents[2]  # contains the package; Python does not search it if the package is not installed
# repeated here because the modules that define them import torch
_META = "meta.json"
_BEST = "checkpoints/best.json"
_LOCK = "lock.json"


class RemoteRun:
    """The remote copy of one run; any method may raise exceptions from the fsspec backend.

    Args:
        url: the run's folder in the store; fsspec finds the credentials.
    """

    def __init__(self, url: str) -> None:
        # listings are not cached, because another machine may write to the folder
        self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        self._root = root.rstrip("/")
        self._checkpoints = f"{self._root}/checkpoints"

    def is_folder(self, folder: Path) -> bool:
        """Return whether the URL refers to `folder` on this machine."""
        return isinstance(self._fs, LocalFileSystem) and Path(self._root).resolve() == folder.resolve()

    def check_writable(self) -> None:
        """Write and delete a hidden file; this raises an exception of the backend if the store is not writable."""
        probe = f"{self._root}/.writable"
        self._make_parents([probe])
        self._fs.pipe_file(probe, b"")
        self._fs.rm_file(probe)

    def names(self) -> list[str]:
        """Return the names of the remote checkpoints, oldest first."""
        names = []
        for path in self._fs.find(self._checkpoints):  # not glob: a run's name may contain special characters
            folder, _, file = path.rpartition("/")
            parent, _, name = folder.rpartition("/")
            if file == _META and parent.endswith("/checkpoints") and re.fullmatch(r"step_\d+", name):
                names.append(name)
        return sorted(names)

    def records(self) -> list[str]:
        """Return the names of the files in the remote run's folder, without its lock and hidden files."""
        try:
            entries = self._fs.ls(self._root, detail=True)
        except FileNotFoundError:  # an object store has no empty folders
            return []
        names = [entry["name"].rpartition("/")[2] for entry in entries if entry["type"] == "file"]
        return [name for name in names if _is_record(name)]

    def push(self, run: Path, names: Sequence[str]) -> None:
        """Copy the checkpoints in `names`, in the given order, and then the run's other files.

        Checkpoints that the store already has are skipped. A checkpoint becomes visible only when it is complete; it
        replaces one of the same step from an earlier launch.
        """
        for name in names:
            source = run / "checkpoints" / name
            target = f"{self._checkpoints}/{name}"
            meta = (source / _META).read_bytes()
            remote_meta = self._read(f"{target}/{_META}")
            if meta == remote_meta:
                continue
            if remote_meta is not None:  # a checkpoint of an earlier launch
                self._fs.rm_file(f"{target}/{_META}")
            self._put({source / file: f"{target}/{file}" for file in json.loads(meta)["files"]})
            self._put_atomically(source / _META, f"{target}/{_META}")

        paths = [path for path in run.iterdir() if _is_record(path.name)]
        files = [path for path in [*paths, run / _BEST] if path.is_file()]
        self._put({path: f"{self._root}/{path.relative_to(run)}" for path in files})

    def pull(self, name: str, files: Sequence[str], folder: Path) -> None:
        """Download files of a checkpoint to `folder` without verifying them.

        Raises `FileNotFoundError` if a file is missing, or `ValueError` if it would be outside `folder`.
        """
        for file in files:
            if not (folder / file).resolve().is_relative_to(folder.resolve()):
                raise ValueError(f"the path {file} leads out of the checkpoint's folder")
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
        self._fs.get([f"{self._checkpoints}/{name}/{file}" for file in files], [str(folder / file) for file in files])

    def pull_records(self, run: Path, replace: bool) -> None:
        """Download the remote run's files, except its checkpoints, to the local folder `run`.

        Files that exist there are kept unless `replace` is true.
        """
        for name in [*self.records(), _BEST]:
            if (run / name).exists() and not replace:
                continue
            content = self._read(f"{self._root}/{name}")
            if content is not None:
                (run / name).write_bytes(content)

    def _put(self, files: Mapping[Path, str]) -> None:
        """Copy files; `files` maps local paths to paths in the store."""
        self._make_parents(files.values())
        self._fs.put(list(map(str, files)), list(files.values()))

    def _put_atomically(self, file: Path, target: str) -> None:
        """Copy a file atomically: object stores write atomically, but file systems need a rename."""
        if self._fs.async_impl:
            self._put({file: target})
        else:
            self._put({file: f"{target}.part"})
            self._fs.mv(f"{target}.part", target)

    def _make_parents(self, paths: Iterable[str]) -> None:
        """Create parent folders, except in object stores (asynchronous backends), where this would create a bucket."""
        if self._fs.async_impl:
            return
        for parent in {path.rpartition("/")[0] for path in paths}:
            self._fs.makedirs(parent, exist_ok=True)

    def _read(self, path: str) -> bytes | None:
        """Return the content of a file, or None if it does not exist."""
        try:
            return self._fs.cat_file(path)
        except FileNotFoundError:
            return None


def _is_record(name: str) -> bool:
    """Return whether a file of a run's folder is copied: the lock belongs to a process, not to the run."""
    return name not in ("", _LOCK) and not name.startswith(".")


def start_push(url: str, run: Path, names: Sequence[str]) -> "subprocess.Popen[str]":
    """Start `push` in a child process, which prints the reason for a failure and ends when this process ends.

    A child process can be killed if the store does not respond, and it does not slow down training.
    """
    return subprocess.Popen(
        [sys.executable, "-m", __name__, str(os.getpid()), url, str(run), *names],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # signals to this process's group do not reach the child
        env={**os.environ, "PYTHONPATH": f"{_ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        text=True,
    )


def main() -> None:
    parent_pid, url, run, *names = sys.argv[1:]
    end_with_parent(int(parent_pid))
    try:
        RemoteRun(url).push(Path(run), names)
    except Exception as error:  # backends raise many types: botocore's, aiohttp's, OSError
        print(f"{type(error).__name__}: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
