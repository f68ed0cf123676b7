"""Tables and plots of the miniature study, from the results of its runs: report.html, report.md and PNG files."""

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from neuclip_ds.reporting.page import Table, write_page
from neuclip_ds.reproduction.paired import Difference, difference
from neuclip_ds.reproduction.study import ABLATIONS, ALIKE, ARMS, OPTIMIZERS, Regime

Scores = Mapping[str, float]
Results = Mapping[str, Scores]
Seeds = Mapping[int, Scores]  # an arm's results in a regime, by seed
RECALLS = [f"{side}_recall@{k}" for side in ("image_to_text", "text_to_image") for k in (1, 5, 10)]
PEER = "openclip"
COMPARED: tuple[tuple[str, str, str], ...] = (
    ("NeuCLIP better than OpenCLIP", "neuclip", PEER),
    ("NeuCLIP's full gradient better than alpha constant", "neuclip", "neuclip, alpha constant"),
    (
        "alpha's part along the positive as good as its full gradient",
        "neuclip, alpha's part along the positive",
        "neuclip",
    ),
    ("NeuCLIP without rho better than with it", "neuclip, no rho", "neuclip"),
    ("NeuCLIP without rho better than OpenCLIP", "neuclip, no rho", PEER),
    ("neuclip_queue better than OpenCLIP", "neuclip_queue", PEER),
    ("neuclip_queue as good as NeuCLIP", "neuclip_queue", "neuclip"),
    *(
        (f"{name} better than OpenCLIP at its rate and start", f"{name}, at OpenCLIP's rate and start", PEER)
        for name in ("neuclip", "neuclip_queue", "neuclip_queue, kappa 0.25", "neuclip_queue, kappa rises")
    ),
    *(
        (f"{name} better than OpenCLIP from tau 0.03", f"{name}, tau from 0.03", "openclip, tau from 0.03")
        for name in (
            "neuclip",
            "neuclip, no rho",
            "neuclip, alpha's part along the positive, no rho",
            "neuclip_queue",
            "fastclip_v3, drift corrected",
        )
    ),
    ("NeuCLIP from its search's start better than OpenCLIP from tau 0.03", "neuclip", "openclip, tau from 0.03"),
    *(
        (f"{name} from tau 0.03 better than from the start of its search", f"{name}, tau from 0.03", name)
        for name in ("openclip", "neuclip", "neuclip_queue")
    ),
    (
        "neuclip_queue without rho better than with it",
        "neuclip_queue, tau from 0.03",
        "neuclip_queue, tau from 0.03, rho",
    ),
    ("neuclip_queue in bf16 better than OpenCLIP in bf16", "neuclip_queue, bf16", "openclip, bf16"),
    ("NeuCLIP in bf16 better than OpenCLIP in bf16", "neuclip, bf16", "openclip, bf16"),
    ("neuclip_queue at tau 0.02 better than OpenCLIP there", "neuclip_queue, tau 0.02", "openclip, tau 0.02"),
    ("NeuCLIP at tau 0.02 better than OpenCLIP there", "neuclip, tau 0.02", "openclip, tau 0.02"),
    ("neuclip_queue with m = 64 as good as NeuCLIP with it", "neuclip_queue, m = 64", "neuclip, m = 64"),
    (
        "a rising kappa helps neuclip_queue with rho",
        "neuclip_queue, tau from 0.03, rho, kappa rises",
        "neuclip_queue, tau from 0.03, rho",
    ),
    ("NeuCLIP better than FastCLIP-v3", "neuclip", "fastclip_v3"),
    ("FastCLIP-v3 better than OpenCLIP", "fastclip_v3", PEER),
    (
        "correcting the drift of u helps FastCLIP-v3",
        "fastclip_v3, drift corrected",
        "fastclip_v3",
    ),
    *(
        (f"FastCLIP-{name} better than {peer}", f"fastclip_{name}", peer)
        for name, peer in (("v3", "fastclip_v0"), ("v3", "fastclip_v1"), ("v3", "fastclip_v2"), ("v1", "fastclip_v0"))
    ),
    ("FastCLIP-v1 better than SogCLR", "fastclip_v1", "sogclr"),
    ("FastCLIP-v2 better than iSogCLR", "fastclip_v2", "isogclr"),
    *((f"AdamW better for FastCLIP-v3 than {name.split(', ')[1]}", "fastclip_v3", name) for name in OPTIMIZERS),
    ("AmorLIP better than OpenCLIP", "amorlip", PEER),
    ("AmorLIP better than FastCLIP-v3", "amorlip", "fastclip_v3"),
    ("AmorLIP better than SigLIP", "amorlip", "siglip"),
    ("NeuCLIP better than SigLIP", "neuclip", "siglip"),
    ("NeuCLIP better than AmorLIP", "neuclip", "amorlip"),
)
"""Claim, the arm that it is about, and the arm that this is compared with."""
EQUAL_TERMS = (
    *((f"neuclip_queue, {terms}", f"{PEER}, {terms}") for terms in ("tau from 0.03", "tau 0.02", "bf16")),
    ("neuclip_queue, at OpenCLIP's rate and start", PEER),
)
"""Arms of the recommended method and of OpenCLIP that differ in the loss alone."""
SMALL_BATCH = 128  # up to which the recommended method should be ahead
_LOWEST = -8  # of the plotted differences: runs that diverge would flatten all others


