"""Processes that an examination starts for its rank: each under a time limit, so that its end is a finding.

They take the place of their rank in the launch, at another port, or run alone on its device. The process that starts
them keeps off the GPUs.
"""

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from neuclip_ds.data.children import killed_with_parent
from neuclip_ds.data.disk import best_effort
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.environment import free_port, read_environment
from neuclip_ds.doctor.request import Request
from neuclip_ds.planning.engine_tuning import reason
from neuclip_ds.planning.memory_check import local_ranks

_PACKAGE = Path(__file__).parents[2]  # what PYTHONPATH needs where the package is not installed
_TORCHRUN = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT")  # its store belongs to the first launch
_KEPT = 400  # last lines of an output


def alone() -> dict[str, str]:
    """Return the variables of a process that is the only rank of a launch, on this rank's device."""
    rank = read_environment().local_rank
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return {**place, "LOCAL_RANK": str(rank)}


def joined(communicator: Communicator) -> dict[str, str]:
    """Return the variables of a process that is this rank in a separate launch; called by all ranks."""
    if communicator.world_size == 1:
        return alone()
    here = read_environment()
    place = {"RANK": str(here.rank), "LOCAL_RANK": str(here.local_rank), "WORLD_SIZE": str(here.world_size)}
    return {**place, "MASTER_PORT": str(communicator.on_rank_zero(free_port))}


def run(
    request: Request,
    arguments: Sequence[str],
    variables: dict[str, str],
    output: Path,
    on_line: Callable[[str], object] = lambda line: None,
) -> str | None:
    """Run `neuclip-ds` with these arguments to its end; return why it failed, if it did.

    Args:
        request: the limit of its time, and its accelerator.
        variables: of its environment, over those of this process.
        output: file for what it prints.
        on_line: called with each line as it is printed.
    """
    lines: deque[str] = deque(maxlen=_KEPT)
    process = subprocess.Popen(
        [sys.executable, "-m", "neuclip_ds", *arguments],
        env=_environment(request, variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        preexec_fn=killed_with_parent(),
    )
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        process.kill()

    timer = threading.Timer(request.limit, expire)
    timer.start()
    try:
        for line in process.stdout or ():
            lines.append(line)
            on_line(line)
        code = process.wait()
    finally:
        timer.cancel()
        process.kill()
        process.wait()
        with best_effort(output):
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text("".join(lines), encoding="utf-8")
    if expired.is_set():
        return f"not ended after {request.limit:g} s (--limit)"
    return f"exit code {code}: {reason(''.join(lines))}" if code else None


def _environment(request: Request, variables: dict[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in (*_TORCHRUN, "DS_ACCELERATOR")}
    accelerator = {"DS_ACCELERATOR": request.accelerator} if request.accelerator else {}
    threads = str(max(1, (os.cpu_count() or 1) // local_ranks()))
    paths = os.pathsep.join(filter(None, [str(_PACKAGE), os.environ.get("PYTHONPATH")]))
    return {"OMP_NUM_THREADS": threads, **kept, **accelerator, "PYTHONPATH": paths, **variables}
