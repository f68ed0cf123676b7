"""Which settings of a DeepSpeed config are worth a try, what was measured of them, and which are better; free of torch.

`tools/tune_engine.py` runs them. Only keys that DeepSpeed 0.19.8 reads in that stage and precision are tried; why the
others do nothing is in docs/zero_settings.md.
"""

from __future__ import annotations

import copy
import json
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from neuclip_ds.engine.config import is_bf16, zero_stage
from neuclip_ds.errors import UserError
from neuclip_ds.reporting.page import Table

_ZERO = "zero_optimization."
_WIRE = "communication_data_type"
_PRECISIONS = (_WIRE, "data_types.grad_accum_dtype")  # others leave the numbers that are summed as they are
_SWITCH = [False, True]
_BUCKETS = [5_000_000, 50_000_000, 500_000_000]
# key -> what DeepSpeed takes where it is absent, and what is tried
_REDUCTION: dict[str, tuple[Any, list[Any]]] = {
    "reduce_bucket_size": (500_000_000, _BUCKETS),
    "contiguous_gradients": (True, _SWITCH),
    "reduce_scatter": (True, _SWITCH),
}
_STAGES_1_AND_2: dict[str, tuple[Any, list[Any]]] = {
    "overlap_comm": (False, _SWITCH),
    **_REDUCTION,
    "use_multi_rank_bucket_allreduce": (True, _SWITCH),
}
_STAGE_3: dict[str, tuple[Any, list[Any]]] = {
    "overlap_comm": (True, _SWITCH),
    **_REDUCTION,
    "stage3_prefetch_bucket_size": (50_000_000, [0, *_BUCKETS]),
    "stage3_param_persistence_threshold": (100_000, [0, 10_000, 100_000, 1_000_000]),
    "stage3_max_reuse_distance": (1_000_000_000, [0, 1_000_000_000]),
}
_REDUCE, _GATHER = "gradient reduce", "parameter gather"
_REASON_LINES, _REASON_LENGTH = 3, 120  # pydantic's words begin in the second line


class Setting(NamedTuple):
    """A key of the JSON, with dots between sections, and its value."""

    key: str
    value: Any

    def __str__(self) -> str:
        return f"{self.key.removeprefix(_ZERO)}={json.dumps(self.value)}"


Settings = tuple[Setting, ...]


@dataclass
class Measurement:
    """What one variant has shown.

    Attributes:
        settings: in which it differs from the base.
        rounds: seconds of the steps of each start.
        traffic: purpose -> calls, bytes_sent, seconds and hidden_seconds of a step and rank.
        difference: the largest of any weight from the base's after the same steps; of the base, from its second start.
        drift: norm of the weights' difference over that of the way that they went in the base; None without a way.
        peak: bytes of memory, of the rank that takes most.
        error: why there is nothing of the above.
    """

    settings: Settings
    rounds: list[list[float]] = field(default_factory=list)
    traffic: dict[str, dict[str, float]] = field(default_factory=dict)
    difference: float | None = None
    drift: float | None = None
    peak: int = 0
    error: str | None = None

    @property
    def name(self) -> str:
        return ", ".join(map(str, self.settings)) or "base"

    @property
    def medians(self) -> list[float]:
        """Of each start, in seconds."""
        return [statistics.median(steps) for steps in self.rounds]

    @property
    def seconds(self) -> float:
        return statistics.median([second for steps in self.rounds for second in steps])

    @property
    def spread(self) -> float:
        """Between the fastest and the slowest start, as a share of the median."""
        return (max(self.medians) - min(self.medians)) / self.seconds

    def ratio(self, base: Measurement) -> float:
        """Time of the base's, each start against the base's of the same round."""
        return statistics.median(own / other for own, other in zip(self.medians, base.medians, strict=True))


