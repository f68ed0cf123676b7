"""Summary of an evaluation, as Markdown and as a tree for programs."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from neuclip_ds.evaluation.results import averages
from neuclip_ds.evaluation.suite import Metrics
from neuclip_ds.evaluation.tasks import TaskList, published_scores


def summary_tree(tasks: TaskList, metrics: Mapping[str, Metrics]) -> dict[str, Any]:
    """Return for each average its value (null unless complete), partial, missing and tasks."""
    return {name: average._asdict() for name, average in averages(tasks, metrics).items()}


def summary_text(tasks: TaskList, metrics: Mapping[str, Metrics], setting: str | None = None) -> str:
    """Return scores and averages in percent, and next to them those published for a setting (one of `settings`).

    An average of which no task is scored is left out.
    """
    measured = [task for task in tasks.tasks if task.key in metrics]
    lines = ["| task | metric | score | chance |", "|---|---|---|---|"]
    lines += [
        _row([task.name, task.metric, *(_percent(metrics[task.key].get(name)) for name in ("main_metric", "chance"))])
        for task in measured
    ]
    found = {name: one for name, one in averages(tasks, metrics).items() if len(one.missing) < one.tasks}
    if found:
        lines += ["", "| average | of | score |", "|---|---|---|"]
    for name, average in found.items():
        done = average.tasks - len(average.missing)
        note = f"none: {done} of {average.tasks} tasks scored" if average.missing else _percent(average.value)
        if average.missing and average.partial is not None:
            note += f", mean of these {_percent(average.partial)}"
        lines.append(f"| {name} | {tasks.averages[name]} | {note} |")
    lines += [""] + [f"Missing from {name}: {', '.join(a.missing)}." for name, a in found.items() if a.missing]
    values = {name: average.value for name, average in found.items()}
    for task in measured:
        values |= {f"{task.name} {metric}": value for metric, value in metrics[task.key].items()}
        values[task.name] = metrics[task.key]["main_metric"]
    for table in compare_with_published(setting, values) if setting is not None else ():
        rule = "|---" * len(table.header) + "|"
        lines += ["", f"{table.title}:", "", _row(table.header), rule, *map(_row, table.rows)]
    return "\n".join(lines)


class Comparison(NamedTuple):
    """A model's scores below those that a source published, in percent."""

    title: str
    header: list[str]
    rows: list[list[str]]


def compare_with_published(setting: str, values: Mapping[str, float | None]) -> list[Comparison]:
    """Return one table for each source that has scores of a setting, or of one that its name begins with.

    Args:
        setting: one of `settings`.
        values: average, task, or task and metric -> of this model, in [0, 1]; None or absent where it has none.
    """
    return [
        Comparison(
            f"{name} in percent: {entry.source}",
            ["", *entry.scores],
            [
                *([row, *map(_published, scores)] for row, scores in rows.items()),
                ["this model", *(_percent(values.get(score)) for score in entry.scores)],
            ],
        )
        for entry in published_scores()
        for name, rows in entry.percent.items()
        if _begins_with(setting, name)
    ]


def published_for(setting: str, score: str) -> tuple[str, dict[str, str]] | None:
    """Return the first source that has a score of a setting, or of one that its name begins with, and its values.

    These are texts in percent, by row of the source's table. None if no source has the score.
    """
    for entry in published_scores():
        for name, rows in entry.percent.items():
            if _begins_with(setting, name) and score in entry.scores:
                place = entry.scores.index(score)
                return entry.source, {row: _published(values[place]) for row, values in rows.items()}
    return None


def setting_of(name: str) -> str | None:
    """Return the longest setting that a run's or recipe's name begins with, None if it is not published."""
    return max((setting for setting in settings() if _begins_with(name, setting)), key=len, default=None)


def _begins_with(name: str, setting: str) -> bool:
    return name == setting or name.startswith(f"{setting}_")


def settings() -> list[str]:
    """Return the settings (data or model, and method of an ablation) with published scores, such as `cc3m`."""
    return list(dict.fromkeys(name for entry in published_scores() for name in entry.percent))


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


def _published(value: float | tuple[float, float]) -> str:
    """Return a score, with its deviation where there is one."""
    return f"{value:.2f}" if isinstance(value, float) else "{:.2f} ± {:.2f}".format(*value)
