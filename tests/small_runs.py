"""Tools of this project called as a user calls them, with a model that trains in no time."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import TYPE_CHECKING, Any

import torch
from forks import Program
from safetensors.torch import load_file
from torch import Tensor

from neuclip_ds.checkpoint.sharded_state import STATE, WEIGHT, StateFiles
from neuclip_ds.data.demo import make_demo_data
from neuclip_ds.distributed.environment import free_port
from neuclip_ds.objectives import METHODS
from neuclip_ds.state.shards import TABLE

if TYPE_CHECKING:
    from neuclip_ds.config import Config
    from neuclip_ds.distributed.communicator import Communicator
    from neuclip_ds.training.hooks import Hook

ROOT = Path(__file__).parents[1]
TRAIN = "tests/logged_train.py"
TIMES = ("samples_per_second", "data_wait_share", "objective_communication_share")  # metrics that no two runs share
SMALL = [
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
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        variables = [{**environment(), **where, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return [Program(ROOT / tool, *options, variables=own, folder=folder) for own in variables]


def call(tool: str, *options: str, folder: Path | None = None, ranks: int = 1, code: int = 0) -> CompletedProcess[str]:
    """Run a tool, all of whose ranks must end with this code; return what they print together."""
    done = ends(start(tool, *options, folder=folder, ranks=ranks))
    out, err = ("".join(texts) for texts in zip(*((one.stdout, one.stderr) for one in done), strict=True))
    assert [one.returncode for one in done] == [code] * ranks, out + err
    return CompletedProcess(done[0].args, code, out, err)


def wait_for(condition: Callable[[], object], programs: Sequence[Program], limit: float = 240) -> None:
    """Wait until a condition holds; fail where a program ends before, or after so many seconds."""
    deadline = time.monotonic() + limit
    while not condition():
        assert all(program.running for program in programs), [program.printed() for program in programs]
        assert time.monotonic() < deadline, "too slow"
        time.sleep(0.005)


def ends(programs: Sequence[Program], timeout: float = 240) -> list[CompletedProcess[str]]:
    """How each program ends; those that do not are killed."""
    try:
        return [program.wait(timeout) for program in programs]
    finally:
        for program in programs:
            program.kill()


def lines_in(path: Path) -> int:
    return path.read_text().count("\n") if path.is_file() else 0


def demo_shards(folder: Path, pairs: int, held_out: int = 40) -> Path:
    """The training shards of a small demo set, its other splits beside them."""
    make_demo_data(folder, pairs=pairs, held_out=held_out, zero_shot=80, size=32, processes=1)
    return folder / "train"


def train(
    runs: Path, data: str | Path, steps: int, *options: str, ranks: int = 1, code: int = 0
) -> CompletedProcess[str]:
    """A training with a log of samples, for some steps of a run named `run` in the folder `runs`."""
    return call(TRAIN, *training(runs, data, steps), *options, ranks=ranks, code=code)


def training(runs: Path, data: str | Path, steps: int) -> list[str]:
    """The options of `train`, for a run that a test starts with `start`."""
    return [*TINY, f"--run.output_dir={runs}", "--run.name=run", f"--data.train={data}", f"--max_steps={steps}"]


def train_connected(communicator: Communicator, config: Config, *hooks: Hook) -> None:
    """Train on ranks that are connected already, as those of `run_ranks` are."""
    from neuclip_ds.training.evaluator import Evaluator
    from neuclip_ds.training.run_folder import staging, take_in
    from neuclip_ds.training.trainer import build

    folder = config.run.output_dir / str(config.run.name)
    with staging(config, folder, communicator) as staged:
        trainer = build(config, communicator, folder, staged, Evaluator)
        communicator.on_rank_zero(lambda: take_in(staged, folder, config))
        trainer.run(hooks)


def newest_checkpoint(runs: Path, run: str = "run") -> Path:
    return max((runs / run / "checkpoints").glob("step_*"))


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def records(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of JSON."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def weights(checkpoint: Path) -> dict[str, Tensor]:
    files = StateFiles(checkpoint / STATE)
    return {name: files.read(name, WEIGHT) for name in files.shapes}


def log_u(checkpoint: Path) -> Tensor:
    """(n, 2)"""
    files = StateFiles(checkpoint / STATE)
    (name,) = (name for name in files.names(TABLE) if name.startswith("samples/"))
    return files.read(name, TABLE)


def tensors(checkpoint: Path) -> dict[str, bytes]:
    """All that a checkpoint's files hold, by file and name."""
    files = {str(path.relative_to(checkpoint)): load_file(path) for path in sorted(checkpoint.rglob("*.safetensors"))}
    return {
        f"{path}/{name}": value.reshape(-1).view(torch.uint8).numpy().tobytes()
        for path, values in files.items()
        for name, value in values.items()
    }


def outcome(runs: Path, run: str = "run") -> dict[str, object]:
    """What two equal runs leave: tensors and counters of the newest checkpoint, metrics, the samples of every step."""
    checkpoint = newest_checkpoint(runs, run)
    counters = json.loads((checkpoint / STATE / "index.json").read_text())["counters"]
    lines = records(runs / run / "metrics.jsonl")
    metrics = [{name: value for name, value in line.items() if name not in TIMES} for line in lines]
    samples = {path.name: path.read_text() for path in sorted((runs / run / "samples").iterdir())}
    return {**tensors(checkpoint), **counters, **samples, "metrics": metrics}
