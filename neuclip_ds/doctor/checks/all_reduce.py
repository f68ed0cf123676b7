"""All-reduces over all ranks at several sizes: their sums, and the bandwidth that they reach."""

from collections.abc import Iterator
from functools import partial

import torch

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.ring import ring_bytes
from neuclip_ds.doctor.finding import Finding, fine, wrong
from neuclip_ds.doctor.request import Request
from neuclip_ds.doctor.timing import mean_seconds

_SIZES = {"cpu": (4 << 10, 1 << 20, 32 << 20), "cuda": (4 << 10, 1 << 20, 64 << 20, 512 << 20)}  # bytes
_CALLS = 20
CALLS, LINK = "calls/s of the smallest all-reduce", "GB/s of the largest all-reduce"
_WHERE = {True: " of one node", False: " between nodes"}


def examine(request: Request, communicator: Communicator) -> Iterator[Finding]:
    ranks = communicator.world_size
    if ranks == 1:
        return
    one_node = len(communicator.ranks_of_node()) == ranks
    sizes = _SIZES[communicator.device.type]
    rates: dict[int, float] = {}
    for size in sizes:
        values = torch.full((size // 4,), communicator.rank + 1.0, device=communicator.device)
        total = communicator.all_reduce(values, "doctor")
        if not bool((total == ranks * (ranks + 1) / 2).all()):
            yield wrong(
                f"An all-reduce of {size:,} bytes gives a wrong sum.",
                "Set NCCL_DEBUG=INFO, try NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1 to find the faulty link.",
            )
        # as many calls on every rank
        seconds = mean_seconds(partial(communicator.all_reduce, values, "doctor"), values.device, _CALLS)
        rates[size] = ring_bytes("all_reduce", size, ranks) / seconds / 1e9
        if size == sizes[0]:
            yield fine(figures={CALLS + _WHERE[one_node]: 1 / seconds})
    middle = {f"GB/s of an all-reduce of {size >> 20} MB": rates[size] for size in sizes[1:-1]}
    yield fine(figures={**middle, LINK + _WHERE[one_node]: rates[sizes[-1]]})
