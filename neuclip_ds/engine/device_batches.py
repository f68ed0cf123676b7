"""Copy batches to the device while the towers compute.

On a GPU, copies run on a side stream, from pinned memory, so that they overlap the computation and the host does not
wait for them. The next batch is fetched after a step's backward pass has been launched, so that the wait for a batch
overlaps this pass. The host holds the pixels, and each micro-batch is copied while the previous one is processed, even
across passes and steps. On a CPU, rows are copied only to join the chunks of a micro-batch, and a batch is fetched when
its step begins.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from neuclip_ds.data.loader import RankBatch
from neuclip_ds.models.packing import Pack, PackedCaptions

MicroBatch = tuple[Tensor, Tensor | PackedCaptions]
"""Pixels (m, 3, H, W) and captions (tokens (m, T), or packed); stored outputs (m, width) may replace either of them."""


class DeviceBatches(Iterator["DeviceBatch"]):
    """Iterator that fetches batches and copies them to a device.

    Attributes:
        micro_batch: number of rows that go through the towers at once.
    """

    def __init__(self, device: torch.device, micro_batch: int, pack: Pack | None = None) -> None:
        """
        Args:
            device: the device of the towers.
            micro_batch: number of rows that go through the towers at once.
            pack: function that packs the captions of each micro-batch on the host; None to leave them padded.
        """
        self._device = device
        self._pack = pack
        self.micro_batch = micro_batch
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.start(iter(()))

    def start(self, source: Iterator[RankBatch]) -> None:
        """Take all subsequent batches from `source`."""
        self._source = source
        self._prefetched: DeviceBatch | Exception | None = None

    def __next__(self) -> DeviceBatch:
        prefetched = self._prefetched
        self._prefetched = None
        if isinstance(prefetched, Exception):
            raise prefetched
        return self._fetch() if prefetched is None else prefetched

    def prefetch(self) -> None:
        """On a GPU, fetch the next batch and start copying it; call this after the backward pass has been launched.

        If fetching fails or no batches are left, the exception is raised at the step that needs the batch.
        """
        if self._stream is None:
            return
        launched = torch.cuda.Event(enable_timing=True)
        fetched = torch.cuda.Event(enable_timing=True)
        launched.record()
        try:
            batch = self._fetch()
            batch.device_wait = DeviceWait(launched, fetched)
            self._prefetched = batch
        except Exception as error:
            self._prefetched = error
        fetched.record()

    def begin_copy(self, pieces: Sequence[tuple[Tensor, Tensor]]) -> DeviceCopy:
        """Start copying a micro-batch, given as chunks of rows: one pair of pixels and tokens per chunk."""
        images = [image for image, _ in pieces]
        tokens = [tokens for _, tokens in pieces]
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            # docs: device
            pixels = self._concatenate(images)
            captions = self._concatenate(tokens) if self._pack is None else self._packed(tokens, self._pack)
            # docs: end
            finished = None if self._stream is None else self._stream.record_event()
        return DeviceCopy(pixels, captions, finished)

    def _packed(self, pieces: Sequence[Tensor], pack: Pack) -> PackedCaptions:
        """Pack chunks of padded captions on the host, and copy them to the device."""
        captions = pack(torch.cat(list(pieces)))
        if self._stream is None:
            return captions
        return captions.pin_memory().to(self._device)

    def _fetch(self) -> DeviceBatch:
        start = time.perf_counter()
        batch = DeviceBatch(next(self._source), self)
        batch.host_seconds = time.perf_counter() - start
        return batch

    def _concatenate(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return the chunks of rows as one tensor on the device."""
        first = pieces[0]
        if len(pieces) == 1:
            return first.to(self._device, non_blocking=True)
        sizes = [len(piece) for piece in pieces]
        result = first.new_empty((sum(sizes), *first.shape[1:]), device=self._device)
        for target, piece in zip(result.split(sizes), pieces, strict=True):
            target.copy_(piece, non_blocking=True)
        return result


class DeviceCopy(NamedTuple):
    """A micro-batch that is being copied."""

    pixels: Tensor
    captions: Tensor | PackedCaptions
    finished: torch.cuda.Event | None  # recorded after the copy; None on a CPU


class DeviceWait(NamedTuple):
    """The GPU events that were recorded before and after the wait for a prefetched batch."""

    launched: torch.cuda.Event
    fetched: torch.cuda.Event


class DeviceBatch:
    """A batch of b rows whose micro-batches arrive on the device one after another.

    Attributes:
        host: the batch on the host.
        rows: the slice of rows of each micro-batch.
        host_seconds: seconds that the host waited for the batch.
        device_wait: events around the wait for a prefetched batch; None if the batch was not prefetched.
    """

    host_seconds = 0.0
    device_wait: DeviceWait | None = None

    def __init__(self, host: RankBatch, batches: DeviceBatches) -> None:
        self.host = host
        self._batches = batches
        size = batches.micro_batch
        self.rows = [slice(start, start + size) for start in range(0, len(host), size)]
        self._arriving = [self._begin_copy(0)]  # the next micro-batch, or nothing

    @property
    def waited(self) -> float:
        """Seconds of waiting for the batch; if it was prefetched, only those after the previous backward pass."""
        if self.device_wait is None:
            return self.host_seconds
        launched, fetched = self.device_wait
        fetched.synchronize()  # does not wait: the host has since read a gradient norm that was computed later
        return launched.elapsed_time(fetched) / 1e3

    def micro_batches(self, passes: int) -> Iterator[MicroBatch]:
        """Yield all micro-batches `passes` times; call this once per batch.

        The current stream, not the host, waits for the copies. The last pass frees the host's pixels as they are used.
        """
        count = len(self.rows)
        total = passes * count
        for position in range(total):
            # this drops the previous micro-batch, so the device holds at most two
            pixels, captions, finished = self._arriving.pop()
            if position + 1 < total:
                self._arriving.append(self._begin_copy((position + 1) % count))
            if position >= total - count:
                self.host.release(self.rows[position % count].stop)
            if finished is not None:
                stream = torch.cuda.current_stream(pixels.device)
                stream.wait_event(finished)
                tokens = captions.tensors if isinstance(captions, PackedCaptions) else (captions,)
                for tensor in (pixels, *tokens):
                    tensor.record_stream(stream)  # reuse of this memory waits for the current stream
            yield pixels, captions

    def _begin_copy(self, number: int) -> DeviceCopy:
        return self._batches.begin_copy(self.host.pieces(self.rows[number]))
