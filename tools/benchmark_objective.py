"""For developers of neuclip_ds: compare a step of our losses (features in, gradients out) with OpenCLIP's loss.

The peer is open_clip's `ClipLoss` in its recommended form: a local loss, and features gathered with gradients. The peer
and our losses run interleaved in the same processes.

A small `--tau` with `--features opposed` is a hard case: computed directly, the exponentials of most pairs would be
subnormal numbers, which slow down CPUs.

Examples:
    python tools/benchmark_objective.py --ranks 1 2 --batch 512 2048 --repeats 20
    python tools/benchmark_objective.py --ranks 1 --batch 512 --tau 0.01 --features opposed
    python tools/benchmark_objective.py --ranks 1 --batch 4096 32768 --device cuda --precision bf16
"""

import argparse
import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from benchmarking import (
    FEATURES,
    PEER,
    RandomFeatures,
    clip_loss,
    connect,
    in_turns,
    machine,
    on_ranks,
    peak_bytes,
    random_features,
)
from benchmarking.run_loss import build_loss
from torch import Tensor

from neuclip_ds.config import Config
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.losses.base import Position
from neuclip_ds.losses.contrastive_loss import ContrastiveLoss
from neuclip_ds.losses.methods import METHODS
from neuclip_ds.losses.neuclip_options import NpnConfig

_COLUMNS = "ranks, rows per rank, objective, ms, time ratio, peak MB, memory ratio, kB received per rank and step"
HEADER = f"| {_COLUMNS.replace(', ', ' | ')} |"
FIRST_STEP = Position(step=0, lr=1e-4, peak_lr=1e-4)


def our_step(loss: ContrastiveLoss, features: RandomFeatures) -> object:
    """Run a step: gather the features, compute the loss and its gradient, and update the state of the loss.

    The step also multiplies the gradient by the incoming gradient, as every backward pass does, and gathers the indices
    if there are several ranks. Arguments are not checked, and the step cannot be undone.
    """
    leaves = [features.image.detach().requires_grad_(), features.text.detach().requires_grad_()]
    value = loss(*leaves, features.index, position=FIRST_STEP)
    return torch.autograd.grad(value, leaves)


def peer_step(
    loss: Callable[[Tensor, Tensor, Tensor], Tensor], leaves: list[Tensor], device: str, with_autocast: bool
) -> object:
    """Run a step of the peer; `leaves` are the features and the logit scale."""
    with torch.autocast(device, torch.bfloat16, enabled=with_autocast):
        value = loss(*leaves)
    return torch.autograd.grad(value, leaves)


def measure(rows: int, repeats: int, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return one rank's measurements by loss: peak memory if repeats = 0, else seconds and bytes."""
    communicator = connect(options.device)
    batch = rows * communicator.world_size
    dim = options.dim
    features = random_features(rows, dim, communicator, options.features)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.precision]
    works: dict[str, Callable[[], object]] = {}

    logit_scale = torch.tensor(1 / options.tau, device=options.device)
    leaves = [x.clone().requires_grad_() for x in (features.image, features.text, logit_scale)]
    works[PEER] = partial(peer_step, clip_loss(communicator), leaves, options.device, dtype == torch.bfloat16)

    communicators = {method: Communicator(options.device) for method in options.methods}  # each counts its traffic
    for method, own_communicator in communicators.items():
        config = Config.model_validate({"objective": {"method": method, "temperature": {"initial": options.tau}}})
        loss = build_loss(config, dim, batch, own_communicator, dtype, undo=False, reduction="sum")
        works[method] = partial(our_step, loss, features)

    in_turns(works, 2 + NpnConfig().prototypes // batch, lambda: None)  # NPN predicts once its queue is full
    if not repeats:
        return {name: {"megabytes": peak_bytes(work, communicator) / 1e6} for name, work in works.items()}
    for own_communicator in communicators.values():
        own_communicator.traffic.clear()
    seconds = in_turns(works, repeats, communicator.barrier)
    # of one modality, from other ranks; autocast does not change the dtype in which the peer gathers features
    feature_bytes = (communicator.world_size - 1) * rows * dim * features.image.itemsize
    received = {PEER: {"features": 2 * feature_bytes, "feature gradients": 2 * feature_bytes}}  # ring algorithms
    for method, own_communicator in communicators.items():
        received[method] = {}
        for purpose, traffic in own_communicator.traffic.items():
            received[method][purpose] = traffic.bytes_sent // repeats
    return {name: {"seconds": seconds[name], "bytes": received[name]} for name in works}


def compare(world_size: int, rows: int, options: argparse.Namespace) -> list[str]:
    """Return the lines of a Markdown table, the peer first; times and memory are those of the worst rank."""
    times_by_rank = on_ranks(world_size, measure, rows, options.repeats, options)
    # freed blocks return to the system at once, which costs time, but then resident memory counts only live blocks
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    memory_by_rank = on_ranks(world_size, measure, rows, 0, options)
    del os.environ["MALLOC_MMAP_THRESHOLD_"]
    seconds: dict[str, float] = {}
    memory: dict[str, float] = {}
    for key in times_by_rank[0]:
        seconds[key] = max(statistics.median(rank[key]["seconds"]) for rank in times_by_rank)
        memory[key] = max(rank[key]["megabytes"] for rank in memory_by_rank)
    lines = []
    for key in seconds:
        traffic = ", ".join(f"{name} {count / 1e3:,.1f}" for name, count in times_by_rank[0][key]["bytes"].items())
        lines.append(
            f"| {world_size} | {rows} | {key} | {seconds[key] * 1e3:.1f} | {seconds[key] / seconds[PEER]:.2f} "
            f"| {memory[key]:.1f} | {memory[key] / memory[PEER]:.2f} | {traffic if world_size > 1 else '-'} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="world sizes (default: 1 2)")
    parser.add_argument("--batch", type=int, nargs="+", default=[512, 2048], help="pairs per rank (default: 512 2048)")
    parser.add_argument("--dim", type=int, default=512, help="feature width (default: 512)")
    parser.add_argument("--tau", type=float, default=0.07, help="temperature (default: 0.07)")
    parser.add_argument("--features", choices=FEATURES, default="random", help="kind of features (default: random)")
    parser.add_argument("--methods", nargs="+", default=[*METHODS], help="methods to measure (default: all)")
    parser.add_argument(
        "--precision",
        choices=["fp32", "bf16"],
        default="fp32",
        help="precision in which our losses send features; with bf16, open_clip's loss uses autocast (default: fp32)",
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="cuda needs one GPU per rank (default: cpu)"
    )
    parser.add_argument("--repeats", type=int, default=20, help="timed steps of each method, interleaved (default: 20)")
    arguments = parser.parse_args()
    print(f"{machine(arguments.device)}, {arguments.precision}, d = {arguments.dim}, tau = {arguments.tau}", end="")
    print(f", features: {arguments.features}\n")
    print(f"{HEADER}\n{'|---' * 8}|")
    for world_size in arguments.ranks:
        for rows in arguments.batch:
            print("\n".join(compare(world_size, rows, arguments)), flush=True)


if __name__ == "__main__":
    main()
