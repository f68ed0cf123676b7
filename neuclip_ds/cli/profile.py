"""Measure computation, communication and overlap of training steps, and bytes by purpose (as FastCLIP's Tables 15-22).

Each combination of method, ZeRO stage and world size trains in fresh processes on random pairs (no loading). OUT
receives report.md, report.html, chart.png and breakdowns.json, and for each combination a folder with breakdown.json
and the trace of rank 0, for chrome://tracing or ui.perfetto.dev. Methods are those of objective.method, and

    openclip_reference        OpenCLIP's scheme: gather with gradient, local loss, reduce-scatter of B x d
    openclip_reference_full   the same, every rank computing the whole loss

Options of the run, such as --model.embed-dim=512, are passed on.

Example:
  neuclip-ds profile --methods openclip_reference openclip fastclip_v3 neuclip --stages 1 3 --world-sizes 2 \\
    --recipe miniature --rows 128 --out runs/profile
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from neuclip_ds.cli.program import Parser
from neuclip_ds.distributed.environment import read_environment
from neuclip_ds.recipe import dump, parse_for
from neuclip_ds.reproduction.step_speed import start

METHODS = ["openclip_reference", "openclip", "fastclip_v3", "neuclip"]


def main(arguments: Sequence[str]) -> None:
    parser = Parser(prog="neuclip-ds profile", description=__doc__)
    parser.add_argument("--methods", nargs="+", default=METHODS, help="to compare")
    parser.add_argument("--stages", type=int, nargs="+", choices=range(4), default=[1], help="of ZeRO")
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2], help="numbers of ranks on this machine")
    parser.add_argument("--recipe", default="demo", help="recipe of model and objective")
    parser.add_argument("--rows", type=int, default=128, help="pairs per rank")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of the towers")
    parser.add_argument("--steps", type=int, default=10, help="steps to profile")
    parser.add_argument("--out", type=Path, default=Path("runs/profile"), help="folder for the results")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options, overrides = parser.parse_with_overrides(arguments)
    (profile_rank if options.worker else compare)(options, overrides)


def compare(arguments: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Profile every combination in fresh processes and write the report on all of them.

    Raises:
        UserError: a combination's processes failed; names their output.
    """
    from neuclip_ds.planning.openclip_reference import REFERENCES  # torch takes seconds to import
    from neuclip_ds.profiling.recorder import BREAKDOWN
    from neuclip_ds.profiling.report import write

    for method in arguments.methods:  # refuses a wrong option before any process starts
        parse_for(None if method in REFERENCES else method, [arguments.recipe, *overrides])
    arguments.out.mkdir(parents=True, exist_ok=True)
    found = []
    for world_size, stage, method in itertools.product(arguments.world_sizes, arguments.stages, arguments.methods):
        folder = arguments.out / f"{method}_zero{stage}_{world_size}ranks"
        own = [f"--methods={method}", f"--stages={stage}", f"--recipe={arguments.recipe}", f"--out={folder}"]
        own += [f"--{name}={getattr(arguments, name)}" for name in ("rows", "precision", "steps")]
        call = ["-m", "neuclip_ds", "profile", "--worker", *own, *overrides]
        start(f"{method} with ZeRO {stage}", call, world_size, folder)
        found.append(json.loads((folder / BREAKDOWN).read_text(encoding="utf-8")))
        seconds = found[-1]["seconds"]
        print(
            f"{method}, ZeRO {stage}, {world_size} ranks: {1e3 * seconds['total']['mean']:.1f} ms a step, "
            f"{1e3 * seconds['communication']['mean']:.1f} ms of it communication",
            flush=True,
        )
    (arguments.out / "breakdowns.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(write(found, arguments.out, "Communication of a training step"))
    print(f"The page is {arguments.out}/report.html; traces and breakdowns are in the folders next to it.")


def profile_rank(arguments: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Run one rank of one combination."""
    from neuclip_ds.distributed.launch import connected
    from neuclip_ds.engine.deterministic import deterministic_algorithms
    from neuclip_ds.objectives import build_objective
    from neuclip_ds.planning.openclip_reference import REFERENCES
    from neuclip_ds.planning.synthetic_profile import first_prediction, run_synthetic_profile

    (name,), (stage,) = arguments.methods, arguments.stages
    batch = arguments.rows * read_environment().world_size
    ours = [f"--data.batch_size={batch}", f"--deepspeed=zero{stage}_{arguments.precision}"]
    ours += [f"--run.profile_steps={arguments.steps}"]
    config = parse_for(None if name in REFERENCES else name, [arguments.recipe, *ours, *overrides])
    config.run.profile_after = 3 if name in REFERENCES else max(3, first_prediction(config) + 1)
    with connected(dump(config), arguments.out) as communicator, deterministic_algorithms(config.run.deterministic):
        run_synthetic_profile(config, communicator, arguments.out, name, REFERENCES.get(name, build_objective))
