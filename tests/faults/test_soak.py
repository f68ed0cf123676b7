"""Two hours of training on two ranks under faults: nothing grows, and every sample is accounted for."""

import json
import os
import random
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import groupby
from pathlib import Path

import psutil
import pytest
from sample_log import read_samples
from small_runs import SMALL, TRAIN, call, demo_shards, newest_checkpoint, read_options, start, wait_for
from soaking import Faults, Usage

MINUTES = float(os.environ.get("SOAK_MINUTES", "120"))
PAIRS, BATCH = 2000, 32
_END = 60.0  # seconds in which the other ranks must have ended by themselves
_OPTIONS = [
    *SMALL,
    f"--data.batch_size={BATCH}",
    "--data.workers=1",
    "--data.timeout=10",
    "--data.max_bad_fraction=1",
    "--data.val=",
    "--data.zero_shot=",
    "--objective.method=neuclip",
    "--objective.npn.prototypes=64",
    "--run.checkpoint_every=100",
    "--epochs=1e6",
]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path | None]:
    """A file system of 500 MB, which can be filled."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=500m", "tmpfs", str(folder)], check=False).returncode:
        yield None
        return
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def steps_done(runs: Path) -> int:
    path = runs / "run" / "metrics.jsonl"
    return json.loads(path.read_text().splitlines()[-1])["step"] if path.is_file() and path.stat().st_size else 0


def _reached(runs: Path, step: int) -> bool:
    return steps_done(runs) >= step


def check_samples(run: Path, steps: int) -> int:
    """Every epoch has shown each sample once; return the number of rows in `steps` steps."""
    per_epoch = -(-PAIRS // BATCH)
    rows, expected = 0, 1
    for epoch, lines in groupby(read_samples(run / "samples"), key=lambda line: (line[0] - 1) // per_epoch):
        seen: list[int] = []
        for step, indices in lines:
            assert step == expected
            expected += 1
            real = [index for index in indices if index >= 0]
            rows += len(real) * (step <= steps)
            seen += real
        assert len(seen) == len(set(seen)), f"epoch {epoch} shows a sample twice"
        if expected > (epoch + 1) * per_epoch:
            assert len(seen) == PAIRS, f"epoch {epoch} leaves out samples"
    assert expected > steps
    return rows


def train_under_faults(
    command: list[str], runs: Path, faults: Faults, usage: Usage, chance: random.Random
) -> dict[int, float]:
    """Start the run again after each rank that is killed, until the time is over; return when each rank ended."""
    began, end, ended = time.monotonic(), MINUTES * 60, dict[int, float]()
    while True:
        programs = start(*command, ranks=2)
        ranks = [program.pid for program in programs]
        try:
            wait_for(partial(_reached, runs, steps_done(runs) + 20), programs, limit=300)
            dies = time.monotonic() - began + chance.expovariate(20 / end)
            dies = dies if dies < end / 4 else end  # then one unbroken life, for the slopes
            while time.monotonic() - began < dies:
                usage.look(ranks)
                faults.one(ranks)
                time.sleep(chance.uniform(1, 10))
                wait_for(partial(_reached, runs, steps_done(runs) + 10), programs, limit=300)
            if dies == end:
                for program in programs:
                    program.terminate()
                ends = [program.wait() for program in programs]
                assert [end.returncode for end in ends] == [143, 143], ends[0].stderr[-3000:]
                return ended
            faults.rank_killed(ranks)
            ends = [program.wait(_END) for program in programs]
            assert all(end.returncode for end in ends)
        finally:
            for program in programs:
                program.kill()
            ended.update(dict.fromkeys(ranks, time.time()))


def left_behind(ended: dict[int, float]) -> list[str]:
    """Return the processes that ranks have started and that run after those have ended."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.Error):
            leader = os.getsid(process.pid)  # a rank leads a session; its number may since be that of another process
            zombie = process.status() == psutil.STATUS_ZOMBIE  # not collected by the system's first process
            if not zombie and process.create_time() <= ended.get(leader, 0):
                found.append(" ".join(process.cmdline()))
    return found


@pytest.mark.soak
def test_hours_of_faults(tmp_path: Path, disk: Path | None) -> None:
    seed = int(os.environ.get("SOAK_SEED", time.time_ns() % 2**32))
    shards, manifest, runs = demo_shards(tmp_path / "data", PAIRS), tmp_path / "manifest", disk or tmp_path
    assert call("tools/build_manifest.py", str(manifest), str(shards)).returncode == 0
    command = [TRAIN, "demo", f"--data.train={manifest}", f"--run.output_dir={runs}", "--run.name=run"]
    faults, usage = Faults(seed, shards, disk), Usage()
    ended = train_under_faults([*command, *read_options(_OPTIONS)], runs, faults, usage, random.Random(seed))
    meta = json.loads((newest_checkpoint(runs) / "meta.json").read_text())
    rows, counted = check_samples(runs / "run", meta["step"]), meta["data"]["hooks"]["WriteRecords"]
    slopes = usage.slopes()
    report = {"seed": seed, "minutes": MINUTES, "starts": len(ended) // 2, "steps": meta["step"], "rows": rows}
    report |= {"faults": dict(faults.counts), "bad": counted, "slopes": slopes}
    print(json.dumps(report, indent=1))
    Path(os.environ.get("SOAK_REPORT", tmp_path / "soak.json")).write_text(json.dumps(report, indent=1))
    assert counted["seen"] == rows
    records = [json.loads(line) for line in (runs / "run" / "bad_samples.jsonl").read_text().splitlines()]
    assert {Path(record["shard"]).name for record in records} <= faults.damaged
    assert left_behind(ended) == []
    for slope in slopes:
        assert slope["handles"] * slope["hours"] < 3, slope
        assert slope["threads"] * slope["hours"] < 2, slope
        assert slope["memory"] < 10, slope  # MB an hour
