"""Batches of an evaluation set sharded over the ranks: each sample goes to one rank, once.

A global batch is `world_size * size` samples of the set, of which rank r takes every K-th from the r-th on. All ranks
reach the end in the same batch without counting samples first, so models that run collectives (ZeRO-3) can be called
once per batch. A sample that cannot be used stops all ranks together, in its batch.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import chain, islice
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.folder import EvaluationFolder, Sample

T = TypeVar("T")

THREADS = "evaluation"  # prefix of the threads' names


class ShardedBatch(NamedTuple, Generic[T]):
    """This rank's rows of a global batch: the first `n_valid` count; where that is 0, one row of padding is there."""

    rows: list[T]
    n_valid: int


def sharded_batches(
    folder: EvaluationFolder,
    prepare: Callable[[Sample], T],
    communicator: Communicator,
    size: int,
    workers: int = 1,
) -> Iterator[ShardedBatch[T]]:
    """Yield this rank's batches; the next one is prepared while the current one is used.

    Args:
        folder: the set, the same on all ranks, which all take every batch.
        prepare: reads and decodes a sample, in a thread; raises `UserError` where it cannot be used.
        size: samples per rank and batch, fewer in the last one.
        workers: threads that prepare; image decoders release Python's lock.

    Raises:
        UserError: on all ranks, with the problem of the first rank that has one.
    """
    copies = set(communicator.gather_objects((folder.bytes, len(folder.shards))))
    if len(copies) > 1:  # ranks with different copies would wait for each other forever
        raise UserError(f"The ranks see different files under {folder.path}; give all nodes the same copy of the set.")
    prepared = _prepare_ahead(_shard(folder, communicator, size), prepare, max(1, workers))
    # closed here, as the garbage collector may run while this thread holds a lock that the pool needs to shut down
    with closing(prepared):
        while (batch := communicator.on_every_rank(lambda: next(prepared, None))) is not None:
            yield batch


def decode(sample: Sample, transform: Callable[[bytes], Tensor], prefix: str = "") -> Tensor:
    """Decode a sample's image, `sample.image(prefix)`, to (3, H, W) uint8 pixels; raise UserError if that fails."""
    encoded = sample.image(prefix)
    try:
        return transform(encoded)
    except Exception as error:  # decoders raise anything; all of it is about this one file
        raise UserError(f"{sample.name} cannot be decoded ({error}); fix or remove it.") from error


def _shard(folder: EvaluationFolder, communicator: Communicator, size: int) -> Iterator[ShardedBatch[Sample]]:
    samples = folder.samples()
    for first in samples:
        batch = chain([first], islice(samples, communicator.world_size * size - 1))
        local = list(islice(batch, communicator.rank, None, communicator.world_size))
        yield ShardedBatch(local or [first], len(local))


def _prepare_ahead(
    batches: Iterator[ShardedBatch[Sample]], prepare: Callable[[Sample], T], workers: int
) -> Generator[ShardedBatch[T], None, None]:
    pool = ThreadPoolExecutor(workers, thread_name_prefix=THREADS)
    pending: deque[ShardedBatch] = deque()
    try:
        for batch in batches:
            pending.append(ShardedBatch([pool.submit(prepare, sample) for sample in batch.rows], batch.n_valid))
            if len(pending) == 2:
                yield _result(pending.popleft())
        yield from map(_result, pending)
    finally:
        pool.shutdown(cancel_futures=True)


def _result(pending: ShardedBatch) -> ShardedBatch:
    return pending._replace(rows=[future.result() for future in pending.rows])
