"""For developers of neuclip_ds: measure how long training waits for checkpoints.

The program trains on random pairs in fresh processes, one per rank. The columns are

    GB              size of a checkpoint
    step s          time of a training step (median)
    unchecked s     time to write the files and force them to disk, without checksums and reading back
    save s          time of the whole save, during which training waits

Example:
    python tools/benchmark_checkpoint.py --folder /data/scratch --models vitb32 --ranks 1 2
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarking import machine, on_ranks
from benchmarking.synthetic_profile import SyntheticSteps
from neuclip_ds.objectives import build_objective

from neuclip_ds.checkpoint.checkpoints import Checkpoints
from neuclip_ds.checkpoint.engine_state import engine_facts, engine_shards
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.launch import process_group
from neuclip_ds.losses.base import Objective
from neuclip_ds.recipe import load_recipe, override, validate
from neuclip_ds.state.shards import shard_files

_MODELS = {"vitb32": "models/vitb32", "vitb16": "models/vitb16", "rn50": "models/rn50", "vith14": "models/dfn5b_vith14"}
_FACTS = {"method": "benchmark"}


class _Run:
    """Training of a model on random pairs, with methods that write its checkpoints."""

    def __init__(self, asked: argparse.Namespace, model: str, ranks: int, communicator: Communicator) -> None:
        options = {"data": {"batch_size": ranks * asked.micro}, "deepspeed": asked.engine}
        config = validate(override(load_recipe(_MODELS[model]), options))
        built: list[Objective] = []

        def build(*arguments: object) -> Objective:
            built.append(build_objective(*arguments))  # type: ignore[arg-type]
            return built[0]

        self._steps, self._communicator = SyntheticSteps(config, communicator, build=build), communicator
        self.engine, self.objective, self._number = self._steps.engine, built[0], 0
        self._batch = self._steps.batch(0)

    def step(self) -> None:
        float(self._steps.run(self._number, self._batch).loss)
        self._number += 1

    def write_unchecked(self, folder: Path) -> None:
        """Write and sync the engine's files, which make up nearly all of a checkpoint."""
        folder.mkdir(exist_ok=True)
        ranks = self._communicator
        for file in shard_files(engine_shards(self.engine, ranks), engine_facts(self.engine), ranks):
            file.write(folder)
            with (folder / file.name).open("rb") as written:
                os.fsync(written.fileno())
        ranks.barrier()

    def save(self, checkpoints: Checkpoints) -> Path:
        return checkpoints.save(self._number, self.engine, self.objective, _FACTS, {})


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(asked: argparse.Namespace, model: str, ranks: int, folder: str) -> dict[str, float]:
    """Return one rank's measurements by column."""
    place = Path(folder)
    with process_group("benchmark") as communicator:
        run = _Run(asked, model, ranks, communicator)
        usual = [_seconds(run.step) for _ in range(asked.steps)]
        step = statistics.median(usual[1:])
        unchecked = [_seconds(lambda: run.write_unchecked(place / "unchecked")) for _ in range(asked.turns)]
        checkpoints = Checkpoints(place / "checkpoints", communicator, 1)
        waited = [_seconds(lambda: run.save(checkpoints)) for _ in range(asked.turns)]
        (checkpoint,) = (place / "checkpoints").glob("step_*")
        size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    names = ("GB", "step", "unchecked", "save")
    figures = (size / 1e9, step, *map(statistics.median, (unchecked, waited)))
    return dict(zip(names, figures, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="folder to write to (default: the folder for temporary files)")
    parser.add_argument("--models", nargs="+", choices=_MODELS, default=["vitb32"])
    parser.add_argument("--engine", default="zero1_bf16", help="name in ds_configs/, or a JSON file")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument("--micro", type=int, default=32, help="pairs per rank")
    parser.add_argument("--steps", type=int, default=6, help="training steps to measure")
    parser.add_argument("--turns", type=int, default=3, help="saves of each kind; the median is printed")
    asked = parser.parse_args()
    print(machine())
    print("| model | ranks | GB | step s | unchecked s | save s |")
    print("|---" * 6 + "|")
    for model in asked.models:
        for ranks in asked.ranks:
            folder = tempfile.mkdtemp(dir=asked.folder)
            try:
                found = on_ranks(ranks, measure, asked, model, ranks, folder)
            finally:
                shutil.rmtree(folder)
            slowest = {name: max(rank[name] for rank in found) for name in found[0]}
            cells = [model, str(ranks), *(f"{value:.2f}" for value in slowest.values())]
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
