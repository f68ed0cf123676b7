"""The cold-start study's tables and curves, from its records: tuneclip.md, tuneclip.html and tuneclip.png."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from neuclip_ds.reporting.page import Table, write_page
from neuclip_ds.reproduction.cold_start import SEARCH, VARIANTS
from neuclip_ds.reproduction.cold_start_record import Record
from neuclip_ds.reproduction.paired import difference
from neuclip_ds.reproduction.report import summarize, verdict

START = "the start"
_PEER = "FastCLIP, constant tau"
_GCL, _NOISY = "GCL, moments and u recovered", "TuneCLIP, mismatched captions"
COMPARED: tuple[tuple[str, str, str], ...] = (
    ("recovering moments and u better than nothing", "TuneCLIP", "HGCL, nothing recovered"),
    ("moments alone better than nothing", "HGCL, moments recovered", "HGCL, nothing recovered"),
    ("u adds to the moments", "TuneCLIP", "HGCL, moments recovered"),
    ("TuneCLIP better than its checkpoint", "TuneCLIP", START),
    ("OpenCLIP's fine-tuning makes the checkpoint worse", START, "OpenCLIP"),
    ("FastCLIP's fine-tuning makes the checkpoint worse", START, _PEER),
    ("better than OpenCLIP's fine-tuning", "TuneCLIP", "OpenCLIP"),
    ("better than FastCLIP's fine-tuning", "TuneCLIP", _PEER),
    ("recovery better than a warm-up with momentum SGD", "TuneCLIP", "HGCL, warm-up with momentum SGD"),
    ("recovery better than a warm-up of AdamW's rate", "TuneCLIP", "HGCL, warm-up of one epoch"),
    ("recovery better than moments of a larger batch", "TuneCLIP", "HGCL, moments of a larger batch"),
    ("AdamW better than momentum SGD after recovery", "TuneCLIP", "TuneCLIP, momentum SGD"),
    ("the hinged loss better than the plain one", "TuneCLIP", _GCL),
    ("the plain loss after recovery better than the checkpoint", _GCL, START),
    ("the plain loss after recovery better than OpenCLIP", _GCL, "OpenCLIP"),
    *((f"margin 0.1 better than {m}", "TuneCLIP", f"TuneCLIP, margin {m}") for m in (0.01, 0.05, 0.2, 0.4)),
    ("full recovery better than cached", "TuneCLIP", "TuneCLIP, cached recovery"),
    ("recovery with the plain loss better than with the hinged", "TuneCLIP", "TuneCLIP, recovery with the hinged loss"),
    ("it gains on noisy data", _NOISY, START),
    ("better than OpenCLIP's on noisy data", _NOISY, "OpenCLIP, mismatched captions"),
    ("the hinged loss better than the plain one on noisy data", _NOISY, "GCL, mismatched captions"),
)
"""Claim, the variant that it says is better, and the other."""
Seeds = Mapping[int, Record]


def write(records: Sequence[Record], folder: Path, heading: str) -> str:
    """Write the study's page into a folder and return its tables as Markdown."""
    finals = _by_seed(records, "tune")
    tables = [_quality(finals), _claims(finals), _search(records), _recoveries(records)]
    tables += [*_summaries(records, "difference", "Cached recovery against the full one"), *_nearest(records)]
    figures = {"tuneclip.png": _plot(finals)}
    return write_page([table for table in tables if table.rows], figures, folder / "tuneclip", heading)


def _by_seed(records: Sequence[Record], kind: str) -> dict[str, dict[int, Record]]:
    """`KIND/GROUP/...` -> GROUP -> seed -> record."""
    groups: defaultdict[str, dict[int, Record]] = defaultdict(dict)
    for record in records:
        parts = record.name.split("/")
        if parts[0] == kind:
            groups["/".join(parts[1:-1])][record.seed] = record
    return dict(groups)


def _quality(finals: Mapping[str, Seeds]) -> Table:
    """Return the table of every variant's last point and, if it has a curve, the extremes after the start."""
    header = ["variant", "learning rate", "start, recall %", "lowest - start", "highest - start", "end - start"]
    table = Table(
        "Fine-tuning on other data, 95 % intervals over seeds", [*header, "zero-shot top-1 %, end - start"], []
    )
    for name, seeds in finals.items():
        recalls = [record.recall for record in seeds.values()]
        zero_shot = [record.zero_shot for record in seeds.values()]
        starts = [curve[0] for curve in recalls]
        has_curve = all(len(curve) > 2 for curve in recalls)
        extremes = (
            str(difference([pick(curve[1:]) for curve in recalls], starts)) if has_curve else "-" for pick in (min, max)
        )
        ends = (
            difference([curve[-1] for curve in curves], [curve[0] for curve in curves])
            for curves in (recalls, zero_shot)
        )
        rate = next(iter(seeds.values())).options["optimizer.lr"]
        table.rows.append([name, f"{rate:g}", str(summarize(starts)), *extremes, *map(str, ends)])
    return table


