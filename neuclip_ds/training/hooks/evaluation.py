"""The hook that evaluates the model and keeps the best checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from neuclip_ds.checkpoint.checkpoints import Best
from neuclip_ds.distributed.stop_signals import deferring
from neuclip_ds.errors import UserError
from neuclip_ds.reporting.metrics import read_metrics, score_lines, scores_among
from neuclip_ds.training.hooks import Hook
from neuclip_ds.training.hooks.standard import SaveCheckpoints

if TYPE_CHECKING:
    from neuclip_ds.training.loop import Loop, StepResult

log = logging.getLogger(__name__)

Evaluate = Callable[[], dict[str, float]]


class EvaluateModel(Hook):
    """Evaluates the model every `run.evaluate_every` steps and after the last; with `run.best_metric`, also at step 0.

    A resumed run first runs any evaluation due at the checkpoint's step, unless metrics.jsonl has the results.
    """

    def __init__(self, evaluate: Evaluate, saver: SaveCheckpoints) -> None:
        self._evaluate, self._saver = evaluate, saver

    def start(self, loop: Loop) -> None:
        run = loop.context.config.run
        self._began = loop.done
        at_start = loop.done == 0 and run.best_metric is not None
        if at_start or (loop.done > 0 and self._is_due(loop)):
            self._measure(loop)

    def after_step(self, loop: Loop, result: StepResult) -> None:
        if self._is_due(loop) and not loop.stop_requested:
            self._measure(loop)

    def finish(self, loop: Loop) -> None:
        self._measure(loop)

    def _is_due(self, loop: Loop) -> bool:
        every = loop.context.config.run.evaluate_every
        return every > 0 and loop.done % every == 0 and loop.done < loop.total

    def _measure(self, loop: Loop) -> None:
        """Evaluate now, and keep a checkpoint of this step if `run.best_metric` has its best value so far.

        A checkpoint is saved before the evaluation, because a stop signal ends the evaluation immediately.
        """
        results, name = self._recorded(loop), loop.context.config.run.best_metric
        if not results or name not in (None, *results):
            if loop.done > loop.saved:
                self._saver.save(loop)
            with deferring(False):
                results = self._evaluate()
            if loop.metrics is not None and results:
                loop.metrics.write(loop.done, results)
        for line in score_lines(results):
            log.info("step %d/%d  %s", loop.done, loop.total, line)
        if name is None:
            return
        if name not in results:
            raise UserError(
                f"run.best_metric={name} is not a metric of this run's evaluation, which measures "
                f"{', '.join(scores_among(results))}."
            )
        if loop.done:
            self._keep_if_best(loop, Best(loop.done, name, results[name]))

    def _recorded(self, loop: Loop) -> dict[str, float]:
        """Return the results of an earlier launch's evaluation at this step, if any."""
        if loop.done != self._began or loop.done == 0:
            return {}

        def read() -> dict[str, float]:
            found: dict[str, float] = {}
            for record in read_metrics(loop.folder / "metrics.jsonl"):
                if record.pop("step") == loop.done and "lr" not in record:  # training records have it
                    found |= record
            return found

        return loop.context.communicator.on_rank_zero(read)

    def _keep_if_best(self, loop: Loop, found: Best) -> None:
        best = loop.checkpoints.best()
        replaces = best is None or best.metric != found.metric or best.step == found.step or found.value > best.value
        if replaces and best != found:
            if loop.saved != found.step:
                self._saver.save(loop)
            if loop.saved == found.step:
                loop.checkpoints.keep_best(found)
