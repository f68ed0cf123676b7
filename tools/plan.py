"""Predicts what a run costs on any number of nodes, and fits the model behind it to profiled steps.

    fit FOLDER ...       reads every breakdown.json below (of tools/profile_communication.py, at several --world-sizes and
                         --rows), compares its collectives with the predicted ones, fits compute and network, and prints
                         measured against predicted times; --out gets machine.json, fit.md and fit.png
    scale RECIPE         tables of step time, communication, memory of a rank, traffic of u, checkpoint, loading and GPU
                         hours for --nodes x --gpus, methods and networks; --out gets scale.md, scale.json and scale.png

A machine is a name of neuclip_ds/planning/machines.yaml, whose rates are partly assumed, or a fitted machine.json.

Examples:
    python tools/profile_communication.py --methods openclip neuclip --world-sizes 1 2 4 --rows 64 --recipe miniature --out runs/cost/64
    python tools/plan.py fit runs/cost --cores 2 --out runs/cost
    python tools/plan.py scale dfn192m_neuclip --methods openclip_reference openclip neuclip --nodes 1 8 64 --rows 640 \\
        --machine h100 --networks infiniband ethernet --samples 1e9 --out runs/scaling
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from neuclip_ds.cli import exit_on_mistake
from neuclip_ds.config import Config
from neuclip_ds.errors import UserError
from neuclip_ds.planning.cost_model import Cluster, Observation, fit, step_time, to_json
from neuclip_ds.planning.cost_report import Fitted, write_fit, write_scaling
from neuclip_ds.planning.machines import find_machine, network_names
from neuclip_ds.planning.openclip_reference import REFERENCES
from neuclip_ds.planning.simulated_rank import Call
from neuclip_ds.profiling.recorder import BREAKDOWN


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    fitting = commands.add_parser("fit", help="the model to profiled steps")
    fitting.add_argument("folders", nargs="+", type=Path)
    fitting.add_argument("--cores", type=int, required=True, help="of the machine that was profiled, one for each rank")
    fitting.add_argument("--out", type=Path, default=Path("runs/cost"))
    scaling = commands.add_parser("scale", help="a recipe to nodes")
    scaling.add_argument("recipe")
    scaling.add_argument("--methods", nargs="+", help="(the recipe's)")
    scaling.add_argument("--nodes", nargs="+", type=int, default=[1, 2, 4, 8])
    scaling.add_argument("--gpus", type=int, default=8, help="of a node (8)")
    scaling.add_argument("--rows", type=int, help="pairs a rank; without it the recipe's batch is shared out")
    scaling.add_argument("--machine", default="h100", help="a name, or a machine.json (h100)")
    scaling.add_argument("--networks", nargs="+", default=network_names(), help=f"({' '.join(network_names())})")
    scaling.add_argument("--samples", type=float, default=1e9, help="n of the data set (1e9)")
    scaling.add_argument("--seen", type=float, default=1.28e10, help="samples of the whole run (1.28e10)")
    scaling.add_argument("--sample-kb", type=float, default=45, help="of an image and its caption in a shard (45)")
    scaling.add_argument("--disk-gb", type=float, default=1, help="a second that a node writes (1)")
    scaling.add_argument("--out", type=Path, default=Path("runs/scaling"))
    arguments, overrides = parser.parse_known_args()
    if arguments.command == "fit" and overrides:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    exit_on_mistake(lambda: fit_all(arguments) if arguments.command == "fit" else scale(arguments, overrides))


def fit_all(arguments: argparse.Namespace) -> None:
    """Fits and says how well.

    Raises:
        UserError: there is no profile.
    """
    paths = sorted(path for folder in arguments.folders for path in folder.rglob(BREAKDOWN))
    if not paths:
        raise UserError("There is no breakdown.json in these folders; tools/profile_communication.py writes them.")
    names, observations, exact = [], [], []
    for path in paths:
        found, predicted = json.loads(path.read_text(encoding="utf-8")), observe(path)
        names.append(
            f"{found['method']}, ZeRO {found['zero_stage']}, {found['precision']}, batch {found['batch_size']}"
        )
        observations.append(predicted)
        alone = predicted.world_size == 1  # DeepSpeed then calls collectives that carry nothing
        calls = [call for call, _ in predicted.transfers]
        exact.append(alone or _counted(calls) == _counted(predicted.work.calls))
    compute, network = fit(observations, arguments.cores)
    rows = []
    for name, one, same in zip(names, observations, exact, strict=True):
        time = step_time(one.work, compute, Cluster(1, one.world_size, network))
        transfer = sum(call.times * seconds for call, seconds in one.transfers)
        rows.append(Fitted(name, one.world_size, one.total, time.total, transfer, time.communication, same))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "machine.json").write_text(json.dumps(to_json(compute, network), indent=1), encoding="utf-8")
    print(write_fit(rows, compute, network, arguments.out))
    print(f"The machine is {arguments.out}/machine.json.")


def observe(path: Path) -> Observation:
    """A profiled configuration and the work that is predicted for it."""
    from neuclip_ds.planning.step_work import count_model, step_work
    from neuclip_ds.planning.synthetic_profile import CONFIG
    from neuclip_ds.recipe import parse

    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    config = parse([str(path.with_name(CONFIG))]).config
    build = {"build": REFERENCES[found["method"]]} if found["method"] in REFERENCES else {}
    transfers = [
        (Call(one["purpose"], one["op"], one["size"], one["calls"]), one["transfer_seconds"] / one["calls"])
        for one in found["collectives"]
    ]
    work = step_work(config, count_model(config), found["world_size"], **build)
    return Observation(work, found["world_size"], found["seconds"]["total"]["mean"], transfers)


def scale(arguments: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Predicts every combination."""
    from neuclip_ds.planning.memory import Towers
    from neuclip_ds.planning.scaling import ClusterAssumptions, count_activated, predict
    from neuclip_ds.planning.step_work import count_model
    from neuclip_ds.recipe import parse

    around = ClusterAssumptions(
        int(arguments.samples), arguments.sample_kb * 1e3, arguments.disk_gb * 1e9, arguments.seen
    )
    methods = arguments.methods or [parse([arguments.recipe, *overrides]).config.objective.method]
    model, found = None, []
    towers: dict[int, Towers] = {}  # by micro-batch
    for network in arguments.networks:
        machine = find_machine(arguments.machine, network)
        for method in methods:
            for nodes in arguments.nodes:
                ranks = nodes * arguments.gpus
                config = _config(arguments, overrides, method, ranks)
                model, micro = model or count_model(config), config.micro_batch(ranks)
                if micro not in towers:
                    towers[micro] = count_activated(config, ranks)
                build = {"build": REFERENCES[method]} if method in REFERENCES else {}
                predicted = predict(config, model, towers[micro], machine, nodes, arguments.gpus, around, **build)
                found.append({"method": method, "network": network, **predicted._asdict()})
                print(f"{method}, {network}, {nodes} nodes: {1e3 * predicted.step:.1f} ms a step", flush=True)
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
    print(write_scaling(found, described, arguments.out))


def _config(arguments: argparse.Namespace, overrides: Sequence[str], method: str, ranks: int) -> Config:
    from neuclip_ds.recipe import parse_for

    ours = [f"--data.batch_size={arguments.rows * ranks}"] if arguments.rows else []
    return parse_for(None if method in REFERENCES else method, [arguments.recipe, *ours, *overrides])


def _counted(calls: Sequence[Call]) -> dict[tuple[str, str, int], float]:
    """Calls a step by purpose, operation and size."""
    found: defaultdict[tuple[str, str, int], float] = defaultdict(float)
    for call in calls:
        found[call.purpose, call.op, call.size] += call.times
    return dict(found)


if __name__ == "__main__":
    main()
