"""Run the jobs of a study as processes of `neuclip-ds train`, some at a time, and read their results."""

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
from typing import Any

from neuclip_ds.data.children import killed_with_parent
from neuclip_ds.errors import UserError
from neuclip_ds.reporting.metrics import read_metrics
from neuclip_ds.reproduction.study import Job

TRAIN = ("-m", "neuclip_ds", "train", "miniature")
Results = dict[str, float]
Curve = list[tuple[int, Results]]  # evaluations by step


class Runner:
    """Runs jobs on the data in `data`, each in a separate folder under `runs`."""

    def __init__(self, data: Path, runs: Path, zero_shot: Path | None, processes: int) -> None:
        self._data, self._runs, self._zero_shot, self._processes = data, runs, zero_shot, processes

    def run(self, jobs: Sequence[Job], on_done: Callable[[], object]) -> dict[str, Results]:
        """Return results by job name; runs that have ended are read instead of repeated.

        Raises:
            UserError: a run failed; names its log.
        """

        def one(job: Job) -> tuple[str, Results]:
            results = self.results(job.name) or self._train(job)
            on_done()
            return job.name, results

        with ThreadPoolExecutor(self._processes) as pool:
            return dict(pool.map(one, jobs))

    def results(self, name: str) -> Results | None:
        """The final line of a run's metrics, with its seconds and the median milliseconds of a step.

        None while it has not ended.
        """
        path = self._runs / name / "job.json"
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if "seconds" not in config:
            return None
        records = self._records(name)
        speeds = [record["samples_per_second"] for record in records if record.get("samples_per_second", 0.0) > 0]
        milliseconds = 1000 * float(config["data.batch_size"]) / statistics.median(speeds) if speeds else float("nan")
        own = {"step_ms": milliseconds, "seconds": config["seconds"]}
        return {**records[-1], **own}

    def curve(self, name: str) -> Curve:
        """The evaluations of a run that has ended."""
        return [(int(record["step"]), record) for record in self._records(name) if "retrieval_pairs" in record]

    def _records(self, name: str) -> list[Results]:
        return list(read_metrics(self._runs / name / "metrics.jsonl"))

    def _train(self, job: Job) -> Results:
        folder = self._runs / job.name
        folder.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {
            "data.train": self._data / job.train,
            "data.val": self._data / job.split,
            "data.zero_shot": self._zero_shot or "",
            "run.seed": job.seed,
            "run.folder": folder.parent,
            "run.name": folder.name,
            **job.options,
        }
        call = [sys.executable, *TRAIN, *(f"--{key}={_text(value)}" for key, value in options.items())]
        threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        began = time.monotonic()
        with (folder / "output.txt").open("w") as output:
            code = subprocess.run(
                call, env={**os.environ, **threads}, stdout=output, stderr=output, preexec_fn=killed_with_parent()
            ).returncode
        if code == 1 and "\nerror: steps " in (folder / "output.txt").read_text():  # diverged, which is a result too
            return {}
        if code:
            raise UserError(f"The run {job.name} failed with exit code {code}; see {folder}/output.txt.")
        record = {**job.options, "seconds": time.monotonic() - began}
        (folder / "job.json").write_text(json.dumps(record, indent=1, default=str), encoding="utf-8")
        if not job.keep:
            shutil.rmtree(folder / "checkpoints")
        return self.results(job.name) or {}


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | list) else str(value)
