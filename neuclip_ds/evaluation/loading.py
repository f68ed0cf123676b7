"""Load pairs and samples of evaluation sets with processes that survive from one evaluation to the next.

All sources share the processes. They are forked at the first evaluation and inherit the pairs' manifests, which may be
large; samples of evaluation sets are sent to them, a shard's path and the places of its members.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from neuclip_ds.data.dataset import Batch, PairDataset
from neuclip_ds.data.loader import Items, Jobs
from neuclip_ds.data.worker_pool import LoaderOptions, WorkerPool
from neuclip_ds.evaluation.folder import Sample
from neuclip_ds.evaluation.packing import Packed

T = TypeVar("T")
Pairs = Mapping[str, PairDataset]


class _Job(Protocol):
    """What a worker does at a time."""

    def __call__(self, pairs: Pairs) -> Any: ...


class _LoadPairs(NamedTuple):
    source: str
    items: Items

    def __call__(self, pairs: Pairs) -> Batch:
        return pairs[self.source].__getitems__(self.items)


class _ReadOriginals(NamedTuple):
    source: str
    samples: list[int]

    def __call__(self, pairs: Pairs) -> list[tuple[bytes, str] | None]:
        return [pairs[self.source].original(index) for index in self.samples]


class _PrepareSamples(NamedTuple):
    prepare: Callable[[Sample], Any]
    samples: list[Sample]

    def __call__(self, pairs: Pairs) -> Packed:
        return Packed.of([self.prepare(sample) for sample in self.samples])


def _do(pairs: Pairs, job: _Job) -> Any:
    return job(pairs)


class EvaluationLoader:
    """Loader of all that a run or a program evaluates on.

    Args:
        options: `workers` is the number of processes; 0 loads in this process.
        pairs: data sets of pairs by name.
    """

    def __init__(self, options: LoaderOptions, pairs: Pairs | None = None) -> None:
        self._workers, self._pairs = options.workers, pairs or {}
        self._pool = WorkerPool(partial(_do, self._pairs), options)

    def batches(self, source: str, jobs: Jobs) -> Iterator[Batch]:
        """Yield a rank's batches, or parts of them, of a source of pairs; raises as `eval_loader` does."""
        pairs = (_LoadPairs(source, jobs.items(number)) for number in range(jobs.number))
        return self._run(pairs, jobs.describe, self._pairs[source].folder)

    def originals(self, source: str, samples: list[int]) -> list[tuple[bytes, str] | None]:
        """Return image file and caption of samples of a source of pairs; None for those that cannot be used."""
        read = [_ReadOriginals(source, samples)]
        (found,) = self._run(read, lambda number: "samples of the gallery", self._pairs[source].folder)
        return found

    def prepared(
        self, prepare: Callable[[Sample], T], groups: Iterable[list[Sample]], folder: Path
    ) -> Generator[list[T], None, None]:
        """Yield `prepare` of the samples of each group, in order.

        Args:
            prepare: can be pickled, as can what it returns, whose tensors have one shape.
            groups: read as far ahead as the workers may prepare.
            folder: that of the set, for messages.

        Raises:
            UserError: of `prepare`, or workers repeatedly die or exceed `options.timeout`.
        """
        jobs = (_PrepareSamples(prepare, samples) for samples in groups)
        with closing(self._run(jobs, lambda number: f"part {number} of an evaluation set", folder)) as parts:
            yield from (packed.rows() for packed in parts)

    def close(self) -> None:
        """Stop the processes."""
        self._pool.close()

    def _run(self, jobs: Iterable[_Job], describe: Callable[[int], str], folder: Path) -> Generator[Any, None, None]:
        where = f"from {self._workers} loader processes (shards in {folder})"
        return self._pool.run(jobs, lambda number: f"{describe(number)} {where}")


IN_PROCESS = EvaluationLoader(LoaderOptions(workers=0))  # keeps nothing
