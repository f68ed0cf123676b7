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
_UPDATES = 10
_PROTOTYPES = 4096
_SUMS = 6  # number of sums of the loss, temperature and norms


def savings(image: Tensor, text: Tensor, world_size: int, tower: Tensor) -> dict[str, tuple[Work, Work]]:
    """Return the variants before and after each optimization, which send the same information.

    Args:
        image, text: (b, d) features of one rank.
        world_size: number of ranks.
        tower: square matrix whose matmul replaces the image tower.
    """
    rows, dim = image.shape
    batch = rows * world_size
    values = image.new_ones(rows, 1)  # one number for each pair
    prototype_gradient = image.new_ones(2, _PROTOTYPES, dim)
    row_sums = torch.ones(2, batch, dtype=torch.float64)

    def gather(communicator: Communicator, comm_dtype: torch.dtype) -> None:
        for x in (image, text):
            communicator.all_gather(x.to(comm_dtype), "features").to(x.dtype)

    def gather_in_float32(communicator: Communicator) -> None:
        gather(communicator, torch.float32)

    def gather_in_bf16(communicator: Communicator) -> None:
        gather(communicator, torch.bfloat16)

    def gather_and_send_gradients(communicator: Communicator) -> None:
        gather(communicator, torch.float32)
        for _ in range(2):
            communicator.reduce_scatter(image.new_ones(batch, dim), "feature gradients")

    def send_scalars_one_by_one(communicator: Communicator) -> None:
        for _ in range(2):
            communicator.all_gather(values, "normalizer")
        for _ in range(_SUMS):
            communicator.all_reduce(values[0], "scalars")

    def send_scalars_together(communicator: Communicator) -> None:
        communicator.all_gather(values.expand(-1, 2), "normalizer")
        communicator.all_reduce(values[0].expand(_SUMS), "scalars")

    def gather_texts_after_the_tower(communicator: Communicator) -> None:
        torch.mm(tower, tower)
        communicator.all_gather(text, "features")

    def gather_texts_during_the_tower(communicator: Communicator) -> None:
        pending = communicator.begin_all_gather(text, "features")
        torch.mm(tower, tower)
        pending.wait()

    def reduce_prototype_gradients(communicator: Communicator) -> None:
        for _ in range(_UPDATES):
            communicator.all_reduce(prototype_gradient, "normalizer")

    def reduce_row_sums(communicator: Communicator) -> None:
        for _ in range(_UPDATES + 1):
            communicator.all_reduce(row_sums, "normalizer")

    return {
        "comm_dtype": (gather_in_float32, gather_in_bf16),
        "gradients": (gather_and_send_gradients, gather_in_float32),
        "scalars": (send_scalars_one_by_one, send_scalars_together),
        "overlap": (gather_texts_after_the_tower, gather_texts_during_the_tower),
        "npn": (reduce_prototype_gradients, reduce_row_sums),
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return one rank's calls, bytes and seconds before and after each optimization, and the errors of bf16."""
    dist.init_process_group("gloo")
    communicator = Communicator()
    features = random_features(arguments.rows, arguments.dim, communicator)
    turns = arguments.repeats + 2
    tower = _tower(arguments.tower_ms)
    measured: dict[str, Any] = {}
    for name, (before, after) in savings(features.image, features.text, arguments.ranks, tower).items():
        communicators = {"before": Communicator(), "after": Communicator()}  # which count the traffic
        works = {
            "before": partial(before, communicators["before"]),
            "after": partial(after, communicators["after"]),
        }
        seconds = in_turns(works, turns, communicator.barrier)
        measured[name] = {}
        for variant, counted in communicators.items():
            measured[name][variant] = {
                "calls": sum(traffic.calls for traffic in counted.traffic.values()) // turns,
                "bytes": sum(traffic.bytes_sent for traffic in counted.traffic.values()) // turns,
                "seconds": seconds[variant][2:],  # the first turns connect and allocate
            }
    measured["difference"] = {str(tau): _difference_of_bf16(features, tau) for tau in (0.07, 0.01)}
    return measured


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
    gradients_by_dtype = []
    for comm_dtype in (torch.float32, torch.bfloat16):
        context = Context(features.image.shape[1], len(features.image), Communicator())
        objective = build_objective(Config.model_validate(tree), context, comm_dtype)
        gradients = objective(features, Step(0, 0, 0.0, 1.0))
        gradients_by_dtype.append(torch.cat([gradients.image, gradients.text]))
    exact, rounded = gradients_by_dtype
    return float((rounded - exact).norm() / exact.norm())


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
    for name, variants in ranks[0].items():
        cells = []
        seconds = []
        for variant, values in variants.items():
            slowest = max(statistics.median(rank[name][variant]["seconds"]) for rank in ranks)
            seconds.append(slowest)
            cells.append(f"{values['calls']} | {values['bytes'] / 1e3:,.1f} | {1e3 * slowest:.2f}")
        bytes_ratio = variants["after"]["bytes"] / variants["before"]["bytes"]
        print(f"| {name} | {' | '.join(cells)} | {bytes_ratio:.3f} | {seconds[1] / seconds[0]:.3f} |")
    for tau in differences[0]:
        change = max(rank[tau] for rank in differences)
        print(
            f"\nfeatures sent in bf16 change OpenCLIP's feature gradients at tau = {tau} by {change:.2e} of their norm."
        )


if __name__ == "__main__":
    main()
