"""What an evaluation found, as Markdown for people and as a tree for programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from neuclip_ds.evaluation.results import averages
from neuclip_ds.evaluation.suite import Metrics
from neuclip_ds.evaluation.tasks import TaskList, published_scores


def summary_tree(tasks: TaskList, metrics: Mapping[str, Metrics]) -> dict[str, Any]:
    """Average -> value (null unless complete), partial, missing, tasks."""
    return {name: average._asdict() for name, average in averages(tasks, metrics).items()}


def summary_text(tasks: TaskList, metrics: Mapping[str, Metrics], setting: str | None = None) -> str:
    """Scores, averages and, for a setting of the papers, their scores; in percent.

    Args:
        tasks: the list.
        metrics: key -> metrics of the tasks that have been measured.
        setting: a setting of published.yaml.
    """
    measured = [task for task in tasks.tasks if task.key in metrics]
    lines = ["| task | metric | score |", "|---|---|---|"]
    lines += [f"| {task.name} | {task.metric} | {_percent(metrics[task.key]['main_metric'])} |" for task in measured]
    found = averages(tasks, metrics)
    lines += ["", "| average | of | score |", "|---|---|---|"]
    for name, average in found.items():
        done = average.tasks - len(average.missing)
        note = f"none: {done} of {average.tasks} tasks scored" if average.missing else _percent(average.value)
        if average.missing and average.partial is not None:
            note += f", mean of these {_percent(average.partial)}"
        lines.append(f"| {name} | {tasks.averages[name]} | {note} |")
    lines += [""] + [f"Missing from {name}: {', '.join(a.missing)}." for name, a in found.items() if a.missing]
    values = {name: average.value for name, average in found.items()}
    for table in beside_published(setting, values) if setting is not None else ():
        rule = "|---" * len(table.header) + "|"
        lines += ["", f"{table.title}:", "", _row(table.header), rule, _row(table.scores)]
    return "\n".join(lines)


class Comparison(NamedTuple):
    """A model's average beside those that a source prints, in percent."""

    title: str
    header: list[str]
    scores: list[str]


def beside_published(setting: str, values: Mapping[str, float | None]) -> list[Comparison]:
    """One table for each source that has scores of a setting.

    Args:
        setting: a setting of published.yaml.
        values: average -> of the model at hand, in [0, 1]; None where it has none.
    """
    return [
        Comparison(
            f"{entry.average} in percent, {setting}: {entry.source}",
            [*entry.percent[setting], "this model"],
            [*(f"{score:.2f}" for score in entry.percent[setting].values()), _percent(values.get(entry.average))],
        )
        for entry in published_scores()
        if setting in entry.percent
    ]


def setting_of(name: str) -> str | None:
    """The setting of published.yaml that a run's or recipe's name begins with."""
    return next((s for s in settings() if name == s or name.startswith(f"{s}_")), None)


def settings() -> list[str]:
    """Those that the papers have scores of."""
    return list(dict.fromkeys(name for entry in published_scores() for name in entry.percent))


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"
