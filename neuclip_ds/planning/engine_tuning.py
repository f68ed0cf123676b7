"""Overrides of a DeepSpeed config worth a try, what was measured of them, and which are better; free of torch.

`tools/tune_engine.py` runs them. Only keys that DeepSpeed reads in that stage and precision are tried; why the others
do nothing is in docs/reference/zero_settings.md.
"""

from __future__ import annotations

import copy
import json
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from neuclip_ds.engine.config import is_bf16
from neuclip_ds.engine.zero import Wrapper, ZeroRules
from neuclip_ds.errors import UserError
from neuclip_ds.reporting.page import Table

_ZERO = "zero_optimization."
_COMM_DTYPE = "communication_data_type"
_PRECISIONS = (_COMM_DTYPE, "data_types.grad_accum_dtype")  # others leave the numbers that are summed as they are
_SWITCH = [False, True]
_BUCKETS = [5_000_000, 50_000_000, 500_000_000]
# key of `zero_optimization` -> values to try
_REDUCTION: dict[str, list[Any]] = {
    "overlap_comm": _SWITCH,
    "reduce_bucket_size": _BUCKETS,
    "contiguous_gradients": _SWITCH,
    "reduce_scatter": _SWITCH,
}
_TRIED: dict[Wrapper, dict[str, list[Any]]] = {
    Wrapper.ZERO_1_2: {**_REDUCTION, "use_multi_rank_bucket_allreduce": _SWITCH},
    Wrapper.ZERO_3: {
        **_REDUCTION,
        "stage3_prefetch_bucket_size": [0, *_BUCKETS],
        "stage3_param_persistence_threshold": [0, 10_000, 100_000, 1_000_000],
        "stage3_max_reuse_distance": [0, 1_000_000_000],
    },
}
_REDUCE, _GATHER = "gradient reduce", "parameter gather"
_REASON_LINES, _REASON_LENGTH = 3, 120  # pydantic's message begins in the second line


class ConfigOverride(NamedTuple):
    """A value for a key of the JSON, with dots between sections."""

    key: str
    value: Any

    def __str__(self) -> str:
        return f"{self.key.removeprefix(_ZERO)}={json.dumps(self.value)}"


@dataclass
class Measurement:
    """Figures of one variant."""

    overrides: tuple[ConfigOverride, ...]  # in which it differs from the base
    rounds: list[list[float]] = field(default_factory=list)  # seconds of the steps of each start
    # purpose -> calls, bytes_sent, seconds and hidden_seconds of a step and rank
    traffic: dict[str, dict[str, float]] = field(default_factory=dict)
    difference: float | None = None  # the largest of any weight from the base's; of the base, from its second start
    drift: float | None = None  # norm of the weights' difference over that of their change in the base, if there is one
    peak: int = 0  # bytes of memory, of the rank that takes most
    error: str | None = None  # why the variant failed

    @property
    def name(self) -> str:
        return ", ".join(map(str, self.overrides)) or "base"

    @property
    def medians(self) -> list[float]:
        """Median seconds of a step, of each start."""
        return [statistics.median(steps) for steps in self.rounds]

    @property
    def seconds(self) -> float:
        return statistics.median([second for steps in self.rounds for second in steps])

    @property
    def spread(self) -> float:
        """Difference between the fastest and the slowest start, as a share of the median."""
        return (max(self.medians) - min(self.medians)) / self.seconds

    def ratio(self, base: Measurement) -> float:
        """Return the time relative to the base's, each start against the base's of the same round."""
        return statistics.median(own / other for own, other in zip(self.medians, base.medians, strict=True))


def parse_override(text: str) -> ConfigOverride:
    """Parse KEY=VALUE, the value in JSON or a bare word.

    Raises:
        UserError: there is no `=`.
    """
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise UserError(f"{text} is no override; write KEY=VALUE, such as zero_optimization.overlap_comm=true.")
    try:
        return ConfigOverride(key, json.loads(value))
    except json.JSONDecodeError:
        return ConfigOverride(key, value)


def apply_overrides(engine: dict[str, Any], overrides: Iterable[ConfigOverride]) -> dict[str, Any]:
    """Return a copy of the config with these overrides."""
    result = copy.deepcopy(engine)
    for key, value in overrides:
        *sections, last = key.split(".")
        section = result
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = value
    return result


