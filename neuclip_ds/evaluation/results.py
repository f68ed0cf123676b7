"""Scores on disk in the layout of DataComp's evaluation, averages over tasks, and a summary in Markdown.

`eval_results.jsonl` has one line per task, {"key": ..., "dataset": ..., "metrics": {..., "main_metric": ...}}, appended
when the task is done. `model.json` identifies the model, so that scores of different models are never mixed. Lines for
your own sets also have a "data" field, which distinguishes sets with the same name.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from neuclip_ds.errors import UserError, explained
from neuclip_ds.evaluation.suite import Metrics
from neuclip_ds.evaluation.tasks import Task, TaskList
from neuclip_ds.files import json_lines

FILE = "eval_results.jsonl"


class Average(NamedTuple):
    """Mean score of a group of tasks."""

    value: float | None  # the mean; None unless every task of the group has a score
    partial: float | None  # mean of the available scores, or None
    missing: tuple[str, ...]  # names of the tasks without a score
    tasks: int  # size of the group


class Results:
    """The scores of one model, stored in a folder; raises UserError if the folder has a different model's scores.

    `metrics` maps task keys to the latest metrics; `data` maps them to the identities of your own sets, or to None.
    """

    def __init__(self, folder: Path, model: Mapping[str, Any]) -> None:
        self._path, self._model_path = folder / FILE, folder / "model.json"
        folder.mkdir(parents=True, exist_ok=True)
        self.metrics: dict[str, Metrics] = {}
        self.data: dict[str, str | None] = {}
        if self._path.is_file():
            found = json.loads(self._model_path.read_text(encoding="utf-8")) if self._model_path.is_file() else None
            if found != json.loads(json.dumps(model)):
                raise UserError(f"{folder} has scores of another model or precision ({found}); change --out.")
            with explained(f"{self._path} cannot be read as scores", "choose a different --out"):
                lines = json_lines(self._path)  # a task whose line is truncated is measured again
                self.metrics = {line["key"]: line["metrics"] for line in lines}
                self.data = {line["key"]: line.get("data") for line in lines}
        self._model_path.write_text(json.dumps(model, indent=2) + "\n", encoding="utf-8")

    def add(self, task: Task, metrics: Metrics, data: str | None = None) -> None:
        """Append a task's line; `data` distinguishes your own sets with the same name."""
        self.metrics[task.key], self.data[task.key] = metrics, data
        line = {"key": task.key, "dataset": task.name, "metrics": metrics, **({"data": data} if data else {})}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")


def averages(tasks: TaskList, metrics: Mapping[str, Metrics]) -> dict[str, Average]:
    """Return all averages of the task list, keyed by name; an average has no value unless all its tasks have scores."""
    found = {}
    for name in tasks.averages:
        group = tasks.in_average(name)
        scores = {task.name: metrics.get(task.key, {}).get("main_metric") for task in group}
        present = [score for score in scores.values() if score is not None]
        partial = sum(present) / len(present) if present else None
        missing = tuple(task for task, score in scores.items() if score is None)
        found[name] = Average(None if missing else partial, partial, missing, len(group))
    return found


def summary_text(tasks: TaskList, metrics: Mapping[str, Metrics]) -> str:
    """Return Markdown tables of scores and averages in percent; averages with no scored tasks are omitted."""
    lines = ["| task | metric | score | chance |", "|---|---|---|---|"]
    for task in tasks.tasks:
        if task.key in metrics:
            score, chance = (_percent(metrics[task.key].get(name)) for name in ("main_metric", "chance"))
            lines.append(f"| {task.name} | {task.metric} | {score} | {chance} |")
    columns = [f"{way}_recall@{k}" for way in ("text_retrieval", "image_retrieval") for k in (1, 5, 10)]
    rows = {task.name: metrics[task.key] for task in tasks.tasks if columns[0] in metrics.get(task.key, {})}
    if rows:
        lines += ["", "| retrieval | image to text R@1 | R@5 | R@10 | text to image R@1 | R@5 | R@10 |"]
        lines += ["|---" * 7 + "|"]
    for name, row in rows.items():
        lines.append(f"| {name} | {' | '.join(_percent(row.get(column)) for column in columns)} |")
    found = {name: one for name, one in averages(tasks, metrics).items() if len(one.missing) < one.tasks}
    if found:
        lines += ["", "| average | of | score |", "|---|---|---|"]
    for name, average in found.items():
        note = _percent(average.value)
        if average.missing:
            done = average.tasks - len(average.missing)
            note = f"none: {done} of {average.tasks} tasks scored, mean of these {_percent(average.partial)}"
        lines.append(f"| {name} | {tasks.averages[name]} | {note} |")
    lines += [""] + [f"Missing from {name}: {', '.join(a.missing)}." for name, a in found.items() if a.missing]
    return "\n".join(lines)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"
