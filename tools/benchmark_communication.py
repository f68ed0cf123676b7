"""For developers of neuclip_ds: measure what each saving of communication saves, in bytes and time, on real ranks.

    comm_dtype          features in float32, and in bf16
    gradients     OpenCLIP's scheme (gather, and a reduce-scatter of B x d for each tower back), and the closed form
    scalars       images' and texts' statistics, sums one by one, and each kind in one collective
    overlap       texts gathered after the image tower, and while it runs (a product of --tower-ms stands for the tower)
    npn           gradients of replicated prototypes (2 m d, T_u times), and sums over split ones (2B, T_u + 1 times)
    amorlip       log g gathered in every step, and where the nets are fitted (every T_online = 8 steps)

Only what travels is timed, not what is computed with it. Bytes are those of the ring algorithms. That results are the
same is held by tests (docs/reference/communication.md names them); for bf16 the difference is printed.

Example: python tools/benchmark_communication.py --ranks 2 --rows 640 --dim 512
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn.functional import normalize

from neuclip_ds.config import Config
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.objectives import build_objective
from neuclip_ds.objectives.base import Context, Step
from neuclip_ds.objectives.gather import Features

Work = Callable[[Communicator], object]
_UPDATES, _PROTOTYPES, _ONLINE = 10, 4096, 8
_SUMS = 6  # of loss, temperature and norms


class Saving(NamedTuple):
    """The same information by two ways."""

    name: str
    before: Work
    after: Work


def savings(image: Tensor, text: Tensor, world_size: int, tower: Tensor) -> list[Saving]:
    """For (b, d) features of one rank; `tower` is a square matrix whose product stands for the image tower."""
    rows, dim = image.shape
    values, batch = image.new_ones(rows, 1), rows * world_size

    def gather(communicator: Communicator, comm_dtype: torch.dtype) -> None:
        for x in (image, text):
            communicator.all_gather(x.to(comm_dtype), "features").to(x.dtype)

    def back_and_forth(communicator: Communicator) -> None:
        gather(communicator, torch.float32)
        for _ in range(2):
            communicator.reduce_scatter(image.new_ones(batch, dim), "feature gradients")

    def one_by_one(communicator: Communicator) -> None:
        for _ in range(2):
            communicator.all_gather(values, "normalizer")
        for _ in range(_SUMS):
            communicator.all_reduce(values[0], "scalars")

    def together(communicator: Communicator) -> None:
        communicator.all_gather(values.expand(-1, 2), "normalizer")
        communicator.all_reduce(values[0].expand(_SUMS), "scalars")

    def texts_after(communicator: Communicator) -> None:
        torch.mm(tower, tower)
        communicator.all_gather(text, "features")

    def texts_meanwhile(communicator: Communicator) -> None:
        pending = communicator.begin_all_gather(text, "features")
        torch.mm(tower, tower)
        pending.wait()

    gradient = image.new_ones(2, _PROTOTYPES, dim)
    sums = torch.ones(2, batch, dtype=torch.float64)
    return [
        Saving("comm_dtype", lambda c: gather(c, torch.float32), lambda c: gather(c, torch.bfloat16)),
        Saving("gradients", back_and_forth, lambda c: gather(c, torch.float32)),
        Saving("scalars", one_by_one, together),
        Saving("overlap", texts_after, texts_meanwhile),
        Saving(
            "npn",
            lambda c: [c.all_reduce(gradient, "normalizer") for _ in range(_UPDATES)],
            lambda c: [c.all_reduce(sums, "normalizer") for _ in range(_UPDATES + 1)],
        ),
        Saving(
            "amorlip",
            lambda c: [c.all_gather(values.expand(-1, 2), "normalizer") for _ in range(_ONLINE)],
            lambda c: c.all_gather(values.expand(-1, 2), "normalizer"),
        ),
    ]


def measure(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    """One rank's seconds and bytes, written to FOLDER/RANK.json."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // arguments.ranks))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=arguments.ranks)
    generator = torch.Generator().manual_seed(rank)
    image, text = (normalize(torch.randn(arguments.rows, arguments.dim, generator=generator), dim=1) for _ in range(2))
    found: dict[str, Any] = {}
    for saving in savings(image, text, arguments.ranks, _tower(arguments.tower_ms)):
        ways = {"before": (saving.before, Communicator()), "after": (saving.after, Communicator())}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(arguments.repeats + 2):
            for way, (work, communicator) in ways.items():
                communicator.barrier()
                began = time.perf_counter()
                work(communicator)
                if turn >= 2:  # the first connect and allocate
                    seconds[way].append(time.perf_counter() - began)
        turns = arguments.repeats + 2
        found[saving.name] = {
            way: {
                "seconds": seconds[way],
                "bytes": sum(traffic.bytes_received for traffic in communicator.traffic.values()) // turns,
                "calls": sum(traffic.calls for traffic in communicator.traffic.values()) // turns,
            }
            for way, (_, communicator) in ways.items()
        }
    found["difference"] = {str(tau): _difference_of_bf16(image, text, rank, tau) for tau in (0.07, 0.01)}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _tower(milliseconds: float) -> Tensor:
    """A matrix whose square takes about as long."""
    size = 512
    while True:
        matrix = torch.randn(size, size)
        began = time.perf_counter()
        torch.mm(matrix, matrix)
        if time.perf_counter() - began >= milliseconds / 1e3:
            return matrix
        size = size * 5 // 4


