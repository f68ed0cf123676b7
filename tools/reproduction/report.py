"""Tables of a comparison from the results of its runs: differences over paired seeds, with confidence intervals."""

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from typing import NamedTuple

from scipy.stats import t as student

from reproduction.study import Regime

Scores = Mapping[str, float]
Results = Mapping[str, Scores]
Seeds = Mapping[int, Scores]  # an arm's results in a regime, by seed
RECALLS = [f"{side}_recall@{k}" for side in ("image_to_text", "text_to_image") for k in (1, 5, 10)]
PEER = "openclip"
_COLUMNS = {
    "image to text R@1 %": ("image_to_text_recall@1", 100),
    "text to image R@1 %": ("text_to_image_recall@1", 100),
    "zero-shot top-1 %": ("zero_shot_top1", 100),
    "normalizer MSE": ("normalizer_mse", 1),
    "step, ms": ("step_ms", 1),
}


class Difference(NamedTuple):
    """Mean of paired differences and the half width of its 95 % interval, by Student's t over the seeds."""

    mean: float
    half_width: float  # infinite with one pair
    pairs: int

    def __str__(self) -> str:
        interval = f" ± {self.half_width:.2f}" if self.pairs > 1 else ""
        return f"{self.mean:+.2f}{interval}"


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """Return the mean of `ours - theirs`, whose entries belong to the same seeds in order.

    Raises:
        ValueError: they differ in number, or are empty.
    """
    gains = [a - b for a, b in zip(ours, theirs, strict=True)]
    if not gains:
        raise ValueError("there is nothing to compare")
    if len(gains) == 1:
        return Difference(gains[0], float("inf"), 1)
    quantile = float(student.ppf(0.975, len(gains) - 1))
    return Difference(statistics.mean(gains), quantile * statistics.stdev(gains) / sqrt(len(gains)), len(gains))


def mean_recall(result: Scores) -> float:
    """Mean of R@1, R@5 and R@10 in both directions, percent; 0 for a run that diverged."""
    return 100 * statistics.mean(result.get(name, 0.0) for name in RECALLS)


def gain(ours: Seeds, theirs: Seeds) -> Difference | None:
    """Return the difference of mean recall over the seeds that both have; None where there is none."""
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None
    return difference([mean_recall(ours[seed]) for seed in seeds], [mean_recall(theirs[seed]) for seed in seeds])


def report(results: Results) -> str:
    """Return a table of Markdown for each regime, and one of the search."""
    groups: defaultdict[Regime, defaultdict[str, dict[int, Scores]]] = defaultdict(lambda: defaultdict(dict))
    for name, result in results.items():
        match = re.fullmatch(r"(\d+x\d+(?:/10)?)/(.+)/seed(\d+)", name)
        if match:
            groups[Regime.parse(match[1])][match[2]][int(match[3])] = result
    ordered = sorted(groups, key=lambda regime: (regime.tenth, regime.epochs, regime.batch))
    return "\n\n".join([*(_regime(regime, groups[regime]) for regime in ordered), *_search(results)]) + "\n"


def _regime(regime: Regime, found: Mapping[str, Seeds]) -> str:
    epochs = f"{regime.epochs} of n/10" if regime.tenth else str(regime.epochs)
    recalls = {name: [mean_recall(result) for result in seeds.values()] for name, seeds in found.items()}
    rows = []
    for name in sorted(found, key=lambda name: -statistics.mean(recalls[name])):
        gained = None if name == PEER else gain(found[name], found.get(PEER, {}))
        cells = [_cell([f * one[key] for one in found[name].values() if key in one]) for key, f in _COLUMNS.values()]
        rows.append([name, _cell(recalls[name]), str(gained or "-"), *cells, str(len(recalls[name]))])
    header = ["arm", "mean recall %", f"minus {PEER} (95 %)", *_COLUMNS, "seeds"]
    return _table(f"B = {regime.batch}, {epochs} epochs", header, rows)


def _search(results: Results) -> list[str]:
    points: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
    for name, one in results.items():
        match = re.fullmatch(r"search/(.+)/(.+)/(lr[^/,]+)(?:, seed \d+)?", name)
        if match:
            points[match.groups()].append(mean_recall(one))
    rows = [[*point, _cell(scores), str(len(scores))] for point, scores in points.items()]
    header = ["regime", "arm", "learning rate and value", "mean recall %", "seeds"]
    return [_table("Search on the validation split", header, rows)] if rows else []


def _cell(values: Sequence[float]) -> str:
    """Return mean and sample deviation."""
    if not values:
        return "-"
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation}"


def _table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join([f"## {title}", "", *("| " + " | ".join(line) + " |" for line in lines)])
