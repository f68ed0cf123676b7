"""Compare replicated state, which must be bit-identical on all ranks, and end a run in which it differs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.zero import replicas
from neuclip_ds.errors import TrainingDiverged
from neuclip_ds.objectives.base import Objective

_SHOWN = 3  # names of tensors in a message
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
_ODD = 0x1E3779B97F4A7C15  # its double fits int64
_CHUNK = 2**22  # elements, which take 64 MB of int64


def compare_replicas(step: int, engine: Any, objective: Objective, communicator: Communicator) -> None:
    """Compare replicated tensors (temperature, nets, counters, weights) on all ranks; each sends one 64-bit hash.

    Raises:
        TrainingDiverged: on all ranks, if any tensor differs between ranks.
    """
    if communicator.world_size == 1:
        return
    tensors = {**objective.replicated_state(), **replicas(engine, communicator.rank)}
    if not tensors:  # ZeRO 3 divides all weights, and individual temperatures are stored with their samples
        return
    hashes = torch.stack([bit_hash(tensor).to(communicator.device) for tensor in tensors.values()])
    found = communicator.all_gather(bit_hash(hashes)[None], "control")
    if not bool((found == found[0]).all()):
        by_name = dict(zip(tensors, hashes.tolist(), strict=True))
        raise TrainingDiverged(f"step {step}: {_difference(communicator.gather_objects(by_name))}")


def _difference(ranks: Sequence[Mapping[str, int]]) -> str:
    """Describe which tensors differ, by their hashes on each rank, and on which ranks."""
    names, odd = [], set()
    for name in {name: None for hashes in ranks for name in hashes}:
        values = [hashes.get(name) for hashes in ranks]
        usual, count = Counter(values).most_common(1)[0]
        if count == len(ranks):
            continue
        names.append(name)
        majority = 2 * count > len(ranks)
        odd |= {rank for rank, value in enumerate(values) if not majority or value != usual}
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} other tensors" * (len(names) > _SHOWN))
    of_ranks = " and ".join(str(rank) for rank in sorted(odd))
    where = f"rank {of_ranks} has others" if len(odd) < len(ranks) else f"ranks {of_ranks} differ"
    return (
        f"{shown} must have the same bits on all ranks, but {where}: test the memory and the GPU there, and resume "
        "from the newest checkpoint, which was compared before it was saved."
    )


def bit_hash(x: Tensor) -> Tensor:
    """Return the 0-dim int64 sum, modulo 2^64, of the elements' bits times an odd weight of each position.

    It does not depend on the order of summation. A change of one element always changes it, as the weights are odd.
    """
    words = x.detach().reshape(-1).view(_WORDS[x.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, len(words), _CHUNK):
        part = words[start : start + _CHUNK].long()
        weights = torch.arange(start, start + len(part), device=x.device).mul_(2 * _ODD).add_(_ODD)
        total += weights.mul_(part).sum()  # `part` is the tensor itself where that is int64
    return total
