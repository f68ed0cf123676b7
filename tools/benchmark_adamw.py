"""For developers of neuclip_ds: time a step of AdamW on the CPU, as it updates offloaded masters.

Contenders take turns on their own copies of the weights: torch's fused AdamW, which the project uses, torch's foreach
AdamW, and DeepSpeedCPUAdam, which is compiled on its first use (a minute or more; it is left out where that fails).

Example: python tools/benchmark_adamw.py --weights 22e6 --steps 20
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import Parameter

Make = Callable[[list[Parameter]], torch.optim.Optimizer]


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=float, default=22e6, help="float32 weights (22e6)")
    parser.add_argument("--tensors", type=int, default=22, help="that these are divided into (22)")
    parser.add_argument("--steps", type=int, default=20, help="of each contender, after two that do not count (20)")
    args = parser.parse_args()
    rows = max(1, int(args.weights) // args.tensors)
    contenders = {name: make(_parameters(args.tensors, rows)) for name, make in _contenders().items()}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(args.steps + 2):
        for name, optimizer in contenders.items():
            begin = time.perf_counter()
            optimizer.step()
            seconds[name].append(time.perf_counter() - begin)
    ours = statistics.median(seconds["torch, fused"][2:])
    print(f"{rows * args.tensors:,} weights, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print("| AdamW | ms a step | fastest | fused / it |\n|---|---|---|---|")
    for name, times in seconds.items():
        median = statistics.median(times[2:])
        print(f"| {name} | {1e3 * median:.1f} | {1e3 * min(times[2:]):.1f} | {ours / median:.2f} |")


def _contenders() -> dict[str, Make]:
    found: dict[str, Make] = {
        "torch, fused": lambda weights: torch.optim.AdamW(weights, lr=1e-4, fused=True),
        "torch, foreach": lambda weights: torch.optim.AdamW(weights, lr=1e-4, foreach=True),
    }
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        DeepSpeedCPUAdam([Parameter(torch.zeros(1))])
    except Exception as error:  # whatever a compiler says
        print(f"DeepSpeedCPUAdam is left out, as it cannot be compiled here: {error}\n")
    else:
        found["DeepSpeedCPUAdam"] = lambda weights: DeepSpeedCPUAdam(weights, lr=1e-4, adamw_mode=True)
    return found


def _parameters(tensors: int, rows: int) -> list[Parameter]:
    weights = [Parameter(torch.randn(rows)) for _ in range(tensors)]
    for weight in weights:
        weight.grad = torch.randn(rows)
    return weights


if __name__ == "__main__":
    main()
