"""The tables of docs/reference/results.md, from the records of tools/study/*.jsonl; tools/write_tables.py writes them.

Most tables list every arm that has records in their stages, in the order of plan.yaml, so that new records need no
code. The others list pairs or groups of arms that the functions name.
"""

import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from data_files import Origin, caption, device_of, grid

from neuclip_ds.errors import counted
from study.tables import PEER, difference, parse_name, read_results

FOLDER = Path(__file__).parent
PLAN = yaml.safe_load((FOLDER / "plan.yaml").read_text(encoding="utf-8"))
SOURCES = yaml.safe_load((FOLDER / "records.yaml").read_text(encoding="utf-8"))
LARGE_BATCH = 32  # factor of the batch size in the stage `gate`
QUEUE = "neuclip_queue, tau 0.05"
_NPN = "neuclip, constant tau"
_POOLED_NPN = "neuclip pooled, constant tau"
_LEARNED_POOLED_NPN = "neuclip pooled, learned tau"
# arms whose names do not describe their variants
_LABELS = {
    "neuclip_queue": "`neuclip_queue`, learned tau",
    "amorlip": "`amorlip`, as published",
    "oracle, exact": "exact, alone",
    "oracle, pooled 1": "exact, pooled with the batch's, kappa = 1",
    "oracle, pooled 1, tau 0.05": "exact, pooled with the batch's, kappa = 1, tau = 0.05",
    "oracle, ratio at most 5": "exact, ratio at most 5",
    "tune tuneclip": "`tuneclip` with recovery",
    "tune tuneclip, not recovered": "`tuneclip` without recovery",
}
# the queue has another name where its temperature was searched
_SAME_COLUMN = {"neuclip_queue, constant tau": QUEUE}
_SETTINGS = {"epochs": "{:g} epochs", "hidden": "hidden layer of {:g} units", "noise": "{:.0%} wrong captions"}
_SETTINGS |= {"copies": "{:.0%} copied pairs"}

