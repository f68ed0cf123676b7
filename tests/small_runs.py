"""Run this project's tools as a user does, with a tiny model that trains quickly."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from forks import Program
from safetensors.torch import load_file
from torch import Tensor

from neuclip_ds.checkpoint.sharded_state import STATE, WEIGHT, StateFiles
from neuclip_ds.data.demo import make_demo_data
from neuclip_ds.distributed.environment import free_port
from neuclip_ds.losses.methods import METHODS, reads_option
from neuclip_ds.state.shards import TABLE

if TYPE_CHECKING:
    from neuclip_ds.config import Config
    from neuclip_ds.distributed.communicator import Communicator
    from neuclip_ds.training.hooks import Hook

ROOT = Path(__file__).parents[1]
TRAIN = "tests/logged_train.py"
TIMES = ("samples_per_second", "data_wait_share", "objective_communication_share")  # metrics that differ between runs
SMALL = [
    "--model.vision.image_size=16",
    '--model.vision.options={"patch_size":8,"embed_dim":16,"depth":1,"num_heads":2}',
    "--model.text.width=16",
    "--model.text.layers=1",
    "--model.text.heads=2",
    "--model.text.vocab_size=300",
    "--model.embed_dim=16",
]
QUICK = [
    "--objective.method=fastclip_v3",
    "--data.batch_size=8",
    "--data.workers=0",
    "--data.val=",
    "--data.zero_shot=",
]
TINY = ["demo", *SMALL, *QUICK]


def read_options(options: Sequence[str]) -> list[str]:
    """Return the options of a demo run, except options that its method does not read."""
    chosen = [option.partition("=")[2] for option in options if option.startswith("--objective.method=")]
    method = METHODS[chosen[-1] if chosen else "openclip"]
    return [option for option in options if reads_option(method, option.removeprefix("--"))]


def environment() -> dict[str, str]:
    """Return the environment variables of a process that was not started by a launcher."""
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def start(tool: str, *options: str, folder: Path | None = None, ranks: int = 1) -> list[Program]:
    """Start a tool, given its path in the repository, as one process without a launcher or as one process per rank."""
    variables = [environment()]
    if ranks > 1:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        variables = [{**environment(), **where, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return [Program(ROOT / tool, *options, variables=own, folder=folder) for own in variables]


def call(tool: str, *options: str, folder: Path | None = None, ranks: int = 1, code: int = 0) -> CompletedProcess[str]:
    """Run a tool, check that every rank exits with this code, and return the combined output of all ranks."""
    done = ends(start(tool, *options, folder=folder, ranks=ranks))
    out, err = ("".join(texts) for texts in zip(*((one.stdout, one.stderr) for one in done), strict=True))
    assert [one.returncode for one in done] == [code] * ranks, out + err
    return CompletedProcess(done[0].args, code, out, err)


def wait_for(condition: Callable[[], object], programs: Sequence[Program], limit: float = 240) -> None:
    """Wait until a condition holds; fail if a program ends first or the limit in seconds is reached."""
    deadline = time.monotonic() + limit
    while not condition():
        assert all(program.running for program in programs), [program.printed() for program in programs]
        assert time.monotonic() < deadline, "too slow"
        time.sleep(0.005)


def is_connected(rank_zero: Program) -> bool:
    """Return whether the ranks of a run have connected; until then, they wait five minutes for a missing rank.

    Rank 0 logs one line before.
    """
    _, logged = rank_zero.printed()
    return logged.count(" INFO ") > 1


def ends(programs: Sequence[Program], timeout: float = 240) -> list[CompletedProcess[str]]:
    """Return the result of each program; if one exceeds the timeout, kill all of them and raise `TimeoutExpired`."""
    try:
        return [program.wait(timeout) for program in programs]
    finally:
        for program in programs:
            program.kill()


def lines_in(path: Path) -> int:
    return path.read_text().count("\n") if path.is_file() else 0


def demo_shards(folder: Path, pairs: int, held_out: int = 40) -> Path:
    """Render a small demo dataset, and return the folder of training shards, which is next to the other splits."""
    make_demo_data(folder, pairs=pairs, held_out=held_out, zero_shot=80, size=32, processes=1)
    return folder / "train"


def train(
    runs: Path, data: str | Path, steps: int, *options: str, ranks: int = 1, code: int = 0
) -> CompletedProcess[str]:
    """Train the run named `run` in the folder `runs` for some steps, with a log of the samples."""
    return call(TRAIN, *training(runs, data, steps), *options, ranks=ranks, code=code)


def training(runs: Path, data: str | Path, steps: int) -> list[str]:
    """Return the options that `train` uses, for tests that start a run with `start`."""
    return [*TINY, f"--run.output_dir={runs}", "--run.name=run", f"--data.train={data}", f"--max_steps={steps}"]


def train_connected(communicator: Communicator, config: Config, *hooks: Hook) -> None:
    """Train on ranks that are already connected, such as the ranks of `run_ranks`.

    The trainer's `CollectGarbage` is disabled, because it unfreezes all objects after a run, so that the collection at
    the start of the next run on these ranks would copy the memory that they share with the fork server.
    """
    from neuclip_ds.training import trainer
    from neuclip_ds.training.hooks import Hook
    from neuclip_ds.training.run_folder import move_staged_files, staging_folder
    from neuclip_ds.training.trainer import build_run, recover_and_train

    folder = config.run.output_dir / str(config.run.name)
    with staging_folder(folder, communicator) as staged:
        run = build_run(config, communicator, folder, staged)
        communicator.on_rank_zero(lambda: move_staged_files(staged, folder, config))
    with patch.object(trainer, "CollectGarbage", Hook):
        recover_and_train(run, hooks)


def newest_checkpoint(runs: Path, run: str = "run") -> Path:
    return max((runs / run / "checkpoints").glob("step_*"))


def contents(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files below a folder, by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def weights(checkpoint: Path) -> dict[str, Tensor]:
    files = StateFiles(checkpoint / STATE)
    return {name: files.read(name, WEIGHT) for name in files.shapes}


def log_u(checkpoint: Path) -> Tensor:
    """Return log u of all samples, (n, 2)."""
    files = StateFiles(checkpoint / STATE)
    (name,) = (name for name in files.names(TABLE) if name.startswith("samples/"))
    return files.read(name, TABLE)


def tensors(checkpoint: Path) -> dict[str, bytes]:
    """Return the bytes of all tensors in a checkpoint's files, by file and tensor name."""
    files = {str(path.relative_to(checkpoint)): load_file(path) for path in sorted(checkpoint.rglob("*.safetensors"))}
    return {
        f"{path}/{name}": value.reshape(-1).view(torch.uint8).numpy().tobytes()
        for path, values in files.items()
        for name, value in values.items()
    }


def outcome(runs: Path, run: str = "run") -> dict[str, object]:
    """Return the results of a run to compare: the newest checkpoint's tensors and counters, metrics, and samples."""
    checkpoint = newest_checkpoint(runs, run)
    counters = json.loads((checkpoint / STATE / "index.json").read_text())["counters"]
    lines = records(runs / run / "metrics.jsonl")
    metrics = [{name: value for name, value in line.items() if name not in TIMES} for line in lines]
    samples = {path.name: path.read_text() for path in sorted((runs / run / "samples").iterdir())}
    return {**tensors(checkpoint), **counters, **samples, "metrics": metrics}
