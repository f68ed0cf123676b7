"""Count the samples that cannot be used, list them, and stop the run when there are too many."""

import json
import logging
import socket
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from neuclip_ds.data.atomic_write import atomic_write
from neuclip_ds.data.dataset import PADDING, BadSample, Batch
from neuclip_ds.data.disk import best_effort
from neuclip_ds.data.rank_batch import RankBatch
from neuclip_ds.errors import UserError
from neuclip_ds.redaction import redact

log = logging.getLogger(__name__)

_MIN_SAMPLES = 1000
_WINDOW = 1000  # steps within which a node may have a larger share of bad samples
_WITHIN = 10  # times max_fraction: one damaged shard gathers in few steps


class SampleCounts(NamedTuple):
    """What a rank has recorded since the last merge."""

    host: str
    steps: int
    seen: int  # samples, without padding
    bad: list[BadSample]


Gather = Callable[[SampleCounts], list[SampleCounts]]  # from one rank to all ranks' counts in rank order


class BadSampleLog:
    """Log of bad samples: each one is listed once in FOLDER/bad_samples.jsonl with index, shard, key and reason.

    Too many stop the run: more than `max_fraction` of all samples, or more than ten times that among those of one node
    in its last 1,000 steps, as when it has lost its data. That window starts empty when a run resumes.

    Args:
        folder: created when the first bad sample is listed.
        max_fraction: largest share of bad samples, in [0, 1] (`data.max_bad_fraction`).
        writes: whether this rank writes the file; true on rank 0 only.
        host: name of this rank's node.

    Attributes:
        seen: samples seen by all ranks together, as of the last `merge`.
        causes: number of bad samples by cause.
    """

    def __init__(
        self, folder: Path, max_fraction: float, *, writes: bool = True, host: str = socket.gethostname()
    ) -> None:
        self.path = folder / "bad_samples.jsonl"
        self.seen = 0
        self.causes: Counter[str] = Counter()
        self._max_fraction, self._writes = max_fraction, writes
        self._host, self._windows = host, defaultdict[str, _Window](_Window)
        self._new_steps, self._new_seen, self._new_bad = 0, 0, list[BadSample]()
        self._recorded = 0
        self._listed = {json.loads(line)["index"] for line in _complete_lines(self.path)} if writes else set()

    @property
    def bad(self) -> int:
        """Number of bad samples on all ranks together, as of the last `merge`."""
        return self.causes.total()

    def restore(self, seen: int, causes: Mapping[str, int]) -> None:
        """Continue from the counts of an interrupted run."""
        self.seen, self.causes = seen, Counter(causes)

    def record(self, batch: Batch | RankBatch) -> None:
        """Count the samples of this rank's batch and log the bad ones."""
        self._new_steps += 1
        self._new_seen += int((batch.index != PADDING).sum())
        self._new_bad += batch.bad
        for sample in batch.bad:
            self._recorded += 1
            if self._recorded & (self._recorded - 1) == 0:  # the 1st, 2nd, 4th, 8th ... keeps the log short
                log.warning(
                    "bad sample %d (number %d on this rank): %s in %s: %s",
                    *(sample.index, self._recorded, sample.key, sample.shard, sample.reason),
                )

    def merge(self, gather: Gather = lambda own: [own]) -> None:
        """Merge what the ranks have recorded since the last merge, and list it; a collective call.

        Raises:
            UserError: on all ranks, when too many samples are bad.
        """
        counts = gather(SampleCounts(self._host, self._new_steps, self._new_seen, self._new_bad))
        self._new_steps, self._new_seen, self._new_bad = 0, 0, []
        bad = [sample for rank in counts for sample in rank.bad]
        self.seen += sum(rank.seen for rank in counts)
        self.causes.update(sample.cause for sample in bad)
        if self._writes:
            self._list(bad)
        # A fraction of fewer than 1000 samples means little (one bad sample among the first 50 is not 2% of the data),
        # so before that the limit is the one for 1000 samples.
        if self.bad > self._max_fraction * max(self.seen, _MIN_SAMPLES):
            cause, count = self.causes.most_common(1)[0]
            raise UserError(
                f"{self.bad} of {self.seen} samples cannot be used, more than "
                f"data.max_bad_fraction={self._max_fraction} allows (most often, {count} times: {cause}); "
                f"fix the shards listed in {self.path} or raise the limit."
            )
        by_host: defaultdict[str, list[SampleCounts]] = defaultdict(list)
        for rank in counts:
            by_host[rank.host].append(rank)
        for host, ranks in by_host.items():
            self._check_window(host, ranks)

    def _check_window(self, host: str, ranks: list[SampleCounts]) -> None:
        """Add what the ranks of a node have counted; raise UserError if too many of its last samples are bad."""
        window = self._windows[host]
        window.add(ranks)
        bad = window.causes.total()
        if bad > self._max_fraction * _WITHIN * max(window.seen, _MIN_SAMPLES):
            cause, count = window.causes.most_common(1)[0]
            raise UserError(
                f"{bad} of the {window.seen} samples that {host} has read in its last {window.steps} steps cannot be "
                f"used, more than {_WITHIN} times data.max_bad_fraction={self._max_fraction} (most often, {count} "
                f"times: {cause}, such as {window.example}); check the data and the storage on that node."
            )

    def _list(self, bad: Iterable[BadSample]) -> None:
        new = {sample.index: sample for sample in bad if sample.index not in self._listed}
        if new:
            with best_effort(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a", encoding="utf-8") as out:
                    out.writelines(redact(json.dumps(sample._asdict())) + "\n" for sample in new.values())
            self._listed |= new.keys()


class _Window:
    """The samples of a node in its last steps, at least the latest `_WINDOW` of them.

    Attributes:
        steps, seen: how many steps, and samples in them.
        causes: number of bad samples by cause.
        example: the latest reason.
    """

    def __init__(self) -> None:
        self.steps = self.seen = 0
        self.causes: Counter[str] = Counter()
        self.example = ""
        self._parts: deque[tuple[int, int, Counter[str]]] = deque()

    def add(self, ranks: list[SampleCounts]) -> None:
        """Add what the node's ranks have counted since the last call, and forget what is older than the window."""
        bad = [sample for rank in ranks for sample in rank.bad]
        part = ranks[0].steps, sum(rank.seen for rank in ranks), Counter(sample.cause for sample in bad)
        self._parts.append(part)
        self._count(part, 1)
        self.example = bad[-1].reason if bad else self.example
        while self.steps - self._parts[0][0] >= _WINDOW:
            self._count(self._parts.popleft(), -1)

    def _count(self, part: tuple[int, int, Counter[str]], sign: int) -> None:
        steps, seen, causes = part
        self.steps, self.seen = self.steps + sign * steps, self.seen + sign * seen
        if sign > 0:
            self.causes += causes
        else:
            self.causes -= causes


def _complete_lines(path: Path) -> list[str]:
    """Return the lines of a file, none if it is absent; cut off a partial last line that a killed run has left."""
    if not path.is_file():
        return []
    *lines, partial = path.read_text(encoding="utf-8").split("\n")
    if partial:
        with atomic_write(path) as temporary:
            temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return lines
