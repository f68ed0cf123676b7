"""Start processes quickly by forking them from a server that has already imported torch and DeepSpeed.

Each process has separate globals, a separate environment and an exit code, like a spawned process. Processes that use
GPUs are spawned instead, because DeepSpeed in the fork server is configured for the CPU.
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
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil

_CONTEXT = multiprocessing.get_context("forkserver")
ON_CPU = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}  # environment of a process that does not use a GPU


def context() -> ForkServerContext:
    """Return the multiprocessing context of the fork server, and start the server if it is not running yet.

    A process of this context inherits the server's environment; `fork` gives each process a separate environment.
    """
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    with patch.dict(os.environ, {"PYTHONPATH": path, **ON_CPU}):
        _CONTEXT.set_forkserver_preload(["warm"])
        forkserver.ensure_running()
    return _CONTEXT


def fork(
    work: Callable[..., None], *args: Any, variables: Mapping[str, str], folder: Path | None = None
) -> BaseProcess:
    """Run a module-level function, `work(*args)`, in a new process and session with only these environment variables.

    If `folder` is given, it is the working directory of the process.
    """
    task = (work, args, dict(variables), folder)
    if variables.get("DS_ACCELERATOR", "cpu") == "cpu":
        process: BaseProcess = context().Process(target=_begin, args=task)
        process.start()
    else:
        process = multiprocessing.get_context("spawn").Process(target=_begin, args=task)
        with patch.dict(os.environ, dict(variables), clear=True):  # the child imports modules before it calls `_begin`
            process.start()
    return process


def _begin(work: Callable[..., None], args: tuple[Any, ...], variables: dict[str, str], folder: Path | None) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(variables)
    if folder is not None:
        os.chdir(folder)
    multiprocessing.set_start_method("fork", force=True)  # the usual default, however this process was started
    np.random.seed()  # Python reseeds `random` after a fork, but not NumPy's generator
    work(*args)


def kill(process: BaseProcess) -> None:
    """Kill a process and all processes that it has started."""
    if process.exitcode is None and process.pid is not None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # the process does not lead a session yet, or has just ended
            process.kill()
    process.join()


class Program:
    """A Python program that runs as if started with `python PATH OPTIONS`.

    Args:
        path: the program's file.
        options: the command-line arguments.
        variables: the environment variables.
        folder: the working directory.
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
        """Return the text that the program has written to standard output and to standard error."""
        out, err = (Path(self._output.name, name) for name in ("out", "err"))
        return out.read_text() if out.exists() else "", err.read_text() if err.exists() else ""

    def wait(self, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        """Wait for the program to end, and return its result; kill it and raise `TimeoutExpired` if it takes longer."""
        self._process.join(timeout)
        if self.running:
            self.kill()
            raise subprocess.TimeoutExpired(self._args, timeout, *self.printed())
        return subprocess.CompletedProcess(self._args, self._process.exitcode or 0, *self.printed())

    def terminate(self) -> None:
        """Send SIGTERM to the program, but not to the processes that it has started."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill the program and all processes that it has started."""
        kill(self._process)


def _program(args: tuple[str, ...], output: str) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(output, name), os.O_WRONLY | os.O_CREAT), number)
    sys.argv = list(args)
    sys.path[:0] = [str(Path(args[0]).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    try:
        runpy.run_path(args[0], run_name="__main__")
    finally:  # run the exit handlers, which a forked process would skip
        threading._shutdown()
        atexit._run_exitfuncs()


def children_of(parent: int, name: str | None = None) -> list[int]:
    """Return the IDs of a process's live descendants, or only of the descendants with the given name."""
    pids = []
    with suppress(psutil.NoSuchProcess):  # a process may end in the meantime
        for child in psutil.Process(parent).children(recursive=True):
            if alive(child.pid) and name in (None, child.name()):
                pids.append(child.pid)
    return pids


def alive(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
