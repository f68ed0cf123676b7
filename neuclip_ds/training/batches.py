"""Load batches in worker processes and copy them to the device while the towers compute.

On a GPU, copies run on a side stream, from pinned memory, so that neither the host nor the computation waits for them.
The next batch is fetched after a step has been launched, so a late batch delays only its own step. The host holds the
pixels, and each micro-batch is copied while the previous one is processed, even across passes and steps.
On a CPU, nothing is copied, and a batch is fetched when its step begins.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from neuclip_ds.data.loader import RankBatch


class DeviceBatches(Iterator["DeviceBatch"]):
    """Iterator that fetches batches and copies them to a device.

    Attributes:
        micro_batch: number of rows that go through the towers at once.
    """

    def __init__(self, device: torch.device, micro_batch: int) -> None:
        self._device, self.micro_batch = device, micro_batch
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.start(iter(()))

    def start(self, source: Iterator[RankBatch]) -> None:
        """Take all subsequent batches from `source`."""
        self._source = source
        self._prefetched: DeviceBatch | Exception | None = None

    def __next__(self) -> DeviceBatch:
        batch, self._prefetched = self._prefetched or self._fetch(), None
        if isinstance(batch, Exception):
            raise batch
        return batch

    def prefetch(self) -> None:
        """On a GPU, fetch the next batch and start copying it; call this after a step has been launched.

        If fetching fails or no batches are left, the exception is raised at the step that needs the batch.
        """
        if self._stream is None:
            return
        launched, fetched = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        launched.record()
        try:
            self._prefetched = batch = self._fetch()
            batch.idle = launched, fetched
        except Exception as error:
            self._prefetched = error
        fetched.record()

    def copy(self, pieces: Sequence[tuple[Tensor, Tensor]]) -> tuple[tuple[Tensor, Tensor], torch.cuda.Event | None]:
        """Copy two tensors, each given as chunks of rows; on a GPU, also return an event recorded after the copy."""
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            first, second = (self._joined(tensors) for tensors in zip(*pieces, strict=True))
            return (first, second), None if self._stream is None else self._stream.record_event()

    def _fetch(self) -> DeviceBatch:
        began = time.perf_counter()
        batch = DeviceBatch(next(self._source), self)
        batch.seconds = time.perf_counter() - began
        return batch

    def _joined(self, pieces: Sequence[Tensor]) -> Tensor:
        first = pieces[0]
        if len(pieces) == 1:
            return first.to(self._device, non_blocking=True)
        whole = first.new_empty((sum(map(len, pieces)), *first.shape[1:]), device=self._device)
        for part, piece in zip(whole.split([len(piece) for piece in pieces]), pieces, strict=True):
            part.copy_(piece, non_blocking=True)
        return whole


class DeviceBatch:
    """A batch of b rows whose micro-batches arrive on the device one after another.

    Attributes:
        host: the batch on the host.
        rows: the slice of rows of each micro-batch.
        seconds: time that the host waited for the batch.
        idle: for a prefetched batch, the GPU events recorded before and after the wait for the batch.
    """

    idle: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
    seconds = 0.0

    def __init__(self, host: RankBatch, copies: DeviceBatches) -> None:
        self.host, self._copies = host, copies
        self.rows = [slice(low, low + copies.micro_batch) for low in range(0, len(host), copies.micro_batch)]
        self._arriving = [self._begin(0)]

    @property
    def waited(self) -> float:
        """Seconds that the step waited for the batch; on a GPU, the time until the previous step ends is excluded."""
        if self.idle is None:
            return self.seconds
        launched, fetched = self.idle
        fetched.synchronize()  # does not wait: the host has since read a gradient norm that was computed later
        return launched.elapsed_time(fetched) / 1e3

    def micro_batches(self, passes: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the (m, 3, H, W) pixels and (m, T) tokens of each micro-batch, `passes` times over; call this once.

        The current stream, not the host, waits for the copies. The last pass frees the host's pixels as they are used.
        """
        visits = list(range(len(self.rows))) * passes
        for visit, number in enumerate(visits, start=1):
            tensors, copied = self._arriving.pop()
            if visit < len(visits):
                self._arriving.append(self._begin(visits[visit]))
            if visit > len(visits) - len(self.rows):
                self.host.release(self.rows[number].stop)
            if copied is not None:
                stream = torch.cuda.current_stream(tensors[0].device)
                stream.wait_event(copied)
                for tensor in tensors:
                    tensor.record_stream(stream)  # reuse of this memory waits for the current stream
            yield tensors

    def _begin(self, number: int) -> tuple[tuple[Tensor, Tensor], torch.cuda.Event | None]:
        return self._copies.copy(self.host.pieces(self.rows[number]))
