"""Ten thousand mutated shards, manifests, images and lists: nothing crashes, hangs or leaves its folder."""

import json
import os
import random
from pathlib import Path

import pytest
from forks import fork, kill
from fuzzing import report
from small_runs import environment


@pytest.mark.parametrize("number", [150, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_inputs(tmp_path: Path, number: int) -> None:
    default = 15 if number == 150 else random.randrange(10**9)
    seed = int(os.environ.get("FUZZ_SEED", default))
    print(f"FUZZ_SEED={seed}")
    (tmp_path / "canary").write_text("untouched")
    process = fork(report, str(tmp_path), seed, number, variables=environment())
    try:
        process.join(3600)
        assert process.exitcode == 0, f"input {sorted((tmp_path / 'in').iterdir())} ended the process"
    finally:
        kill(process)
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    print(outcome)
    assert not outcome["failures"]
    assert {path.name for path in tmp_path.iterdir()} == {"canary", "in", "outcome.json", "stderr"}
    assert (tmp_path / "canary").read_text() == "untouched"
    assert sum(outcome["counts"].values()) == number
    assert min(outcome["counts"][result] for result in ("read", "refused", "bad")) > number / 50