class Summary(NamedTuple):
    """A figure over seeds."""

    mean: float
    deviation: float
    seeds: int

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.deviation:.2f}" if self.seeds > 1 else f"{self.mean:.2f}"


def mean_recall(result: Scores) -> float:
    """Mean of R@1, R@5 and R@10 in both directions, percent; 0 for a run that diverged."""
    return 100 * statistics.mean(result.get(name, 0.0) for name in RECALLS)


def summarize(values: Iterable[float]) -> Summary:
    """Mean and sample deviation."""
    known = list(values)
    return Summary(statistics.mean(known), statistics.stdev(known) if len(known) > 1 else 0.0, len(known))


def by_group(results: Results, kind: str) -> dict[str, list[Scores]]:
    """`KIND/GROUP/seedN` -> results of GROUP's seeds."""
    return {group: list(seeds.values()) for group, seeds in by_seed(results, kind).items()}


def by_seed(results: Results, kind: str) -> dict[str, dict[int, Scores]]:
    """`KIND/GROUP/seedN` -> GROUP -> N -> results."""
    groups: defaultdict[str, dict[int, Scores]] = defaultdict(dict)
    for name, result in results.items():
        match = re.fullmatch(rf"{re.escape(kind)}/(.+)/seed(\d+)", name)
        if match:
            groups[match[1]][int(match[2])] = result
    return dict(groups)


def after_seed(results: Results, last: int) -> Results:
    """Return the results without the finals of seeds up to `last`."""
    seeds = {name: re.fullmatch(r"\d.*/seed(\d+)", name) for name in results}
    return {name: results[name] for name, match in seeds.items() if match is None or int(match[1]) > last}


def regimes(results: Results) -> list[Regime]:
    """Return the regimes that have results, by epochs and batch size."""
    found = {match[1] for name in results if (match := re.fullmatch(r"(\d+x\d+(?:/10)?)/.+/seed\d+", name))}
    return sorted(map(Regime.parse, found), key=lambda regime: (regime.tenth, regime.epochs, regime.batch))


def gain(ours: Seeds, theirs: Seeds) -> Difference | None:
    """Return the difference of mean recall over the seeds that both have; None where there is none."""
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None
    return difference([mean_recall(ours[seed]) for seed in seeds], [mean_recall(theirs[seed]) for seed in seeds])


def verdict(found: Difference | None) -> str:
    """Say what an interval shows about a claim that its arm is better."""
    if found is None or found.pairs == 1:
        return "-"
    return ("holds" if found.mean > 0 else "fails") if found.clear else "within noise"


