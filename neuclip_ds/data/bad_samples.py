"""Keeps account of samples that cannot be used, and stops the run when there are too many."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from neuclip_ds.data.atomic_write import atomic_write
from neuclip_ds.data.dataset import PADDING, BadSample, Batch
from neuclip_ds.errors import UserError

logger = logging.getLogger(__name__)

_LEAST_SAMPLES = 1000


class SampleCounts(NamedTuple):
    """What one rank has met since the last time."""

    seen: int  # samples, padding not counted
    bad: tuple[BadSample, ...]


Gather = Callable[[SampleCounts], list[SampleCounts]]  # of all ranks, in their order


class BadSampleLog:
    """Lists every bad sample once in FOLDER/bad_samples.jsonl: index, shard, key and reason.

    Attributes:
        seen: samples that all ranks together have seen, as of the last `merge`.
        causes: how many of them were bad, by cause.
    """

    def __init__(self, folder: Path, max_fraction: float, *, writes: bool = True) -> None:
        """
        Args:
            folder: created with the first bad sample.
            max_fraction: largest share of bad samples, in [0, 1] (`data.max_bad_fraction`).
            writes: whether this rank keeps the file: rank 0.
        """
        self.path = folder / "bad_samples.jsonl"
        self.seen = 0
        self.causes: Counter[str] = Counter()
        self._max_fraction, self._writes = max_fraction, writes
        self._new_seen, self._new_bad = 0, list[BadSample]()
        self._met = 0
        self._listed = {json.loads(line)["index"] for line in _mended(self.path)} if writes else set()

    @property
    def bad(self) -> int:
        """Bad samples that all ranks together have met, as of the last `merge`."""
        return self.causes.total()

    def record(self, batch: Batch) -> None:
        """Count this rank's batch and log what is bad in it."""
        self._new_seen += int((batch.index != PADDING).sum())
        self._new_bad += batch.bad
        for sample in batch.bad:
            self._met += 1
            if self._met & (self._met - 1) == 0:  # the 1st, 2nd, 4th, 8th ...: a flood of them does not flood the log
                logger.warning(
                    "bad sample %d (the %d. here): %s in %s: %s",
                    *(sample.index, self._met, sample.key, sample.shard, sample.reason),
                )

    def merge(self, gather: Gather = lambda share: [share]) -> None:
        """Put together what the ranks have recorded since the last time, and list it; all ranks call it.

        Raises:
            UserError: on all ranks, when too many samples are bad.
        """
        shares = gather(SampleCounts(self._new_seen, tuple(self._new_bad)))
        self._new_seen, self._new_bad = 0, []
        bad = [sample for share in shares for sample in share.bad]
        self.seen += sum(share.seen for share in shares)
        self.causes.update(sample.cause for sample in bad)
        if self._writes:
            self._list(bad)
        # Of fewer than 1000 samples the share says little (one bad sample among the first 50 is not 2% of the data),
        # so until then bad samples count against what 1000 may hold: bad luck passes, thoroughly bad data does not.
        if self.bad > self._max_fraction * max(self.seen, _LEAST_SAMPLES):
            cause, count = self.causes.most_common(1)[0]
            raise UserError(
                f"{self.bad} of {self.seen} samples cannot be used, more than "
                f"data.max_bad_fraction={self._max_fraction} allows (most often, {count} times: {cause}); "
                f"mend the shards listed in {self.path} or raise the limit."
            )

    def _list(self, bad: Iterable[BadSample]) -> None:
        new = {sample.index: sample for sample in bad if sample.index not in self._listed}
        if new:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as out:
                out.writelines(json.dumps(sample._asdict()) + "\n" for sample in new.values())
            self._listed |= new.keys()


def _mended(path: Path) -> list[str]:
    """Lines of a file, none where it is absent; a broken last one, which an interrupted run has left, is cut off."""
    if not path.is_file():
        return []
    *lines, broken = path.read_text(encoding="utf-8").split("\n")
    if broken:
        with atomic_write(path) as aside:
            aside.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return lines
