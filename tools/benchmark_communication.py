"""For developers of neuclip_ds: measure the bytes and time that each communication optimization saves on real ranks.

    comm_dtype    features in float32 -> features in bf16
    gradients     OpenCLIP's scheme (gather, and reduce-scatter B x d gradients of each tower) -> the closed form
    scalars       separate collectives for the statistics of images and texts and for each sum -> one per kind
    overlap       gather texts after the image tower -> while it runs (a matmul of --tower-ms replaces the tower)
    npn           gradients of replicated prototypes (2 m d, T_u times) -> sums over split ones (2B, T_u + 1 times)

B is the global batch size, d the feature width, m the number of prototypes, and T_u the number of their updates in a
step. Times include the collectives, conversions to and from bf16, and the matmul of `overlap`. Bytes are calculated for
the ring algorithms. Tests check that both variants give the same results (tests/losses/test_loss_ranks.py); the program
prints the error of bf16.

Example: python tools/benchmark_communication.py --ranks 2 --rows 640 --dim 512
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from benchmarking import RandomFeatures, in_turns, machine, on_ranks, random_features
from benchmarking.run_loss import build_loss
from torch import Tensor

from neuclip_ds.config import Config
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.losses.base import Position

Work = Callable[[Communicator], object]
_UPDATES = 10
_PROTOTYPES = 4096
_SUMS = 6  # number of sums of the loss, temperature and norms
_UNTIMED = 2  # first turns, which connect the ranks and allocate memory


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One rank's measurements of the communication with or without an optimization."""

    calls: int  # per turn
    bytes: int  # per turn
    seconds: list[float]  # of each turn


def savings(image: Tensor, text: Tensor, world_size: int, tower: Tensor) -> dict[str, tuple[Work, Work]]:
    """Return, for each optimization by name, two functions: a step's communication without it and with it.

    Args:
        image, text: (b, d) features of one rank.
        world_size: number of ranks.
        tower: square matrix whose matmul replaces the image tower.
    """
    rows, dim = image.shape
    batch = rows * world_size
    values = image.new_ones(rows, 1)

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
    """Return one rank's `Variant` before and after each optimization, and the errors of bf16."""
    dist.init_process_group("gloo")
    communicator = Communicator()
    features = random_features(arguments.rows, arguments.dim, communicator)
    tower = _tower(arguments.tower_ms)
    turns = arguments.repeats + _UNTIMED
    variants: dict[str, list[dict[str, Any]]] = {}
    for name, works in savings(features.image, features.text, arguments.ranks, tower).items():
        communicators = [Communicator(), Communicator()]  # each counts the traffic of one variant
        before = partial(works[0], communicators[0])
        after = partial(works[1], communicators[1])
        seconds = in_turns({"before": before, "after": after}, turns, communicator.barrier)
        variants[name] = []
        for variant, counter in zip(("before", "after"), communicators, strict=True):
            calls = sum(traffic.calls for traffic in counter.traffic.values())
            size = sum(traffic.bytes_sent for traffic in counter.traffic.values())
            result = Variant(calls=calls // turns, bytes=size // turns, seconds=seconds[variant][_UNTIMED:])
            variants[name].append(asdict(result))
    errors = {str(tau): _error_of_bf16(features, tau) for tau in (0.07, 0.01)}
    return {"variants": variants, "errors": errors}


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


def _error_of_bf16(features: RandomFeatures, tau: float) -> float:
    """Return the norm of the change that bf16 makes to OpenCLIP's feature gradients, relative to their norm."""
    config = Config.model_validate({"objective": {"method": "openclip", "temperature": {"initial": tau}}})
    rows, dim = features.image.shape
    gradients: list[Tensor] = []
    for comm_dtype in (torch.float32, torch.bfloat16):
        loss = build_loss(config, dim, rows, Communicator(), comm_dtype, undo=False, reduction="sum")
        leaves = [features.image.detach().requires_grad_(), features.text.detach().requires_grad_()]
        value = loss(*leaves, features.index, position=Position(step=0, lr=0.0, peak_lr=1.0))
        gradients.append(torch.cat(torch.autograd.grad(value, leaves)))
    exact, rounded = gradients
    return float((rounded - exact).norm() / exact.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="ranks on this machine (default: 2)")
    parser.add_argument("--rows", type=int, default=640, help="pairs per rank (default: 640)")
    parser.add_argument("--dim", type=int, default=512, help="feature width (default: 512)")
    parser.add_argument(
        "--tower-ms",
        type=float,
        default=50,
        help="duration of a matrix product that replaces the image tower, in milliseconds (default: 50)",
    )
    parser.add_argument(
        "--repeats", type=int, default=30, help="timed repetitions of each variant, interleaved (default: 30)"
    )
    arguments = parser.parse_args()
    ranks = on_ranks(arguments.ranks, measure, arguments)
    sizes = f"{arguments.ranks} ranks, {arguments.rows} pairs per rank, d = {arguments.dim}"
    print(f"{machine()}, gloo, {sizes}\n")
    print("| saving | calls before | kB before | ms before | calls | kB | ms | bytes ratio | time ratio |")
    print("|---" * 9 + "|")
    for name in ranks[0]["variants"]:
        before_by_rank = [Variant(**rank["variants"][name][0]) for rank in ranks]
        after_by_rank = [Variant(**rank["variants"][name][1]) for rank in ranks]
        before = before_by_rank[0]
        after = after_by_rank[0]
        before_seconds = max(statistics.median(variant.seconds) for variant in before_by_rank)
        after_seconds = max(statistics.median(variant.seconds) for variant in after_by_rank)
        print(
            f"| {name} | {before.calls} | {before.bytes / 1e3:,.1f} | {1e3 * before_seconds:.2f} "
            f"| {after.calls} | {after.bytes / 1e3:,.1f} | {1e3 * after_seconds:.2f} "
            f"| {after.bytes / before.bytes:.3f} | {after_seconds / before_seconds:.3f} |"
        )
    for tau in ranks[0]["errors"]:
        error = max(rank["errors"][tau] for rank in ranks)
        print(
            f"\nIf features are sent in bf16, OpenCLIP's feature gradients at tau = {tau} change by {error:.2e} of "
            "their norm."
        )


if __name__ == "__main__":
    main()