def tables(results: Results) -> list[Table]:
    """Return a table for each claim, each regime and the ablations, then the search and the costs."""
    known = {regime: by_seed(results, str(regime)) for regime in regimes(results)}
    pages = [*filter(None, (_together(known), *(_claim(known, *compared) for compared in COMPARED)))]
    pages += [
        _regime(regime, {name: found[name] for name in (*ARMS, *ALIKE) if name in found})
        for regime, found in known.items()
    ]
    pages += [table for regime, found in known.items() for table in _ablations(regime, found)]
    costs = {name: summarize(one["step_ms"] for one in group) for name, group in by_group(results, "cost").items()}
    times = [[name, str(cost), f"{cost.mean / costs[PEER].mean:.2f}"] for name, cost in costs.items()]
    one_at_a_time = "Time of a step, one run at a time, one process with one thread"
    return [*pages, *_search(results), Table(one_at_a_time, ["method", "ms", "of openclip's"], times)]


def _claim(known: Mapping[Regime, Mapping[str, Seeds]], claim: str, arm: str, peer: str) -> Table | None:
    rows = []
    for regime, found in known.items():
        gained = gain(found.get(arm, {}), found.get(peer, {}))
        if gained is not None:
            both = found[arm].keys() & found[peer].keys()
            means = (str(summarize(mean_recall(found[name][seed]) for seed in both)) for name in (arm, peer))
            rows.append([str(regime.batch), _epochs(regime), *means, *_judged(gained)])
    header = ["B", "epochs", arm, peer, "difference (95 %)", "seeds", "claim"]
    return Table(f"Claim: {claim}", header, rows) if rows else None


def _together(known: Mapping[Regime, Mapping[str, Seeds]]) -> Table | None:
    """All comparisons on equal terms at small batches, and the mean of each seed's differences over them."""
    compared = {
        (regime, arm): (found[arm], found[peer])
        for regime, found in known.items()
        for arm, peer in EQUAL_TERMS
        if regime.batch <= SMALL_BATCH and arm in found and peer in found
    }
    if len(compared) < 2:
        return None
    gains = {which: gain(*both) for which, both in compared.items()}
    rows = [
        [str(regime.batch), _epochs(regime), arm, *_judged(found)]
        for (regime, arm), found in gains.items()
        if found is not None
    ]
    seeds = sorted(set.intersection(*(ours.keys() & theirs.keys() for ours, theirs in compared.values())))
    if seeds:
        means = [
            [statistics.mean(mean_recall(both[side][seed]) for both in compared.values()) for seed in seeds]
            for side in (0, 1)
        ]
        rows.append(["all", "", "mean of each seed's differences", *_judged(difference(*means))])
    title = f"Claim: neuclip_queue better than OpenCLIP on equal terms, B <= {SMALL_BATCH}"
    return Table(title, ["B", "epochs", "arm", "difference (95 %)", "seeds", "claim"], rows)


def _judged(found: Difference) -> list[str]:
    return [str(found), str(found.pairs), verdict(found)]


def _epochs(regime: Regime) -> str:
    return f"{regime.epochs} of n/10" if regime.tenth else str(regime.epochs)


_COLUMNS = {
    "image to text R@1 %": ("image_to_text_recall@1", 100),
    "text to image R@1 %": ("text_to_image_recall@1", 100),
    "zero-shot top-1 %": ("zero_shot_top1", 100),
    "normaliser MSE": ("normalizer_mse", 1),
}


def _regime(regime: Regime, found: Mapping[str, Seeds]) -> Table:
    title = f"B = {regime.batch}, {_epochs(regime)} epochs"
    ranked = sorted(found, key=lambda name: -summarize(map(mean_recall, found[name].values())).mean)
    rows = [_row(name, found[name], found.get(PEER, {})) for name in ranked]
    return Table(title, ["arm", "mean recall %", "minus openclip (95 %)", *_COLUMNS, "seeds"], rows)


def _ablations(regime: Regime, found: Mapping[str, Seeds]) -> list[Table]:
    rows = [_row(name, found[name], found.get(method, {})) for name, (method, _) in ABLATIONS.items() if name in found]
    title = f"Ablations, B = {regime.batch}, {_epochs(regime)} epochs"
    header = ["variant", "mean recall %", "minus its method (95 %)", *_COLUMNS, "seeds"]
    return [Table(title, header, rows)] if rows else []


