"""For developers of neuclip_ds: measure the peak memory of training steps against the prediction of `--dry-run`.

Every case runs in fresh processes, one a rank: engine, objective and three steps on random pixels. On a CPU the
measurement is the highest resident memory of a rank during those steps (VmHWM, reset before them) minus its resident
memory before the model is built, when all libraries are loaded; freed blocks go back to the system at once. On a GPU it
is torch.cuda.max_memory_allocated, and samples/s and the share of the peak FLOP/s are measured as well.

Examples:
    python tools/benchmark_memory.py --engines zero1_bf16 zero3_bf16 --ranks 1 2 --micro 16 --passes 1 2
    python tools/benchmark_memory.py --models vith14 --micro 32 64 128 --checkpointing on --tflops 989
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import socket
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp

from neuclip_ds.config import Config
from neuclip_ds.recipe import dump, load_recipe, override, validate

_MODELS = {"vitb32": "models/vitb32", "vitb16": "models/vitb16", "rn50": "models/rn50", "vith14": "models/dfn5b_vith14"}
_TOKENS = 512  # of the vocabulary, from which random captions are drawn


class Case(NamedTuple):
    """One line of the table."""

    model: str
    engine: str
    ranks: int
    micro: int
    passes: int  # micro-batches a step
    checkpointing: bool
    method: str
    optimizer: str

    def config(self) -> Config:
        options = {
            "data": {"batch_size": self.ranks * self.micro * self.passes, "micro_batch": self.micro},
            "model": {"activation_checkpointing": self.checkpointing},
            "objective": {"method": self.method},
            "optimizer": {"name": self.optimizer, "lr": 1e-5},
            "deepspeed": self.engine,
        }
        return validate(override(load_recipe(_MODELS[self.model]), options))


def measure(rank: int, case: Case, port: int, steps: int, folder: str) -> None:
    """One rank's figures, written to FOLDER/RANK.json."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // case.ranks))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(case.ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    from neuclip_ds.distributed.launch import connected
    from neuclip_ds.engine.config import load_engine_config
    from neuclip_ds.engine.precision import resolve_comm_dtype
    from neuclip_ds.engine.start import start_engine
    from neuclip_ds.models.source import locate_model, model_source
    from neuclip_ds.objectives import build_objective
    from neuclip_ds.objectives.base import Context, Step
    from neuclip_ds.planning.dry_run import StandInTokenizer
    from neuclip_ds.planning.memory import MemoryQuery, account, count_towers
    from neuclip_ds.planning.step_work import forward_flops
    from neuclip_ds.training.step import TrainStep

    config = case.config()
    with connected(dump(config)) as communicator:
        device = communicator.device
        place = locate_model(config.model, weights=False)
        source = model_source(config.model, place)
        stand_in: Any = StandInTokenizer(config.model.text)
        tokenizer = source.tokenizer(lambda: stand_in)
        rows, samples = config.rank_batch(case.ranks), 10 * config.data.batch_size
        query = MemoryQuery(config, source, tokenizer, case.ranks, samples, device.type, place)
        towers = count_towers(query)
        found = account(query, towers)

        before = _resident("VmRSS")
        engine_config = load_engine_config(config, case.ranks)
        engine = start_engine(source.build(tokenizer), config.optimizer, engine_config, communicator)
        context = Context(source.embed_dim, samples, communicator)
        objective = build_objective(config, context, resolve_comm_dtype(config, engine_config))
        step = TrainStep(engine, objective, communicator, case.micro, seed=0)
        batch = _random_batch(rows, source.preprocessing.size, tokenizer.context_length, rank)
        _reset_peaks(device)
        seconds = []
        for number in range(steps):
            began = time.perf_counter()
            loss = float(step(batch, Step(number, 0, 1e-6, 1e-6)).loss)
            seconds.append(time.perf_counter() - began)
        on_gpu = device.type == "cuda"
        figures = {
            "measured": torch.cuda.max_memory_allocated() if on_gpu else _resident("VmHWM") - before,
            "predicted": found.peak + (0 if on_gpu else found.host),
            "parts": found.lines(),
            "seconds": min(seconds[1:]),
            "flops": 3 * sum(forward_flops(source, tokenizer)) * rows,
            "loss": loss,
            "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        }
        Path(folder, f"{rank}.json").write_text(json.dumps(figures))


def _random_batch(rows: int, size: int, length: int, rank: int) -> Any:
    from neuclip_ds.data.dataset import Batch

    image = torch.randint(0, 256, (rows, 3, size, size), dtype=torch.uint8)
    tokens = torch.randint(1, _TOKENS, (rows, length))
    index = torch.arange(rows) + rank * rows
    return Batch(image=image, tokens=tokens, index=index, valid=torch.ones(rows, dtype=torch.bool), bad=())


def _reset_peaks(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew


def _resident(field: str) -> int:
    """Bytes of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def run(case: Case, steps: int) -> list[dict[str, Any]]:
    """The figures of every rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (case, port, steps, folder), nprocs=case.ranks)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(case.ranks)]


