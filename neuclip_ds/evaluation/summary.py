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
    """Return scores and averages in percent, and next to them those published for a setting (one of `settings`)."""
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
    for table in compare_with_published(setting, values) if setting is not None else ():
        rule = "|---" * len(table.header) + "|"
        lines += ["", f"{table.title}:", "", _row(table.header), rule, _row(table.scores)]
    return "\n".join(lines)


class Comparison(NamedTuple):
    """A model's average next to those that a source published, in percent."""

    title: str
    header: list[str]
    scores: list[str]


def compare_with_published(setting: str, values: Mapping[str, float | None]) -> list[Comparison]:
    """Return one table for each source that has scores of a setting.

    Args:
        setting: one of `settings`.
        values: average -> of this model, in [0, 1]; None where it has none.
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
    """Return the setting that a run's or recipe's name begins with, None if it is not published."""
    return next((s for s in settings() if name == s or name.startswith(f"{s}_")), None)


def settings() -> list[str]:
    """Return the papers' settings (model and data) with published scores, such as `cc3m`."""
    return list(dict.fromkeys(name for entry in published_scores() for name in entry.percent))


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"
