"""Predict what a run costs on any number of nodes, and fit the model behind it to profiled steps.

    fit FOLDER ...       reads each breakdown.json below (written by `neuclip-ds profile`, at several --world-sizes and
                         --rows), compares its collectives with the predicted ones, fits compute and network, and prints
                         measured against predicted times; --out receives machine.json, fit.md and fit.png
    scale RECIPE         tables of step time, communication, memory per rank, traffic of u, checkpoint, loading and GPU
                         hours for --nodes x --gpus, methods and networks; --out receives scale.md, .json and .png
    published            holds the model against the step times that papers report, and prints its errors and the rates
                         that these times imply; --out receives published.md

A machine is a name in neuclip_ds/planning/machines.yaml, whose rates are ranges, from what published codes reached to
what is aimed at, or a fitted machine.json. Predictions for the former are ranges too: low - high. --page puts the
tables into a Markdown page, each in place of the one below the line `<!-- its title -->`. Options of the run, such as
--model.embed-dim=512, are passed on.

Examples:
  neuclip-ds profile --methods openclip neuclip --world-sizes 1 2 4 --rows 64 --recipe miniature --out runs/cost/64
  neuclip-ds plan fit runs/cost --cores 2 --out runs/cost
  neuclip-ds plan scale dfn192m_neuclip --methods openclip_reference openclip neuclip --nodes 1 8 64 --rows 640 \\
    --machine h100 --networks infiniband ethernet --samples 1e9 --out runs/scaling
  neuclip-ds plan published
"""

from collections.abc import Sequence
from pathlib import Path

from neuclip_ds.cli.program import Parser


def main(arguments: Sequence[str]) -> None:
    parser = Parser(prog="neuclip-ds plan", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    fitting = commands.add_parser("fit", help="fit the cost model to profiled steps")
    fitting.add_argument("folders", nargs="+", type=Path, help="with breakdown.json files at any depth")
    fitting.add_argument("--cores", type=int, required=True, help="of the profiled machine, one for each rank")
    fitting.add_argument("--out", type=Path, default=Path("runs/cost"), help="folder for the results")
    scaling = commands.add_parser("scale", help="predict a recipe's cost on more nodes")
    scaling.add_argument("recipe", help="a recipe's name, or the path of a YAML file")
    scaling.add_argument("--methods", nargs="+", help="to compare (default: the recipe's)")
    scaling.add_argument("--nodes", nargs="+", type=int, default=[1, 2, 4, 8], help="numbers of nodes")
    scaling.add_argument("--gpus", type=int, default=8, help="per node")
    scaling.add_argument("--rows", type=int, help="pairs per rank (default: the recipe's batch, divided by the ranks)")
    scaling.add_argument("--machine", default="h100", help="a name, or a machine.json")
    scaling.add_argument("--networks", nargs="+", help="between nodes (default: all in machines.yaml)")
    scaling.add_argument("--samples", type=float, default=1e9, help="size n of the data set")
    scaling.add_argument("--seen", type=float, default=1.28e10, help="samples seen in the whole run")
    scaling.add_argument("--sample-kb", type=float, default=45, help="KB of an image and its caption in a shard")
    scaling.add_argument("--disk-gb", type=float, default=1, help="GB per second that a node writes")
    scaling.add_argument("--out", type=Path, default=Path("runs/scaling"), help="folder for the results")
    comparing = commands.add_parser("published", help="hold the cost model against published times")
    comparing.add_argument("--out", type=Path, default=Path("runs/published"), help="folder for the results")
    for command in (fitting, scaling, comparing):
        command.add_argument("--page", type=Path, help="Markdown page whose tables to replace")
    options, overrides = parser.parse_with_overrides(arguments)
    if options.command != "scale" and overrides:
        commands.choices[options.command].error(f"unknown option {overrides[0]}")
    from neuclip_ds.cli.plan_work import fit_profiles, hold_against_published, scale  # torch takes seconds to import

    match options.command:
        case "fit":
            fit_profiles(options.folders, options.cores, options.out, options.page)
        case "scale":
            scale(options, overrides)
        case "published":
            hold_against_published(options.out, options.page)
