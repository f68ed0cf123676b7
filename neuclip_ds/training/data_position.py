"""Map training steps to places in the data, also when the data have grown while a run was interrupted.

The epoch that was begun then ends with the shards that it began with; the next one has the new shards too.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from neuclip_ds.config import BudgetConfig
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.order import BatchOrder
from neuclip_ds.data.shard_requests import ShardRequest
from neuclip_ds.errors import UserError

log = logging.getLogger(__name__)


class Span(NamedTuple):
    """Training steps with the same shards, from training step `step` on, at which epoch `epoch` begins."""

    step: int
    epoch: int
    order: BatchOrder
    shards: int  # of the manifest
    removed: tuple[int, ...]  # numbers of those that were not in use

    def record(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it."""
        return {"step": self.step, "epoch": self.epoch, "shards": self.shards, "removed": list(self.removed)}


class StepLocation(NamedTuple):
    """A training step's place in the data."""

    order: BatchOrder
    epoch: int
    step: int  # within the epoch


class DataPosition:
    """The map from training steps to epochs: spans of steps, nearly always one."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = tuple(spans)

    @classmethod
    def start(cls, order: BatchOrder, manifest: Manifest) -> "DataPosition":
        """Return the position of a run that begins."""
        return cls([Span(0, 0, order, manifest.n_shards, manifest.removed)])

    def at(self, number: int) -> StepLocation:
        """Return a training step's place, counted from 0."""
        span = self._span(number)
        epochs, step = divmod(number - span.step, span.order.steps_per_epoch)
        return StepLocation(span.order, span.epoch + epochs, step)

    def is_rest(self, number: int) -> bool:
        """Return whether a training step has the rest of an epoch, less than half a batch, whose loss is another."""
        order, _, step = self.at(number)
        return 0 < step == order.steps_per_epoch - 1 and 2 * order.last_batch_size < order.batch_size

    def _span(self, number: int) -> Span:
        return next(span for span in reversed(self.spans) if span.step <= number or span is self.spans[0])

    def parts(self, begin: int, end: int) -> Iterator[tuple[StepLocation, int]]:
        """Yield the place of the first of the training steps begin ... end - 1 in each span, and their number."""
        ends = [span.step for span in self.spans[1:]]
        for stop in [min(stop, end) for stop in ends if stop > begin] + [end]:
            if begin < stop:
                yield self.at(begin), stop - begin
            begin = max(begin, stop)

    def batch(self, number: int) -> NDArray[np.int64]:
        """Return the global indices of a training step's batch."""
        place = self.at(number)
        return place.order.batch(place.epoch, place.step)

    def shards_ahead(self, number: int, rows: Sequence[slice]) -> Iterator[ShardRequest]:
        """Yield what `GlobalOrder.shards_ahead` does from a training step on, with batches counted as those are."""
        ends = [span.step for span in self.spans[1:]] + [None]
        for span, end in zip(self.spans, ends, strict=True):
            if end is not None and end <= number:
                continue
            place = self.at(max(number, span.step))
            offset = span.step - span.epoch * span.order.steps_per_epoch
            for request in place.order.shards_ahead(place.epoch, place.step, rows):
                if end is not None and request.first + offset >= end:
                    break
                yield request._replace(first=request.first + offset, last=request.last + offset)

    def end(self, budget: BudgetConfig) -> int:
        """Return the number of steps after which training ends."""
        if budget.steps:
            return budget.steps
        span = next(span for span in reversed(self.spans) if span.epoch < budget.epochs or span is self.spans[0])
        left = round((budget.epochs - span.epoch) * span.order.steps_per_epoch)
        return max(span.step + left, span.step, 1)

    def record(self, manifest: Manifest) -> dict[str, Any]:
        """Return what a checkpoint keeps of the data."""
        spans = [span.record() for span in self.spans]
        return {"hash": manifest.content_hash, "shards": manifest.n_shards, "spans": spans}


def check_data(saved: Mapping[str, Any], manifest: Manifest) -> None:
    """Raise `UserError` unless the data are those of a checkpoint, or have grown from them."""
    if manifest.hash_of_first(saved["shards"]) != saved["hash"] or manifest.n_shards < saved["shards"]:
        raise UserError(
            f"The checkpoint was written with other data (hash {saved['hash']}, {saved['shards']} shards; now "
            f"{manifest.content_hash}, {manifest.n_shards}): name the data it was trained on, or a manifest that "
            "`neuclip-ds build-manifest --update` has made from theirs, or give the run another name (--run.name)."
        )


def resume(saved: Mapping[str, Any], done: int, manifest: Manifest, order: BatchOrder) -> DataPosition:
    """Return the position of a run that resumes after `done` steps.

    Args:
        saved: the checkpoint's record.
        order: that of the data as they are now, which may have grown, or lack shards that were removed: what these hold
            of an epoch that was begun stays empty.

    Raises:
        UserError: the data are not those of the record.
    """
    check_data(saved, manifest)
    spans = saved["spans"] if "spans" in saved else _earlier_spans(saved, manifest)
    before = DataPosition([_build(span, manifest, order) for span in spans])
    last = before.spans[-1]
    if (manifest.n_shards, manifest.removed) == (last.shards, last.removed):
        return before
    under_way = before.at(done)
    step = done + -under_way.step % under_way.order.steps_per_epoch
    after = Span(step, under_way.epoch + (under_way.step > 0), order, manifest.n_shards, manifest.removed)
    log.warning(
        "the data have changed from %d shards to %d (%d samples in use): epoch %d, from step %d on, is the first with "
        "these",
        *(last.shards, manifest.n_shards, manifest.n_used, after.epoch, step),
    )
    return DataPosition([*[span for span in before.spans if span.step <= done][-1:], after] if step > done else [after])


def _earlier_spans(saved: Mapping[str, Any], manifest: Manifest) -> list[dict[str, Any]]:
    """Return the span of an earlier version's record, which has only a hash of what was in use.

    Raises `UserError` if shards were removed before the checkpoint and others after it.
    """
    shards = saved["shards"]
    for removed in (tuple(number for number in manifest.removed if number < shards), ()):
        if manifest.use_hash_of(shards, removed) == saved["in_use"]:
            return [{name: saved[name] for name in ("step", "epoch", "shards")} | {"removed": removed}]
    raise UserError(
        "An earlier version wrote the checkpoint, and shards have been removed or restored since: restore the manifest "
        "that the run had, finish its epoch, and update the manifest then."
    )


def _build(span: Mapping[str, Any], manifest: Manifest, order: BatchOrder) -> Span:
    shards, removed = span["shards"], tuple(span["removed"])
    if (shards, removed) != (manifest.n_shards, manifest.removed):
        order = order.of_shards(manifest.sizes_without(removed)[:shards], manifest.removed)
    return Span(span["step"], span["epoch"], order, shards, removed)
