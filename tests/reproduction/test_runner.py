"""Jobs of a study as processes: a run that diverges is a result, one that fails is an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import SMALL, demo_shards

from neuclip_ds.errors import UserError
from neuclip_ds.reproduction.runner import Runner
from neuclip_ds.reproduction.study import Job

_OPTIONS = {
    **dict(option.removeprefix("--").split("=", 1) for option in SMALL),
    "objective.method": "openclip",
    "data.batch_size": 8,
    "data.workers": 0,
    "budget.steps": 30,
    "run.max_skipped": 3,
    "optimizer.warmup_steps": 1,
}


@pytest.mark.slow
def test_a_diverged_run_has_no_results(tmp_path: Path) -> None:
    demo_shards(tmp_path / "data", 40)
    runner = Runner(tmp_path / "data", tmp_path / "runs", None, processes=1)
    job = Job("diverges", "openclip", 0, "val", {**_OPTIONS, "optimizer.lr": 1e30})
    assert runner.run([job], lambda: None) == {"diverges": {}}
    with pytest.raises(UserError, match=r"The run fails failed with exit code 2; see .*/runs/fails/output.txt\."):
        runner.run([Job("fails", "openclip", 0, "val", {**_OPTIONS, "optimizer.lr": -1})], lambda: None)
