"""For developers of neuclip_ds: measure how well its order of samples mixes, against MosaicML's py1e and py1br.

All orders are of the same samples: shards of equal size, read once in batches of B over N nodes. MosaicML's are those
of its shuffle and partition functions with its defaults: N canonical nodes, blocks of max(4,000,000 / N, 262,144)
samples. `uniform` is a random permutation of all samples, the best mixing that there is. MosaicML streaming is left
out where it is not installed (`make peers`).

Example: python tools/benchmark_mixing.py --samples 12000000 --batch 4096 5120 --nodes 1 8 64
"""

import argparse
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from benchmarking.mosaic import has_mosaic
from numpy.typing import NDArray

from neuclip_ds.cli.program import exit_on_mistake
from neuclip_ds.data.interleave import DataSize, choose_interleave
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.errors import UserError

RANKS = 8  # of a node
TOLERANCE = 0.01  # relative, of the two means
STANDARD_ERRORS = 3  # of the difference of two shares
HEADER = (
    "| B | N | order | shards in a batch | neighbours together, x uniform | distance, steps | x uniform "
    "| shards kept by a node | ours no worse |"
)


class Samples(NamedTuple):
    """n samples in shards of equal size, the last one may be smaller."""

    n: int
    per_shard: int

    @property
    def starts(self) -> NDArray[np.int64]:
        """(n_shards,) index of each shard's first sample."""
        return np.arange(0, self.n, self.per_shard)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """(n_shards,) samples of each shard."""
        return np.diff(self.starts, append=self.n)


class Mixing(NamedTuple):
    """How well an order mixes, over the full batches of one epoch."""

    shards: float  # different ones in a batch, mean
    together: float  # share of the neighbours i, i + 1 of a shard that are in the same batch
    neighbours: int  # pairs of them
    distance: float  # steps between two neighbours, mean
    kept: int  # shards that the first node has in use at once, from first to last read: the most

    def is_no_worse_than(self, other: "Mixing") -> bool:
        """Compare the three measures of mixing: the means to 1 %, the share to three standard errors."""
        error = math.sqrt((self.together + other.together) / self.neighbours)
        return (
            self.shards >= (1 - TOLERANCE) * other.shards
            and self.together <= other.together + STANDARD_ERRORS * error
            and self.distance >= (1 - TOLERANCE) * other.distance
        )


Order = Callable[[Samples, int, int, int], NDArray[np.int64]]  # samples, B, nodes, seed to (T, B) indices


