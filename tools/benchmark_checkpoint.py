"""For developers of neuclip_ds: measure how long training waits for checkpoints.

The program trains on random pairs in fresh processes, one per rank. The columns are

    GB            size of a checkpoint
    step s        median time of a training step
    unchecked s   time to write the engine's files and force them to disk, without reading them again to verify them
    save s        time of the whole save, during which training waits

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

from neuclip_ds.checkpoint.checkpoints import Checkpoints
from neuclip_ds.checkpoint.engine_state import engine_metadata, engine_shards
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.launch import process_group
from neuclip_ds.losses.contrastive_loss import ContrastiveLoss
from neuclip_ds.recipe import load_recipe, override, validate
from neuclip_ds.state.shards import shard_files

_MODELS = {"vitb32": "models/vitb32", "vitb16": "models/vitb16", "rn50": "models/rn50", "vith14": "models/dfn5b_vith14"}
_FACTS = {"method": "benchmark"}


class _Run:
    """A training run on random pairs, with methods that write its checkpoints."""

    def __init__(self, options: argparse.Namespace, model: str, ranks: int, communicator: Communicator) -> None:
        changes = {"data": {"batch_size": ranks * options.micro}, "deepspeed": options.engine}
        config = validate(override(load_recipe(_MODELS[model]), changes))
        self._communicator = communicator
        self._steps = SyntheticSteps(config, communicator)
        loss = self._steps.loss
        assert isinstance(loss, ContrastiveLoss)
        self._loss = loss
        self._number = 0

    def step(self) -> None:
        self._steps.run(self._number)
        self._number += 1

    def write_unchecked(self, folder: Path) -> None:
        """Write and sync the engine's files, which make up nearly all of a checkpoint."""
        folder.mkdir(exist_ok=True)
        engine = self._steps.engine
        ranks = self._communicator
        for file in shard_files(engine_shards(engine, ranks), engine_metadata(engine), ranks):
            file.write(folder)
            with (folder / file.name).open("rb") as written:
                os.fsync(written.fileno())
        ranks.barrier()

    def save(self, checkpoints: Checkpoints) -> Path:
        return checkpoints.save(self._number, self._steps.engine, self._loss.function, _FACTS, {})


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(options: argparse.Namespace, model: str, ranks: int, folder: str) -> dict[str, float]:
    """Return one rank's measurements by column."""
    with process_group("benchmark") as communicator:
        run = _Run(options, model, ranks, communicator)
        step_times = [_seconds(run.step) for _ in range(options.steps)]
        unchecked_folder = Path(folder) / "unchecked"
        unchecked_times = [_seconds(lambda: run.write_unchecked(unchecked_folder)) for _ in range(options.turns)]
        checkpoints = Checkpoints(Path(folder) / "checkpoints", communicator, 1)
        save_times = [_seconds(lambda: run.save(checkpoints)) for _ in range(options.turns)]
        (checkpoint,) = (Path(folder) / "checkpoints").glob("step_*")
        size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    return {
        "GB": size / 1e9,
        "step": statistics.median(step_times[1:]),
        "unchecked": statistics.median(unchecked_times),
        "save": statistics.median(save_times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="folder to write to (default: the system's temporary folder)")
    parser.add_argument(
        "--models", nargs="+", choices=_MODELS, default=["vitb32"], help="models to save (default: vitb32)"
    )
    parser.add_argument(
        "--engine",
        default="zero1_bf16",
        help="DeepSpeed config: a name in ds_configs/ or a JSON file (default: zero1_bf16)",
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1], help="numbers of ranks on this machine (default: 1)"
    )
    parser.add_argument("--micro", type=int, default=32, help="pairs per rank (default: 32)")
    parser.add_argument(
        "--steps",
        type=int,
        default=6,
        help="number of training steps, at least 2; the first one is not timed (default: 6)",
    )
    parser.add_argument(
        "--turns", type=int, default=3, help="times to measure each kind of save; the medians are printed (default: 3)"
    )
    options = parser.parse_args()
    print(machine())
    print("| model | ranks | GB | step s | unchecked s | save s |")
    print("|---" * 6 + "|")
    for model in options.models:
        for ranks in options.ranks:
            folder = tempfile.mkdtemp(dir=options.folder)
            try:
                by_rank = on_ranks(ranks, measure, options, model, ranks, folder)
            finally:
                shutil.rmtree(folder)
            cells = [model, str(ranks)]
            for name in by_rank[0]:
                slowest = max(rank[name] for rank in by_rank)
                cells.append(f"{slowest:.2f}")
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
