"""What shows only once the findings of all ranks are there: nodes that differ, ranks that are slow, data sheets."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from neuclip_ds.doctor.checks.all_reduce import LINK
from neuclip_ds.doctor.checks.matmul import BF16, FLOAT32
from neuclip_ds.doctor.checks.memory_bandwidth import MEMORY
from neuclip_ds.doctor.finding import Finding, warning
from neuclip_ds.planning.machines import data_sheet

_SLOW = 0.8  # of the median rate of all ranks
_REACHED = 0.5  # of a data sheet's rate
_SHEET = {  # figure -> key of machines.yaml
    BF16: "tower_tflops",
    FLOAT32: "objective_tflops",
    MEMORY: "memory_gb_per_s",
    f"{LINK} of one node": "link_gb_per_s",
}


def differing_nodes(found: Sequence[Finding]) -> Iterator[Finding]:
    """Yield a warning for each fact that is not the same everywhere."""
    values: defaultdict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for one in found:
        for name, value in one.facts.items():
            values[one.check, name][one.where] = value
    for (check, name), by_place in values.items():
        most = statistics.mode(by_place.values())
        for place, value in by_place.items():
            if value != most:
                finding = warning(f"{name}: {value}, elsewhere {most}.", "Install the same on all nodes.")
                yield replace(finding, check=check, where=place)


def slow_ranks(found: Sequence[Finding]) -> Iterator[Finding]:
    """Yield a warning for each rank or node whose figure is far below the median."""
    for (check, name), by_place in _figures(found).items():
        median = statistics.median(by_place.values())
        for place, rate in by_place.items():
            if rate < _SLOW * median:
                message = f"{name}: {rate:,.1f}, where the median is {median:,.1f}; every step waits for the slowest."
                fix = "Look for other programs, heat and power limits there (`nvidia-smi -q -d PERFORMANCE`)."
                yield replace(warning(message, fix), check=check, where=place)


def below_data_sheet(found: Sequence[Finding]) -> Iterator[Finding]:
    """Yield a warning where a GPU that machines.yaml knows stays far below its data sheet."""
    sheet = data_sheet(gpu_name(found))
    for (check, name), by_place in _figures(found).items():
        if sheet is None or name not in _SHEET:
            continue
        for place, rate in by_place.items():
            peak = sheet[_SHEET[name]]
            if rate < _REACHED * peak:
                message = f"{name}: {rate:,.1f} of the {peak:,g} of its data sheet."
                fix = "Look for other programs and for limits of power or clocks (`nvidia-smi -q -d PERFORMANCE`)."
                yield replace(warning(message, fix), check=check, where=place)


def gpu_name(found: Sequence[Finding]) -> str:
    """Return the name of the GPUs; empty without."""
    return next((one.facts["GPUs"] for one in found if "GPUs" in one.facts), "")


def _figures(found: Sequence[Finding]) -> dict[tuple[str, str], dict[str, float]]:
    """Return by check and figure the value in each place."""
    values: defaultdict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for one in found:
        for name, value in one.figures.items():
            values[one.check, name][one.where] = value
    return values


COMPARISONS: tuple[Callable[[Sequence[Finding]], Iterator[Finding]], ...] = (
    differing_nodes,
    slow_ranks,
    below_data_sheet,
)
