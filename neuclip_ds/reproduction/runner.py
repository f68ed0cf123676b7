"""Runs a study's jobs as processes of train.py, some at a time, and reads what they leave."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from neuclip_ds.errors import UserError
from neuclip_ds.reproduction.study import Job

TRAIN = Path(__file__).parents[2] / "train.py"
Results = dict[str, float]


class Runner:
    """Jobs over the data in `data`, each in a folder of its own under `runs`."""

    def __init__(self, data: Path, runs: Path, zero_shot: Path | None, processes: int) -> None:
        self._data, self._runs, self._zero_shot, self._processes = data, runs, zero_shot, processes

    def run(self, jobs: Sequence[Job], on_done: Callable[[], object]) -> dict[str, Results]:
        """Results by job name; what has been run before is read.

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
        """The final line of a run's metrics, with the median milliseconds of a step; None while it has none."""
        path = self._runs / name / "metrics.jsonl"
        if not path.is_file():
            return None
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if not records or "retrieval_pairs" not in records[-1]:
            return None
        config = json.loads((self._runs / name / "job.json").read_text(encoding="utf-8"))
        speeds = [record["samples_per_second"] for record in records if "samples_per_second" in record]
        milliseconds = 1000 * float(config["data.batch_size"]) / statistics.median(speeds) if speeds else float("nan")
        return {**{key: float(value) for key, value in records[-1].items()}, "step_ms": milliseconds}

    def _train(self, job: Job) -> Results:
        folder = self._runs / job.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "job.json").write_text(json.dumps(dict(job.options), indent=1), encoding="utf-8")
        options: dict[str, Any] = {
            "data.train": self._data / job.train,
            "data.val": self._data / job.split,
            "data.zero_shot": self._zero_shot or "",
            "run.seed": job.seed,
            "run.folder": folder.parent,
            "run.name": folder.name,
            **job.options,
        }
        call = [sys.executable, str(TRAIN), "miniature", *(f"--{key}={_text(value)}" for key, value in options.items())]
        threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        with (folder / "output.txt").open("w") as output:
            code = subprocess.run(call, env={**os.environ, **threads}, stdout=output, stderr=output).returncode
        results = self.results(job.name)
        if code not in (0, 1) or (code == 0 and results is None):
            raise UserError(f"The run {job.name} failed with exit code {code}; see {folder}/output.txt.")
        if results is None:  # diverged: a result of its own
            return {}
        for checkpoint in (folder / "checkpoints").rglob("*"):
            if checkpoint.is_file():
                checkpoint.unlink()
        return results


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | list) else str(value)
