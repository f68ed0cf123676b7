"""For developers of neuclip_ds: measure the bytes and time that each communication optimization saves on real ranks.

    comm_dtype    features in float32 -> features in bf16
    gradients     OpenCLIP's scheme (gather, and reduce-scatter B x d gradients of each tower) -> the closed form
    scalars       separate collectives for the statistics of images and texts and for each sum -> one per kind
    overlap       gather texts after the image tower -> while it runs (a matmul of --tower-ms replaces the tower)
    npn           gradients of replicated prototypes (2 m d, T_u times) -> sums over split ones (2B, T_u + 1 times)

Times include only the collectives and the matmul of `overlap`. Bytes are those of the ring algorithms. Tests check that
both variants give the same results (tests/distributed/test_objective_ranks.py); the program prints the error of bf16.

Example: python tools/benchmark_communication.py --ranks 2 --rows 640 --dim 512
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from benchmarking import in_turns, machine, on_ranks, random_features
from neuclip_ds.objectives import build_objective
from torch import Tensor

from neuclip_ds.config import Config
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.losses.base import Context, Step
from neuclip_ds.losses.gather import Features

Work = Callable[[Communicator], object]
_UPDATES, _PROTOTYPES = 10, 4096
_SUMS = 6  # number of sums of the loss, temperature and norms


def savings(image: Tensor, text: Tensor, world_size: int, tower: Tensor) -> dict[str, tuple[Work, Work]]:
    """Return the variants before and after each optimization, which send the same information.

    Args:
        image, text: (b, d) features of one rank.
        world_size: number of ranks.
        tower: square matrix whose matmul replaces the image tower.
    """
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
    return {
        "comm_dtype": (lambda c: gather(c, torch.float32), lambda c: gather(c, torch.bfloat16)),
        "gradients": (back_and_forth, lambda c: gather(c, torch.float32)),
        "scalars": (one_by_one, together),
        "overlap": (texts_after, texts_meanwhile),
        "npn": (
            lambda c: [c.all_reduce(gradient, "normalizer") for _ in range(_UPDATES)],
            lambda c: [c.all_reduce(sums, "normalizer") for _ in range(_UPDATES + 1)],
        ),
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return one rank's calls, bytes and seconds before and after each optimization, and the errors of bf16."""
    dist.init_process_group("gloo")
    communicator = Communicator()
    features, turns = random_features(arguments.rows, arguments.dim, communicator), arguments.repeats + 2
    found: dict[str, Any] = {}
    tower = _tower(arguments.tower_ms)
    for name, ways in savings(features.image, features.text, arguments.ranks, tower).items():
        counted = {way: Communicator() for way in ("before", "after")}
        works = {way: partial(work, counted[way]) for way, work in zip(counted, ways, strict=True)}
        seconds = in_turns(works, turns, communicator.barrier)
        found[name] = []
        for way, of in counted.items():
            calls, size = (sum(getattr(x, key) for x in of.traffic.values()) for key in ("calls", "bytes_sent"))
            found[name].append([calls // turns, size // turns, seconds[way][2:]])  # first turns connect and allocate
    found["difference"] = {str(tau): _difference_of_bf16(features, tau) for tau in (0.07, 0.01)}
    return found


def _tower(milliseconds: float) -> Tensor:
    """Return a square matrix whose matmul with itself takes at least `milliseconds`."""
    size = 512
    while True:
        matrix = torch.randn(size, size)
        began = time.perf_counter()
        torch.mm(matrix, matrix)
        if time.perf_counter() - began >= milliseconds / 1e3:
            return matrix
        size = size * 5 // 4


def _difference_of_bf16(features: Features, tau: float) -> float:
    """Return the norm of the change that bf16 makes to OpenCLIP's feature gradients, relative to their norm."""
    tree = {"objective": {"method": "openclip", "temperature": {"initial": tau}}}
    found = []
    for comm_dtype in (torch.float32, torch.bfloat16):
        context = Context(features.image.shape[1], len(features.image), Communicator())
        objective = build_objective(Config.model_validate(tree), context, comm_dtype)
        gradients = objective(features, Step(0, 0, 0.0, 1.0))
        found.append(torch.cat([gradients.image, gradients.text]))
    return float((found[1] - found[0]).norm() / found[0].norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="ranks on this machine (2)")
    parser.add_argument("--rows", type=int, default=640, help="pairs per rank (640)")
    parser.add_argument("--dim", type=int, default=512, help="feature width (512)")
    parser.add_argument("--tower-ms", type=float, default=50, help="milliseconds that the image tower takes (50)")
    parser.add_argument("--repeats", type=int, default=30, help="interleaved repetitions (30)")
    arguments = parser.parse_args()
    ranks = on_ranks(arguments.ranks, measure, arguments)
    sizes = f"{arguments.ranks} ranks, {arguments.rows} pairs per rank, d = {arguments.dim}"
    print(f"{machine()}, gloo, {sizes}\n")
    print("| saving | calls | kB received | ms | calls after | kB | ms | bytes | time |")
    print("|---" * 9 + "|")
    differences = [rank.pop("difference") for rank in ranks]
    for name, ways in ranks[0].items():
        seconds = [max(statistics.median(rank[name][way][2]) for rank in ranks) for way in (0, 1)]
        cells = [f"{way[0]} | {way[1] / 1e3:,.1f} | {1e3 * took:.2f}" for way, took in zip(ways, seconds, strict=True)]
        print(f"| {name} | {' | '.join(cells)} | {ways[1][1] / ways[0][1]:.3f} | {seconds[1] / seconds[0]:.3f} |")
    for tau in differences[0]:
        change = max(rank[tau] for rank in differences)
        print(
            f"\nfeatures sent in bf16 change OpenCLIP's feature gradients at tau = {tau} by {change:.2e} of their norm."
        )


if __name__ == "__main__":
    main()
