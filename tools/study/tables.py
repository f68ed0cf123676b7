"""Tables of a study: mean scores over seeds, and paired differences from OpenCLIP with 95% intervals."""

import json
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from math import inf, sqrt
from pathlib import Path
from typing import Any, NamedTuple

from scipy.stats import t as student

from neuclip_ds.errors import UserError, cause_of

PEER = "openclip"
_COLUMNS = ["tau", "kl", "ratio_std", "seconds"]


class RunName(NamedTuple):
    """The parts of the name of a run."""

    stage: str
    arm: str
    batch: int  # of the stage, without the arm's batch_factor
    setting: str  # options that the stage varies, such as `epochs=3/lr=0.001`
    seed: int


def parse_name(name: str) -> RunName:
    """Return the parts of a run's name; raise ValueError if it is not STAGE/ARM/BBATCH[/SETTING]/seedSEED."""
    match = re.fullmatch(r"([^/]+)/([^/]+)/B(\d+)/?(.*)/seed(\d+)", name)
    if match is None:
        raise ValueError(f"{name} is not STAGE/ARM/BBATCH[/SETTING]/seedSEED")
    stage, arm, batch, setting, seed = match.groups()
    return RunName(stage, arm, int(batch), setting, int(seed))


def read_results(path: Path) -> dict[str, Any]:
    """Return the records of a results.jsonl by name, or none if the file does not exist.

    Raises:
        UserError: a line is not a record.
    """
    lines = path.read_bytes().splitlines() if path.is_file() else []
    records: dict[str, Any] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            name = record["name"]
            parse_name(name)
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"Line {number} of {path} is not the record of a run ({cause_of(error)}); remove the line, and repeat "
                "the run if you need it."
            ) from error
        records[name] = record
    return records


def end_last_line(path: Path) -> None:
    """Prepare a results.jsonl for more lines: end the last line with a newline, or drop it if it is incomplete."""
    content = path.read_bytes() if path.is_file() else b""
    if not content or content.endswith(b"\n"):
        return
    start = content.rfind(b"\n") + 1
    with path.open("r+b") as file:
        try:
            json.loads(content[start:])
        except ValueError:
            file.truncate(start)
            print(f"Dropped the incomplete last line of {path}; its run is repeated if a stage needs it.", flush=True)
        else:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")


def difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Return the mean of paired differences, and the half width of its 95% t interval, which is inf for one pair."""
    gains = [a - b for a, b in zip(ours, theirs, strict=True)]
    if len(gains) < 2:
        return statistics.mean(gains), inf
    quantile = float(student.ppf(0.975, len(gains) - 1))
    return statistics.mean(gains), quantile * statistics.stdev(gains) / sqrt(len(gains))


Groups = dict[tuple[str, int], dict[str, dict[int, Any]]]  # (stage, batch) -> setting -> seed -> results


def grouped(records: Mapping[str, Any]) -> Groups:
    """Return the results of runs by stage and batch size, setting, and seed."""
    groups: Groups = {}
    for name, record in records.items():
        stage, arm, batch, varied, seed = parse_name(name)
        setting = f"{arm}, {varied.replace('/', ', ')}" if varied else arm
        seeds = groups.setdefault((stage, batch), {}).setdefault(setting, {})
        seeds[seed] = record["results"]
    return groups


def tables(records: Mapping[str, Any]) -> str:
    """Return a Markdown table for each stage and batch size; each row is compared with the setting from `peer_of`."""
    return "\n\n".join(_table(stage, batch, rows) for (stage, batch), rows in sorted(grouped(records).items()))


def peer_of(name: str, rows: Mapping[str, Mapping[int, Any]]) -> str | None:
    """Return the setting of OpenCLIP with which a setting is compared, or None if there is no other.

    Each setting is compared with plain `openclip`, if the stage contains it. Otherwise, it is compared with OpenCLIP in
    the same setting; OpenCLIP itself, or an arm without such a run, is compared with the best setting of OpenCLIP.

    Args:
        rows: the results of a stage at one batch size, by setting and seed.
    """
    peers = [peer for peer in rows if peer.split(",")[0].removeprefix("tune ") == PEER]
    best = PEER if PEER in rows else max(peers, key=lambda peer: _mean(rows[peer], "recall"), default=None)
    same_setting = [peer for peer in peers if peer != name and name.endswith(peer.removeprefix(PEER))]
    chosen = min(same_setting, key=len, default=best)
    return None if chosen == name else chosen


def _table(stage: str, batch: int, rows: Mapping[str, Mapping[int, Any]]) -> str:
    header = ["arm", "recall %", f"minus {PEER}", *_COLUMNS, "lowest", "seeds"]
    has_guides = any(_unguided(name) in rows for name in rows if name != _unguided(name))
    if has_guides:
        header.insert(3, "minus the loss alone")
    lines = [header, ["---"] * len(header)]
    for name, seeds in sorted(rows.items(), key=lambda row: -_mean(row[1], "recall")):
        peer = peer_of(name, rows)
        gain = "-" if peer is None else _gain(seeds, rows[peer])
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
