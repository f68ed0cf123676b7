"""`neuclip-ds plan`: the cost model fitted to profiled steps, held against published ones, and what a recipe costs."""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from neuclip_ds.errors import UserError
from neuclip_ds.objectives import build_objective
from neuclip_ds.planning.cost_model import Call, Cluster, Observation, fit, step_time, to_json
from neuclip_ds.planning.cost_report import Fitted, span, write_fit, write_published, write_scaling
from neuclip_ds.planning.machines import find_machine, network_names
from neuclip_ds.planning.memory import MemoryQuery, Towers, count_towers
from neuclip_ds.planning.openclip_reference import REFERENCES
from neuclip_ds.planning.published import compare, implied_rates, read_published
from neuclip_ds.planning.scaling import ClusterAssumptions, count_model, predict, step_work
from neuclip_ds.planning.synthetic_profile import CONFIG
from neuclip_ds.profiling.recorder import BREAKDOWN
from neuclip_ds.recipe import parse, parse_for
from neuclip_ds.reporting.page import Table, markdown, replace_tables


def fit_profiles(folders: Sequence[Path], cores: int, out: Path, page: Path | None) -> None:
    """Fit compute and network to the profiles below some folders, and print measured against predicted times.

    Raises:
        UserError: there is no profile.
    """
    paths = sorted(path for folder in folders for path in folder.rglob(BREAKDOWN))
    if not paths:
        raise UserError("There is no breakdown.json in these folders; `neuclip-ds profile` writes them.")
    profiles = {path: json.loads(path.read_text(encoding="utf-8")) for path in paths}
    observations = [observe(path, found) for path, found in profiles.items()]
    compute, network = fit(observations, cores)
    rows = []
    for found, one in zip(profiles.values(), observations, strict=True):
        time = step_time(one.work, compute, Cluster(1, one.world_size, network))
        alone = one.world_size == 1  # DeepSpeed then calls collectives that carry nothing
        same = alone or _counted(call for call, _ in one.transfers) == _counted(one.work.calls)
        name = f"{found['method']}, ZeRO {found['zero_stage']}, {found['precision']}, batch {found['batch_size']}"
        rows.append(Fitted(name, one, time, same))
    out.mkdir(parents=True, exist_ok=True)
    (out / "machine.json").write_text(json.dumps(to_json(compute, network), indent=1), encoding="utf-8")
    _show(write_fit(rows, compute, network, out), page)
    print(f"The machine is {out}/machine.json.")


def observe(path: Path, found: Mapping[str, Any]) -> Observation:
    """Return a profiled configuration with the work that is predicted for it."""
    config = parse([str(path.with_name(CONFIG))]).config
    transfers = [
        (Call(one["purpose"], one["op"], one["size"], one["calls"]), one["transfer_seconds"] / one["calls"])
        for one in found["collectives"]
    ]
    work = step_work(config, count_model(config), found["world_size"], REFERENCES.get(found["method"], build_objective))
    return Observation(work, found["world_size"], found["seconds"]["total"]["mean"], transfers)


def _counted(calls: Iterable[Call]) -> dict[tuple[str, str, int], float]:
    """Return the number of calls per step by purpose, operation and size."""
    found: defaultdict[tuple[str, str, int], float] = defaultdict(float)
    for call in calls:
        found[call.purpose, call.op, call.size] += call.times
    return dict(found)


def scale(arguments: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Predict every combination of network, method and number of nodes, and write the tables."""
    around = ClusterAssumptions(
        int(arguments.samples), arguments.sample_kb * 1e3, arguments.disk_gb * 1e9, arguments.seen
    )
    methods = arguments.methods or [parse([arguments.recipe, *overrides]).config.objective.method]
    machines = {network: find_machine(arguments.machine, network) for network in arguments.networks or network_names()}
    model, found = None, []
    towers: dict[int, Towers] = {}  # by micro-batch
    for method in methods:
        for nodes in arguments.nodes:
            ranks = nodes * arguments.gpus
            rows = [f"--data.batch_size={arguments.rows * ranks}"] if arguments.rows else []
            known = None if method in REFERENCES else method
            config = parse_for(known, [arguments.recipe, *rows, *overrides])
            model, micro = model or count_model(config), config.micro_batch(ranks)
            if micro not in towers:
                towers[micro] = count_towers(MemoryQuery(config, ranks))
            work = step_work(config, model, ranks, REFERENCES.get(method, build_objective))
            for network, machine in machines.items():
                predicted = predict(config, model, work, towers[micro], machine, nodes, arguments.gpus, around)
                found.append({"method": method, "network": network, **predicted._asdict()})
                print(f"{method}, {network}, {nodes} nodes: {span(predicted.step, 1e3)} ms a step", flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    described = {
        "recipe": arguments.recipe,
        "options": list(overrides),
        "machine": arguments.machine,
        "gpus_a_node": arguments.gpus,
        "samples": around.samples,
        "seen": around.seen,
    }
    (arguments.out / "scale.json").write_text(json.dumps({**described, "predicted": found}, indent=1), encoding="utf-8")
    _show(write_scaling(found, described, arguments.out), arguments.page)


def hold_against_published(out: Path, page: Path | None) -> None:
    """Compare the model with published times, and write the tables."""
    found = list(compare(read_published()))
    out.mkdir(parents=True, exist_ok=True)
    _show(write_published(found, implied_rates(found), out), page)


def _show(tables: Sequence[Table], page: Path | None) -> None:
    """Print tables, and put them into a page."""
    print(markdown(tables))
    if page is not None:
        replace_tables(page, tables)