def variants(engine: dict[str, Any]) -> list[ConfigOverride]:
    """Return single overrides of this config that DeepSpeed acts upon.

    Without ZeRO, and in the bf16 optimizer's ZeRO 1, all gradients are reduced at once after the backward pass.
    """
    rules = ZeroRules.of(engine)
    tried = _TRIED.get(rules.wrapper, {}).items()
    found = [
        ConfigOverride(_ZERO + key, value) for key, values in tried for value in values if value != rules.zero[key]
    ]
    if is_bf16(engine):
        found += [ConfigOverride(_COMM_DTYPE, name) for name, size in (("bf16", 2), ("fp32", 4)) if size != rules.sent]
    return found


def is_better(one: Measurement, base: Measurement) -> bool:
    """Return whether the slowest start is faster than the base's fastest; a single start shows nothing."""
    if one.error or base.error or min(len(one.rounds), len(base.rounds)) < 2:
        return False
    return max(one.medians) < min(base.medians)


def best_together(found: Sequence[Measurement], base: Measurement) -> tuple[ConfigOverride, ...]:
    """Return the fastest value of each key among those better than the base; never a precision, which users choose."""
    fastest: dict[str, Measurement] = {}
    for one in found:
        if len(one.overrides) != 1 or one.overrides[0].key in _PRECISIONS or not is_better(one, base):
            continue
        key = one.overrides[0].key
        if key not in fastest or one.seconds < fastest[key].seconds:
            fastest[key] = one
    return tuple(one.overrides[0] for one in fastest.values())


def choose(found: Iterable[Measurement], base: Measurement) -> Measurement:
    """Return the fastest variant that is better than the base, else the base."""
    return min((one for one in found if is_better(one, base)), key=lambda one: one.seconds, default=base)


def reason(output: str) -> str:
    """Return the message of the last error in a program's output."""
    error = re.compile(r"^(?:\[rank\d+\]:\s*)?(?:[\w.]+\.)?((?:\w*(?:Error|Exception)|error)\b.*)", re.MULTILINE)
    found = list(error.finditer(output))
    if not found:
        return "killed (no error reported)"
    lines = [found[-1][1], *output[found[-1].end() :].splitlines()[1:_REASON_LINES]]
    text = " ".join(" ".join(lines).split())
    return text if len(text) <= _REASON_LENGTH else text[: _REASON_LENGTH - 1] + "…"


def table(found: Sequence[Measurement], base: Measurement, title: str) -> Table:
    """Return a table with a row per variant; MB are those that a rank sends in a step."""
    header = [
        *("overrides", "ms a step", "spread", "ratio", "better"),
        *("reduce calls", "reduce MB", "gather calls", "gather MB", "hidden"),
        *("largest difference of weights", "share of their change", "peak MB"),
    ]
    return Table(title, header, [_row(one, base, len(header)) for one in found])


def _row(one: Measurement, base: Measurement, width: int) -> list[str]:
    if one.error:
        return [one.name, one.error.replace("|", "/"), *[""] * (width - 2)]
    compared = not base.error and one is not base and len(one.rounds) == len(base.rounds)
    times = [f"{1e3 * one.seconds:.1f}", f"{one.spread:.1%}", f"{one.ratio(base):.3f}" if compared else "-"]
    verdict = ("yes" if is_better(one, base) else "no") if compared else "-"
    traffic = [cell for purpose in (_REDUCE, _GATHER) for cell in _traffic(one.traffic.get(purpose))]
    differs = "-" if one.difference is None else f"{one.difference:.2g}"
    drift = "-" if one.drift is None else f"{one.drift:.2%}"
    return [one.name, *times, verdict, *traffic, _hidden(one), differs, drift, f"{one.peak / 1e6:,.0f}"]


def _traffic(of: dict[str, float] | None) -> list[str]:
    return [f"{of['calls']:g}", f"{of['bytes_sent'] / 1e6:,.2f}"] if of else ["0", "0"]


def _hidden(one: Measurement) -> str:
    """Return the share of the engine's communication under which a rank computes."""
    engine = [one.traffic[purpose] for purpose in (_REDUCE, _GATHER) if purpose in one.traffic]
    total = sum(of["seconds"] for of in engine)
    return f"{sum(of['hidden_seconds'] for of in engine) / total:.0%}" if total else "-"
