"""Scores on disk in the layout of DataComp's evaluation, averages over tasks, and a summary in Markdown.

`eval_results.jsonl` contains one line per task, {"key": ..., "dataset": ..., "metrics": {..., "main_metric": ...}},
appended when the task is done. `model.json` contains the model's name, its precision and the hash of its weights; a
folder with scores of another name, precision or hash is refused. A line may also have a "data" field, which identifies
the set and its files; DataComp's own files lack this field.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from neuclip_ds.errors import UserError, explained
from neuclip_ds.evaluation.suite import Metrics
from neuclip_ds.evaluation.tasks import Task, TaskList
from neuclip_ds.files import atomic_write, explain_disk, json_lines
from neuclip_ds.reporting.metrics import percent

FILE = "eval_results.jsonl"
_FIX = "choose another --out"


class Average(NamedTuple):
    """Mean score of a group of tasks."""

    value: float | None  # the mean; None unless every task of the group has a score
    partial: float | None  # mean of the available scores, or None
    missing: tuple[str, ...]  # names of the tasks without a score
    tasks: int  # size of the group


class Results:
    """The scores of one model, stored in a folder.

    `model` is the content of model.json: the model's name (`model`), its `precision` and the hash of its `weights`. The
    folder may also contain scores of `other_name`, another name of the same model, and scores of version 0.1, which
    stored no hash.
    `metrics` maps task keys to the tasks' latest metrics, and `data` maps task keys to the strings that identify their
    sets, or to None if unknown. Raises `UserError` if the folder contains scores of another model, of other weights or
    in another precision, or scores that cannot be read, or if the folder cannot be written.
    """

    def __init__(self, folder: Path, model: Mapping[str, Any], other_name: str | None = None) -> None:
        self._path = folder / FILE
        self._model_path = folder / "model.json"
        with explain_disk(folder, _FIX):
            folder.mkdir(parents=True, exist_ok=True)
        self.metrics: dict[str, Metrics] = {}
        self.data: dict[str, str | None] = {}
        if self._path.is_file():
            scored_model = None
            if self._model_path.is_file():
                with explained(f"{self._model_path} cannot be read", _FIX):
                    scored_model = json.loads(self._model_path.read_text(encoding="utf-8"))
            without_weights = {name: value for name, value in model.items() if name != "weights"}
            accepted = [model, without_weights]
            accepted += [{**identity, "model": other_name} for identity in (model, without_weights)]
            if scored_model not in json.loads(json.dumps(accepted)):
                other = "unknown, because model.json is missing"
                if scored_model is not None:
                    other = ", ".join(f"{name}: {value}" for name, value in scored_model.items())
                raise UserError(
                    f"{folder} contains scores of another model, of other weights or in another precision ({other}): "
                    "choose another --out, or delete this folder."
                )
            with explained(f"{self._path} cannot be read as scores", _FIX):
                lines = json_lines(self._path)  # a task whose line is truncated is measured again
                self.metrics = {line["key"]: line["metrics"] for line in lines}
                self.data = {line["key"]: line.get("data") for line in lines}
        with explain_disk(self._model_path, _FIX), atomic_write(self._model_path) as temporary:
            temporary.write_text(json.dumps(model, indent=2) + "\n", encoding="utf-8")

    def add(self, task: Task, metrics: Metrics, data: str | None = None) -> None:
        """Append a task's line; `data`, if given, is a string that identifies the set and its files.

        Raises UserError if the line cannot be written.
        """
        self.metrics[task.key] = metrics
        self.data[task.key] = data
        line = {"key": task.key, "dataset": task.name, "metrics": metrics}
        if data:
            line["data"] = data
        with explain_disk(self._path, _FIX), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")


def averages(tasks: TaskList, metrics: Mapping[str, Metrics]) -> dict[str, Average]:
    """Return all averages of the task list, keyed by name; an average has no value unless all its tasks have scores."""
    averages_by_name = {}
    for name in tasks.averages:
        scores = []
        missing = []
        for task in tasks.in_average(name):
            score = metrics.get(task.key, {}).get("main_metric")
            if score is None:
                missing.append(task.name)
            else:
                scores.append(score)
        mean = sum(scores) / len(scores) if scores else None
        averages_by_name[name] = Average(
            value=None if missing else mean,
            partial=mean,
            missing=tuple(missing),
            tasks=len(scores) + len(missing),
        )
    return averages_by_name


def summary_text(tasks: TaskList, metrics: Mapping[str, Metrics]) -> str:
    """Return Markdown tables of scores and averages in percent; averages with no scored tasks are omitted."""
    scored_tasks = [task for task in tasks.tasks if task.key in metrics]
    lines = ["| task | metric | score | chance |", "|---|---|---|---|"]
    for task in scored_tasks:
        score = percent(metrics[task.key].get("main_metric"))
        chance = percent(metrics[task.key].get("chance"))
        lines.append(f"| {task.name} | {task.metric} | {score} | {chance} |")
    lines += _recall_table({task.name: metrics[task.key] for task in scored_tasks})
    lines += _average_table(tasks, metrics)
    return "\n".join(lines)


def _recall_table(metrics: Mapping[str, Metrics]) -> list[str]:
    """Return the lines of a table of the retrieval tasks, given all tasks' metrics by name, or [] if there are none."""
    columns = []
    for direction in ("text_retrieval", "image_retrieval"):
        columns += [f"{direction}_recall@{k}" for k in (1, 5, 10)]
    rows = {name: metrics_of_task for name, metrics_of_task in metrics.items() if columns[0] in metrics_of_task}
    if not rows:
        return []
    lines = [
        "",
        "| retrieval | image to text R@1 | R@5 | R@10 | text to image R@1 | R@5 | R@10 |",
        "|---" * 7 + "|",
    ]
    for name, row in rows.items():
        of_prefixes = [metric.removesuffix(columns[0]) for metric in row if metric.endswith(columns[0])]
        for prefix in of_prefixes:  # the empty prefix stands for the full features
            cells = [prefix + name, *(percent(row.get(prefix + column)) for column in columns)]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _average_table(tasks: TaskList, metrics: Mapping[str, Metrics]) -> list[str]:
    """Return the lines of a table of the averages with at least one scored task, then the tasks that each lacks."""
    shown = {name: average for name, average in averages(tasks, metrics).items() if average.partial is not None}
    lines = []
    if shown:
        lines += ["", "| average | tasks | score |", "|---|---|---|"]
    for name, average in shown.items():
        score = percent(average.value)
        if average.missing:
            scored = average.tasks - len(average.missing)
            partial = percent(average.partial)
            score = f"none: scores exist for only {scored} of {average.tasks} tasks; their mean is {partial}"
        lines.append(f"| {name} | {tasks.averages[name]} | {score} |")
    lines.append("")
    for name, average in shown.items():
        if average.missing:
            lines.append(f"Missing from {name}: {', '.join(average.missing)}.")
    return lines
