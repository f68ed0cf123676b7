"""Scores of blends, which average the weights of a run's start and its result: a JSON file, a table and a plot.

`evaluation/STEP/blends.json` in a run's folder contains

    {"start": "openai/clip-vit-base-patch16", "result": "runs/tuned/checkpoints/step_000000500",
     "target": "own/validation", "tasks": {"own/validation": {"name": "validation", "metric": "mean_recall@1"}, ...},
     "blends": [{"fraction": 0.5, "target": 0.42, "others": 0.61, "scores": {"own/validation": 0.42, ...}}, ...]}

A blend's `target` is the score of the target task, and `others` is the mean of the other tasks' known scores. A score
that is not known is null.
"""

import html
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from neuclip_ds.files import atomic_write
from neuclip_ds.reporting.metrics import percent

FILE = "blends.json"

# the plot, in pixels
_WIDTH = 460
_HEIGHT = 320
_LEFT = 60
_RIGHT = 30
_TOP = 20
_BOTTOM = 45
_GRID_LINES = 4  # per axis, at least; at most 10


@dataclass(frozen=True, kw_only=True)
class ScoredTask:
    """A task's name, and the name of its main metric."""

    name: str
    metric: str


@dataclass(frozen=True, kw_only=True)
class BlendScores:
    """Scores of one blend."""

    fraction: float  # 0 is the start, 1 the result
    target: float | None
    others: float | None  # mean of the other tasks' known scores
    scores: dict[str, float | None]  # value of each task's main metric, by key

    @classmethod
    def of(cls, fraction: float, target: str, scores: Mapping[str, float | None]) -> "BlendScores":
        """Summarize the scores of all tasks by key, given the key of the target."""
        others = [score for key, score in scores.items() if key != target and score is not None]
        mean = sum(others) / len(others) if others else None
        return cls(fraction=fraction, target=scores[target], others=mean, scores=dict(scores))


@dataclass(frozen=True, kw_only=True)
class Blends:
    """The scores of several blends of one run; all fields are in blends.json."""

    start: str
    result: str
    target: str  # key of the target task
    tasks: dict[str, ScoredTask]  # by key
    blends: list[BlendScores]

    def write(self, folder: Path) -> None:
        """Write FOLDER/blends.json."""
        with atomic_write(folder / FILE) as path:
            path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Blends":
        """Read FOLDER/blends.json.

        Raises `OSError` if it cannot be read, and `ValueError`, `TypeError`, `KeyError` or `AttributeError` if it is
        damaged.
        """
        fields = json.loads((folder / FILE).read_text(encoding="utf-8"))
        fields["tasks"] = {key: ScoredTask(**task) for key, task in fields["tasks"].items()}
        fields["blends"] = [BlendScores(**blend) for blend in fields["blends"]]
        return cls(**fields)

    def rows(self) -> Iterator[list[str]]:
        """Yield the rows of a table of scores in percent, with a column for each blend.

        After the header, there is a row for the target task, one for the mean of the other tasks if there are several,
        and one for each of them.
        """
        target = self.tasks[self.target]
        others = {key: task for key, task in self.tasks.items() if key != self.target}
        yield ["blend", *(f"{blend.fraction:g}" for blend in self.blends)]
        yield [f"target: {target.name}, {target.metric}", *(percent(blend.target) for blend in self.blends)]
        if len(others) > 1:
            yield [f"mean of the {len(others)} others", *(percent(blend.others) for blend in self.blends)]
        for key, task in others.items():
            yield [f"{task.name}, {task.metric}", *(percent(blend.scores[key]) for blend in self.blends)]

    def markdown(self) -> str:
        """Return the table of scores in Markdown."""
        header, *rows = self.rows()
        lines = [_markdown_row(header), "|---" * len(header) + "|"]
        lines += [_markdown_row(row) for row in rows]
        return "\n".join(lines)


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def blends_plot(blends: Blends) -> str:
    """Return an SVG plot of the target's score against the mean score of the other tasks, with a point per blend.

    The result is empty if fewer than two blends have both scores.
    """
    points = []
    for blend in blends.blends:
        if blend.target is not None and blend.others is not None:
            points.append((blend.others, blend.target, blend.fraction))
    if len(points) < 2:
        return ""
    x = _Axis([100 * others for others, _, _ in points], _LEFT, _WIDTH - _RIGHT)
    y = _Axis([100 * target for _, target, _ in points], _HEIGHT - _BOTTOM, _TOP)
    target = blends.tasks[blends.target]
    elements = []
    for value in x.grid():
        elements.append(_line(x.at(value), x.at(value), _TOP, _HEIGHT - _BOTTOM))
        elements.append(_text(x.at(value), _HEIGHT - _BOTTOM + 16, f"{value:g}", "middle"))
    for value in y.grid():
        elements.append(_line(_LEFT, _WIDTH - _RIGHT, y.at(value), y.at(value)))
        elements.append(_text(_LEFT - 6, y.at(value) + 4, f"{value:g}", "end"))
    elements.append(_text((_LEFT + _WIDTH) / 2, _HEIGHT - 8, "mean of the other tasks, %", "middle"))
    elements.append(
        _text(_LEFT - 45, _TOP - 8, f"{html.escape(target.name)}, {html.escape(target.metric)}, %", "start")
    )
    pixels = [(x.at(100 * others), y.at(100 * score), fraction) for others, score, fraction in points]
    path = " ".join(f"{left:.1f},{top:.1f}" for left, top, _ in pixels)
    elements.append(f'<polyline points="{path}" class="curve" stroke="#1f77b4"/>')
    for left, top, fraction in pixels:
        elements.append(f'<circle cx="{left:.1f}" cy="{top:.1f}" r="4" fill="#1f77b4"/>')
        elements.append(_text(left + 7, top - 6, f"{fraction:g}", "start"))
    label = "Target score and mean of the other tasks, by blend"
    size = f'width="{_WIDTH}" height="{_HEIGHT}"'
    return f'<svg {size} role="img" aria-label="{label}">{"".join(elements)}</svg>'


class _Axis:
    """Linear map from the range of some values, with a margin, to pixels."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        margin = 0.1 * (max(values) - min(values)) or 1.0
        self._low = min(values) - margin
        self._high = max(values) + margin
        self._start = start
        self._end = end

    def at(self, value: float) -> float:
        """Return the position of a value in pixels."""
        return self._start + (value - self._low) / (self._high - self._low) * (self._end - self._start)

    def grid(self) -> Iterator[float]:
        """Yield the multiples of a round step within the range."""
        raw_step = (self._high - self._low) / _GRID_LINES
        power = 10.0 ** math.floor(math.log10(raw_step))
        step = max(factor * power for factor in (1, 2, 5) if factor * power <= raw_step)
        for multiple in range(math.ceil(self._low / step), math.floor(self._high / step) + 1):
            yield round(multiple * step, 10)


def _line(x1: float, x2: float, y1: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}" class="grid"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'