def ours(samples: Samples, batch: int, nodes: int, seed: int) -> NDArray[np.int64]:
    interleave = choose_interleave(DataSize(samples.n, len(samples.starts), 0), batch, nodes=nodes)
    order = GlobalOrder(samples.starts, samples.sizes, batch, seed, interleave)
    return np.stack([order.batch(0, step) for step in range(samples.n // batch)])


def uniform(samples: Samples, batch: int, nodes: int, seed: int) -> NDArray[np.int64]:
    steps = samples.n // batch
    return np.random.default_rng(seed).permutation(samples.n)[: steps * batch].reshape(steps, batch)


def py1e(samples: Samples, batch: int, nodes: int, seed: int) -> NDArray[np.int64]:
    return _mosaic("py1e", samples, batch, nodes, seed)


def py1br(samples: Samples, batch: int, nodes: int, seed: int) -> NDArray[np.int64]:
    return _mosaic("py1br", samples, batch, nodes, seed)


def _mosaic(algorithm: str, samples: Samples, batch: int, nodes: int, seed: int) -> NDArray[np.int64]:
    from streaming.base.partition import get_partitions
    from streaming.base.shuffle import get_shuffle

    block = max(4_000_000 // nodes, 1 << 18)  # the defaults of StreamingDataset
    shuffled = get_shuffle(algorithm, samples.sizes, nodes, seed, 0, block)
    places = get_partitions("relaxed", samples.n, nodes, nodes, RANKS, 1, batch // (nodes * RANKS))
    by_step = places[:, :, 0, : samples.n // batch].transpose(2, 0, 1, 3)  # (T, N, ranks, batch of a rank)
    return shuffled[by_step.reshape(-1, batch)]


ORDERS: dict[str, Order] = {"ours": ours, "uniform": uniform, "py1e": py1e, "py1br": py1br}


def measure(batches: NDArray[np.int64], samples: Samples, nodes: int) -> Mixing:
    """Return the mixing of (T, B) indices, where node r of N reads the r-th N-th of each row."""
    steps, batch = batches.shape
    step_of = np.full(samples.n, -1, dtype=np.int32)
    step_of[batches] = np.arange(steps, dtype=np.int32)[:, None]
    apart = np.abs(np.diff(step_of))
    are_neighbours = (step_of[1:] >= 0) & (step_of[:-1] >= 0)  # both in full batches
    are_neighbours[samples.starts[1:] - 1] = False  # of different shards
    apart = apart[are_neighbours]
    shards = [len(np.unique(row // samples.per_shard)) for row in batches]
    return Mixing(
        float(np.mean(shards)),
        float(np.mean(apart == 0)),
        len(apart),
        float(np.mean(apart)),
        _most_kept(batches[:, : batch // nodes] // samples.per_shard, len(samples.starts)),
    )


def _most_kept(shards: NDArray[np.int64], n_shards: int) -> int:
    """Return how many shards are in use at once, from first to last read: the most; `shards` are (T, b) numbers."""
    steps = len(shards)
    first, last = np.full(n_shards, steps), np.full(n_shards, steps)
    for step in range(steps):
        last[shards[step]] = step
        first[shards[-1 - step]] = steps - 1 - step
    opened, closed = (np.bincount(when, minlength=steps + 1)[:steps] for when in (first, last))
    return int((np.cumsum(opened) - np.cumsum(closed) + closed).max())


def line(batch: int, nodes: int, name: str, found: Mixing, mine: Mixing, samples: Samples) -> str:
    """Return a row of the table."""
    steps = samples.n // batch
    together = found.together * (samples.n - 1) / (batch - 1)  # relative to the expected value of a permutation
    distance = found.distance / ((steps - 1 / steps) / 3)  # likewise
    verdict = "-" if name == "ours" else "yes" if mine.is_no_worse_than(found) else "**no**"
    figures = f"{found.shards:,.1f} | {together:.3f} | {found.distance:,.1f} | {distance:.3f} | {found.kept:,}"
    return f"| {batch:,} | {nodes} | {name} | {figures} | {verdict} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=12_000_000, help="n (12e6; 64e6 takes 5 GB of memory)")
    parser.add_argument("--per-shard", type=int, default=10_000, help="samples of a shard (10,000)")
    parser.add_argument("--batch", type=int, nargs="+", default=[4096, 5120], help="global batch sizes B (4096 5120)")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 8, 64], help="numbers of nodes N (1 8 64)")
    parser.add_argument("--seed", type=int, default=0, help="of all orders (0)")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    with exit_on_mistake():
        run(options)


def run(options: argparse.Namespace) -> None:
    samples, rows = Samples(options.samples, options.per_shard), []
    names = list(ORDERS) if has_mosaic() else ["ours", "uniform"]
    print(f"{samples.n:,} samples in {len(samples.starts):,} shards\n\n{HEADER}\n{'|---' * HEADER.count(' |')}|")
    for batch, nodes in itertools.product(options.batch, options.nodes):
        if batch % (nodes * RANKS) or batch > samples.n:
            raise UserError(
                f"A batch of {batch} is not divisible by {nodes} nodes of {RANKS} ranks, or larger than the data; "
                "choose another --batch."
            )
        found: dict[str, Mixing] = {}
        for name in names:
            found[name] = measure(ORDERS[name](samples, batch, nodes, options.seed), samples, nodes)
            rows.append({"batch": batch, "nodes": nodes, "order": name, **found[name]._asdict()})
            print(line(batch, nodes, name, found[name], found["ours"], samples), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps({"samples": samples.n, "per_shard": samples.per_shard, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
