"""Train for two hours on two ranks under faults: resource usage does not grow, and every sample is accounted for."""

import json
import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import pytest
from sample_log import read_samples
from small_runs import SMALL, TRAIN, call, demo_shards, newest_checkpoint, read_options, start, wait_for

MINUTES = float(os.environ.get("SOAK_MINUTES", "120"))
PAIRS, BATCH = 2000, 32
_END = 60.0  # seconds within which the other ranks must end on their own
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
_SETTLES = 0.25  # initial fraction of a process's lifetime in which its resource usage may grow
_ROOM = 200_000  # bytes that are left free on a full disk
_LIFE = 300.0  # shortest time in seconds from which a slope is computed


class Snapshot(NamedTuple):
    """The resource usage of one process at one moment."""

    time: float  # seconds
    memory: int  # bytes that are not shared
    handles: int  # open files and sockets
    threads: int
    children: int


class Usage:
    """The resource usage of processes over their lifetimes."""

    def __init__(self) -> None:
        self._snapshots: dict[int, list[Snapshot]] = {}  # by process

    def record(self, pids: list[int]) -> None:
        """Take a snapshot of each process."""
        for pid in pids:
            process = psutil.Process(pid)
            snapshot = Snapshot(
                time=time.monotonic(),
                memory=process.memory_full_info().uss,
                handles=process.num_fds(),
                threads=process.num_threads(),
                children=len(process.children(recursive=True)),
            )
            self._snapshots.setdefault(pid, []).append(snapshot)

    def slopes(self) -> list[dict[str, float]]:
        """Return the growth per hour (memory in MB) of each process that was observed for at least five minutes."""
        slopes = []
        for snapshots in self._snapshots.values():
            settled = snapshots[int(_SETTLES * len(snapshots)) :]
            if len(settled) < 2 or settled[-1].time - settled[0].time < _LIFE:
                continue
            hours = np.array([snapshot.time - settled[0].time for snapshot in settled]) / 3600
            slope = {"hours": hours[-1], "megabytes": settled[-1].memory / 1e6}
            for name in ("memory", "handles", "threads", "children"):
                values = [float(getattr(snapshot, name)) for snapshot in settled]
                slope[name] = np.polyfit(hours, values, 1)[0]
            slope["memory"] /= 1e6
            slopes.append({name: round(float(value), 3) for name, value in slope.items()})
        return slopes


