"""Tools of this project called as a user calls them, with a model that trains in no time."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import TYPE_CHECKING

from forks import Program

from neuclip_ds.data.demo import make_demo_data
from neuclip_ds.objectives import METHODS

if TYPE_CHECKING:
    from neuclip_ds.config import Config
    from neuclip_ds.distributed.communicator import Communicator
    from neuclip_ds.training.hooks import Hook

ROOT = Path(__file__).parents[1]
SMALL = [  # and without a report, whose plots take longer than the training
    "--run.report=false",
    "--model.vision.image_size=16",
    '--model.vision.options={"patch_size":8,"embed_dim":16,"depth":1,"num_heads":2}',
    "--model.text.width=16",
    "--model.text.layers=1",
    "--model.text.heads=2",
    "--model.text.vocab_size=300",
    "--model.embed_dim=16",
]
TINY = [
    "demo",
    *SMALL,
    "--objective.method=fastclip_v3",
    "--data.batch_size=8",
    "--data.workers=0",
    "--run.sample_log=true",
    "--data.val=",
    "--data.zero_shot=",
]


def read_options(options: Sequence[str]) -> list[str]:
    """The options of a demo run without those that its method does not read."""
    chosen = [option.partition("=")[2] for option in options if option.startswith("--objective.method=")]
    method = METHODS[chosen[-1] if chosen else "neuclip_queue"]
    return [option for option in options if method.reads(option.removeprefix("--"))]


def environment() -> dict[str, str]:
    """Of a process that no launcher has started."""
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def start(tool: str, *options: str, folder: Path | None = None, ranks: int = 1) -> list[Program]:
    """A tool by its path in the repository, in a working folder: as no launcher starts it, or as so many ranks."""
    variables = [environment()]
    if ranks > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": str(ranks)}
        variables = [{**environment(), **where, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return [Program(ROOT / tool, *options, variables=own, folder=folder) for own in variables]


def call(tool: str, *options: str, folder: Path | None = None, ranks: int = 1) -> CompletedProcess[str]:
    """How a tool ends, and what all its ranks print."""
    programs = start(tool, *options, folder=folder, ranks=ranks)
    try:
        done = [program.wait() for program in programs]
    finally:
        for program in programs:
            program.kill()
    code = max((one.returncode for one in done), key=abs)
    return CompletedProcess(
        done[0].args, code, "".join(one.stdout for one in done), "".join(one.stderr for one in done)
    )


def demo_shards(folder: Path, pairs: int, held_out: int = 40) -> Path:
    """The training shards of a small demo set, its other splits beside them."""
    make_demo_data(folder, pairs=pairs, held_out=held_out, zero_shot=80, size=32, processes=1)
    return folder / "train"


def train(runs: Path, data: str, steps: int, *options: str, ranks: int = 1) -> CompletedProcess[str]:
    """train.py, for some steps of a run named `run` in the folder `runs`."""
    return call("train.py", *training(runs, data, steps), *options, ranks=ranks)


def training(runs: Path, data: str, steps: int) -> list[str]:
    """The options of `train`, for a run that a test starts with `start`."""
    return [*TINY, f"--run.folder={runs}", "--run.name=run", f"--data.train={data}", f"--budget.steps={steps}"]


def train_connected(communicator: Communicator, config: Config, *hooks: Hook) -> None:
    """Train on ranks that are connected already, as those of `run_ranks` are."""
    from neuclip_ds.distributed.launch import join
    from neuclip_ds.training.run_folder import staging, take_in
    from neuclip_ds.training.trainer import build

    join()
    folder = config.run.folder / str(config.run.name)
    with staging(config, folder, communicator) as staged:
        trainer = build(config, communicator, folder, staged)
        communicator.on_rank_zero(lambda: take_in(staged, folder, config))
        trainer.run(hooks)


def newest_checkpoint(runs: Path) -> Path:
    return max((runs / "run" / "checkpoints").glob("step_*"))
