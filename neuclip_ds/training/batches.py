"""Batches of the training data on their way to the device: loaded by processes, copied while the towers compute.

On a GPU copies run in a side stream, from pinned memory, so that neither the host nor the computation waits for them. A
batch of one micro-batch is copied while the step before it runs. The pixels of a larger batch stay on the host, and
each micro-batch is copied while the one before it is computed, in either pass. On a CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from typing import NamedTuple, cast

import torch
from torch import Tensor

from neuclip_ds.data.dataset import PairDataset
from neuclip_ds.data.images import EvalTransform, RandomCrop
from neuclip_ds.data.loader import Loader, LoaderOptions, RankBatch, join_parts, part_count, train_jobs
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.mixture import BatchOrder
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.models.tokenizer import CaptionTokenizer, ModelTokenizer


class TrainingData(NamedTuple):
    """The training samples of a run, their order, and what turns them into batches."""

    manifest: Manifest
    order: BatchOrder
    loading: LoaderOptions
    transform: RandomCrop | EvalTransform
    tokenizer: ModelTokenizer

    def of_sizes(self, image_size: int | None, context_length: int | None) -> TrainingData:
        """Return the same samples as images and rows of tokens of other sizes; None keeps a size."""
        transform = self.transform if image_size is None else self.transform.at_size(image_size)
        tokenizer = self.tokenizer
        if context_length is not None:
            tokenizer = cast(CaptionTokenizer, tokenizer).of_length(context_length)  # others have no phases
        return self._replace(transform=transform, tokenizer=tokenizer)

    def batches(
        self, communicator: Communicator, order: BatchOrder, epoch: int, step: int, steps: int
    ) -> Iterator[RankBatch]:
        """Yield a rank's next `steps` batches from a place in an order."""
        parts = part_count(order.batch_size // communicator.world_size, self.transform.image_size)
        jobs = train_jobs(order, communicator.rank, communicator.world_size, epoch, step, steps, parts)
        options = self.loading
        pairs = PairDataset(self.manifest, self.transform, self.tokenizer, order.seed, options.captions, options.cache)
        with closing(Loader(options, {"train": pairs})) as loader:
            yield from join_parts(loader.batches("train", jobs), parts)


class Arriving(NamedTuple):
    """Two tensors on the device that a side stream may still be filling."""

    tensors: tuple[Tensor, Tensor]
    done: torch.cuda.Event | None  # None where there is no side stream

    def wait(self) -> tuple[Tensor, Tensor]:
        """Return them; the current stream, not the host, waits for the copies."""
        if self.done is not None:
            stream = torch.cuda.current_stream(self.tensors[0].device)
            stream.wait_event(self.done)
            for tensor in self.tensors:
                tensor.record_stream(stream)  # the side stream may reuse the memory only after the current one
        return self.tensors


class DeviceBatches:
    """Copy batches to a device.

    Attributes:
        micro_batch: rows that go through the towers at once.
    """

    def __init__(self, device: torch.device, micro_batch: int) -> None:
        self._device, self.micro_batch = device, micro_batch
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, batch: RankBatch) -> DeviceBatch:
        """Start to copy a batch."""
        return DeviceBatch(batch, self)

    def ahead(self, batches: Iterator[RankBatch]) -> Iterator[DeviceBatch]:
        """Iterate over batches, on a GPU each after the copy of the next has begun.

        Of batches that are larger than a micro-batch one is taken at a time, as the host keeps their pixels. An error
        in getting a batch is raised when its turn comes.
        """
        begun = map(self.begin, batches)
        batch = next(begun, None)
        while batch is not None:
            following = failure = None
            if self._stream is not None and len(batch.rows) == 1:
                try:
                    following = next(begun, None)
                except Exception as error:
                    failure = error
            yield batch
            if failure is not None:
                raise failure
            batch = following or next(begun, None)

    def copy(self, pieces: Sequence[tuple[Tensor, Tensor]]) -> Arriving:
        """Start to copy two tensors, which come in consecutive pieces of rows."""
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            first, second = (self._joined(tensors) for tensors in zip(*pieces, strict=True))
            return Arriving((first, second), None if self._stream is None else self._stream.record_event())

    def _joined(self, pieces: Sequence[Tensor]) -> Tensor:
        first = pieces[0]
        if len(pieces) == 1:
            return first.to(self._device, non_blocking=True)
        whole = first.new_empty((sum(map(len, pieces)), *first.shape[1:]), device=self._device)
        for part, piece in zip(whole.split([len(piece) for piece in pieces]), pieces, strict=True):
            part.copy_(piece, non_blocking=True)
        return whole


class DeviceBatch:
    """A batch of b rows whose micro-batches arrive on the device one after the other.

    Attributes:
        host: the batch on the host.
        rows: the rows of each micro-batch.
    """

    def __init__(self, host: RankBatch, copies: DeviceBatches) -> None:
        self.host, self._copies = host, copies
        self.rows = [slice(low, low + copies.micro_batch) for low in range(0, len(host), copies.micro_batch)]
        self._following: Arriving | None = self._begin(0)

    def micro_batches(self, passes: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (m, 3, H, W) pixels and (m, T) tokens of each micro-batch, `passes` times over, and once only.

        The last pass frees them on the host as they are used.
        """
        visits = list(range(len(self.rows))) * passes
        for visit, number in enumerate(visits):
            arriving = self._following
            assert arriving is not None
            more = visit + 1 < len(visits)
            self._following = self._begin(visits[visit + 1]) if more else None
            if visit >= len(visits) - len(self.rows):
                self.host.release(self.rows[number].stop)
            yield arriving.wait()

    def _begin(self, number: int) -> Arriving:
        return self._copies.copy(self.host.pieces(self.rows[number]))