def _difference_of_bf16(image: Tensor, text: Tensor, rank: int, tau: float) -> float:
    """Norm of the change of OpenCLIP's feature gradients over their norm."""
    index = torch.arange(len(image)) + rank * len(image)
    features = Features(image, text, index, torch.ones(len(image), dtype=torch.bool))
    tree = {"objective": {"method": "openclip", "temperature": {"initial": tau}}}
    found = []
    for comm_dtype in (torch.float32, torch.bfloat16):
        context = Context(image.shape[1], len(image), Communicator())
        objective = build_objective(Config.model_validate(tree), context, comm_dtype)
        gradients = objective(features, Step(0, 0, 0.0, 1.0))
        found.append(torch.cat([gradients.image, gradients.text]))
    return float((found[1] - found[0]).norm() / found[0].norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="on this machine (2)")
    parser.add_argument("--rows", type=int, default=640, help="pairs a rank (640)")
    parser.add_argument("--dim", type=int, default=512, help="feature width (512)")
    parser.add_argument("--tower-ms", type=float, default=50, help="that the image tower takes (50)")
    parser.add_argument("--repeats", type=int, default=30, help="in turns (30)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (arguments, folder), nprocs=arguments.ranks)
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(arguments.ranks)]
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, gloo, {arguments.ranks} ranks, "
          f"{arguments.rows} pairs a rank, d = {arguments.dim}\n")  # fmt: skip
    print("| saving | calls | kB received | ms | calls after | kB | ms | bytes | time |")
    print("|---|---|---|---|---|---|---|---|---|")
    differences = [rank.pop("difference") for rank in ranks]
    for name in ranks[0]:
        cells, of = [], {}
        for way in ("before", "after"):
            seconds = max(statistics.median(rank[name][way]["seconds"]) for rank in ranks)
            size, calls = ranks[0][name][way]["bytes"], ranks[0][name][way]["calls"]
            of[way] = (size, seconds)
            cells += [str(calls), f"{size / 1e3:,.1f}", f"{1e3 * seconds:.2f}"]
        ratios = [f"{after / before:.3f}" for before, after in zip(of["before"], of["after"], strict=True)]
        print(f"| {name} | {' | '.join([*cells, *ratios])} |")
    for tau in differences[0]:
        change = max(rank[tau] for rank in differences)
        print(
            f"\nfeatures sent in bf16 change OpenCLIP's feature gradients at tau = {tau} by {change:.2e} of their norm."
        )


if __name__ == "__main__":
    main()
