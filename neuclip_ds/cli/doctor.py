"""Examine this machine, or all nodes of a launch, before a run: what is wrong, and its fix, comes first.

Looks at devices, drivers, versions, DeepSpeed's ops, precision, shared memory, open files and disks, and compares the
nodes; then measures disks, shards, matrix products, memory, copies and all-reduces, runs every method's step on the
device against the CPU, and trains ten steps with each DeepSpeed file. Room and memory are those that --recipe needs;
options of the run, such as --run.folder=/shared/runs, are passed on. A launcher starts it on more ranks and nodes, as
it starts a run. OUT receives what the processes print, and machine.json for `neuclip-ds plan scale --machine`.

The exit code is 0, or 1 where something is wrong; warnings do not count.

Examples:
  neuclip-ds doctor --quick
  neuclip-ds doctor --recipe cc12m_neuclip --shards=/data/cc12m --json=doctor.json
  deepspeed --hostfile hostfiles/8node --module neuclip_ds doctor --recipe dfn14m_neuclip --out=/shared/doctor
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from neuclip_ds.cli.program import Parser
from neuclip_ds.engine.config import FOLDER, read_engine_file
from neuclip_ds.recipe import parse

# those of fp16 are for GPUs without bf16
ENGINES = sorted(path.stem for path in FOLDER.glob("*.json") if not path.stem.endswith("_fp16"))


def main(arguments: Sequence[str]) -> None:
    parser = Parser(prog="neuclip-ds doctor", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="look only, in seconds, and measure nothing")
    parser.add_argument("--recipe", default="demo", help="recipe that the machine is for")
    parser.add_argument("--shards", default="", help="shards or manifest whose read speed is measured")
    parser.add_argument("--engines", nargs="+", default=ENGINES, help="DeepSpeed files to train ten steps with")
    parser.add_argument("--limit", type=float, default=300, help="seconds that a process may take")
    parser.add_argument("--out", type=Path, default=Path("runs/doctor"), help="folder for the results, of all nodes")
    parser.add_argument("--json", type=Path, help="file for all findings and figures")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options, overrides = parser.parse_with_overrides(arguments)
    config = parse([options.recipe, *overrides]).config
    for engine in options.engines:
        read_engine_file(engine)
    accelerator = os.environ.get("DS_ACCELERATOR")
    if not options.worker:  # the processes that measure have the GPUs
        os.environ["DS_ACCELERATOR"] = "cpu"
    from neuclip_ds.cli.doctor_work import diagnose  # torch and DeepSpeed take seconds to import
    from neuclip_ds.doctor.request import Request
    from neuclip_ds.doctor.table import Scope
    from neuclip_ds.doctor.worker import work

    request = Request(
        config,
        options.out,
        options.engines,
        shards=options.shards,
        limit=options.limit,
        quick=options.quick,
        accelerator=accelerator,
    )
    if options.worker:
        work(Scope(options.worker), request)
    elif not diagnose(request, ["doctor", *arguments], options.json):
        sys.exit(1)
