"""Compare replicated state, which must be bit-identical on all ranks, and end the run if the state differs."""

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
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size in bytes
_ODD = 0x1E3779B97F4A7C15  # twice this number fits into int64
_CHUNK = 2**22  # elements per chunk, whose two int64 tensors take 64 MB


def compare_replicas(step: int, engine: Any, objective: Objective, communicator: Communicator) -> None:
    """Compare replicated tensors (temperature, MLPs, counters, weights) across ranks; each rank sends a 64-bit hash.

    Raises:
        TrainingDiverged: on all ranks, if any tensor differs between ranks.
    """
    if communicator.world_size == 1:
        return
    tensors = {**objective.replicated_state(), **replicas(engine, communicator.rank)}
    if not tensors:  # ZeRO 3 partitions all weights, and individual temperatures are stored with their samples
        return
    hashes = torch.stack([bit_hash(tensor).to(communicator.device) for tensor in tensors.values()])
    found = communicator.all_gather(bit_hash(hashes)[None], "control")
    if not bool((found == found[0]).all()):
        by_name = dict(zip(tensors, hashes.tolist(), strict=True))
        raise TrainingDiverged(f"step {step}: {_difference(communicator.gather_objects(by_name))}")


def _difference(ranks: Sequence[Mapping[str, int]]) -> str:
    """Describe which tensors differ and on which ranks, given their hashes on each rank."""
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
    where = f"those of rank {of_ranks} differ" if len(odd) < len(ranks) else f"ranks {of_ranks} differ"
    return (
        f"{shown} must have the same bits on all ranks, but {where}: test the memory and the GPU there, and resume "
        "from the newest checkpoint, which was compared before it was saved."
    )


def bit_hash(x: Tensor) -> Tensor:
    """Return a 0-dim int64 hash: the sum, modulo 2^64, of each element's bits times an odd weight for its position.

    The order of summation does not matter. Because the weights are odd, changing one element always changes the hash.
    """
    words = x.detach().reshape(-1).view(_WORDS[x.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, len(words), _CHUNK):
        part = words[start : start + _CHUNK].long()
        weights = torch.arange(start, start + len(part), device=x.device).mul_(2 * _ODD).add_(_ODD)
        total += weights.mul_(part).sum()  # overwrites `weights`, because an int64 `part` is a view of `x`
    return total
