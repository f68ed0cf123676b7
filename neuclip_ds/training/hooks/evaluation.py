"""The hook that evaluates the model and keeps the best checkpoint."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from neuclip_ds.checkpoint.checkpoints import Best, step_folder
from neuclip_ds.checkpoint.integrity import is_complete
from neuclip_ds.distributed.stop_signals import deferring
from neuclip_ds.engine.average import WeightAverage
from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.evaluator import Evaluator
from neuclip_ds.reporting.metrics import AVERAGED, CHANCE, read_metrics, score_lines, scores_among
from neuclip_ds.training.checkpointing import SaveCheckpoints
from neuclip_ds.training.hooks import Hook

if TYPE_CHECKING:
    from neuclip_ds.training.trainer import Loop, StepResult

log = logging.getLogger(__name__)


class EvaluateModel(Hook):
    """Evaluates the model every `run.evaluate_every` steps and after the last; with `run.best_metric`, also at step 0.

    A resumed run first runs any evaluation due at the checkpoint's step, unless metrics.jsonl has the results.

    Args:
        evaluator: evaluates the model.
        saver: saves checkpoints before evaluations.
        average: the moving average of the weights, if there is one, which is also evaluated.
    """

    def __init__(self, evaluator: Evaluator, saver: SaveCheckpoints, average: WeightAverage | None) -> None:
        self._evaluator = evaluator
        self._saver = saver
        self._average = average

    def start(self, loop: Loop) -> None:
        run = loop.context.config.run
        self._first_step = loop.done
        if run.best_metric is not None and loop.done > 0:
            best = self._best_so_far(loop, run.best_metric)
            if best is not None and loop.checkpoints.best() != best:
                loop.checkpoints.keep_best(best)
        if loop.done == 0:
            is_due = run.best_metric is not None
        else:
            is_due = self._is_due(loop)
        if is_due:
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
        results = self._recorded_results(loop)
        name = loop.context.config.run.best_metric
        if not results or (name is not None and name not in results):
            if loop.done > loop.saved:
                self._saver.save(loop)
            with deferring(False):
                results = self._evaluate(loop)
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

    def _evaluate(self, loop: Loop) -> dict[str, float]:
        """Evaluate the weights and, if enabled, their moving average, whose results are named `ema/NAME`."""
        engine = loop.context.engine
        results = self._evaluator(engine, loop.loss)
        if self._average is None:
            return results
        with self._average.in_use():
            average_results = self._evaluator(engine, loop.loss)
        for name, value in average_results.items():
            results[name if name.startswith(CHANCE) else AVERAGED + name] = value
        return results

    def _recorded_results(self, loop: Loop) -> dict[str, float]:
        """Return the results of an earlier launch's evaluation at this step, if any."""
        if loop.done != self._first_step or loop.done == 0:
            return {}

        def read() -> dict[str, float]:
            results: dict[str, float] = {}
            for record in read_metrics(loop.folder / "metrics.jsonl"):
                if record.pop("step") == loop.done and "lr" not in record:  # training records have it
                    results.update(record)
            return results

        return loop.context.communicator.on_rank_zero(read)

    def _keep_if_best(self, loop: Loop, result: Best) -> None:
        """Save a checkpoint and record it as the best if no earlier result is better."""
        best = self._best_so_far(loop, result.metric)
        if best == result:
            return
        is_better = (
            best is None or best.metric != result.metric or best.step == result.step or result.value > best.value
        )
        if not is_better:
            return
        if loop.saved != result.step:
            self._saver.save(loop)
        if loop.saved == result.step:
            loop.checkpoints.keep_best(result)

    def _best_so_far(self, loop: Loop, metric: str) -> Best | None:
        """Return the best evaluation so far, or None if there is none.

        If best.json is lost or damaged, metrics.jsonl still has the scores of the steps whose checkpoints exist.
        """
        best = loop.checkpoints.best()
        if best is not None:
            return best

        def read() -> Best | None:
            bests = []
            for record in read_metrics(loop.folder / "metrics.jsonl"):
                step = int(record["step"])
                if (
                    metric in record
                    and step < loop.done
                    and is_complete(step_folder(loop.folder / "checkpoints", step))
                ):
                    bests.append(Best(step, metric, record[metric]))
            return max(bests, key=lambda best: (best.value, best.step), default=None)

        fields = loop.context.communicator.on_rank_zero(read)
        return None if fields is None else Best(*fields)  # JSON makes it a list