def line(case: Case, figures: list[dict[str, Any]], tflops: float | None) -> str:
    """A line of the Markdown table: the rank with the largest peak."""
    worst = max(figures, key=lambda rank: rank["measured"])
    seconds = max(rank["seconds"] for rank in figures)
    ratio = worst["predicted"] / worst["measured"]
    share = f"{worst['flops'] / seconds / tflops / 1e12:.2f}" if tflops else "-"
    return (
        f"| {case.model} | {case.engine} | {case.ranks} | {case.passes} x {case.micro} | "
        f"{'yes' if case.checkpointing else 'no'} | {worst['predicted'] / 1e6:,.0f} | {worst['measured'] / 1e6:,.0f} | "
        f"{ratio:.2f} | {case.ranks * case.micro * case.passes / seconds:,.1f} | {share} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=_MODELS, default=["vitb32"])
    parser.add_argument("--engines", nargs="+", default=["zero1_bf16"], help="names in ds_configs/, or JSON files")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument("--micro", type=int, nargs="+", default=[32], help="rows of a micro-batch")
    parser.add_argument("--passes", type=int, nargs="+", default=[1], help="micro-batches a step and rank")
    parser.add_argument("--checkpointing", nargs="+", choices=["on", "off"], default=["off"])
    parser.add_argument("--method", default="fastclip_v3")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tflops", type=float, help="peak of the GPU in this precision, for the share that is reached")
    parser.add_argument("--parts", action="store_true", help="print the account's parts as well")
    asked = parser.parse_args()
    # freed blocks return to the system at once, so that resident memory is what lives
    os.environ.update(MALLOC_MMAP_THRESHOLD_="1000000", MALLOC_TRIM_THRESHOLD_="0", MALLOC_ARENA_MAX="1")
    names = "model, engine, ranks, batch of a rank, checkpointing, predicted MB, measured MB, ratio, samples/s"
    print(f"| {names.replace(', ', ' | ')} | share of peak FLOP/s |")
    print("|---" * 10 + "|")
    cases = itertools.product(
        asked.models, asked.engines, asked.ranks, asked.micro, asked.passes, [c == "on" for c in asked.checkpointing]
    )
    for values in cases:
        case = Case(*values, method=asked.method, optimizer=asked.optimizer)
        try:
            figures = run(case, asked.steps)
        except mp.ProcessRaisedException as error:
            if "out of memory" not in str(error):
                raise
            print(f"| {case.model} | {case.engine} | {case.ranks} | {case.passes} x {case.micro} | out of memory |")
            continue
        print(line(case, figures, asked.tflops), flush=True)
        if asked.parts:
            print("\n".join(figures[0]["parts"]))


if __name__ == "__main__":
    main()
