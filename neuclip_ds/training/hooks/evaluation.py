"""Evaluate during training, and keep the best checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from neuclip_ds.checkpoint.checkpoints import Best
from neuclip_ds.distributed.stop_signals import deferring
from neuclip_ds.errors import UserError
from neuclip_ds.reporting.metrics import MetricsLog
from neuclip_ds.training.hooks.base import Hook

if TYPE_CHECKING:
    from neuclip_ds.training.loop import Loop, StepResult

log = logging.getLogger(__name__)

Evaluate = Callable[[], dict[str, float]]


class EvaluateModel(Hook):
    """Evaluate before the first step if asked to, every `run.evaluate_every` steps, and after the last step."""

    def __init__(self, evaluate: Evaluate, metrics: MetricsLog | None) -> None:
        self._evaluate, self._metrics = evaluate, metrics

    def start(self, loop: Loop) -> None:
        run = loop.context.config.run
        if loop.done == 0 and (run.evaluate_start or run.best_metric is not None):
            self._measure(loop)

    def after_step(self, loop: Loop, result: StepResult) -> None:
        every = loop.context.config.run.evaluate_every
        if every and result.step % every == 0 and not result.last and not loop.stop_requested:
            self._measure(loop)

    def finish(self, loop: Loop) -> None:
        for name, value in self._measure(loop).items():
            log.info("%s: %.4g", name, value)

    def _measure(self, loop: Loop) -> dict[str, float]:
        """Evaluate now, and keep a checkpoint of this step if its metric is the best so far.

        A signal ends the evaluation at once, so there is a checkpoint before it.
        """
        if loop.done > loop.saved:
            loop.save()
        with deferring(False):
            results = self._evaluate()
        if self._metrics is not None and results:
            self._metrics.write(loop.done, results)
        name = loop.context.config.run.best_metric
        if name is None:
            return results
        if name not in results:
            raise UserError(
                f"run.best_metric={name} is not a metric of this run's evaluation, which gives "
                f"{', '.join(results) or 'none: set data.val or data.zero_shot'}."
            )
        step, best = loop.done, loop.checkpoints.best()
        if step and (best is None or best.metric != name or best.step == step or results[name] > best.value):
            loop.checkpoints.keep_best(Best(step, name, results[name]))
        return results
