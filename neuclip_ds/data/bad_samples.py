"""Count and list unusable samples, and stop the run if there are too many."""

import json
import logging
import socket
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from neuclip_ds.data.dataset import PADDING, BadSample, Batch
from neuclip_ds.data.loader import RankBatch
from neuclip_ds.errors import UserError, counted, is_power_of_two, redact
from neuclip_ds.files import append_lines, best_effort, records

log = logging.getLogger(__name__)

_MIN_SAMPLES = 1000  # fewer samples say little: 1 bad sample in the first 50 does not mean that 2% of the data is bad
_RECENT_STEPS = 1000  # number of a rank's latest steps to which the wider limit applies
_RECENT_FACTOR = 10  # the wider limit in units of max_fraction; a damaged shard can give many bad samples in few steps


class BadSampleLog:
    """A log of bad samples: FOLDER/bad_samples.jsonl lists each of them once, with its index, shard, key and reason.

    The run stops if more than `max_fraction` of the samples read so far are bad. It also stops if the fraction of bad
    samples in the last 1,000 steps of one rank exceeds ten times `max_fraction`, for example because a node has lost
    its data. In both fractions, fewer than 1,000 samples count as 1,000.

    Args:
        folder: the folder for the file; it is created, if necessary, when the first bad sample is listed.
        max_fraction: the largest fraction of bad samples with which the run continues (`data.max_bad_fraction`).
        writes: whether this rank writes the file; true on one rank.

    Attributes:
        seen: the total number of samples read by all ranks, as of the last `merge`.
        causes: the number of bad samples by cause.
    """

    def __init__(self, folder: Path, max_fraction: float, *, writes: bool = True) -> None:
        self.path = folder / "bad_samples.jsonl"
        self.seen = 0
        self.causes: Counter[str] = Counter()
        self._max_fraction = max_fraction
        self._writes = writes
        self._recent = deque[tuple[int, int]](maxlen=_RECENT_STEPS)  # (samples, bad samples) per step of this rank
        # counted on this rank since the last `take_new`
        self._new_seen = 0
        self._new_bad: list[BadSample] = []
        self._recorded = 0  # bad samples on this rank since the start
        self._listed: set[int] = set()
        if writes and self.path.is_file():
            self._listed = {record["index"] for _, record in records(self.path, "index")}

    @property
    def bad(self) -> int:
        """The total number of bad samples on all ranks, as of the last `merge`."""
        return self.causes.total()

    def restore(self, seen: int, causes: Mapping[str, int]) -> None:
        """Continue from the counts that a checkpoint stored: `seen` samples, and the number of bad samples by cause."""
        self.seen = seen
        self.causes = Counter(causes)

    def record(self, batch: Batch | RankBatch) -> None:
        """Count the samples of this rank's batch, and log the rank's 1st, 2nd, 4th, 8th ... bad sample."""
        samples = int((batch.index != PADDING).sum())
        self._recent.append((samples, len(batch.bad)))
        self._new_seen += samples
        self._new_bad += batch.bad
        for sample in batch.bad:
            self._recorded += 1
            if is_power_of_two(self._recorded):
                log.warning(
                    "sample %s of %s (index %d) cannot be used (%s); unusable samples on this rank so far: %d",
                    sample.key or "(key unknown)",
                    sample.shard,
                    sample.index,
                    sample.reason,
                    self._recorded,
                )

    def take_new(self) -> list[Any]:
        """Return this rank's records since the last call as JSON values; `merge` takes those of all ranks."""
        new = [self._new_seen, [asdict(sample) for sample in self._new_bad], self._recent_problem()]
        self._new_seen = 0
        self._new_bad = []
        return new

    def merge(self, new_of_ranks: Sequence[list[Any]]) -> None:
        """Merge the results of `take_new` from all ranks, in the same order on every rank, and list the bad samples.

        Raises UserError on all ranks if too many samples are bad.
        """
        bad = []
        for seen, samples, _ in new_of_ranks:
            self.seen += seen
            bad += [BadSample(**sample) for sample in samples]
        self.causes.update(sample.cause for sample in bad)
        if self._writes:
            self._list({sample.index: sample for sample in bad if sample.index not in self._listed})
        if self.bad > self._max_fraction * max(self.seen, _MIN_SAMPLES):
            cause, count = self.causes.most_common(1)[0]
            raise UserError(
                f"{self.bad} of {self.seen} samples cannot be used, more than "
                f"data.max_bad_fraction={self._max_fraction} allows (the most frequent cause: {cause}, "
                f"{counted(count, 'time')}). {self.path} lists these samples and their shards. Fix them, or raise "
                "data.max_bad_fraction."
            )
        if problem := next((problem for _, _, problem in new_of_ranks if problem is not None), None):
            raise UserError(problem)

    def _recent_problem(self) -> str | None:
        """Return an error message if too many samples in this rank's recent steps are bad, or None otherwise."""
        if not self._new_bad:
            return None
        seen = sum(samples for samples, _ in self._recent)
        bad = sum(bad_samples for _, bad_samples in self._recent)
        if bad <= self._max_fraction * _RECENT_FACTOR * max(seen, _MIN_SAMPLES):
            return None
        return (
            f"{bad:,} of the {counted(seen, 'sample')} that a rank on {socket.gethostname()} has read in its last "
            f"{counted(len(self._recent), 'step')} cannot be used, more than {_RECENT_FACTOR} times the fraction that "
            f"data.max_bad_fraction={self._max_fraction} allows (the latest reason: {self._new_bad[-1].reason}). Check "
            "the data and the storage on that node."
        )

    def _list(self, new: Mapping[int, BadSample]) -> None:
        if new:
            with best_effort(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                append_lines(self.path, [redact(json.dumps(asdict(sample))) for sample in new.values()])
            self._listed |= new.keys()
