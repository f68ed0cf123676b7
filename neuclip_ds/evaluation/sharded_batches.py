"""RankSampler a set's samples among the ranks: each sample on one rank, once, in equally many rounds on every rank.

A round is `world_size * size` samples of the set, of which rank r takes every K-th from the r-th on. All ranks meet the
end in the same round without counting ahead, so models that hold collectives (ZeRO-3) can be called once a round. A
sample that cannot be used stops all ranks together, in the round in which one of them has met it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import chain, islice
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from neuclip_ds.errors import UserError
from neuclip_ds.evaluation import Communicator
from neuclip_ds.evaluation.folder import EvaluationFolder, Sample

T = TypeVar("T")

THREADS = "evaluation"  # what the names of the threads begin with


class Round(NamedTuple, Generic[T]):
    """What this rank has of a round: the first `used` rows count; where it is 0, one row is there to fill a batch."""

    rows: list[T]
    used: int


def rounds(
    folder: EvaluationFolder,
    prepare: Callable[[Sample], T],
    communicator: Communicator,
    size: int,
    workers: int = 1,
) -> Iterator[Round[T]]:
    """This rank's samples, a round ahead of their use.

    Args:
        folder: the set, the same on all ranks.
        prepare: reads and decodes a sample, in a thread; raises `UserError` where it is of no use.
        communicator: the ranks, who all take every round.
        size: samples a rank has in a round, fewer in the last one.
        workers: threads that prepare; image decoders work outside of Python's lock.

    Raises:
        UserError: on all ranks, what one of them has met.
    """
    _agree_on_size(folder, communicator)
    prepared = _prepared(_dealt(folder, communicator, size), prepare, max(1, workers))
    # closed here and not by the garbage collector, which may run while a thread that is to end needs what it holds up
    with closing(prepared):
        while (found := together(communicator, lambda: next(prepared, None))) is not None:
            yield found


def together(communicator: Communicator, work: Callable[[], T]) -> T:
    """What `work` gives on each rank; a `UserError` of one is raised on all, so that none waits for it.

    Raises:
        UserError: the first rank's that has met one.
    """
    try:
        found = work()
    except UserError as error:
        communicator.agree(str(error))
        raise
    communicator.agree(None)
    return found


def decode(sample: Sample, transform: Callable[[bytes], Tensor], prefix: str = "") -> Tensor:
    """(3, H, W) uint8 pixels of a sample; for `prefix` see `Sample.image`.

    Raises:
        UserError: it has no image, or a broken one.
    """
    encoded = sample.image(prefix)
    try:
        return transform(encoded)
    except Exception as error:  # decoders raise what they like; all of it is about this one file
        raise UserError(f"{sample.name} cannot be decoded ({error}); mend or remove it.") from error


def _agree_on_size(folder: EvaluationFolder, communicator: Communicator) -> None:
    """Ranks whose copies of the set differ would wait for each other for ever."""
    own = torch.tensor([[folder.bytes, len(folder.shards)]], device=communicator.device)
    everyones = communicator.all_gather(own, "evaluation")
    if (everyones != everyones[0]).any():
        raise UserError(f"The ranks see different files under {folder.path}; give all nodes the same copy of the set.")


def _dealt(folder: EvaluationFolder, communicator: Communicator, size: int) -> Iterator[Round[Sample]]:
    samples = folder.samples()
    for first in samples:
        whole = chain([first], islice(samples, communicator.world_size * size - 1))
        own = list(islice(whole, communicator.rank, None, communicator.world_size))
        yield Round(own or [first], len(own))


def _prepared(
    dealt: Iterator[Round[Sample]], prepare: Callable[[Sample], T], workers: int
) -> Generator[Round[T], None, None]:
    """While a round is in use, the next one is prepared."""
    pool = ThreadPoolExecutor(workers, thread_name_prefix=THREADS)
    pending: deque[Round] = deque()
    try:
        for own in dealt:
            pending.append(Round([pool.submit(prepare, sample) for sample in own.rows], own.used))
            if len(pending) == 2:
                yield _result(pending.popleft())
        yield from map(_result, pending)
    finally:
        pool.shutdown(cancel_futures=True)


def _result(own: Round) -> Round:
    return Round([future.result() for future in own.rows], own.used)
