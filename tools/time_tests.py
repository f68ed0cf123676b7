"""Run the fast tests folder by folder, and print a Markdown table of the CPU time of each folder.

The seconds are those of one pytest process per folder and its child processes, imports included, with one thread per
process. Other processes on the machine hardly change them.

Examples:
  python tools/time_tests.py
  python tools/record_measurement.py test_times
"""

import argparse
import ctypes
import multiprocessing
import os
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass

from data_files import ROOT
from time_tutorials import cpu_time_of_children

from neuclip_ds.cli.program import exit_on_mistake
from neuclip_ds.errors import UserError

TESTS = ROOT / "tests"
_SET_CHILD_SUBREAPER = 36  # of prctl, in linux/prctl.h
AREAS = {
    "losses": "gradients, ranks, state and options of every method; loops of other libraries",
    "data": "tar reader, manifests, order, loader, cache, remote shards",
    "models": "towers, checkpoints of other libraries, export",
    "evaluation": "metrics, tasks, zero-shot, retrieval",
    "training": "the loop: resume, recovery, hooks, ZeRO stages",
    "faults": "killed ranks, full disks, damaged files, outages",
    "engine": "DeepSpeed's engine, precision, micro-batches",
    "gpu_ready": "a simulated GPU: hidden waits, memory, copies",
    "distributed": "collectives, rendezvous, failure detector",
    "checkpoint": "checkpoints, other world sizes, remote copies",
    "cli": "messages and exit codes of the commands",
    "tools": "benchmarks and studies",
    "planning": "memory estimates and dry runs",
    "profiling": "profiles of steps and communication",
    "embedding": "features on disk",
    "reporting": "reports and metrics",
    "state": "shards of per-sample statistics",
    "test_*.py": "docs, recipes, API, imports, packaging",
}


@dataclass(frozen=True, kw_only=True)
class Area:
    """The tests of a folder, or those directly in tests/."""

    name: str
    fast: int  # number of fast tests
    slow: int  # number of slow test functions; each may be several tests
    cpu_seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "areas", nargs="*", help="folders in tests/, or 'test_*.py' for the files directly in tests/ (default: all)"
    )
    parser.add_argument("--processes", type=int, default=2, help="number of concurrent pytest processes (default: 2)")
    options = parser.parse_args()
    with exit_on_mistake():
        names = options.areas or list(AREAS)
        unknown = set(names) - set(AREAS)
        if unknown:
            raise UserError(f"No area is called {', '.join(sorted(unknown))}: choose from {', '.join(AREAS)}.")
        print("| folder in `tests/` | what it tests | fast tests | CPU s | slow test functions |")
        print("|---|---|---|---|---|", flush=True)
        spawn = multiprocessing.get_context("spawn")
        with spawn.Pool(options.processes, maxtasksperchild=1) as pool:
            for area in pool.imap(timed, names):
                cells = [f"`{area.name}`", AREAS[area.name], str(area.fast), f"{area.cpu_seconds:.0f}", str(area.slow)]
                print(f"| {' | '.join(cells)} |", flush=True)


def timed(name: str) -> Area:
    """Measure the CPU time of an area's fast tests, and count its slow test functions.

    The time is that of all child processes, so this process must have no other children.

    Raises:
        UserError: a test failed, or pytest could not run the tests.
    """
    paths = [str(path) for path in sorted(TESTS.glob(name))]
    collecting = _pytest("--collect-only", "-q", "-m", "slow", *paths)
    listed = subprocess.run(collecting, cwd=ROOT, capture_output=True, text=True, check=False)
    slow = {line.partition("[")[0] for line in listed.stdout.splitlines() if "::" in line}

    # descendants whose parents have ended, such as those of a fork server, become children of this process
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    before = cpu_time_of_children()
    command = _pytest("-q", *paths)
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    with suppress(ChildProcessError):
        while True:
            os.wait()
    seconds = cpu_time_of_children() - before
    output = done.stdout
    if done.returncode:
        raise UserError(f"The tests of {name} ended with exit code {done.returncode}:\n{output}")
    passed = re.search(r"(\d+) passed", output)
    return Area(
        name=name,
        fast=int(passed[1]) if passed else 0,
        slow=len(slow),
        cpu_seconds=seconds,
    )


def _pytest(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", *arguments]


if __name__ == "__main__":
    main()
