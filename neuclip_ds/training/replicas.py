"""Compare replicated state, which must be bit-identical on all ranks, and end the run if the state differs."""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.engine import Engine
from neuclip_ds.errors import TrainingDiverged, counted
from neuclip_ds.losses.base import LossFunction

_SHOWN_NAMES = 3  # names of tensors in a message
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size in bytes
_ODD_FACTOR = 0x1E3779B97F4A7C15  # twice this number fits into int64
_CHUNK = 2**22  # elements per chunk, whose two int64 tensors take 64 MiB


def compare_replicas(step: int, engine: Engine, loss: LossFunction, communicator: Communicator) -> None:
    """Compare replicated tensors (temperature, MLPs, counters, weights) across ranks; each rank sends a 64-bit hash.

    Raises:
        TrainingDiverged: on all ranks, if any tensor differs between ranks.
    """
    if communicator.world_size == 1:
        return
    tensors = {**loss.replicated_state(), **engine.replicas()}
    if not tensors:  # ZeRO 3 partitions all weights, and individual temperatures are stored with their samples
        return
    hashes = torch.stack([bit_hash(tensor).to(communicator.device) for tensor in tensors.values()])
    rank_hashes = communicator.all_gather(bit_hash(hashes)[None], "control")
    if not bool((rank_hashes == rank_hashes[0]).all()):
        hash_of_name = dict(zip(tensors, hashes.tolist(), strict=True))
        raise TrainingDiverged(f"step {step}: {_difference(communicator.gather_objects(hash_of_name))}")


def _difference(ranks: Sequence[Mapping[str, int]]) -> str:
    """Describe which tensors differ and on which ranks, given their hashes on each rank."""
    names: dict[str, None] = {}  # the tensors of any rank, in order
    for hashes in ranks:
        names.update(dict.fromkeys(hashes))
    differing_names = []
    differing_ranks = set()
    for name in names:
        values = [hashes.get(name) for hashes in ranks]
        usual, count = Counter(values).most_common(1)[0]
        if count == len(ranks):
            continue
        differing_names.append(name)
        has_majority = 2 * count > len(ranks)
        for rank, value in enumerate(values):
            if not has_majority or value != usual:
                differing_ranks.add(rank)

    shown_names = ", ".join(differing_names[:_SHOWN_NAMES])
    if len(differing_names) > _SHOWN_NAMES:
        shown_names += f" and {counted(len(differing_names) - _SHOWN_NAMES, 'other tensor')}"
    *first_ranks, last_rank = [str(rank) for rank in sorted(differing_ranks)]
    shown_ranks = f"{', '.join(first_ranks)} and {last_rank}" if first_ranks else last_rank
    if len(differing_ranks) < len(ranks):
        noun = "rank" if len(differing_ranks) == 1 else "ranks"
        difference = f"those of {noun} {shown_ranks} differ"
    else:
        difference = f"ranks {shown_ranks} differ"
    return (
        f"{shown_names} must have the same bits on all ranks, but {difference}: test the memory and the GPUs of the "
        "affected nodes, and resume from the newest checkpoint, which was compared before it was saved."
    )


def bit_hash(x: Tensor) -> Tensor:
    """Return a 0-dim int64 hash: the sum, modulo 2^64, of each element's bits times an odd weight for its position.

    The order of summation does not matter. Because the weights are odd, changing one element always changes the hash.
    """
    integers = x.detach().reshape(-1).view(_INTEGERS[x.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, len(integers), _CHUNK):
        chunk = integers[start : start + _CHUNK].long()
        weights = torch.arange(start, start + len(chunk), device=x.device).mul_(2 * _ODD_FACTOR).add_(_ODD_FACTOR)
        total += weights.mul_(chunk).sum()  # overwrites `weights`, because an int64 `chunk` is a view of `x`
    return total
