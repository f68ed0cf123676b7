"""Tables of a study: scores over paired seeds, and differences from OpenCLIP at B and at 32 B with 95 % intervals."""

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import inf, sqrt
from pathlib import Path
from typing import Any

from scipy.stats import t as student

PEER = "openclip"
_COLUMNS = ["tau", "kl", "ratio_std", "seconds"]


def read_results(path: Path) -> dict[str, Any]:
    """Return the records of a results.jsonl by name; there are none without the file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return {record["name"]: record for record in map(json.loads, lines)}


def difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Return the mean of paired differences, and the half width of its 95 % t interval, which is inf for one pair."""
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
        stage, arm, batch, label, seed = match.groups()
        setting = arm + label.replace("/", ", ")
        groups[stage, int(batch)][setting][int(seed)] = record["results"]
    return groups


def tables(records: Mapping[str, Any]) -> str:
    """Return a Markdown table for each stage and batch size.

    Each arm is compared with plain `openclip`, if the stage contains it. Otherwise, it is compared with OpenCLIP in the
    same setting; OpenCLIP itself, or an arm without such a run, is compared with the best setting of OpenCLIP.
    """
    return "\n\n".join(_table(stage, batch, rows) for (stage, batch), rows in sorted(grouped(records).items()))


def _table(stage: str, batch: int, rows: Mapping[str, Mapping[int, Any]]) -> str:
    peers = [name for name in rows if name.split(",")[0].removeprefix("tune ") == PEER]
    best = PEER if PEER in rows else max(peers, key=lambda name: _mean(rows[name], "recall"), default=None)
    header = ["arm", "recall %", f"minus {PEER}", *_COLUMNS, "lowest", "seeds"]
    has_guides = any(_unguided(name) in rows for name in rows if name != _unguided(name))
    if has_guides:
        header.insert(3, "minus the loss alone")
    lines = [header, ["---"] * len(header)]
    for name, seeds in sorted(rows.items(), key=lambda row: -_mean(row[1], "recall")):
        # the plain peer, else the peer in the same setting, else the best peer
        same_setting = [peer for peer in peers if peer != name and name.endswith(peer.removeprefix(PEER))]
        peer = min(same_setting, key=len, default=best)
        gain = "-"
        if peer is not None and name != peer:
            gain = _gain(seeds, rows[peer])
        line = [name, f"{_mean(seeds, 'recall'):.2f}", gain]
        if has_guides:
            alone = rows.get(_unguided(name), {})
            line.append("-" if name == _unguided(name) else _gain(seeds, alone))
        for key in _COLUMNS:
            line.append(f"{_mean(seeds, key):.3g}" if key in next(iter(seeds.values())) else "-")
        lowest = min(results["recall"] for results in seeds.values())
        lines.append([*line, f"{lowest:.2f}", str(len(seeds))])
    return "\n".join([f"## {stage}, B = {batch}", "", *("| " + " | ".join(line) + " |" for line in lines)])


def _unguided(name: str) -> str:
    """Return the setting of the same loss without a reference or a teacher."""
    return re.sub(r" \+ [^,]+", "", name)


def _gain(seeds: Mapping[int, Any], peer_seeds: Mapping[int, Any]) -> str:
    """Return the mean difference of the recall on the seeds that both have, with its interval."""
    shared = sorted(seeds.keys() & peer_seeds.keys())
    if not shared:
        return "-"
    ours = [seeds[seed]["recall"] for seed in shared]
    theirs = [peer_seeds[seed]["recall"] for seed in shared]
    mean, half_width = difference(ours, theirs)
    return f"{mean:+.2f} ± {half_width:.2f}"


def _mean(seeds: Mapping[int, Any], key: str) -> float:
    return statistics.mean(results[key] for results in seeds.values())
