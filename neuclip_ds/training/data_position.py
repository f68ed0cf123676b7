"""Map training steps to places in the data, also when the data have grown while a run was interrupted."""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from neuclip_ds.config import BudgetConfig
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.errors import UserError

log = logging.getLogger(__name__)


class DataPosition(NamedTuple):
    """The map from training steps to epochs: epoch `epoch` begins at training step `step`."""

    step: int
    epoch: int
    steps_per_epoch: int

    def at(self, number: int) -> tuple[int, int]:
        """Return (epoch, step within it) of a training step."""
        epochs, step = divmod(number - self.step, self.steps_per_epoch)
        return self.epoch + epochs, step

    def end(self, budget: BudgetConfig) -> int:
        """Return the number of steps after which training ends."""
        left = round((budget.epochs - self.epoch) * self.steps_per_epoch)
        return budget.steps or max(self.step + left, self.step, 1)

    def record(self, manifest: Manifest) -> dict[str, Any]:
        """Return what a checkpoint keeps of the data."""
        data = {"hash": manifest.content_hash, "shards": manifest.n_shards, "in_use": manifest.use_hash}
        return {**data, **self._asdict()}


def check_data(saved: Mapping[str, Any], manifest: Manifest) -> None:
    """Raise `UserError` unless the data are those of a checkpoint, or have grown from them."""
    if manifest.hash_of_first(saved["shards"]) != saved["hash"] or manifest.n_shards < saved["shards"]:
        raise UserError(
            f"The checkpoint was written with other data (hash {saved['hash']}, {saved['shards']} shards; now "
            f"{manifest.content_hash}, {manifest.n_shards}): name the data it was trained on, or a manifest that "
            "`neuclip-ds build-manifest --update` has made from theirs, or give the run another name (--run.name)."
        )


def resume(saved: Mapping[str, Any], done: int, manifest: Manifest, steps_per_epoch: int) -> DataPosition:
    """Return the position of a run that resumes after `done` steps.

    Data that have changed since (shards were appended or removed) have another order of samples, so the epoch that was
    begun cannot be finished: the next one begins at once. Raises `UserError` if they are not those of the checkpoint's
    record `saved`.
    """
    check_data(saved, manifest)
    before = DataPosition(saved["step"], saved["epoch"], saved["steps_per_epoch"])
    if (manifest.n_shards, manifest.use_hash) == (saved["shards"], saved["in_use"]):
        return before
    epoch, step = before.at(done)
    after = DataPosition(done, epoch + (step > 0), steps_per_epoch)
    log.warning(
        "the data have changed from %d shards to %d (%d samples in use): epoch %d begins",
        *(saved["shards"], manifest.n_shards, manifest.n_used, after.epoch),
    )
    return after