def _claims(finals: Mapping[str, Seeds]) -> Table:
    header = ["claim", "better", "than", "mean recall %", "claim", "zero-shot top-1 %", "claim", "seeds"]
    table = Table("Claims: paired differences at the end, 95 % intervals", header, [])
    for claim, ours, theirs in COMPARED:
        if not {ours, theirs} - {START} <= finals.keys():
            continue
        seeds = sorted(set.intersection(*(set(finals[name]) for name in (ours, theirs) if name != START)))
        cells = []
        for score in (lambda record: record.recall, lambda record: record.zero_shot):
            found = difference(
                *(_ends(finals, name, other, seeds, score) for name, other in ((ours, theirs), (theirs, ours)))
            )
            cells += [str(found), verdict(found)]
        table.rows.append([claim, ours, theirs, *cells, str(len(seeds))])
    return table


def _ends(
    finals: Mapping[str, Seeds], name: str, other: str, seeds: Sequence[int], score: Callable[[Record], Sequence[float]]
) -> list[float]:
    """Return a variant's scores at the end, or those that the other one started from."""
    if name == START:
        return [score(finals[other][seed])[0] for seed in seeds]
    return [score(finals[name][seed])[-1] for seed in seeds]


def _search(records: Sequence[Record]) -> Table:
    scores: defaultdict[str, dict[float, float]] = defaultdict(dict)
    for record in records:
        if record.name.startswith(f"{SEARCH}/"):
            found = record.recall[-1] if record.recall else 0.0
            scores[record.name.split("/")[1]][record.options["optimizer.lr"]] = found
    rates = sorted({rate for found in scores.values() for rate in found})
    rows = [[name, *(f"{found[r]:.2f}" if r in found else "-" for r in rates)] for name, found in scores.items()]
    title = "Search on the validation split (seed 0), mean recall %"
    return Table(title, ["variant", *(f"lr {rate:g}" for rate in rates)], rows)


def _recoveries(records: Sequence[Record]) -> Table:
    """Return the table of the error of u after every way to recover, over pretrained models."""
    table = Table("Error of the recovered u", ["recovered", "log u against all pairs, mean square"], [])
    for name, seeds in _by_seed(records, "recover").items():
        errors = [record.scores["normalizer_mse"] for record in seeds.values() if "normalizer_mse" in record.scores]
        if errors and all(map(math.isfinite, errors)):
            table.rows.append([name, str(summarize(errors))])
    return table


def _summaries(records: Sequence[Record], kind: str, title: str) -> list[Table]:
    """Return a table of all scores of a kind of measurement, over seeds."""
    tables = []
    for seeds in _by_seed(records, kind).values():
        found = [record.scores for record in seeds.values()]
        summaries = {key: summarize(row[key] for row in found) for key in found[0]}
        rows = [[key, f"{of.mean:.3f} ± {of.deviation:.3f}"] for key, of in summaries.items()]
        tables.append(Table(title, ["what", "mean and deviation over seeds"], rows))
    return tables


def _nearest(records: Sequence[Record]) -> list[Table]:
    header = ["model", "positive", "five nearest negatives", "their deviation", "negatives of ranks 90 to 100"]
    table = Table("Cosine similarities on the fine-tuning pairs", header, [])
    for name, seeds in _by_seed(records, "nearest").items():
        columns = zip(*(record.scores.values() for record in seeds.values()), strict=True)
        table.rows.append([name, *(f"{(of := summarize(column)).mean:.4f} ± {of.deviation:.4f}" for column in columns)])
    return [table]


def _plot(finals: Mapping[str, Seeds]) -> Figure:
    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2)
    titles = ("mean recall %", "zero-shot top-1 %")
    for axes, title, score in zip(panels, titles, (lambda r: r.recall, lambda r: r.zero_shot), strict=True):
        for name in (name for name, variant in VARIANTS.items() if variant.searched is None and name in finals):
            runs = list(finals[name].values())
            changes = [[value - score(run)[0] for value in score(run)] for run in runs]
            summaries = [summarize(of_step) for of_step in zip(*changes, strict=True)]
            low, mean, high = ([s.mean + sign * s.deviation for s in summaries] for sign in (-1, 0, 1))
            (line,) = axes.plot(runs[0].step, mean, label=name)
            axes.fill_between(runs[0].step, low, high, alpha=0.15, color=line.get_color())
        axes.axhline(0, color="gray", linewidth=0.8)
        axes.set(xlabel="step of fine-tuning", ylabel=f"{title}, held out, change from the start")
    panels[0].legend(fontsize=8)
    return figure
