"""The report of an examination: what is wrong and its fix, warnings, what is fine, figures; in 80 columns."""

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from neuclip_ds.doctor.finding import Finding

_WIDTH = 80
_TITLES = {"wrong": "WRONG", "warning": "WARNINGS", "fine": "FINE"}
_PLACES = 4  # that are named


def text(found: Sequence[Finding]) -> str:
    """Return the report for a terminal."""
    lines: list[str] = []
    for level in ("wrong", "warning"):
        of_level = [one for one in found if one.level == level]
        if of_level:
            lines += [f"{_TITLES[level]}", *_problems(of_level), ""]
    good = list(_good(found))
    lines += [_TITLES["fine"], *good, ""] if good else []
    return "\n".join([*lines, *_figures(found), _verdict(found)])


def as_json(found: Sequence[Finding]) -> dict[str, Any]:
    """Return the report for other programs."""
    counts = {level: sum(one.level == level for one in found) for level in _TITLES}
    return {**counts, "findings": [asdict(one) for one in found]}


def _verdict(found: Sequence[Finding]) -> str:
    wrong, warnings = (sum(one.level == level for one in found) for level in ("wrong", "warning"))
    said = f"{wrong} wrong" if wrong else "Nothing is wrong"
    return f"{said}, {warnings} warning{'' if warnings == 1 else 's'}."


def _problems(found: Sequence[Finding]) -> Iterator[str]:
    """Yield each problem with the places that have it, then its fix."""
    for (check, message, fix), places in _merged(found).items():
        yield from _wrapped(f"{check} ({_places(places)}): {message}", "  ", "    ")
        if fix:
            yield from _wrapped(f"Fix: {fix}", "    ", "    ")


def _good(found: Sequence[Finding]) -> Iterator[str]:
    """Yield what is fine, each text once, by check."""
    texts: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for one in found:
        if one.level == "fine":
            facts = [f"{name} {value}" if name != one.check else value for name, value in one.facts.items()]
            texts[one.check].update(dict.fromkeys(filter(None, [one.message, ", ".join(facts)])))
    for check, of_check in texts.items():
        for line in of_check:
            yield from _wrapped(f"{check}: {line}", "  ", "    ")


def _figures(found: Sequence[Finding]) -> Iterator[str]:
    """Yield the lowest and the highest value of each figure."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for one in found:
        for name, value in one.figures.items():
            values[name].append(value)
    if not values:
        return
    yield "FIGURES, lowest - highest"
    width = max(map(len, values))
    for name, measured in values.items():
        ends = dict.fromkeys(map(_number, (min(measured), max(measured))))
        yield f"  {name:<{width}}  {' - '.join(ends)}"
    yield ""


def _merged(found: Iterable[Finding]) -> dict[tuple[str, str, str], list[str]]:
    """Return the places of each finding that is the same in several."""
    merged: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
    for one in found:
        merged[one.check, one.message, one.fix].append(one.where)
    return merged


def _places(places: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(places))
    others = f" and {len(distinct) - _PLACES} more" if len(distinct) > _PLACES else ""
    return ", ".join(distinct[:_PLACES]) + others


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _wrapped(line: str, first: str, others: str) -> list[str]:
    return textwrap.wrap(line, _WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)