def _row(name: str, seeds: Seeds, peers: Seeds) -> list[str]:
    group = list(seeds.values())
    gained = None if seeds is peers else gain(seeds, peers)
    cells = (_cell(group, *column) for column in _COLUMNS.values())
    mean = summarize(map(mean_recall, group))
    return [name, str(mean), "-" if gained is None else str(gained), *cells, str(mean.seeds)]


def _cell(group: Sequence[Scores], key: str, factor: float = 1) -> str:
    values = [factor * result[key] for result in group if key in result]
    return str(summarize(values)) if values else "-"


def _search(results: Results) -> list[Table]:
    points: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
    for name, one in results.items():
        match = re.fullmatch(r"search/(.+)/(.+)/(lr[^/,]+)(?:, seed \d+)?", name)
        if match:
            points[match.groups()].append(mean_recall(one))
    rows = [[*point, str(summary := summarize(scores)), str(summary.seeds)] for point, scores in points.items()]
    header = ["regime", "arm", "learning rate and value", "mean recall %", "seeds"]
    return [Table("Search on the validation split", header, rows)] if rows else []


def write(results: Results, folder: Path, heading: str) -> str:
    """Write report.html, report.md, gain.png and normalizer_error.png into a folder; return report.md."""
    figures = {"gain.png": _plot_gains(results), "normalizer_error.png": _plot_errors(results)}
    return write_page(tables(results), figures, folder / "report", heading)


def _plot_gains(results: Results) -> Figure:
    """Differences to OpenCLIP by batch size, a panel for each number of epochs."""
    whole = [regime for regime in regimes(results) if not regime.tenth]
    epochs = sorted({regime.epochs for regime in whole}) or [0]
    figure = Figure(figsize=(5.2 * len(epochs), 4.4), layout="constrained")
    panels = figure.subplots(1, len(epochs), squeeze=False, sharey=True)[0]
    for axes, count in zip(panels, epochs, strict=True):
        groups = {regime: by_seed(results, str(regime)) for regime in whole if regime.epochs == count}
        for number, name in enumerate(name for name in (*ARMS, *ALIKE) if name != PEER):
            gains = {r.batch: gain(found.get(name, {}), found.get(PEER, {})) for r, found in groups.items()}
            known = {batch: found for batch, found in gains.items() if found is not None and found.pairs > 1}
            axes.errorbar(
                [batch * 1.02 ** (number - len(ARMS) / 2) for batch in known],  # side by side
                [found.mean for found in known.values()],
                [found.half_width for found in known.values()],
                label=name,
                marker="osv"[number // 10],
                capsize=2,
                color=f"C{number % 10}",
            )
        batches = sorted(regime.batch for regime in groups)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set(xlabel="global batch size", xscale="log", title=f"{count} epochs")
        axes.set_xticks(batches, [str(batch) for batch in batches], minor=False)
        axes.set_xticks([], minor=True)
    panels[0].set_ylabel("mean recall minus OpenCLIP's, points (95 %)")
    panels[0].set_ylim(max(panels[0].get_ylim()[0], _LOWEST))
    panels[-1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _plot_errors(results: Results) -> Figure:
    """Mean recall against the normaliser's error, a point for each arm and regime."""
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.subplots()
    for number, regime in enumerate(regimes(results)):
        found = by_seed(results, str(regime))
        peers = found.get(PEER, {})
        points = [
            (summarize(one["normalizer_mse"] for one in seeds.values()).mean, gained.mean)
            for seeds in found.values()
            if all("normalizer_mse" in one for one in seeds.values()) and (gained := gain(seeds, peers)) is not None
        ]
        if points:
            errors, gains = zip(*points, strict=True)
            axes.scatter(errors, gains, label=str(regime), color=f"C{number}", s=18)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(xscale="log", xlabel="normaliser's error (mean squared, log)", ylabel="mean recall minus OpenCLIP's")
    axes.set_ylim(max(axes.get_ylim()[0], _LOWEST))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(title="B x epochs")
    return figure
