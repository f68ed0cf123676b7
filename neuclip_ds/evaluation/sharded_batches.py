"""Batches of an evaluation set, sharded over the ranks so that each sample is a valid row on exactly one rank.

A global batch contains up to `world_size * size` samples of the set; rank r takes samples r, r + world_size, and so on.
All ranks finish after the same batch, without counting the samples first, so models that run collectives (ZeRO 3) can
be called once per batch. If a sample cannot be used, all ranks stop together at the batch with that sample.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from itertools import chain, islice
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from neuclip_ds.data.loader import IN_PROCESS, Loader
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError, explained
from neuclip_ds.evaluation.sets import EvaluationSet, Sample

T = TypeVar("T")

_SAMPLES_PER_JOB = 32  # samples that a worker prepares at a time; few, so that small sets keep all workers busy


class ShardedBatch(NamedTuple, Generic[T]):
    """This rank's rows of a global batch. The first `n_valid` are valid; a rank with no valid row has a padding row."""

    rows: list[T]
    n_valid: int


def sharded_batches(
    folder: EvaluationSet,
    prepare: Callable[[Sample], T],
    communicator: Communicator,
    size: int,
    loader: Loader = IN_PROCESS,
) -> Iterator[ShardedBatch[T]]:
    """Yield this rank's batches of up to `size` samples while the loader's workers prepare the next batches.

    `prepare` reads and decodes a sample. It must be picklable, and raise `UserError` if the sample cannot be used.

    Raises:
        UserError: the ranks see different files, or a sample cannot be used. All ranks raise it together, with the
            message of the lowest rank that failed.
    """
    contents_of_ranks = set(communicator.gather_objects(repr(folder.contents)))
    if len(contents_of_ranks) > 1:  # ranks with different copies would wait for each other forever
        raise UserError(f"The ranks see different files under {folder.path}; give all nodes the same copy of the set.")
    local_batches = _local_batches(folder, prepare, communicator, size, loader)
    with closing(local_batches):  # stops workers at once; the garbage collector may run late
        while True:
            batch = communicator.on_every_rank(lambda: next(local_batches, None))
            if batch is None:
                return
            yield batch


def decode(sample: Sample, transform: Callable[[bytes], Tensor], prefix: str = "") -> Tensor:
    """Read and decode a sample's image, `sample.image(prefix)`; raise UserError if either fails.

    Returns the uint8 pixels (3, H, W).
    """
    encoded = sample.image(prefix)
    with explained(f"{sample.name} cannot be decoded", "replace or remove the image"):
        return transform(encoded)


def _local_batches(
    folder: EvaluationSet, prepare: Callable[[Sample], T], communicator: Communicator, size: int, loader: Loader
) -> Generator[ShardedBatch[T], None, None]:
    """Yield this rank's batches; the loader's workers prepare the samples of several batches ahead."""
    batches_in_progress: deque[ShardedBatch[Sample]] = deque()  # their samples have been given to the loader

    def jobs() -> Iterator[list[Sample]]:
        samples = folder.samples()
        for first in samples:
            global_batch = chain([first], islice(samples, communicator.world_size * size - 1))
            local_samples = list(islice(global_batch, communicator.rank, None, communicator.world_size))
            rows = local_samples or [first]  # the first sample is the padding row
            batches_in_progress.append(ShardedBatch(rows, len(local_samples)))
            for start in range(0, len(rows), _SAMPLES_PER_JOB):
                yield rows[start : start + _SAMPLES_PER_JOB]

    prepared_rows: list[T] = []
    with closing(loader.map(prepare, jobs(), folder.path)) as results:
        for result in results:
            prepared_rows += result
            if len(prepared_rows) == len(batches_in_progress[0].rows):
                batch = batches_in_progress.popleft()
                yield ShardedBatch(prepared_rows, batch.n_valid)
                prepared_rows = []
