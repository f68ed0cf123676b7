"""Processes that start at once: a server that has imported torch and DeepSpeed forks them off.

Each is a fresh process with its own globals, environment and exit code, as a spawned one would be. Those for GPUs are
spawned ones: the server has told DeepSpeed that there are none.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil

_CONTEXT = multiprocessing.get_context("forkserver")
ON_CPU = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}  # variables of a process that uses no GPU


def context() -> ForkServerContext:
    """Return what starts processes by the server, which this call starts where it does not run yet.

    Its `Process` keeps this process's environment of that moment; `fork` gives each its own.
    """
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    with patch.dict(os.environ, {"PYTHONPATH": path, **ON_CPU}):
        _CONTEXT.set_forkserver_preload(["warm"])
        ensure_running()
    return _CONTEXT


def fork(
    work: Callable[..., None], *args: Any, variables: Mapping[str, str], folder: Path | None = None
) -> BaseProcess:
    """Start `work(*args)`, a module's function, in a session of its own with these environment variables alone."""
    task = (work, args, dict(variables), folder)
    if variables.get("DS_ACCELERATOR", "cpu") == "cpu":
        process: BaseProcess = context().Process(target=_begin, args=task)
        process.start()
    else:
        process = multiprocessing.get_context("spawn").Process(target=_begin, args=task)
        with patch.dict(os.environ, dict(variables), clear=True):  # it imports modules before `_begin`
            process.start()
    return process


def _begin(work: Callable[..., None], args: tuple[Any, ...], variables: dict[str, str], folder: Path | None) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(variables)
    if folder is not None:
        os.chdir(folder)
    multiprocessing.set_start_method("fork", force=True)  # the platform's default, and not the server's
    np.random.seed()  # as `random` does by itself in a fork
    work(*args)


def kill(process: BaseProcess) -> None:
    """End a process and all that it has started."""
    if process.exitcode is None and process.pid is not None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it leads no session yet, or has just ended
            process.kill()
    process.join()


class Program:
    """A Python program that runs as `python PATH OPTIONS` would.

    Args:
        path: its file.
        options: its arguments.
        variables: its environment.
        folder: its working folder.
    """

    def __init__(self, path: Path, *options: str, variables: Mapping[str, str], folder: Path | None = None) -> None:
        self._args = (str(path), *options)
        self._output = tempfile.TemporaryDirectory()
        self._process = fork(_program, self._args, self._output.name, variables=variables, folder=folder)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.exitcode is None

    def printed(self) -> tuple[str, str]:
        """Return what it has written to standard output and to standard error."""
        out, err = (Path(self._output.name, name) for name in ("out", "err"))
        return out.read_text() if out.exists() else "", err.read_text() if err.exists() else ""

    def wait(self, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        """Return how it ended; a program that takes longer is killed."""
        self._process.join(timeout)
        if self.running:
            self.kill()
            raise subprocess.TimeoutExpired(self._args, timeout, *self.printed())
        return subprocess.CompletedProcess(self._args, self._process.exitcode or 0, *self.printed())

    def terminate(self) -> None:
        """Send SIGTERM to this process, but not to those that it has started."""
        self._process.terminate()

    def kill(self) -> None:
        """End it and all that it has started."""
        kill(self._process)


def _program(args: tuple[str, ...], output: str) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(output, name), os.O_WRONLY | os.O_CREAT), number)
    sys.argv = list(args)
    sys.path[:0] = [str(Path(args[0]).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    try:
        runpy.run_path(args[0], run_name="__main__")
    finally:  # the end of an interpreter, which that of a fork leaves out
        threading._shutdown()
        atexit._run_exitfuncs()


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
