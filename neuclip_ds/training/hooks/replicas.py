"""Compare what all ranks must hold with the same bits, and end a run in which they do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.zero import replicas
from neuclip_ds.errors import TrainingDiverged
from neuclip_ds.objectives.base import Objective
from neuclip_ds.state.bit_hash import bit_hash
from neuclip_ds.training.hooks.base import Hook

if TYPE_CHECKING:
    from neuclip_ds.training.loop import Loop, StepResult

_SHOWN = 3  # names of tensors in a message


class CompareReplicas(Hook):
    """Compare the ranks every `run.compare_every` steps; `Loop.save` does before each checkpoint."""

    def after_step(self, loop: Loop, result: StepResult) -> None:
        every = loop.context.config.run.compare_every
        if every and result.step % every == 0 and not result.saves:
            loop.compare_replicas()


def compare_replicas(step: int, engine: Any, objective: Objective, communicator: Communicator) -> None:
    """Compare temperature, nets, counters and weights, as far as every rank holds all of them: one number a rank.

    Raises:
        TrainingDiverged: on all ranks, if any tensor differs between ranks.
    """
    if communicator.world_size == 1:
        return
    tensors = {**objective.replicated_state(), **replicas(engine, communicator.rank)}
    if not tensors:  # ZeRO 3 divides all weights, and individual temperatures lie with their samples
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
