"""Run the jobs of a study, some at a time, and keep what they found in one file."""

import json
import multiprocessing
import os
import runpy
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

from neuclip_ds.data.children import be_killed_with
from neuclip_ds.errors import UserError
from neuclip_ds.reporting.metrics import read_metrics
from neuclip_ds.reproduction.study import Job

# a server imports these once and forks every run off, which saves a quarter of a miniature run
_CONTEXT = multiprocessing.get_context("forkserver")
_IMPORTED = ["neuclip_ds.training.trainer", "neuclip_ds.cli.train", "transformers", "timm"]
MINIATURE = "miniature"  # recipe
Results = dict[str, float]
Curve = list[tuple[int, Results]]  # evaluations by step


class Runner:
    """Runs jobs of a recipe on the data in `data`, each in a separate folder under `runs`.

    `results.jsonl` next to `runs` has a line for each run that has ended; a run with a line is not repeated.
    """

    def __init__(self, data: Path, runs: Path, zero_shot: Path | None, processes: int, recipe: str = MINIATURE) -> None:
        self._data, self._runs, self._zero_shot, self._processes = data, runs, zero_shot, processes
        self._recipe = recipe
        self._path = runs.parent / "results.jsonl"
        self._lock = Lock()
        self._known = _records_of(self._path) if self._path.is_file() else {}

    def run(self, jobs: Sequence[Job], on_done: Callable[[], object]) -> dict[str, Results]:
        """Return results by job name; runs that have ended are looked up instead of repeated.

        Raises:
            UserError: a run failed; names its log. Or a known run had other options.
        """

        def one(job: Job) -> tuple[str, Results]:
            known = self._known.get(job.name)
            if known is not None and known["options"] != _plain(job):
                changed = sorted(_differences(known["options"], _plain(job)))
                raise UserError(
                    f"{self._path} has {job.name} with another {', '.join(changed)}; choose another --out, or remove "
                    "its line to repeat it."
                )
            if known is None:
                self._train(job)
            on_done()
            return job.name, self._known[job.name]["results"]

        with ThreadPoolExecutor(self._processes) as pool:
            return dict(pool.map(one, jobs))

    def results(self, name: str) -> Results | None:
        """The final line of a run's metrics, with its seconds and the median milliseconds of a step.

        None where it has not ended, empty where it diverged.
        """
        known = self._known.get(name)
        return None if known is None else known["results"]

    def curve(self, name: str) -> Curve:
        """The evaluations of a run that has ended."""
        return [(int(record["step"]), record) for record in self._records(name) if "retrieval_pairs" in record]

    def _records(self, name: str) -> list[Results]:
        return list(read_metrics(self._runs / name / "metrics.jsonl"))

    def _train(self, job: Job) -> None:
        folder = self._runs / job.name
        shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was interrupted
        folder.mkdir(parents=True)
        options: dict[str, Any] = {
            "data.train": self._data / job.train,
            "data.val": self._data / job.split,
            "data.zero_shot": self._zero_shot or "",
            "run.seed": job.seed,
            "run.folder": folder.parent,
            "run.name": folder.name,
            **job.options,
        }
        arguments = ["train", self._recipe, *(f"--{key}={_text(value)}" for key, value in options.items())]
        _CONTEXT.set_forkserver_preload(_IMPORTED)
        began = time.monotonic()
        process = _CONTEXT.Process(target=_call, args=(arguments, str(folder / "output.txt")))
        process.start()
        process.join()
        seconds = time.monotonic() - began
        code = process.exitcode
        # diverged, which is a result too
        diverged = code == 1 and "\nerror: steps " in (folder / "output.txt").read_text()
        if code and not diverged:
            raise UserError(f"The run {job.name} failed with exit code {code}; see {folder}/output.txt.")
        if not job.keep:
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        self._keep(job, {} if diverged else self._scores(job, seconds))

    def _scores(self, job: Job, seconds: float) -> Results:
        records = self._records(job.name)
        speeds = [record["samples_per_second"] for record in records if record.get("samples_per_second", 0.0) > 0]
        batch = float(job.options["data.batch_size"])
        step = {"step_ms": 1000 * batch / statistics.median(speeds)} if speeds else {}
        return {**records[-1], **step, "seconds": seconds}

    def _keep(self, job: Job, results: Results) -> None:
        rounded = {name: float(f"{value:.6g}") for name, value in results.items()}
        record = {"name": job.name, "options": _plain(job), "results": rounded}
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            self._known[job.name] = record


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


def _call(arguments: list[str], output: str) -> None:
    """Be `python -m neuclip_ds ARGUMENTS` with one thread, and write to a file."""
    be_killed_with(os.getppid())
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    import torch

    torch.set_num_threads(1)  # the server's torch has read the variable before
    multiprocessing.set_start_method("fork", force=True)
    with Path(output).open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["neuclip_ds", *arguments]
    runpy.run_module("neuclip_ds", run_name="__main__")


def _plain(job: Job) -> dict[str, Any]:
    """Return a job's options as a line of the file has them."""
    plain: dict[str, Any] = json.loads(json.dumps({**job.options, "data.train": job.train}, default=str))
    return plain


def _differences(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | list) else str(value)
