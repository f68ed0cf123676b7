"""Tables of a study: scores over paired seeds, and differences to OpenCLIP at B and at 32 B with 95 % intervals."""

import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import inf, sqrt
from typing import Any

from scipy.stats import t as student

PEER = "openclip"
_COLUMNS = ["tau", "kl", "ratio_std", "seconds"]


def difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Return the mean of paired differences, and the half width of its 95 % interval by Student's t."""
    gains = [a - b for a, b in zip(ours, theirs, strict=True)]
    if len(gains) < 2:
        return statistics.mean(gains), inf
    quantile = float(student.ppf(0.975, len(gains) - 1))
    return statistics.mean(gains), quantile * statistics.stdev(gains) / sqrt(len(gains))


Groups = defaultdict[tuple[str, int], defaultdict[str, dict[int, Any]]]  # (stage, batch) -> setting -> seed -> results


def grouped(records: Mapping[str, Any]) -> Groups:
    """Return the results of runs by stage and batch size, setting, and seed."""
    groups: Groups = defaultdict(lambda: defaultdict(dict))
    for name, record in records.items():
        match = re.fullmatch(r"([^/]+)/([^/]+)/B(\d+)(.*)/seed(\d+)", name)
        assert match is not None, name
        groups[match[1], int(match[3])][match[2] + match[4].replace("/", ", ")][int(match[5])] = record["results"]
    return groups


def tables(records: Mapping[str, Any]) -> str:
    """Return a Markdown table for each stage and batch size.

    Each arm is compared with OpenCLIP in the same setting. OpenCLIP itself, or an arm without such a run, is compared
    with the best setting of OpenCLIP.
    """
    return "\n\n".join(_table(stage, batch, rows) for (stage, batch), rows in sorted(grouped(records).items()))


def _table(stage: str, batch: int, rows: Mapping[str, Mapping[int, Any]]) -> str:
    peers = [name for name in rows if name.split(",")[0].removeprefix("tune ") == PEER]
    best = PEER if PEER in rows else max(peers, key=lambda name: _mean(rows[name], "recall"), default=None)
    header = ["arm", "recall %", f"minus {PEER}", *_COLUMNS, "lowest", "seeds"]
    lines = [header, ["---"] * len(header)]
    for name, seeds in sorted(rows.items(), key=lambda row: -_mean(row[1], "recall")):
        alike = [peer for peer in peers if peer != name and name.endswith(peer.removeprefix(PEER))]
        peer = min(alike, key=len, default=best)
        shared = sorted(seeds.keys() & rows[peer].keys()) if peer and name != peer else []
        gain = "-"
        if shared:
            assert peer is not None
            pairs = [[one[seed]["recall"] for seed in shared] for one in (seeds, rows[peer])]
            gain = "{:+.2f} ± {:.2f}".format(*difference(*pairs))
        lowest = min(one["recall"] for one in seeds.values())
        cells = [f"{_mean(seeds, key):.3g}" if key in next(iter(seeds.values())) else "-" for key in _COLUMNS]
        lines.append([name, f"{_mean(seeds, 'recall'):.2f}", gain, *cells, f"{lowest:.2f}", str(len(seeds))])
    return "\n".join([f"## {stage}, B = {batch}", "", *("| " + " | ".join(line) + " |" for line in lines)])


def _mean(seeds: Mapping[int, Any], key: str) -> float:
    return statistics.mean(one[key] for one in seeds.values())
