"""Count the samples that cannot be used, list them, and stop the run when there are too many."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from neuclip_ds.data.atomic_write import atomic_write
from neuclip_ds.data.dataset import PADDING, BadSample, Batch
from neuclip_ds.data.disk import best_effort
from neuclip_ds.errors import UserError
from neuclip_ds.redaction import redact

log = logging.getLogger(__name__)

_MIN_SAMPLES = 1000


SampleCounts = tuple[int, list[BadSample]]  # the samples seen since the last merge, without padding, and the bad ones
Gather = Callable[[SampleCounts], list[SampleCounts]]  # from one rank to all ranks' counts in rank order


class BadSampleLog:
    """Log of bad samples: each one is listed once in FOLDER/bad_samples.jsonl with index, shard, key and reason.

    Args:
        folder: created when the first bad sample is listed.
        max_fraction: largest share of bad samples, in [0, 1] (`data.max_bad_fraction`).
        writes: whether this rank writes the file; true on rank 0 only.

    Attributes:
        seen: samples seen by all ranks together, as of the last `merge`.
        causes: number of bad samples by cause.
    """

    def __init__(self, folder: Path, max_fraction: float, *, writes: bool = True) -> None:
        self.path = folder / "bad_samples.jsonl"
        self.seen = 0
        self.causes: Counter[str] = Counter()
        self._max_fraction, self._writes = max_fraction, writes
        self._new_seen, self._new_bad = 0, list[BadSample]()
        self._recorded = 0
        self._listed = {json.loads(line)["index"] for line in _complete_lines(self.path)} if writes else set()

    @property
    def bad(self) -> int:
        """Number of bad samples on all ranks together, as of the last `merge`."""
        return self.causes.total()

    def restore(self, seen: int, causes: Mapping[str, int]) -> None:
        """Continue from the counts of an interrupted run."""
        self.seen, self.causes = seen, Counter(causes)

    def record(self, batch: Batch) -> None:
        """Count the samples of this rank's batch and log the bad ones."""
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
        counts = gather((self._new_seen, self._new_bad))
        self._new_seen, self._new_bad = 0, []
        bad = [sample for _, found in counts for sample in found]
        self.seen += sum(seen for seen, _ in counts)
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

    def _list(self, bad: Iterable[BadSample]) -> None:
        new = {sample.index: sample for sample in bad if sample.index not in self._listed}
        if new:
            with best_effort(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a", encoding="utf-8") as out:
                    out.writelines(redact(json.dumps(sample._asdict())) + "\n" for sample in new.values())
            self._listed |= new.keys()


def _complete_lines(path: Path) -> list[str]:
    """Return the lines of a file, none if it is absent; cut off a partial last line that a killed run has left."""
    if not path.is_file():
        return []
    *lines, partial = path.read_text(encoding="utf-8").split("\n")
    if partial:
        with atomic_write(path) as temporary:
            temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return lines