class Faults:
    """Random faults; a full disk, a damaged or missing shard, and a paused rank recover after a few seconds.

    Attributes:
        counts: how often each kind of fault happened.
        damaged: the names of shards that were damaged or moved away.
    """

    def __init__(self, seed: int, shards: Path, disk: Path | None) -> None:
        """
        Args:
            seed: the seed of all random choices.
            shards: the folder of the training shards.
            disk: a small file system that contains the run, or None if it could not be mounted.
        """
        self._chance = random.Random(seed)
        self._shards = shards
        self._disk = disk
        self.counts: Counter[str] = Counter()
        self.damaged: set[str] = set()

    def cause_one(self, ranks: list[int]) -> None:
        """Cause one fault of a random kind."""
        kinds: list[Callable[[list[int]], None]] = [
            self.loader_killed,
            self.loader_hangs,
            self.rank_pauses,
            self.bit_flipped,
            self.shard_vanishes,
        ]
        if self._disk is not None:
            kinds.append(self.disk_full)
        kind = self._chance.choice(kinds)
        kind(ranks)
        self.counts[kind.__name__] += 1

    def rank_killed(self, ranks: list[int]) -> None:
        """Kill one rank."""
        psutil.Process(self._chance.choice(ranks)).kill()
        self.counts["rank_killed"] += 1

    def loader_killed(self, ranks: list[int]) -> None:
        for worker in self._loaders(ranks)[:1]:
            worker.kill()

    def loader_hangs(self, ranks: list[int]) -> None:
        for worker in self._loaders(ranks)[:1]:
            worker.suspend()

    def rank_pauses(self, ranks: list[int]) -> None:
        rank = psutil.Process(self._chance.choice(ranks))
        rank.suspend()
        time.sleep(self._chance.uniform(0.1, 5))
        rank.resume()

    def bit_flipped(self, ranks: list[int]) -> None:
        """Flip one bit in the middle half of a shard, and flip it back after a few seconds."""
        shard = self._shard()
        size = shard.stat().st_size
        position = self._chance.randrange(size // 4, 3 * size // 4)
        bit = 1 << self._chance.randrange(8)
        for _ in range(2):  # flip the bit, then flip it back
            with shard.open("r+b") as file:
                file.seek(position)
                (byte,) = file.read(1)
                file.seek(position)
                file.write(bytes([byte ^ bit]))
            time.sleep(self._chance.uniform(1, 10))

    def shard_vanishes(self, ranks: list[int]) -> None:
        shard = self._shard()
        elsewhere = shard.rename(shard.with_suffix(".away"))
        time.sleep(self._chance.uniform(1, 10))
        elsewhere.rename(shard)

    def disk_full(self, ranks: list[int]) -> None:
        """Leave too little space for a checkpoint, but enough for a line of the log."""
        assert self._disk is not None
        filler = self._disk / "filler"
        try:
            with filler.open("wb", buffering=0) as file, suppress(OSError):  # full sooner, because the run writes too
                free = psutil.disk_usage(str(self._disk)).free - _ROOM
                while free > 0:
                    free -= file.write(b"\0" * min(free, 1 << 20))
            time.sleep(self._chance.uniform(1, 10))
        finally:
            filler.unlink()

    def _shard(self) -> Path:
        shard = self._chance.choice(sorted(self._shards.glob("*.tar")))
        self.damaged.add(shard.name)
        return shard

    def _loaders(self, ranks: list[int]) -> list[psutil.Process]:
        children = psutil.Process(self._chance.choice(ranks)).children()
        return self._chance.sample(children, len(children))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path | None]:
    """Mount a file system of 500 MB, and yield its folder, or None if it cannot be mounted."""
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
    """Check that no epoch repeats or omits a sample; return the number of samples in the first `steps` steps."""
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
    """Restart the run after each killed rank until the time is over; return the time at which each process ended."""
    began = time.monotonic()
    end = MINUTES * 60
    ended: dict[int, float] = {}
    while True:
        programs = start(*command, ranks=2)
        ranks = [program.pid for program in programs]
        try:
            wait_for(partial(_reached, runs, steps_done(runs) + 20), programs, limit=300)
            dies = time.monotonic() - began + chance.expovariate(20 / end)
            dies = dies if dies < end / 4 else end  # ranks are killed only in the first quarter of the time
            while time.monotonic() - began < dies:
                usage.record(ranks)
                faults.cause_one(ranks)
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
    """Return the command lines of processes that ranks have started and that outlived the ranks."""
    commands = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.Error):
            leader = os.getsid(process.pid)  # a rank leads a session; its ID may have been reused
            zombie = process.status() == psutil.STATUS_ZOMBIE  # ended, but not yet reaped by init
            if not zombie and process.create_time() <= ended.get(leader, 0):
                commands.append(" ".join(process.cmdline()))
    return commands


@pytest.mark.soak
def test_hours_of_faults_leak_no_resources_and_lose_no_sample(tmp_path: Path, disk: Path | None) -> None:
    seed = int(os.environ.get("SOAK_SEED", time.time_ns() % 2**32))
    shards = demo_shards(tmp_path / "data", PAIRS)
    manifest = tmp_path / "manifest"
    runs = disk or tmp_path
    call("tools/build_manifest.py", str(manifest), str(shards))
    command = [TRAIN, "demo", f"--data.train={manifest}", f"--run.output_dir={runs}", "--run.name=run"]
    faults = Faults(seed, shards, disk)
    usage = Usage()
    ended = train_under_faults([*command, *read_options(_OPTIONS)], runs, faults, usage, random.Random(seed))
    meta = json.loads((newest_checkpoint(runs) / "meta.json").read_text())
    rows = check_samples(runs / "run", meta["step"])
    counted = meta["data"]["hooks"]["WriteRecords"]
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
        assert slope["memory"] < 10, slope  # MB per hour
