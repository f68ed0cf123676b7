"""The hook that evaluates the model and keeps the best checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from neuclip_ds.checkpoint.checkpoints import Best, step_folder
from neuclip_ds.checkpoint.integrity import SaveFailed, is_complete
from neuclip_ds.config import Config
from neuclip_ds.distributed.stop_signals import raising_at_once
from neuclip_ds.engine.average import WeightAverage
from neuclip_ds.evaluation.evaluator import Evaluator, check_measured
from neuclip_ds.reporting.metrics import AVERAGED, CHANCE, NORMALIZER, read_metrics, score_lines, scores_among
from neuclip_ds.training.checkpointing import SaveCheckpoints
from neuclip_ds.training.hooks import Hook

if TYPE_CHECKING:
    from neuclip_ds.training.trainer import Loop, StepResult

log = logging.getLogger(__name__)

_RECALLS = ("image_to_text_recall@1", "text_to_image_recall@1")


class EvaluateModel(Hook):
    """Evaluates the model every `run.evaluate_every` steps, at the end, and before step 1 if `evaluates_start` holds.

    If a run starts from a pretrained checkpoint, the first evaluation during training and the last one are compared
    with the evaluation before step 1, if there was one. A resumed run first runs any evaluation that is due at the
    checkpoint's step, unless metrics.jsonl contains the results.

    Args:
        evaluator: object that evaluates the model.
        saver: hook that saves checkpoints before evaluations.
        average: the moving average of the weights, which is also evaluated; None if the run keeps none.
    """

    def __init__(self, evaluator: Evaluator, saver: SaveCheckpoints, average: WeightAverage | None) -> None:
        self._evaluator = evaluator
        self._saver = saver
        self._average = average
        self._first_step = 0  # steps done when the loop started

    def start(self, loop: Loop) -> None:
        self._first_step = loop.done
        metric = loop.context.config.run.best_metric
        if metric is not None and loop.done > 0:
            best = self._best_so_far(loop, metric)
            if best is not None and loop.checkpoints.best() != best:
                self._record_best(loop, best)
        if loop.done == 0:
            is_due = evaluates_start(loop.context.config)
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

        Results that an earlier launch recorded for this step are reused. Otherwise, a checkpoint is saved before the
        evaluation, because a stop signal ends the evaluation immediately. Raises `UserError` if `run.best_metric` is
        not a metric of the evaluation.
        """
        results = self._recorded_results(loop)
        name = loop.context.config.run.best_metric
        if not results or (name is not None and name not in results):
            if loop.done > loop.saved:
                self._saver.save(loop)
            with raising_at_once():
                results = self._evaluate(loop)
            if loop.metrics is not None and results:
                loop.metrics.write(loop.done, results)
                self._compare_with_start(loop)
        for line in score_lines(results):
            log.info("step %d/%d  %s", loop.done, loop.total, line)
        if name is None:
            return
        check_measured(name, results)
        if loop.done:
            self._keep_if_best(loop, Best(loop.done, name, results[name]))

    def _evaluate(self, loop: Loop) -> dict[str, float]:
        """Evaluate the weights and, if enabled, their moving average, whose results are named `ema/NAME`."""
        engine = loop.context.engine
        results = self._evaluator(engine, loop.loss)
        if loop.context.communicator.rank == 0:
            self._evaluator.write_examples(loop.folder, loop.done)
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
            return _evaluations(loop.folder).get(loop.done, {})

        return loop.context.communicator.on_rank_zero(read)

    def _compare_with_start(self, loop: Loop) -> None:
        """Warn if scores of the first or the last evaluation are below the scores of the run's initial checkpoint."""
        if loop.done == 0 or not loop.context.config.model.pretrained:
            return
        evaluations = _evaluations(loop.folder)
        start = evaluations.pop(0, None)
        if start is None or loop.done not in evaluations:  # a record may be missing if the disk was full
            return
        if loop.done not in (min(evaluations), loop.total):
            return
        losses = scores_below(start, evaluations[loop.done], loop.context.config.run.best_metric)
        if losses:
            message = (
                f"The model after step {loop.done} scores lower than before step 1: {', '.join(losses)}. Lower "
                "optimizer.lr or the number of steps, or score blends of the initial and the new weights: "
                f"neuclip-ds evaluate {loop.folder} --blend 0,0.25,0.5,0.75,1 --data SETS"
            )
            loop.events.add(loop.done, "below_start", message)

    def _keep_if_best(self, loop: Loop, result: Best) -> None:
        """Save a checkpoint and record it as the best if `result` is the best so far."""
        best = self._best_so_far(loop, result.metric)
        if best is not None and not _replaces(result, best):
            return
        if loop.saved != result.step:
            self._saver.save(loop)
        if loop.saved == result.step:
            self._record_best(loop, result)

    def _record_best(self, loop: Loop, best: Best) -> None:
        """Record an evaluation as the best; if that fails, record an event and let training continue."""
        try:
            loop.checkpoints.keep_best(best)
        except SaveFailed as error:
            message = f"{error} Training continues, but step {best.step} is not recorded as the best."
            loop.events.add(loop.done, "save_failed", message, shared=True)

    def _best_so_far(self, loop: Loop, metric: str) -> Best | None:
        """Return the best evaluation so far, or None if there is none.

        If best.json is lost or damaged, metrics.jsonl gives the best of the earlier steps whose checkpoints exist.
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

        return loop.context.communicator.value_from_rank_zero(Best | None, read)


def _replaces(result: Best, best: Best) -> bool:
    """Return whether a result replaces the best one so far."""
    if result == best:
        return False
    if result.metric != best.metric:
        return True  # `run.best_metric` has changed
    if result.step == best.step:
        return True  # the step has been evaluated again
    return result.value > best.value


def evaluates_start(config: Config) -> bool:
    """Return whether a run is also evaluated before step 1.

    This is the case if `run.best_metric` is set, or if the run starts from a checkpoint, so that scores below the
    checkpoint's are noticed. Exception: with `run.evaluate_every=0` and without `run.best_metric`, a run that starts
    from a checkpoint is not evaluated before step 1 if its evaluation may take hours (`data.evaluation_sets` or
    `run.normalizer_anchors`).
    """
    run = config.run
    if run.best_metric is not None:
        return True
    is_cheap = config.data.evaluation_sets is None and run.normalizer_anchors == 0
    return bool(config.model.pretrained) and (run.evaluate_every > 0 or is_cheap)


def scores_below(start: Mapping[str, float], now: Mapping[str, float], best_metric: str | None) -> list[str]:
    """Describe each score that is below its value at the start: the target score, and the mean of the other scores.

    The target is `best_metric` or, by default, the mean recall@1. The other scores are the zero-shot accuracy and the
    scores of evaluation sets. Scores that only one of the evaluations contains are ignored.
    """
    names = [name for name in scores_among(start) if name in now]
    target_name = best_metric or "the mean recall@1"
    target_names = _RECALLS if best_metric is None else (best_metric,)
    target = [name for name in names if name in target_names]
    others = [name for name in names if name == "zero_shot_top1" or name.startswith("task/")]
    others = [name for name in others if name not in target]
    losses = []
    groups = {target_name: target, _describe(others): others}
    for description, group in groups.items():
        if not group:
            continue
        before = sum(start[name] for name in group) / len(group)
        after = sum(now[name] for name in group) / len(group)
        if after < before:
            losses.append(f"{description} is {after:.4g} instead of {before:.4g}")
    return losses


def _describe(scores: list[str]) -> str:
    return scores[0] if len(scores) == 1 else f"the mean of {len(scores)} other scores"


def _evaluations(folder: Path) -> dict[int, dict[str, float]]:
    """Return the results of all evaluations in a run's metrics.jsonl, by step."""
    results: dict[int, dict[str, float]] = {}
    for record in read_metrics(folder / "metrics.jsonl"):
        step = int(record.pop("step"))
        if any(name.startswith((CHANCE, NORMALIZER)) for name in record):  # unlike records of training and of hooks
            results.setdefault(step, {}).update(record)
    return results
