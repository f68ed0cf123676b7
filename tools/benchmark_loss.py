"""For developers of neuclip_ds: time `ContrastiveLoss` against the losses of open_clip and fast_clip.

All losses run forward and backward on the same features, interleaved in one loop; each loss is called as in its
project's training loop. Ratios are relative to open_clip's ClipLoss; times are medians on the slowest rank. fast_clip
is read from the checkout given by --fast-clip; without a checkout, fast_clip is omitted.

Example: python tools/benchmark_loss.py --ranks 1 2 --batch 512 2048 --fast-clip ../fast_clip
"""

import argparse
import runpy
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarking import PEER, clip_loss, connect, in_turns, machine, on_ranks, random_features
from torch import Tensor

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.losses import ContrastiveLoss
from neuclip_ds.losses.neuclip_options import NpnConfig

Loss = Callable[[Tensor, Tensor], Tensor]


def open_clip_loss(communicator: Communicator) -> Loss:
    loss = clip_loss(communicator)
    log_scale = torch.tensor(1 / 0.07, device=communicator.device).log().requires_grad_()
    return lambda image, text: loss(image, text, log_scale.exp())


def fast_clip_loss(folder: Path, rows: int, device: torch.device) -> Loss:
    """Return FastCLIP-v3's loss from a fast_clip checkout, called as in its training loop."""
    path = folder / "src" / "fast_clip" / "loss.py"
    loss = runpy.run_path(str(path))["FastCLIPLoss"](
        rows * dist.get_world_size(), 0.2, gamma_decay_epochs=1, rho=6.5, device=device
    )
    loss.adjust_hyperparams(1)
    log_scale = torch.tensor(1 / 0.07, device=device).log().requires_grad_()
    offset = dist.get_rank() * rows
    index = torch.arange(rows) + offset

    def call(image: Tensor, text: Tensor) -> Tensor:
        scale = log_scale.exp()
        gathered = _gathered([image, text])
        loss1, loss2, by_image, by_text, u = loss.local([image, text], (index, index), gathered, scale, offset)
        all_u = _gathered(u)
        indices = index[:, None].to(device)
        all_image_indices, all_text_indices = _gathered([indices, indices])
        loss.set_params(all_image_indices.squeeze(-1).cpu(), all_text_indices.squeeze(-1).cpu(), *all_u)
        similar = (by_text.T, by_image.T)
        result: Tensor = loss([image, text], gathered, all_u, (loss1, loss2), u, similar, scale, offset)
        return result

    return call


def _gathered(tensors: list[Tensor]) -> list[Tensor]:
    """Gather the rows of all ranks in one collective, without gradients."""
    stacked = torch.stack(tensors).detach()
    parts = [torch.empty_like(stacked) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, stacked)
    return list(torch.cat(parts, dim=1))


def our_loss(method: str, rows: int, dim: int, device: torch.device) -> Loss:
    samples = rows * dist.get_world_size()
    loss = ContrastiveLoss(method, dim=dim, samples=samples, epochs=30, steps_per_epoch=1000, device=device)
    index = torch.arange(rows, device=device) + dist.get_rank() * rows
    return lambda image, text: loss(image, text, index)


def measure(rows: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return one rank's times in seconds by loss."""
    communicator = connect(options.device)
    device = communicator.device
    losses: dict[str, Loss] = {PEER: open_clip_loss(communicator)}
    if options.fast_clip is not None:
        losses["fast_clip FastCLIPLoss"] = fast_clip_loss(options.fast_clip, rows, device)
    for method in options.methods:
        losses[f"ours, {method}"] = our_loss(method, rows, options.dim, device)
    features = random_features(rows, options.dim, communicator)
    leaves = [features.image.requires_grad_(), features.text.requires_grad_()]

    def wait() -> None:
        for leaf in leaves:
            leaf.grad = None
        dist.barrier()

    def work(loss: Loss) -> None:
        loss(*leaves).backward()

    works = {name: partial(work, loss) for name, loss in losses.items()}
    # NPN predicts once its queue is full
    steps_to_predict = 2 + NpnConfig().prototypes // (rows * dist.get_world_size())
    in_turns(works, steps_to_predict, wait)
    return in_turns(works, options.repeats, wait)


def compare(world_size: int, rows: int, options: argparse.Namespace) -> list[str]:
    """Return the lines of a Markdown table; the first line is for open_clip's ClipLoss."""
    ranks = on_ranks(world_size, measure, rows, options)
    slowest: dict[str, float] = {}
    for name in ranks[0]:
        slowest[name] = max(statistics.median(rank[name]) for rank in ranks)
    lines: list[str] = []
    for name, seconds in slowest.items():
        lines.append(f"| {world_size} | {rows} | {name} | {seconds * 1e3:.1f} | {seconds / slowest[PEER]:.2f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="world sizes (default: 1 2)")
    parser.add_argument("--batch", type=int, nargs="+", default=[512, 2048], help="pairs per rank (default: 512 2048)")
    parser.add_argument("--dim", type=int, default=512, help="feature width (default: 512)")
    parser.add_argument("--repeats", type=int, default=20, help="timed steps of each loss, interleaved (default: 20)")
    parser.add_argument(
        "--methods",
        nargs="+",
        default=["openclip", "fastclip_v3", "neuclip"],
        help="methods of neuclip_ds (default: openclip fastclip_v3 neuclip)",
    )
    parser.add_argument(
        "--fast-clip", type=Path, help="checkout of Optimization-AI/fast_clip, whose loss is then measured too"
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="cuda needs one GPU per rank (default: cpu)"
    )
    options = parser.parse_args()
    print(f"{machine(options.device)}, float32, d = {options.dim}\n")
    print("| ranks | b | loss | ms | ratio |\n|---|---|---|---|---|", flush=True)
    for world_size in options.ranks:
        for rows in options.batch:
            print("\n".join(compare(world_size, rows, options)), flush=True)


if __name__ == "__main__":
    main()
