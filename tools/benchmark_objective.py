"""For developers of neuclip_ds: compare an objective step (features in, gradients out) with OpenCLIP's loss.

The peer is open_clip's `ClipLoss` in its recommended form: a local loss, and features gathered with gradients. The peer
and our objectives run interleaved in the same processes.

With a small `--tau` and `--features opposed`, the exponentials of most pairs would be subnormal numbers.

Examples:
    python tools/benchmark_objective.py --ranks 1 2 --batch 512 2048 --repeats 20
    python tools/benchmark_objective.py --ranks 1 --batch 512 --tau 0.01 --features opposed
    python tools/benchmark_objective.py --ranks 1 --batch 4096 32768 --device cuda --precision bf16
"""

import argparse
import os
import statistics
from typing import Any

import torch
from benchmarking import FEATURES, PEER, clip_loss, connect, in_turns, machine, on_ranks, peak_bytes, random_features
from neuclip_ds.objectives import METHODS, build_objective

from neuclip_ds.config import Config
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.losses.base import Context, Step
from neuclip_ds.losses.options import NpnConfig

HEADER = "| ranks | b | objective | ms | ratio | peak MB | ratio | kB received per rank and step |"


def measure(rows: int, repeats: int, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return one rank's measurements by objective: peak memory if repeats = 0, else seconds and bytes."""
    communicator = connect(options.device)
    batch = rows * communicator.world_size
    dim = options.dim
    tau = options.tau
    features = random_features(rows, dim, communicator, options.features)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.precision]
    loss = clip_loss(communicator)
    leaves = [features.image.clone(), features.text.clone(), torch.tensor(1 / tau, device=options.device)]
    leaves = [leaf.requires_grad_() for leaf in leaves]

    def peer_step() -> object:
        with torch.autocast(options.device, torch.bfloat16, enabled=dtype == torch.bfloat16):
            value = loss(*leaves)
        return torch.autograd.grad(value, leaves)

    works: dict[str, Any] = {PEER: peer_step}
    communicators = {method: Communicator(options.device) for method in options.methods}  # which count the traffic
    for method, counted in communicators.items():
        config = Config.model_validate({"objective": {"method": method, "temperature": {"initial": tau}}})
        objective = build_objective(config, Context(dim, batch, counted), dtype)
        works[method] = lambda objective=objective: objective(features, Step(0, 0, 1e-4, 1e-4))
    in_turns(works, 2 + NpnConfig().prototypes // batch, lambda: None)  # NPN predicts once its queue is full
    if not repeats:
        return {name: {"megabytes": peak_bytes(work, communicator) / 1e6} for name, work in works.items()}
    for counted in communicators.values():
        counted.traffic.clear()
    seconds = in_turns(works, repeats, communicator.barrier)
    others = (communicator.world_size - 1) * rows * dim * dtype.itemsize  # bytes of one side of the other ranks
    received = {PEER: {"features": 2 * others, "feature gradients": 2 * others}}  # ring algorithms
    for method, counted in communicators.items():
        received[method] = {name: traffic.bytes_sent // repeats for name, traffic in counted.traffic.items()}
    return {name: {"seconds": seconds[name], "bytes": received[name]} for name in works}


def compare(world_size: int, rows: int, options: argparse.Namespace) -> list[str]:
    """Return the lines of a Markdown table, the peer first; times and memory are those of the worst rank."""
    timed = on_ranks(world_size, measure, rows, options.repeats, options)
    # freed blocks return to the system at once, which costs time, but then resident memory counts only live blocks
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    weighed = on_ranks(world_size, measure, rows, 0, options)
    del os.environ["MALLOC_MMAP_THRESHOLD_"]
    seconds = {}
    megabytes = {}
    for name in timed[0]:
        seconds[name] = max(statistics.median(rank[name]["seconds"]) for rank in timed)
        megabytes[name] = max(rank[name]["megabytes"] for rank in weighed)
    lines = []
    for name in seconds:
        traffic = "-"
        if world_size > 1:
            sent = timed[0][name]["bytes"]
            traffic = ", ".join(f"{purpose} {count / 1e3:,.1f}" for purpose, count in sent.items())
        lines.append(
            f"| {world_size} | {rows} | {name} | {seconds[name] * 1e3:.1f} | {seconds[name] / seconds[PEER]:.2f} "
            f"| {megabytes[name]:.1f} | {megabytes[name] / megabytes[PEER]:.2f} | {traffic} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="world sizes (default 1 2)")
    parser.add_argument("--batch", type=int, nargs="+", default=[512, 2048], help="pairs per rank (default 512 2048)")
    parser.add_argument("--dim", type=int, default=512, help="feature width (default 512)")
    parser.add_argument("--tau", type=float, default=0.07, help="temperature (default 0.07)")
    parser.add_argument("--features", choices=FEATURES, default="random", help="kind of features (default random)")
    parser.add_argument("--methods", nargs="+", default=[*METHODS], help="methods to measure (default all)")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="bf16 is autocast in the peer")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="one GPU per rank (default cpu)")
    parser.add_argument("--repeats", type=int, default=20, help="timed steps, interleaved (default 20)")
    arguments = parser.parse_args()
    print(f"{machine(arguments.device)}, {arguments.precision}, d = {arguments.dim}, tau = {arguments.tau}", end="")
    print(f", features: {arguments.features}\n")
    print(f"{HEADER}\n{'|---' * 8}|")
    for world_size in arguments.ranks:
        for rows in arguments.batch:
            print("\n".join(compare(world_size, rows, arguments)), flush=True)


if __name__ == "__main__":
    main()
