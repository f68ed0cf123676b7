"""Pools of processes work in scripts without a main guard, and their errors name how a process ended."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_runs import environment

from neuclip_ds.data.children import process_pool
from neuclip_ds.errors import UserError

SCRIPT = """
from operator import add
from neuclip_ds.data.children import process_pool
print("the script starts")
with process_pool(2) as pool:
    print(*pool.map(add, [1, 2, 3], [4, 5, 6]))
"""


@pytest.mark.parametrize("given", ["a file", "standard input", "an option"])
def test_a_script_without_a_main_guard_starts_processes(given: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    program = {"a file": ["script.py"], "standard input": ["-"], "an option": ["-c", SCRIPT]}[given]
    done = subprocess.run(
        [sys.executable, *program],
        input=SCRIPT,
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stdout) == (0, "the script starts\n5 7 9\n"), done.stderr


@pytest.mark.parametrize(
    ("work", "arguments", "cause"),
    [
        (os._exit, [3], "ended with exit code 3"),
        (signal.raise_signal, [signal.SIGKILL], "was killed .SIGKILL.; if memory ran out, close other programs"),
        (signal.raise_signal, [signal.SIGABRT], "was killed by SIGABRT"),
    ],
)
def test_the_end_of_a_process_is_named(work: Any, arguments: list[int], cause: str) -> None:
    with pytest.raises(UserError, match=f"One of 2 worker processes {cause}") as raised, process_pool(2) as pool:
        pool.submit(work, *arguments).result()
    assert ("memory" in str(raised.value)) == (signal.SIGKILL in arguments)
