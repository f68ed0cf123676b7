"""Measure the computation, communication, overlap and traffic of training steps (as in FastCLIP's Tables 15-22).

Each combination of method, ZeRO stage and world size trains in fresh processes on random pairs, without loading data.
The program writes report.md and breakdowns.json to OUT and, for each combination, a folder with breakdown.json and rank
0's trace for chrome://tracing or ui.perfetto.dev. The methods are the values of objective.method and

    openclip_reference   OpenCLIP's scheme: gather with gradients, local loss, reduce-scatter of B x d

Config options, such as --model.embed-dim=512, are passed to the runs.

Example:
  python tools/profile_communication.py --methods openclip_reference openclip fastclip_v3 neuclip --stages 1 3 \\
    --world-sizes 2 --recipe miniature --rows 128 --out runs/profile
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarking.method_config import CAPTION_TOKENS, FULL, STORED_WIDTH, config_for

from neuclip_ds.cli.program import Parser, exit_on_mistake
from neuclip_ds.config import dump
from neuclip_ds.distributed.environment import read_environment
from neuclip_ds.errors import UserError, counted

METHODS = ["openclip_reference", "openclip", "fastclip_v3", "neuclip"]
_SHOWN = 15  # number of last lines of a failed program's output


def main() -> None:
    parser = Parser(prog="profile_communication.py", description=__doc__)
    parser.add_argument("--methods", nargs="+", default=METHODS, help="methods to compare")
    parser.add_argument("--stages", type=int, nargs="+", choices=range(4), default=[1], help="ZeRO stages")
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2], help="numbers of ranks on this machine")
    parser.add_argument("--recipe", default="demo", help="recipe of the model and objective")
    parser.add_argument("--rows", type=int, default=128, help="pairs per rank")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="precision of the towers")
    parser.add_argument("--stored-width", type=int, help=STORED_WIDTH)
    parser.add_argument("--caption-tokens", default=FULL, help=CAPTION_TOKENS)
    parser.add_argument("--steps", type=int, default=10, help="steps to profile")
    parser.add_argument("--out", type=Path, default=Path("runs/profile"), help="folder for the results")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options, overrides = parser.parse_with_overrides(sys.argv[1:])
    (profile_rank if options.worker else compare)(options, overrides)


def compare(arguments: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Profile every combination in fresh processes, and write a report on all combinations.

    Raises:
        UserError: a config option is invalid, or the processes of a combination failed; the message then names the file
            with their output.
    """
    from benchmarking.openclip_reference import REFERENCES  # torch takes seconds to import
    from benchmarking.random_pairs import check_caption_tokens

    from neuclip_ds.profiling.breakdown import report
    from neuclip_ds.profiling.recorder import BREAKDOWN, REPORT

    for method in arguments.methods:  # rejects a wrong option before any process starts
        config = config_for(None if method in REFERENCES else method, [arguments.recipe, *overrides])
        check_caption_tokens(arguments.caption_tokens, config)
    arguments.out.mkdir(parents=True, exist_ok=True)
    breakdowns = []
    for world_size, stage, method in itertools.product(arguments.world_sizes, arguments.stages, arguments.methods):
        folder = arguments.out / f"{method}_zero{stage}_{world_size}ranks"
        worker_options = [f"--methods={method}", f"--stages={stage}", f"--recipe={arguments.recipe}", f"--out={folder}"]
        worker_options += [f"--{name}={getattr(arguments, name)}" for name in ("rows", "precision", "steps")]
        worker_options.append(f"--caption-tokens={arguments.caption_tokens}")
        if arguments.stored_width is not None:
            worker_options.append(f"--stored-width={arguments.stored_width}")
        call = [__file__, "--worker", *worker_options, *overrides]
        run_on_ranks(f"{method} with ZeRO {stage}", call, world_size, folder)
        breakdowns.append(json.loads((folder / BREAKDOWN).read_text(encoding="utf-8")))
        seconds = breakdowns[-1]["seconds"]
        print(
            f"{method}, ZeRO {stage}, {counted(world_size, 'rank')}: {1e3 * seconds['total']['mean']:.1f} ms per step, "
            f"{1e3 * seconds['communication']['mean']:.1f} ms of which are communication",
            flush=True,
        )
    (arguments.out / "breakdowns.json").write_text(json.dumps(breakdowns, indent=1), encoding="utf-8")
    text = report(breakdowns)
    (arguments.out / REPORT).write_text(text, encoding="utf-8")
    print(f"{text}\nWrote {arguments.out / REPORT}; traces and breakdowns are in the folders next to it.")


def run_on_ranks(
    name: str,
    program: Sequence[str],
    ranks: int,
    folder: Path,
    threads: int | None = None,
    packages: Sequence[str] = (),
) -> None:
    """Run a program to its end on `ranks` ranks, which share this machine's cores; log to FOLDER/output.txt.

    `program` is a script, or `-m` and a module, with arguments. Error messages call the program `name`. Modules in the
    folders `packages` replace installed ones.

    Raises:
        UserError: the program failed; the message shows the end of the output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    call = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *program]
    shared = str(max(1, (os.cpu_count() or 1) // ranks))
    # name the loopback interface, because gloo may otherwise take long to look up the host name
    variables = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": shared, **os.environ, "HF_HUB_OFFLINE": "1"}
    variables |= {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join([*packages, *sys.path])}
    variables |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
    path = folder / "output.txt"
    with path.open("w") as output:
        code = subprocess.run(call, env=variables, stdout=output, stderr=output).returncode
    if code:
        rank_said = path.read_text(errors="replace").partition("torch/distributed/elastic")[0]  # only the ranks' output
        lines = [line for line in rank_said.splitlines() if line.strip() and "torch/_" not in line]  # no torch messages
        end = "\n".join(lines[-_SHOWN:])
        ranks_output = f"The last lines of the ranks' output in {path}"
        raise UserError(f"{name} on {counted(ranks, 'rank')} ended with exit code {code}. {ranks_output}:\n{end}")


def profile_rank(arguments: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Profile one rank of one combination."""
    from benchmarking.openclip_reference import REFERENCES
    from benchmarking.run_loss import build_loss
    from benchmarking.synthetic_profile import first_prediction, run_synthetic_profile

    from neuclip_ds.distributed.launch import process_group
    from neuclip_ds.engine.precision import deterministic_algorithms

    (name,) = arguments.methods
    (stage,) = arguments.stages
    batch = arguments.rows * read_environment().world_size
    ours = [f"--data.batch_size={batch}", f"--deepspeed=zero{stage}_{arguments.precision}"]
    ours += [f"--run.profile_steps={arguments.steps}"]
    config = config_for(None if name in REFERENCES else name, [arguments.recipe, *ours, *overrides])
    after = 3 if name in REFERENCES else max(3, first_prediction(config) + 1)
    with process_group(dump(config)) as communicator, deterministic_algorithms(config.run.deterministic):
        build = REFERENCES.get(name, build_loss)
        run_synthetic_profile(
            config,
            communicator,
            arguments.out,
            name,
            after,
            build,
            caption_tokens=arguments.caption_tokens,
            stored_width=arguments.stored_width,
        )


if __name__ == "__main__":
    with exit_on_mistake():
        main()
