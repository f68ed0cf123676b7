"""Run the jobs of a study, some at a time, and keep what they found in one file."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

from neuclip_ds.errors import UserError
from neuclip_ds.reporting.metrics import read_metrics
from reproduction.study import Job

MINIATURE = "miniature"  # recipe
Results = dict[str, float]


class Runner:
    """Runs jobs of a recipe on the data in `data`, each in a separate folder under `runs`.

    `results.jsonl` next to `runs` has a line for each run that has ended; a run with a line is not repeated.
    """

    def __init__(self, data: Path, runs: Path, zero_shot: Path | None, processes: int, recipe: str = MINIATURE) -> None:
        self._data, self._runs, self._zero_shot, self._processes = data, runs, zero_shot, processes
        self._recipe, self._path, self._lock = recipe, runs.parent / "results.jsonl", Lock()
        self._known = _records_of(self._path) if self._path.is_file() else {}

    def run(self, jobs: Sequence[Job], on_done: Callable[[], object]) -> dict[str, Results]:
        """Return the final line of each run's metrics by job name; runs that have ended are looked up.

        A run that diverged has no results.

        Raises:
            UserError: a run failed; names its log. Or a known run had other options.
        """

        def one(job: Job) -> tuple[str, Results]:
            known = self._known.get(job.name)
            if known is None:
                known = self._train(job)
            elif changed := _differences(known["options"], _plain(job)):
                raise UserError(
                    f"{self._path} has {job.name} with another {', '.join(changed)}; choose another --out, or remove "
                    "its line to repeat it."
                )
            on_done()
            results: Results = known["results"]
            return job.name, results

        with ThreadPoolExecutor(self._processes) as pool:
            return dict(pool.map(one, jobs))

    def _train(self, job: Job) -> dict[str, Any]:
        folder = self._runs / job.name
        shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was interrupted
        folder.mkdir(parents=True)
        options: dict[str, Any] = {
            "data.train": self._data / job.train,
            "data.val": self._data / job.split,
            "data.zero_shot": self._zero_shot or "",
            "run.seed": job.seed,
            "run.output_dir": folder.parent,
            "run.name": folder.name,
            **job.options,
        }
        arguments = [self._recipe, *(f"--{key}={as_text(value)}" for key, value in options.items())]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        began = time.monotonic()
        with (folder / "output.txt").open("w") as file:
            call = [sys.executable, "-m", "neuclip_ds", "train", *arguments]
            code = subprocess.run(call, env=variables, stdout=file, stderr=subprocess.STDOUT).returncode
        seconds = time.monotonic() - began
        # diverged, which is a result too
        diverged = code == 1 and "\nerror: steps " in (folder / "output.txt").read_text()
        if code and not diverged:
            raise UserError(f"The run {job.name} failed with exit code {code}; see {folder}/output.txt.")
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        results = {} if diverged else self._results(job, seconds)
        record = {"name": job.name, "options": _plain(job), "results": results}
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        return record

    def _results(self, job: Job, seconds: float) -> Results:
        records = list(read_metrics(self._runs / job.name / "metrics.jsonl"))
        speeds = [record["samples_per_second"] for record in records if record.get("samples_per_second", 0.0) > 0]
        step = {"step_ms": 1000 * job.options["data.batch_size"] / statistics.median(speeds)} if speeds else {}
        found = {**records[-1], **step, "seconds": seconds}
        return {name: float(f"{value:.6g}") for name, value in found.items()}


def read_results(path: Path) -> dict[str, Results]:
    """Return the results of a study's results.jsonl by the name of the run.

    Raises:
        UserError: there is no such file, or it holds something else.
    """
    try:
        return {name: record["results"] for name, record in _records_of(path).items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not the results.jsonl of a study ({error}); name one.") from error


def _records_of(path: Path) -> dict[str, dict[str, Any]]:
    return {record["name"]: record for record in map(json.loads, path.read_text(encoding="utf-8").splitlines())}


def _plain(job: Job) -> dict[str, Any]:
    """Return a job's options as a line of the file has them."""
    plain: dict[str, Any] = json.loads(json.dumps({**job.options, "data.train": job.train}, default=str))
    return plain


def _differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def as_text(value: Any) -> str:
    """Return a value as an option of a command has it."""
    return json.dumps(value) if isinstance(value, bool | list) else str(value)
