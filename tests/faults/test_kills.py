"""Runs that are killed at random moments, fifty times in all, end bit-identical to an undisturbed run."""

import os
import random
import shutil
import time
from pathlib import Path

import pytest
from small_runs import SMALL, TRAIN, call, demo_shards, is_connected, outcome, read_options, start

KILLS = 50
_END = 60.0  # seconds within which the other ranks must end on their own
_OPTIONS = [
    *SMALL,
    "--data.batch_size=16",
    "--data.micro_batch=4",
    "--data.workers=1",
    "--data.zero_shot=",
    "--objective.method=neuclip",
    "--objective.npn.prototypes=64",
    "--objective.npn.redraw_every=5",
    "--run.checkpoint_every=3",
    "--run.evaluate_every=4",
    "--run.log_every=1",
    "--max_steps=24",  # ends in the second epoch
]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_runs_killed_at_random_moments_end_as_an_undisturbed_run(ranks: int, tmp_path: Path) -> None:
    seed = int(os.environ.get("KILL_SEED", time.time_ns() % 2**32))
    print(f"KILL_SEED={seed}")  # shown if the test fails, or with -s
    draw = random.Random(seed)
    data = demo_shards(tmp_path / "data", 300)
    where = [f"--data.train={data}", f"--run.output_dir={tmp_path}"]
    command = [TRAIN, "demo", *where, *read_options(_OPTIONS)]
    for name in ("first", "undisturbed"):  # the first call also starts the fork server, so the second is timed
        started = time.monotonic()
        done = call(*command, f"--run.name={name}", ranks=ranks)
        seconds_without_kills = time.monotonic() - started
    expected = outcome(tmp_path, "undisturbed")
    kills = 0
    compared = 0
    while kills < KILLS or compared == 0:
        programs = start(*command, "--run.name=broken", ranks=ranks)
        limit = time.monotonic() + (draw.uniform(0, seconds_without_kills) if kills < KILLS else 600)
        while time.monotonic() < limit and any(program.running for program in programs):
            time.sleep(0.002)
        if any(program.running for program in programs):
            kills += 1
            connected = is_connected(programs[0])
            draw.choice(programs).kill()  # also kills the rank's loader processes
            if not connected or draw.random() < 0.5:  # as if a machine failed; else the others end on their own
                for program in programs:
                    program.kill()
            ends = [program.wait(_END) for program in programs]
            done = (tmp_path / "broken" / "complete.json").exists()  # if so, ranks may have exited before the kill
            assert done or all(end.returncode for end in ends), (seed, kills, [end.stderr for end in ends])
            continue
        ends = [program.wait() for program in programs]
        assert not any(end.returncode for end in ends), (seed, kills, [end.stderr for end in ends])
        resumed = outcome(tmp_path, "broken")
        assert resumed.keys() == expected.keys(), (seed, kills)
        assert [name for name in expected if resumed[name] != expected[name]] == [], (seed, kills)
        compared += 1
        shutil.rmtree(tmp_path / "broken")
    print(f"{kills} kills, {compared} runs compared, {seconds_without_kills:.1f} s each if left alone")
