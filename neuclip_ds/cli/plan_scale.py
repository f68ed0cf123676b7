"""`neuclip-ds plan scale`: what a recipe costs on more nodes."""

import argparse
import json
from collections.abc import Sequence

from neuclip_ds.objectives import build_objective
from neuclip_ds.planning.cost_report import write_scaling
from neuclip_ds.planning.machines import find_machine, network_names
from neuclip_ds.planning.memory import MemoryQuery, Towers, count_towers
from neuclip_ds.planning.openclip_reference import REFERENCES
from neuclip_ds.planning.scaling import ClusterAssumptions, count_model, predict
from neuclip_ds.recipe import parse, parse_for


def scale(arguments: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Predict every combination of network, method and number of nodes, and write the tables."""
    around = ClusterAssumptions(
        int(arguments.samples), arguments.sample_kb * 1e3, arguments.disk_gb * 1e9, arguments.seen
    )
    methods = arguments.methods or [parse([arguments.recipe, *overrides]).config.objective.method]
    model, found = None, []
    towers: dict[int, Towers] = {}  # by micro-batch
    for network in arguments.networks or network_names():
        machine = find_machine(arguments.machine, network)
        for method in methods:
            for nodes in arguments.nodes:
                ranks = nodes * arguments.gpus
                rows = [f"--data.batch_size={arguments.rows * ranks}"] if arguments.rows else []
                known = None if method in REFERENCES else method
                config = parse_for(known, [arguments.recipe, *rows, *overrides])
                model, micro = model or count_model(config), config.micro_batch(ranks)
                if micro not in towers:
                    towers[micro] = count_towers(MemoryQuery(config, ranks))
                build = REFERENCES.get(method, build_objective)
                predicted = predict(config, model, towers[micro], machine, nodes, arguments.gpus, around, build)
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
