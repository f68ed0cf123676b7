"""Traffic of a rank's collectives by purpose: calls, bytes, and time that computation does not hide."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

PURPOSE = "purpose: "  # prefix of the range that names a collective's purpose in a profiler's trace

_MAX_UNREAD_EVENTS = 4096  # bounds memory if nobody reads the times


def ring_bytes(op: str, size: int, world_size: int) -> int:
    """Return how many bytes a rank would send with the ring algorithm, whichever algorithm the backend uses.

    Args:
        op: all_gather, all_reduce, reduce_scatter, all_to_all, reduce or broadcast. For reduce and broadcast, where
            ranks send different amounts, the mean over ranks is returned; for any other operation, 0.
        size: size of a rank's input in bytes: the local rows for all_gather, the rows sent to other ranks for
            all_to_all, and the whole tensor for the remaining operations.
        world_size: number of ranks K.
    """
    if op == "all_to_all":
        return size
    rounds = {
        "all_gather": world_size,
        "all_reduce": 2,
        "reduce_scatter": 1,
        "reduce": 1,
        "broadcast": 1,
    }
    return rounds.get(op, 0) * (world_size - 1) * size // world_size


@dataclass
class Traffic:
    """This rank's traffic for one purpose: calls, bytes (see `ring_bytes`), and time not hidden by computation."""

    calls: int = 0
    bytes_sent: int = 0  # equal to the bytes received
    seconds: float = 0.0


class TrafficCounter:
    """Counts the collectives of a rank and measures the time that it spends on them.

    Attributes:
        by_purpose: maps each purpose to its `Traffic`; on a GPU, call `collect_times` before reading the times.
    """

    def __init__(self) -> None:
        self.by_purpose: defaultdict[str, Traffic] = defaultdict(Traffic)
        self._unread_events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []  # purpose, start, end

    def count(self, purpose: str, bytes_sent: int) -> None:
        """Count one call that sends this many bytes."""
        traffic = self.by_purpose[purpose]
        traffic.calls += 1
        traffic.bytes_sent += bytes_sent

    @contextmanager
    def timed(self, purpose: str, device: torch.device) -> Iterator[None]:
        """Add the time of the block, which launches a collective or waits for one, excluding overlapped time."""
        if device.type == "cuda":
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._unread_events.append((purpose, start, end))
            if len(self._unread_events) > _MAX_UNREAD_EVENTS:
                self.collect_times()
        else:
            started = time.perf_counter()
            yield
            self.by_purpose[purpose].seconds += time.perf_counter() - started

    def collect_times(self) -> None:
        """Wait for the GPU and add the times of all calls since the last `collect_times`."""
        for purpose, start, end in self._unread_events:
            end.synchronize()
            self.by_purpose[purpose].seconds += start.elapsed_time(end) / 1e3
        self._unread_events.clear()

    def seconds(self) -> float:
        """Return the total time of all purposes, in seconds."""
        self.collect_times()
        return sum(traffic.seconds for traffic in self.by_purpose.values())