def parse_setting(text: str) -> Setting:
    """KEY=VALUE as it is typed, the value in JSON or a bare word.

    Raises:
        UserError: there is no `=`.
    """
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise UserError(f"{text} is no setting; write KEY=VALUE, such as zero_optimization.overlap_comm=true.")
    try:
        return Setting(key, json.loads(value))
    except json.JSONDecodeError:
        return Setting(key, value)


def changed(engine: dict[str, Any], settings: Iterable[Setting]) -> dict[str, Any]:
    """A copy of the config with these settings."""
    result = copy.deepcopy(engine)
    for key, value in settings:
        *sections, last = key.split(".")
        place = result
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return result


def variants(engine: dict[str, Any]) -> list[Setting]:
    """Single changes of this config that DeepSpeed acts upon."""
    stage, zero = zero_stage(engine), engine.get("zero_optimization", {})
    found = []
    for key, (default, values) in _keys(engine, stage).items():
        found += [Setting(_ZERO + key, value) for value in values if value != zero.get(key, default)]
    if is_bf16(engine):
        now = engine.get(_WIRE, "bf16")
        found += [Setting(_WIRE, value) for value in ("bf16", "fp32") if value != now]
    return found


def _keys(engine: dict[str, Any], stage: int) -> dict[str, tuple[Any, list[Any]]]:
    """Without ZeRO, and in bf16's ZeRO 1, all gradients are reduced at once when the backward pass is over."""
    at_once = is_bf16(engine) and engine.get("data_types", {}).get("grad_accum_dtype") == "fp32"
    offloads = "offload_optimizer" in engine.get("zero_optimization", {})
    if stage == 0 or (stage == 1 and at_once and not offloads):
        return {}
    return _STAGE_3 if stage == 3 else _STAGES_1_AND_2


def is_better(one: Measurement, base: Measurement) -> bool:
    """Whether its slowest start is faster than the base's fastest; a single start shows nothing."""
    if one.error or base.error or min(len(one.rounds), len(base.rounds)) < 2:
        return False
    return max(one.medians) < min(base.medians)


def best_together(found: Sequence[Measurement], base: Measurement) -> Settings:
    """Of each key the fastest value that is better than the base's; never a precision, which the user has to choose."""
    fastest: dict[str, Measurement] = {}
    for one in found:
        if len(one.settings) != 1 or one.settings[0].key in _PRECISIONS or not is_better(one, base):
            continue
        key = one.settings[0].key
        if key not in fastest or one.seconds < fastest[key].seconds:
            fastest[key] = one
    return tuple(one.settings[0] for one in fastest.values())


def choose(found: Iterable[Measurement], base: Measurement) -> Measurement:
    """The fastest that is better than the base, else the base."""
    return min((one for one in found if is_better(one, base)), key=lambda one: one.seconds, default=base)


def reason(output: str) -> str:
    """The words of the last error in a program's output."""
    error = re.compile(r"^(?:\[rank\d+\]:\s*)?(?:[\w.]+\.)?((?:\w*(?:Error|Exception)|error)\b.*)", re.MULTILINE)
    found = list(error.finditer(output))
    if not found:
        return "ended without a word"
    lines = [found[-1][1], *output[found[-1].end() :].splitlines()[1:_REASON_LINES]]
    text = " ".join(" ".join(lines).split())
    return text if len(text) <= _REASON_LENGTH else text[: _REASON_LENGTH - 1] + "…"


def table(found: Sequence[Measurement], base: Measurement, title: str) -> Table:
    """A row a variant; MB are those that a rank sends in a step."""
    header = [
        *("settings", "ms a step", "spread", "ratio", "better"),
        *("reduce calls", "reduce MB", "gather calls", "gather MB", "hidden"),
        *("largest difference of weights", "of their way", "peak MB"),
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
    """Share of the engine's communication under which a rank computes."""
    engine = [one.traffic[purpose] for purpose in (_REDUCE, _GATHER) if purpose in one.traffic]
    total = sum(of["seconds"] for of in engine)
    return f"{sum(of['hidden_seconds'] for of in engine) / total:.0%}" if total else "-"
