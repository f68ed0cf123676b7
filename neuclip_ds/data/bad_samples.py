"""Keeps account of samples that cannot be used, and stops the run when there are too many."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path

from neuclip_ds.data.dataset import PADDING, Batch
from neuclip_ds.errors import UserError

logger = logging.getLogger(__name__)

_LEAST_SAMPLES = 1000


class BadSampleLog:
    """Appends every bad sample once to FOLDER/bad_samples.jsonl: index, shard, key and reason.

    With several ranks each one records its own batches under its own file; the limit then holds for each, or for
    all together where `check` is given the sums.
    """

    def __init__(self, folder: Path, max_fraction: float, rank: int = 0) -> None:
        """
        Args:
            folder: created with the first bad sample.
            max_fraction: largest share of bad samples, in [0, 1] (`data.max_bad_fraction`).
            rank: ranks other than 0 write bad_samples.rankR.jsonl.
        """
        self.path = folder / ("bad_samples.jsonl" if rank == 0 else f"bad_samples.rank{rank}.jsonl")
        self.seen = 0  # samples, padding not counted
        self.bad = 0
        self._max_fraction = max_fraction
        self.causes: Counter[str] = Counter()  # how many bad samples each has
        self._written: set[int] = set()

    def record(self, batch: Batch) -> None:
        """Count the batch, write and log what is bad in it."""
        self.seen += int((batch.index != PADDING).sum())
        new = [sample for sample in batch.bad if sample.index not in self._written]
        if new:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as out:
                out.writelines(json.dumps(sample._asdict()) + "\n" for sample in new)
            self._written.update(sample.index for sample in new)
        for sample in batch.bad:
            self.bad += 1
            self.causes[sample.cause] += 1
            if self.bad & (self.bad - 1) == 0:  # the 1st, 2nd, 4th, 8th ...: a flood of them does not flood the log
                logger.warning(
                    "bad sample %d (%d of %d so far): %s in %s: %s",
                    *(sample.index, self.bad, self.seen, sample.key, sample.shard, sample.reason),
                )

    def check(self, seen: int | None = None, bad: int | None = None) -> None:
        """UserError when too many samples are bad; `seen` and `bad` summed over ranks, or this rank's own."""
        seen, bad = self.seen if seen is None else seen, self.bad if bad is None else bad
        # Of fewer than 1000 samples the share says little (one bad sample among the first 50 is not 2% of the data),
        # so until then bad samples count against what 1000 may hold: bad luck passes, thoroughly bad data does not.
        if bad <= self._max_fraction * max(seen, _LEAST_SAMPLES):
            return
        cause = self.causes.most_common(1)[0][0] if self.causes else "see the other ranks' files"
        raise UserError(
            f"{bad} of {seen} samples cannot be used, more than data.max_bad_fraction={self._max_fraction} allows "
            f"(most often: {cause}); mend the shards listed in {self.path} or raise the limit."
        )
