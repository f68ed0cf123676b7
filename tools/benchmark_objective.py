"""For developers of neuclip_ds: measure an objective step (features in, gradients out) against OpenCLIP's loss.

The peer is OpenCLIP's recommended form, written out with autograd: local loss, features gathered with gradient. Where
open_clip_torch is installed its own `ClipLoss` is taken. Both run in the same processes, one after the other in turns.

Example: python tools/benchmark_objective.py --ranks 1 2 --batch 512 2048 --repeats 20
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from neuclip_ds.config import Config
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.objectives import METHODS, build_objective
from neuclip_ds.objectives.base import Context, Step
from neuclip_ds.objectives.gather import Features
from neuclip_ds.objectives.methods.neuclip import NpnConfig

Work = Callable[[], object]


def peer_loss(rank: int, world_size: int) -> tuple[str, Callable[..., Tensor]]:
    """Name and function (image, text, logit_scale) -> loss of this rank."""
    try:
        from open_clip.loss import ClipLoss

        loss = ClipLoss(local_loss=True, gather_with_grad=True, cache_labels=True, rank=rank, world_size=world_size)
        return "open_clip ClipLoss", loss
    except ImportError:
        return "written-out OpenCLIP loss", lambda image, text, scale: _written_out(
            image, text, scale, rank, world_size
        )


def _written_out(image: Tensor, text: Tensor, scale: Tensor, rank: int, world_size: int) -> Tensor:
    all_image, all_text = image, text
    if world_size > 1:
        from torch.distributed.nn.functional import all_gather

        all_image, all_text = torch.cat(all_gather(image)), torch.cat(all_gather(text))
    labels = torch.arange(len(image)) + rank * len(image)
    by_image, by_text = scale * image @ all_text.T, scale * text @ all_image.T
    return (cross_entropy(by_image, labels) + cross_entropy(by_text, labels)) / 2


class _PeakMemory:
    """Highest resident memory above the start, sampled every millisecond; an estimate from below."""

    def __enter__(self) -> _PeakMemory:
        self._start = self._peak = _resident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def megabytes(self) -> float:
        return (self._peak - self._start) / 1e6

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self._peak = max(self._peak, _resident())


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(rank: int, world_size: int, rows: int, dim: int, repeats: int, folder: str) -> None:
    """One rank's measurements, written to FOLDER/RANK.json; memory with repeats = 0, else seconds and bytes."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    communicator = Communicator()
    generator = torch.Generator().manual_seed(rank)
    image, text = (normalize(torch.randn(rows, dim, generator=generator), dim=1) for _ in range(2))
    works: dict[str, Work] = {}
    peer, loss = peer_loss(rank, world_size)
    scale = torch.tensor(1 / 0.07, requires_grad=True)
    leaves = [image.clone().requires_grad_(), text.clone().requires_grad_()]
    works[peer] = lambda: torch.autograd.grad(loss(*leaves, scale), [*leaves, scale])
    counted = {method: Communicator() for method in METHODS}
    for method in METHODS:
        works[method] = _our_step(method, counted[method], image, text, rank)
    for _ in range(2 + NpnConfig().prototypes // (rows * world_size)):  # NPN predicts once its queue is full
        for work in works.values():
            work()
    measured: dict[str, Any] = {key: {"seconds": []} for key in works}
    for communicator_of in counted.values():
        communicator_of.traffic.clear()
    for _ in range(repeats):
        for key, work in works.items():
            communicator.barrier()
            began = time.perf_counter()
            work()
            measured[key]["seconds"].append(time.perf_counter() - began)
    for key, work in works.items() if repeats == 0 else ():
        communicator.barrier()
        with _PeakMemory() as memory:
            work()
        measured[key]["megabytes"] = memory.megabytes
    for key, of in counted.items() if repeats else ():
        measured[key]["bytes"] = {name: traffic.bytes_received // repeats for name, traffic in of.traffic.items()}
    share = (world_size - 1) * rows * dim * 4
    measured[peer]["bytes"] = {"features": 2 * share, "feature gradients": 2 * share}  # ring algorithms
    Path(folder, f"{rank}.json").write_text(json.dumps(measured))
    dist.destroy_process_group()


def _our_step(method: str, communicator: Communicator, image: Tensor, text: Tensor, rank: int) -> Work:
    config = Config.model_validate({"objective": {"method": method}})
    batch = len(image) * communicator.world_size
    objective = build_objective(config, Context(image.shape[1], batch, communicator), torch.float32)
    index = torch.arange(len(image)) + rank * len(image)
    features = Features(image, text, index, torch.ones(len(image), dtype=torch.bool))
    return lambda: objective(features, Step(0, 0, 1e-4, 1e-4))


def run(world_size: int, rows: int, dim: int, repeats: int) -> list[dict[str, Any]]:
    """The measurements of every rank."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (world_size, rows, dim, repeats, folder), nprocs=world_size)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world_size)]


def compare(world_size: int, rows: int, dim: int, repeats: int) -> list[str]:
    """Lines of a Markdown table; the first is the peer. Times and memory are those of the worst rank."""
    timed = run(world_size, rows, dim, repeats)
    # freed blocks return to the system at once, which costs time but makes resident memory what lives
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    weighed = run(world_size, rows, dim, repeats=0)
    del os.environ["MALLOC_MMAP_THRESHOLD_"]
    lines = []
    peer = next(iter(timed[0]))
    seconds = {key: max(statistics.median(rank[key]["seconds"]) for rank in timed) for key in timed[0]}
    memory = {key: max(rank[key]["megabytes"] for rank in weighed) for key in timed[0]}
    for key in seconds:
        traffic = ", ".join(f"{name} {count / 1e3:,.1f}" for name, count in timed[0][key]["bytes"].items())
        lines.append(
            f"| {world_size} | {rows} | {key} | {seconds[key] * 1e3:.1f} | {seconds[key] / seconds[peer]:.2f} "
            f"| {memory[key]:.1f} | {memory[key] / memory[peer]:.2f} | {traffic if world_size > 1 else '-'} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="world sizes (default 1 2)")
    parser.add_argument("--batch", type=int, nargs="+", default=[512, 2048], help="rows a rank (default 512 2048)")
    parser.add_argument("--dim", type=int, default=512, help="feature width (default 512)")
    parser.add_argument("--repeats", type=int, default=20, help="timed steps, in turns (default 20)")
    arguments = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, float32, d = {arguments.dim}\n")
    print("| ranks | b | objective | ms | ratio | peak MB | ratio | kB received per rank and step |")
    print("|---|---|---|---|---|---|---|---|")
    for world_size in arguments.ranks:
        for rows in arguments.batch:
            print("\n".join(compare(world_size, rows, arguments.dim, arguments.repeats)), flush=True)


if __name__ == "__main__":
    main()
