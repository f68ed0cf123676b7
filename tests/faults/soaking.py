"""Faults for a run of hours, and what its processes take meanwhile."""

import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

_SETTLES = 0.25  # share of a process's life that is left out of its slope
_ROOM = 200_000  # bytes that are left free on a full disk
_LIFE = 300.0  # seconds below which a life tells nothing of slopes


class Look(NamedTuple):
    """What one process takes."""

    time: float  # seconds
    memory: int  # bytes of its own
    handles: int  # open files and sockets
    threads: int
    children: int


class Usage:
    """What processes take over their lives."""

    def __init__(self) -> None:
        self._lives: dict[int, list[Look]] = {}

    def look(self, pids: list[int]) -> None:
        for pid in pids:
            process = psutil.Process(pid)
            own, children = process.memory_full_info().uss, len(process.children(recursive=True))
            look = Look(time.monotonic(), own, process.num_fds(), process.num_threads(), children)
            self._lives.setdefault(pid, []).append(look)

    def slopes(self) -> list[dict[str, float]]:
        """Return growth an hour (memory in MB) over each life of more than five minutes."""
        found = []
        for life in self._lives.values():
            life = life[int(_SETTLES * len(life)) :]
            if len(life) < 2 or life[-1].time - life[0].time < _LIFE:
                continue
            time, *columns = np.array(life, dtype=np.float64).T
            hours = (time - time[0]) / 3600
            growth = dict(zip(Look._fields[1:], (np.polyfit(hours, column, 1)[0] for column in columns), strict=True))
            growth["memory"] /= 1e6
            found.append({"hours": hours[-1], "megabytes": columns[0][-1] / 1e6, **growth})
        return [{name: round(float(value), 3) for name, value in one.items()} for one in found]


class Faults:
    """Faults at random moments: each lasts some seconds and is then undone.

    Attributes:
        counts: how often each happened.
        damaged: names of the shards that were damaged.
    """

    def __init__(self, seed: int, shards: Path, disk: Path | None) -> None:
        """
        Args:
            seed: of all choices.
            shards: the folder of the training shards.
            disk: a small file system that holds the run, or None where none can be made.
        """
        self._chance, self._shards, self._disk = random.Random(seed), shards, disk
        self.counts: Counter[str] = Counter()
        self.damaged: set[str] = set()

    def one(self, ranks: list[int]) -> None:
        """Cause one fault of any kind, and undo it."""
        kinds: list[Callable[[list[int]], None]] = [
            self.loader_killed,
            self.loader_hangs,
            self.rank_pauses,
            self.bit_flipped,
            self.shard_vanishes,
            *([self.disk_full] if self._disk is not None else []),
        ]
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
        """Flip one bit in the middle half of a shard, for some seconds."""
        shard = self._shard()
        place = self._chance.randrange(shard.stat().st_size // 4, 3 * shard.stat().st_size // 4)
        bit = 1 << self._chance.randrange(8)
        for _ in range(2):  # there and back
            with shard.open("r+b") as file:
                file.seek(place)
                (byte,) = file.read(1)
                file.seek(place)
                file.write(bytes([byte ^ bit]))
            time.sleep(self._chance.uniform(1, 10))

    def shard_vanishes(self, ranks: list[int]) -> None:
        shard = self._shard()
        elsewhere = shard.rename(shard.with_suffix(".away"))
        time.sleep(self._chance.uniform(1, 10))
        elsewhere.rename(shard)

    def disk_full(self, ranks: list[int]) -> None:
        """Leave too little room for a checkpoint, but some for a line of a log."""
        assert self._disk is not None
        filler = self._disk / "filler"
        try:
            with filler.open("wb", buffering=0) as file, suppress(OSError):  # full already, as the run writes too
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
