"""Ten steps of training with each DeepSpeed file: tiny towers on rendered pairs, all ranks, each file in processes of
its own. Files of one precision compute the same steps, so their losses agree."""

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from neuclip_ds.data.demo import make_demo_data
from neuclip_ds.data.disk import explain_disk
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.doctor import processes
from neuclip_ds.doctor.finding import Finding, fine, wrong
from neuclip_ds.doctor.progress import announce
from neuclip_ds.doctor.request import Request
from neuclip_ds.engine.config import is_bf16, read_engine_file
from neuclip_ds.reporting.metrics import read_metrics

STEPS = 10
TOLERANCES = {"float32": 1e-3, "bf16": 5e-2}  # largest difference of a loss, relative to the loss
_ROWS = 16  # pairs a rank
_TINY = (
    "train",
    "demo",
    *("--run.report=false", "--run.resume=never", "--run.log_every=1", f"--budget.steps={STEPS}"),
    *("--data.val=", "--data.zero_shot=", "--data.workers=1", "--optimizer.warmup_steps=2"),
    *("--model.vision.image_size=32", "--model.embed_dim=32", "--objective.npn.prototypes=32"),
    '--model.vision.options={"patch_size":8,"embed_dim":32,"depth":2,"num_heads":2}',
    *("--model.text.width=32", "--model.text.layers=1", "--model.text.heads=2", "--model.text.vocab_size=300"),
)


def examine(request: Request, communicator: Communicator) -> Iterator[Finding]:
    folder, batch = (request.out / "training").absolute(), _ROWS * communicator.world_size
    communicator.on_rank_zero(lambda: _render(folder, 2 * max(batch, STEPS * _ROWS)))
    own = [*_TINY, f"--data.train={folder}/data/train", f"--data.batch_size={batch}", f"--run.folder={folder}"]
    losses: dict[str, list[float]] = {}
    for number, name in enumerate(request.engines, start=1):
        announce(f"training with {name}, {number} of {len(request.engines)}", communicator)
        options = [*own, f"--run.name={Path(name).stem}", f"--deepspeed={name}"]
        output = request.out / f"training_{Path(name).stem}_{communicator.rank}.txt"
        failure = processes.run(request, options, processes.joined(communicator), output)
        failures = [
            f"rank {rank}: {why}" for rank, why in enumerate(communicator.gather_objects(failure)) if why is not None
        ]
        if communicator.rank:
            continue
        if failures:
            # the rank that failed first knows why, the others only that it did
            cause = max(failures, key=lambda text: "rror" in text)
            yield wrong(f"Training with {name} fails, {cause}", f"See {request.out}/training_{Path(name).stem}_*.txt.")
        else:
            losses[name] = [record["loss"] for record in read_metrics(folder / Path(name).stem / "metrics.jsonl")]
    yield from compare(losses)


def compare(losses: Mapping[str, Sequence[float]]) -> Iterator[Finding]:
    """Yield whether the files of each precision have trained alike."""
    for precision, tolerance in TOLERANCES.items():
        names = [name for name in losses if is_bf16(read_engine_file(name)[1]) == (precision == "bf16")]
        if not names:
            continue
        apart = {name: _apart(losses[names[0]], losses[name]) for name in names}
        for name, difference in apart.items():
            if not difference <= tolerance:
                yield wrong(
                    f"The losses of {name} differ from those of {names[0]} by {difference:.0e} of the loss; "
                    f"{tolerance:.0e} is allowed.",
                    "Train with another DeepSpeed file, and report the machine and the versions.",
                )
        agreement = f"; their losses agree to {max(apart.values()):.0e}" if len(names) > 1 else ""
        yield fine(f"{STEPS} steps in {precision} with {', '.join(names)}{agreement}.")


def _apart(wanted: Sequence[float], found: Sequence[float]) -> float:
    if len(wanted) != len(found):
        return math.nan
    return max((abs(a - b) / abs(a) for a, b in zip(wanted, found, strict=True)), default=0.0)


def _render(folder: Path, pairs: int) -> None:
    with explain_disk(folder, "choose another --out"):
        shutil.rmtree(folder, ignore_errors=True)
        make_demo_data(folder / "data", pairs=pairs, held_out=8, zero_shot=80, size=32, processes=1)
