"""The base class of hooks, which run code around training steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuclip_ds.config import Config
from neuclip_ds.data.loader import RankBatch
from neuclip_ds.distributed.communicator import Communicator

if TYPE_CHECKING:
    from neuclip_ds.training.trainer import Loop, StepResult


class Hook:
    """Base class for code that runs before and after the steps of a training loop; override the methods you need.

    All ranks have the same hooks and call them in the same order, so a hook may use collectives. Hooks that you pass to
    `train` run before the built-in ones (health, metrics, signals, checkpoints, evaluation) and close after them.

    A `loop` has these attributes: `folder`, `done` and `total` (numbers of steps), `loss` (a `ContrastiveLoss`),
    `metrics`, `events` (see `start`), and `stop_requested`. To end the loop after the current step with a checkpoint,
    set `loop.stop_requested = True` on all ranks.

    The `result` of a step has these attributes: `step` (number of steps done), `loss`, `tau` (the temperature, or None
    if the loss has none), `lr`, `grad_norm` (of the encoders), `applied` (False if the step was skipped), `skipped`
    (number of skipped steps so far), `batch` (this rank's samples, without pixels), `seconds` (duration of the step),
    `waited` (the part of `seconds` spent waiting for the batch), and `metrics` (all metrics of the step by name; the
    first access waits for the GPU).

    Attributes:
        in_recovery: whether the hook also runs during the recovery of statistics (`recovery.*`); False by default.

    Example:
        import neuclip_ds


        class StopBelow(neuclip_ds.Hook):
            def after_step(self, loop, result):
                if result.loss < 1.0:
                    loop.stop_requested = True  # saves a checkpoint; the same call resumes


        look = {"max_steps": 3, "data": {"batch_size": 32}, "run": {"name": "look"}}
        run = neuclip_ds.train("demo", hooks=[StopBelow()], **look)
    """

    in_recovery = False

    def before_run(self, config: Config, communicator: Communicator, folder: Path) -> None:
        """Called before the data and the model are opened; until then, a new run's folder contains only a lock file."""

    def start(self, loop: Loop) -> None:
        """Called before the first step after a launch, resume or rollback; `loop.done` is the number of steps done.

        From now on, `loop.metrics` is the open log of metrics on rank 0, and None on the other ranks:
        `loop.metrics.write(step, {"name": 1.0})` adds a line to metrics.jsonl and a point to TensorBoard.
        `loop.events.add(step, "kind", "message")` logs an event on any rank and adds it to events.jsonl (an event of a
        rank other than 0 when the next checkpoint is saved).
        """

    def before_step(self, loop: Loop) -> None:
        """Called before the loop waits for the next batch."""

    def on_batch(self, loop: Loop, batch: RankBatch) -> None:
        """Called with the batch, before the step trains on it.

        `batch.index` (b,) contains the positions of this rank's samples in the training set, and `batch.valid` (b,) is
        False for rows that the step ignores; both are in host memory.
        """

    def after_step(self, loop: Loop, result: StepResult) -> None:
        """Called after a step; `result` is equal on all ranks, except for its batch and times."""

    def finish(self, loop: Loop) -> None:
        """Called after the last step, unless a stop was requested."""

    def state(self, loop: Loop) -> dict[str, Any]:
        """Return the hook's state for a checkpoint (JSON-compatible, equal on all ranks); called on all ranks.

        An empty state is also saved.
        """
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the hook's state from a checkpoint; called before `start` if the checkpoint contains such a state."""

    def close(self, loop: Loop, error: BaseException | None) -> None:
        """Release the resources acquired by `start`; called after every successful `start`, even if the loop fails.

        `error` is the exception that ended the loop, if any: a `RollBack` if the run returns to its newest checkpoint.
        The error may have occurred on this rank alone; the other ranks then end without calling this method.
        """

    def after_run(self, loop: Loop) -> None:
        """Called after training, even if a hook stopped it or an earlier launch completed the run.

        By then, the ranks have left their process group, so a collective would fail. If an error or a signal ended the
        run, or if the recovery of statistics was stopped, this method is not called.
        """


def hook_names(hooks: Sequence[Hook]) -> list[str]:
    """Return the names under which a checkpoint stores the states of hooks, in the order of `hooks`.

    A name is the hook's class name, followed by a number (2, 3, ...) if earlier hooks have the same class. A resumed
    run must therefore have the hooks of one class in the same order.
    """
    counts: Counter[str] = Counter()
    names: list[str] = []
    for hook in hooks:
        name = type(hook).__name__
        counts[name] += 1
        names.append(name if counts[name] == 1 else f"{name} {counts[name]}")
    return names
