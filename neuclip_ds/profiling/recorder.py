"""Profile some steps of a run on all ranks, and write tables and a trace to a folder."""

from __future__ import annotations

import json
import logging
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from neuclip_ds.distributed.communicator import STEP, Communicator
from neuclip_ds.files import best_effort
from neuclip_ds.profiling.breakdown import breakdown, rank_record, report
from neuclip_ds.profiling.trace import read_trace

log = logging.getLogger(__name__)

# files in the folder of a profile
TRACE = "trace.json.gz"
BREAKDOWN = "breakdown.json"
REPORT = "report.md"


class Recorder:
    """Profiler of `steps` training steps on all ranks, after the first `after` steps; does nothing if `steps` is 0.

    Rank 0 writes breakdown.json (with `labels` such as the method and ZeRO stage), report.md and its trace.json.gz to
    the folder. If `after` is at least 1, the profiler starts one step early, because starting it slows down that step.
    On a GPU, each profiled step begins and ends with a synchronization, so that the step contains only its own kernels.
    """

    def __init__(
        self, folder: Path, communicator: Communicator, steps: int, after: int, labels: dict[str, Any] | None = None
    ) -> None:
        self._folder = folder
        self._communicator = communicator
        self._first = after
        self._end = after + steps if steps else 0
        self._on_gpu = communicator.device.type == "cuda"
        name = torch.cuda.get_device_name(communicator.device) if self._on_gpu else platform.machine()
        self._labels = {**(labels or {}), "device": name, "torch": torch.__version__}
        self._done = 0  # number of steps so far
        self._profiler: profile | None = None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if self._profiler is not None:
            self._profiler.stop()
        if kind is None and self._done < self._end:
            log.warning(
                "no profile was written: this launch ran %d steps, but the profile needs %d; train longer, or lower "
                "run.profile_steps",
                self._done,
                self._end,
            )

    @contextmanager
    def step(self) -> Iterator[None]:
        """Profile the enclosed training step if its turn has come; every step must run in this context."""
        if self._done >= self._end:
            yield
            return
        if self._profiler is None and self._done >= self._first - 1:
            activities = [ProfilerActivity.CPU]
            if self._on_gpu:
                activities.append(ProfilerActivity.CUDA)
            self._profiler = profile(activities=activities, record_shapes=True)
            self._profiler.start()
        if self._done < self._first:
            yield
        else:
            self._wait_for_gpu()
            with record_function(STEP):
                yield
                self._wait_for_gpu()
        self._done += 1
        if self._done == self._end:
            self._finish()

    def _wait_for_gpu(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

    def _finish(self) -> None:
        """Stop the profiler, read the trace on each rank, and let rank 0 write the breakdown for all ranks."""
        profiler = self._profiler
        self._profiler = None
        assert profiler is not None
        profiler.stop()
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / TRACE
            profiler.export_chrome_trace(str(path))
            records = self._communicator.gather_objects(rank_record(read_trace(path)))
            content = {**self._labels, **breakdown(records)}
            self._communicator.on_rank_zero(lambda: self._write(content, path))

    def _write(self, content: dict[str, Any], trace: Path) -> None:
        with best_effort(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(trace, self._folder / TRACE)
            (self._folder / BREAKDOWN).write_text(json.dumps(content, indent=1), encoding="utf-8")
            (self._folder / REPORT).write_text(report([content]), encoding="utf-8")
            log.info(
                "profiled %d steps: %.1f ms per step, of which %.1f ms are communication without overlap; see %s",
                content["steps"],
                1e3 * content["seconds"]["total"]["mean"],
                1e3 * content["seconds"]["pure_communication"]["mean"],
                self._folder,
            )