# losses whose gains choose_loss.md compares -> the names of their arms
_COMPARED = {
    "`sogclr`": ("sogclr",),
    "`fastclip_v1`": ("fastclip_v1",),
    "`fastclip_v3`": ("fastclip_v3",),
    "`neuclip` as published": ("neuclip",),
    "`neuclip`, constant tau": ("neuclip, constant tau",),
    "`neuclip`, pooled (ours), constant tau": ("neuclip pooled, constant tau",),
    "`neuclip`, pooled (ours), learned tau": ("neuclip pooled, learned tau",),
    "`neuclip_queue` (ours), constant tau": (QUEUE, "neuclip_queue, constant tau"),
    "`neuclip_queue` (ours), learned tau": ("neuclip_queue",),
    "`amorlip`, as published": ("amorlip",),
    "`amorlip`, released code": ("amorlip, released code",),
    "`siglip`": ("siglip",),
}
# column heading -> situation: a stage, the setting that it varies, and batch sizes
_SITUATIONS = {
    "frozen, B = 8 and 16": ("finals", "", (8, 16)),
    "frozen, B = 32 and 64": ("finals", "", (32, 64)),
    "frozen, 1 epoch": ("map_epochs", "epochs=1", (16,)),
    "20% wrong captions": ("map_noise", "noise=0.2", (16,)),
    "50% wrong captions": ("map_noise", "noise=0.5", (16,)),
    "80% copied pairs": ("map_copies", "copies=0.8", (16,)),
    "from scratch, 2 epochs": ("trained_scenes", "epochs=2", (16,)),
    "from scratch, 6 epochs": ("trained_scenes_long", "epochs=6", (16,)),
    "pretrained, 2 epochs, same learning rate": ("trained_photographs", "", (10,)),
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """A run of the study."""

    stage: str
    arm: str
    batch: int
    setting: str  # options that the stage varies, such as `epochs=3`
    seed: int
    run: Mapping[str, Any]  # fields of Run (loop.py)
    results: Mapping[str, Any]
    origin: Origin

    @property
    def recall(self) -> float:
        return float(self.results["recall"])


Seeds = Mapping[int, Result]


@cache
def all_results() -> Sequence[Result]:
    """Return the runs in all files of records, in the order of the files.

    Raises `ValueError` if neither a record nor records.yaml gives a run's hardware, date and commit.
    """
    results: list[Result] = []
    for path in sorted(FOLDER.glob("*.jsonl")):
        default = SOURCES["files"].get(path.name, {})
        for name, record in read_results(path).items():
            stage, arm, batch, setting, seed = parse_name(name)
            source = default | {key: record[key] for key in ("hardware", "date", "commit") if record.get(key)}
            if not {"hardware", "date", "commit"} <= source.keys():
                raise ValueError(
                    f"{path.name}: {name} lacks hardware, date or commit; add them for this file to records.yaml."
                )
            origin = Origin(
                name=f"{path.name}@{source['commit']}",
                device=device_of(source["hardware"]),
                hardware=source["hardware"],
                date=source["date"],
                commit=source["commit"],
                code=default.get("code", SOURCES["code"]),
            )
            results.append(
                Result(
                    stage=stage,
                    arm=arm,
                    batch=batch,
                    setting=setting,
                    seed=seed,
                    run=record["run"],
                    results=record["results"],
                    origin=origin,
                )
            )
    return results


def runs(stage: str, arm: str, batch: int, setting: str = "") -> Seeds:
    """Return the runs of an arm by seed."""
    chosen: dict[int, Result] = {}
    for result in all_results():
        if (result.stage, result.arm, result.batch, result.setting) == (stage, arm, batch, setting):
            chosen[result.seed] = result
    return chosen


def of_stages(*stages: str) -> list[Result]:
    return [result for result in all_results() if result.stage in stages]


def arms_of(*stages: str) -> list[str]:
    """Return the arms that have records in any of the stages, in the order of the plan."""
    seen = {result.arm for result in of_stages(*stages)}
    ordered: dict[str, None] = {}
    for stage in stages:
        ordered |= dict.fromkeys(arm for arm in PLAN["stages"][stage]["arms"] if arm in seen)
    return list(ordered)


def batches_of(stage: str) -> list[int]:
    return sorted({result.batch for result in of_stages(stage)})


def label(arm: str) -> str:
    """Return an arm's name as the pages print it: the method as code, and `tau = 0.05` for `tau 0.05`."""
    if arm in _LABELS:
        return _LABELS[arm]
    method, *variant = arm.removeprefix("tune ").removesuffix(", quarter").split(", ")
    name, *pooled = method.split(" ")
    variants = ["".join(f" {word}" for word in pooled).strip(), *variant]
    text = re.sub(r"\b(tau|kappa|gamma) ([\d.]+)", r"\1 = \2", ", ".join(part for part in variants if part))
    text = text.replace("recovered", "with recovery")
    return f"`{name}`, {text}" if text else f"`{name}`"


def label_on_heads(arm: str) -> str:
    """Return an arm's label in the study of heads, with the value of a constant temperature."""
    text = label(arm)
    if "constant tau" in text:
        result = next(result for result in of_stages("finals") if result.arm == arm)
        text = text.replace("constant tau", f"tau = {result.run['options']['temperature']['initial']:g}")
    return text


def mean(seeds: Seeds) -> str:
    return f"{statistics.mean(result.recall for result in seeds.values()):.2f}" if seeds else "-"


def gain(ours: Seeds, theirs: Seeds) -> str:
    """Return the mean difference in recall over the seeds that both have and, with three or more, its 95% interval."""
    shared = sorted(ours.keys() & theirs.keys())
    if not shared:
        return "-"
    middle, half_width = difference([ours[seed].recall for seed in shared], [theirs[seed].recall for seed in shared])
    if len(shared) <= 2:  # from two, the interval would extend 9 standard deviations to either side
        return f"{middle:+.2f} ({counted(len(shared), 'seed')})"
    return f"{middle:+.2f} ± {half_width:.2f}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], results: Sequence[Result]) -> str:
    """Return a Markdown table and, below it, the line that names the source of its results."""
    return f"{grid(head, rows)}\n\n{source_line(results)}"


def source_line(results: Sequence[Result]) -> str:
    """Return the caption of results: one origin for each file and commit, and the numbers of seeds."""
    origins = {result.origin.name: result.origin for result in results}
    by_arm: dict[tuple[str, str, int, str], int] = {}
    for result in results:
        key = (result.stage, result.arm, result.batch, result.setting)
        by_arm[key] = by_arm.get(key, 0) + 1
    seeds = sorted(set(by_arm.values()))
    numbers = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    return caption(*sorted(origins.values(), key=lambda origin: origin.name), note=f"seeds per row: {numbers}")


def best_large_batch(batch: int) -> Seeds:
    """Return the runs of OpenCLIP at 32 times the batch size, at the learning rate with the better mean recall."""
    large = [result for result in of_stages("gate") if result.batch == LARGE_BATCH * batch]
    return _best(_grouped(large, lambda result: result.setting).values())


def _grouped(results: Iterable[Result], key: Callable[[Result], str]) -> dict[str, Seeds]:
    """Return runs by a key, and then by seed."""
    groups: dict[str, dict[int, Result]] = {}
    for result in results:
        groups.setdefault(key(result), {})[result.seed] = result
    return dict(groups)


def _best(candidates: Iterable[Seeds]) -> Seeds:
    """Return the runs with the best mean recall, or none if there are no candidates."""
    return max(candidates, key=lambda seeds: statistics.mean(result.recall for result in seeds.values()), default={})


def losses() -> str:
    """Recall of OpenCLIP by batch size, and the differences of the other arms from it."""
    batches = batches_of("finals")
    peers = {batch: runs("finals", PEER, batch) for batch in batches}
    rows = [[f"recall of `{PEER}`", *(mean(peers[batch]) for batch in batches)]]
    rows.append([f"`{PEER}`, 32x batch", *(gain(best_large_batch(batch), peers[batch]) for batch in batches)])
    for arm in arms_of("finals"):
        if arm != PEER:
            gains = [gain(runs("finals", arm, batch), peers[batch]) for batch in batches]
            rows.append([label_on_heads(arm), *gains])
    head = ["recall minus that of `openclip`", *(f"B = {batch}" for batch in batches)]
    return markdown(head, rows, of_stages("finals", "gate"))


def pairs_of_losses() -> str:
    """Differences between two arms by batch size, for the pairs of arms that the text and the claims compare."""
    compared = [
        ("fastclip_v1", "fastclip_v3"),
        ("neuclip", "fastclip_v3"),
        ("neuclip_queue", "fastclip_v3"),
        (QUEUE, "fastclip_v3"),
        (QUEUE, "fastclip_v1"),
        (QUEUE, "sogclr"),
    ]
    # variants of NeuCLIP with a constant temperature are compared with the published one, with moving averages and with
    # the queue; variants with a learned temperature, with the published one and with the same variant at a constant one
    for arm in arms_of("finals"):
        if arm.startswith("neuclip") and arm.endswith("constant tau"):
            compared += [(arm, "neuclip"), (arm, "sogclr"), (arm, "fastclip_v3"), (arm, QUEUE)]
        elif arm.startswith("neuclip") and arm.endswith("learned tau"):
            compared += [(arm, "neuclip"), (arm, arm.replace("learned", "constant"))]
    batches = batches_of("finals")
    rows: list[list[str]] = []
    for ours, theirs in compared:
        gains = [gain(runs("finals", ours, batch), runs("finals", theirs, batch)) for batch in batches]
        rows.append([f"{label_on_heads(ours)}, minus {label_on_heads(theirs)}", *gains])
    large = [gain(runs("finals", QUEUE, batch), best_large_batch(batch)) for batch in batches]
    rows.append([f"{label(QUEUE)}, minus the 32x batch", *large])
    return markdown(["difference", *(f"B = {batch}" for batch in batches)], rows, of_stages("finals", "gate"))


def normalizer_errors() -> str:
    """Standard deviation over anchors of the error of the log normalizer, by arm and batch size."""
    batches = batches_of("finals")
    rows: list[list[str]] = []
    for arm in arms_of("finals"):
        row = [label_on_heads(arm)]
        for batch in batches:
            results = [run.results for run in runs("finals", arm, batch).values()]
            errors = [result.get("error_std", math.nan) for result in results]
            errors = [error for error in errors if math.isfinite(error)]  # AmorLIP has no normalizer of a sample
            row.append(f"{statistics.mean(errors):.1f}" if errors else "-")
        if set(row[1:]) != {"-"}:
            rows.append(row)
    head = ["deviation of the log normalizer", *(f"B = {batch}" for batch in batches)]
    return markdown(head, rows, of_stages("finals"))


def settings() -> str:
    """Recall of OpenCLIP in other settings, and the differences of the other arms, except NeuCLIP's, from it."""
    stages = [stage for stage in PLAN["stages"] if stage.startswith("map_") or stage == "scenes"]
    columns: dict[str, None] = {}
    for arm in arms_of(*stages):
        if arm not in (_NPN, _POOLED_NPN, _LEARNED_POOLED_NPN):
            columns[_SAME_COLUMN.get(arm, arm)] = None
    others = [arm for arm in columns if arm != PEER]
    rows: list[list[str]] = []
    results: list[Result] = []
    for first in _first_of_each_setting(*stages):
        by_column: dict[str, Seeds] = {}
        for arm in arms_of(first.stage):
            column = _SAME_COLUMN.get(arm, arm)
            if column in columns:
                by_column[column] = runs(first.stage, arm, first.batch, first.setting)
                results += by_column[column].values()
        peer = by_column.get(PEER, {})
        gains = [gain(by_column.get(arm, {}), peer) for arm in others]
        lead = gain(by_column.get(QUEUE, {}), by_column.get("fastclip_v3", {}))
        rows.append([_setting_of(first), str(first.batch), mean(peer), *gains, lead])
    head = ["setting", "B", f"recall of `{PEER}`", *(label_on_heads(arm) for arm in others)]
    head.append(f"{label(QUEUE)}, minus `fastclip_v3`")
    return markdown(head, rows, results)


def neuclip_settings() -> str:
    """Differences of NeuCLIP's variants, alone and pooled, from other arms and each other in other settings."""
    compared = [
        (_NPN, PEER),
        (_NPN, "fastclip_v3"),
        (_POOLED_NPN, PEER),
        (_POOLED_NPN, "fastclip_v3"),
        (_POOLED_NPN, QUEUE),
        (_LEARNED_POOLED_NPN, _POOLED_NPN),
    ]
    rows: list[list[str]] = []
    used: dict[tuple[str, str, str, int], Result] = {}
    for first in _first_of_each_setting(*(stage for stage in PLAN["stages"] if stage.startswith("map_"))):
        gains: list[str] = []
        for arms in compared:
            ours, theirs = (runs(first.stage, arm, first.batch, first.setting) for arm in arms)
            gains.append(gain(ours, theirs))
            for seed in ours.keys() & theirs.keys():
                for result in (ours[seed], theirs[seed]):
                    used[result.stage, result.arm, result.setting, seed] = result
        if set(gains) != {"-"}:
            rows.append([_setting_of(first), *gains])
    head = [f"{label_on_heads(ours)}, minus {label_on_heads(theirs)}" for ours, theirs in compared]
    return markdown(["setting, B = 16", *head], rows, list(used.values()))


def _first_of_each_setting(*stages: str) -> list[Result]:
    """Return one result of each setting of the stages, in the order of the stages."""
    firsts: dict[tuple[str, str], Result] = {}
    for stage in stages:
        for result in of_stages(stage):
            firsts.setdefault((stage, result.setting), result)
    return list(firsts.values())


def _setting_of(result: Result) -> str:
    parts: list[str] = []
    for part in filter(None, result.setting.split("/")):
        key, _, value = part.partition("=")
        text = _SETTINGS[key].format(float(value)) if key in _SETTINGS else part
        parts.append("1 epoch" if text == "1 epochs" else text)
    return ", ".join(["scenes", *parts] if result.stage == "scenes" else parts)


def temperatures() -> str:
    """Learned temperatures during training; KL divergence, error of the normalizers and recall at the end."""
    shown = {
        "12 epochs": ("finals", ""),
        "30 epochs": ("map_long", "epochs=30"),
        "80% copied pairs": ("map_copies", "copies=0.8"),
        "50% wrong captions": ("map_noise", "noise=0.5"),
    }
    rows: list[list[str]] = []
    results: list[Result] = []
    for title, (stage, setting) in shown.items():
        for arm in arms_of(stage):
            seeds = runs(stage, arm, 16, setting)
            curves = [result.results["curve"] for result in seeds.values()]
            has_normalizers = math.isfinite(curves[0][-1].get("error_mean", math.nan))
            if not has_normalizers or not _learns_tau(seeds):
                continue
            results += seeds.values()
            path: list[str] = []
            for records in zip(*curves, strict=True):
                path.append(f"{statistics.mean(record['tau'] for record in records):.3f}")
            divergence = statistics.mean(curve[-1]["kl"] for curve in curves)
            error = statistics.mean(curve[-1]["error_mean"] for curve in curves)
            numbers = [f"{divergence:.2f}", _rho_of(seeds), f"{error:+.2f}", mean(seeds)]
            rows.append([title, label(arm), ", ".join(path), *numbers])
    head = ["B = 16", "loss", "tau after 10, 30, 60, 100%", "KL", "rho", "error of the log normalizer", "recall"]
    return markdown(head, rows, results)


def _learns_tau(seeds: Seeds) -> bool:
    """Return whether the temperature of an arm moves by more than rounding."""
    curve = next(iter(seeds.values())).results["curve"]
    return bool(abs(curve[0]["tau"] - curve[-1]["tau"]) > 1e-4)


def _rho_of(seeds: Seeds) -> str:
    """Return log(n / effective), or a dash if the arm has no rho."""
    result = next(iter(seeds.values()))
    effective = result.run["effective"]
    if effective is None:
        return "-"
    samples = round(result.results["step"] * result.batch / result.run["epochs"])
    return f"{math.log(samples / effective):.2f}"


def causes() -> str:
    """Recall of variants that test why a loss is worse than others, and their differences from these other losses."""
    # by stage: its setting, and the stages and arms with which its arms are compared
    peers = {
        "neuclip_tau": ("", [("finals", "neuclip"), ("finals", "neuclip, constant tau")]),
        "queue_copies": ("copies=0.8", [("map_copies", "fastclip_v3"), ("queue_copies", QUEUE)]),
        "queue_long": ("epochs=30", [("map_long", "fastclip_v3"), ("map_long", "neuclip_queue"), ("map_long", QUEUE)]),
    }
    rows: list[list[str]] = []
    for stage, (setting, compared) in peers.items():
        for arm, seeds in _by_arm(stage).items():
            title = _setting_of(next(iter(seeds.values()))) or "12 epochs"
            tau = statistics.mean(result.results["tau"] for result in seeds.values())
            for peer_stage, peer in compared:
                if (peer_stage, peer) != (stage, arm):
                    difference_from_peer = gain(seeds, runs(peer_stage, peer, 16, setting))
                    rows.append(
                        [
                            title,
                            label_on_heads(arm),
                            f"{tau:.3f}",
                            mean(seeds),
                            label_on_heads(peer),
                            difference_from_peer,
                        ]
                    )
    head = ["setting, B = 16", "loss", "final tau", "recall", "compared with", "difference"]
    return markdown(head, rows, of_stages(*peers))


def oracles() -> str:
    """Recall with exact normalizers, and the standard deviation of an anchor's total negative weight in a batch."""
    peer = runs("oracles", "openclip, tau 0.026", 16)
    rows: list[list[str]] = []
    for stage in ("oracles", "oracle_constant_tau"):
        for arm in arms_of(stage):
            seeds = runs(stage, arm, 16)
            deviations = [result.results["ratio_std"] for result in seeds.values() if "ratio_std" in result.results]
            deviation = f"{statistics.mean(deviations):.1f}" if deviations else "-"
            queue = gain(seeds, runs("finals", QUEUE, 16)) if stage == "oracle_constant_tau" else "-"
            minus_peer = "-" if seeds == peer or stage != "oracles" else gain(seeds, peer)
            rows.append([label(arm), mean(seeds), minus_peer, queue, deviation])
    head = ["normalizer, B = 16", "recall", f"minus `{PEER}`", f"minus {label(QUEUE)}", "deviation of the ratio"]
    return markdown(head, rows, of_stages("oracles", "oracle_constant_tau"))


def guides() -> str:
    """Recall of each loss with and without a reference model or a teacher."""
    stages = {"heads, Flickr8k": "guided", "towers, scenes": "towers"}
    rows: list[list[str]] = []
    for title, stage in stages.items():
        for arm in arms_of(stage):
            if " + " in arm:
                continue
            alone = runs(stage, arm, 64)
            name = arm.removesuffix(", quarter")
            gains = [gain(runs(stage, f"{name} + {guide}, quarter", 64), alone) for guide in ("reference", "teacher")]
            minus_peer = gain(alone, runs(stage, f"{PEER}, quarter", 64)) if name != PEER else "-"
            rows.append([title, label(arm), mean(alone), minus_peer, *gains])
    head = ["setting", "loss", "recall alone", f"alone, minus `{PEER}`", "with reference", "with teacher"]
    return markdown(head, rows, of_stages(*stages.values()))


def guide_settings() -> str:
    """The guides of both settings, and the runs that use them."""
    rows: list[list[str]] = []
    for title, stage, guided in (("heads, Flickr8k", "guide", "guided"), ("towers, scenes", "towers_guide", "towers")):
        for result in of_stages(stage):
            steps = of_stages(guided)[0].results["step"]
            pairs = f"{result.results['step']:,} steps at B = {result.batch}"
            rows.append([title, pairs, f"{result.recall:.2f}", f"{steps:,} steps at B = {of_stages(guided)[0].batch}"])
    return markdown(["setting", "guide", "recall of the guide", "runs"], rows, of_stages("guide", "towers_guide"))


def trained_towers() -> str:
    """Recall of OpenCLIP with both towers trained, and the differences of the other arms from it."""
    columns = _final_runs_of_trained_towers()
    scenes = _by_arm("trained_scenes")
    rows: list[list[str]] = []
    for arm in arms_of("trained_scenes"):
        tau = statistics.mean(result.results["tau"] for result in scenes[arm].values())
        if arm == PEER:
            title = f"recall of `{PEER}`"
            cells = [mean(by_arm.get(PEER, {})) for by_arm in columns.values()] + ["-"]
        else:
            title = label(arm)
            cells = [gain(by_arm.get(arm, {}), by_arm.get(PEER, {})) for by_arm in columns.values()]
            on_photographs = runs("trained_photographs", arm, 10)
            cells.append(gain(on_photographs, _peer_at_the_rate_of(on_photographs)))
        rows.append([title, f"{_rate_of(scenes[arm]):g}", f"{tau:.3f}", *cells])
    results: list[Result] = []
    for by_arm in columns.values():
        for seeds in by_arm.values():
            results += seeds.values()

    # runs with another learning rate than the one that was best on scenes
    photographs = "photographs, 2 epochs"
    columns_of_stages = {
        "scenes_half_rate": "scenes, 6 epochs",
        "photographs_half_rate": photographs,
        "photographs_rate": photographs,
    }
    for stage, column in columns_of_stages.items():
        for arm, seeds in _by_arm(stage).items():
            by_column = dict.fromkeys(columns, "-") | {column: gain(seeds, columns[column][PEER])}
            has_peer = arm != PEER and column == photographs
            at_its_rate = gain(seeds, _peer_at_the_rate_of(seeds)) if has_peer else "-"
            rows.append([label(arm), f"{_rate_of(seeds):g}", "-", *by_column.values(), at_its_rate])
            results += seeds.values()
    head = [f"recall minus that of `{PEER}`", "learning rate", "final tau, scenes, 2 epochs", *columns]
    head.append(f"photographs, minus `{PEER}` at the same rate")
    return markdown(head, rows, results)


def _rate_of(seeds: Seeds) -> float:
    """Return the learning rate that all runs of an arm share."""
    (rate,) = {result.run["lr"] for result in seeds.values()}
    return float(rate)


def _peer_at_the_rate_of(ours: Seeds) -> Seeds:
    """Return the runs of OpenCLIP on photographs with the same learning rate, or none if there are none."""
    stages = ("trained_photographs", "photographs_half_rate")
    peers = [result for result in of_stages(*stages) if result.arm == PEER]
    return {peer.seed: peer for peer in peers if ours and peer.run["lr"] == _rate_of(ours)}


def pairs_of_trained_towers() -> str:
    """Differences between the pairs of arms that the text compares, with both towers trained."""
    compared = [
        ("neuclip_queue, constant tau", "fastclip_v3"),
        ("neuclip_queue, constant tau", "neuclip"),
        ("neuclip_queue, constant tau", "neuclip pooled, constant tau"),
        ("neuclip_queue, constant tau", "neuclip_queue"),
        ("neuclip", "fastclip_v3"),
        ("neuclip", "sogclr"),
        ("neuclip pooled, constant tau", "neuclip"),
    ]
    columns = _final_runs_of_trained_towers()
    rows: list[list[str]] = []
    for ours, theirs in compared:
        gains = [gain(by_arm.get(ours, {}), by_arm.get(theirs, {})) for by_arm in columns.values()]
        rows.append([f"{label(ours)}, minus {label(theirs)}", *gains])
    results: list[Result] = []
    for by_arm in columns.values():
        for arm in {arm for pair in compared for arm in pair}:
            results += by_arm.get(arm, {}).values()
    return markdown(["difference", *columns], rows, results)


def _final_runs_of_trained_towers() -> dict[str, dict[str, Seeds]]:
    """Return the final runs with both towers trained, by column title and arm; columns without runs are omitted."""
    stages = {
        "scenes, 2 epochs": "trained_scenes",
        "scenes, 6 epochs": "trained_scenes_long",
        "photographs, 2 epochs": "trained_photographs",
    }
    columns = {title: _by_arm(stage) for title, stage in stages.items()}
    return {title: by_arm for title, by_arm in columns.items() if by_arm}


def _by_arm(stage: str) -> dict[str, Seeds]:
    return _grouped(of_stages(stage), lambda result: result.arm)


def gains_by_situation() -> str:
    """The gains of losses in each situation: intervals at one batch size, and ranges of means over several."""
    rows: list[list[str]] = []
    results: list[Result] = []
    for title, arms in _COMPARED.items():
        cells: list[str] = []
        for stage, setting, batches in _SITUATIONS.values():
            gains: list[tuple[Seeds, Seeds]] = []
            for arm, batch in itertools.product(arms, batches):
                ours = runs(stage, arm, batch, setting)
                if ours:
                    theirs = runs(stage, PEER, batch, setting)
                    if stage == "trained_photographs":  # the searched rates differ by a factor of two
                        theirs = _peer_at_the_rate_of(ours)
                    gains.append((ours, theirs))
                    results += ours.values()
            cells.append(gain(*gains[0]) if len(batches) == 1 and gains else range_of_gains(gains))
        if set(cells) != {"-"}:
            rows.append([title, *cells])
    return markdown(["points above `openclip`", *_SITUATIONS], rows, results)


def range_of_gains(gains: Iterable[tuple[Seeds, Seeds]]) -> str:
    """Return the smallest and the largest of some mean differences of the recall, or a dash if there are none."""
    means: list[float] = []
    for ours, theirs in gains:
        shared = ours.keys() & theirs.keys()
        means.append(statistics.mean(ours[seed].recall - theirs[seed].recall for seed in shared))
    return _range(means)


def gains_on_heads(*arms: str) -> str:
    """Return the range of the gains of arms over OpenCLIP at all batch sizes, for a sentence."""
    gains: list[tuple[Seeds, Seeds]] = []
    for arm, batch in itertools.product(arms, batches_of("finals")):
        ours = runs("finals", arm, batch)
        if ours:
            gains.append((ours, runs("finals", PEER, batch)))
    return f"{range_of_gains(gains).replace('+', '')} points"


def lowest_recall_on_heads() -> str:
    """Return the lowest recall of a final run with linear heads."""
    return f"{min(result.recall for result in of_stages('finals')):.1f}"


def _range(values: Sequence[float]) -> str:
    """Return the range of numbers with one decimal, or a dash if there are none."""
    if not values:
        return "-"
    low = f"{min(values):+.1f}"
    high = f"{max(values):+.1f}"
    return low if low == high else f"{low} to {high}"


def fine_tuning() -> str:
    """Recall after fine-tuning, and the difference from OpenCLIP without recovery."""
    peer = runs("tune", "tune openclip", 16)
    rows: list[list[str]] = []
    for arm in arms_of("tune"):
        seeds = runs("tune", arm, 16)
        rows.append([label(arm), mean(seeds), "-" if seeds == peer else gain(seeds, peer)])
    return markdown(["loss", "recall", f"minus `{PEER}`"], rows, of_stages("tune"))


TABLES: Mapping[str, Callable[[], str]] = {
    "study_losses": losses,
    "study_pairs": pairs_of_losses,
    "study_normalizers": normalizer_errors,
    "study_settings": settings,
    "study_neuclip_settings": neuclip_settings,
    "study_temperatures": temperatures,
    "study_causes": causes,
    "study_oracles": oracles,
    "study_guide_settings": guide_settings,
    "study_guides": guides,
    "study_trained_towers": trained_towers,
    "study_pairs_of_trained_towers": pairs_of_trained_towers,
    "study_fine_tuning": fine_tuning,
    "study_gains_by_situation": gains_by_situation,
}
VALUES: Mapping[str, Callable[[], str]] = {
    "gain_of_queue_on_heads": lambda: gains_on_heads(QUEUE),
    "lowest_recall_on_heads": lowest_recall_on_heads,
    "gain_of_moving_averages_on_heads": lambda: gains_on_heads("sogclr", "fastclip_v1", "fastclip_v3"),
}
