"""The exponential moving average (EMA) of the weights, in float32.

It lies with the optimizer's state of each master. So it takes the place of the masters under every ZeRO stage, and is
saved, restored and handed to other stages and numbers of ranks as the moments are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from neuclip_ds.engine.zero import refresh_weights, release_gathered

AVERAGE = "average"  # its kind among the optimizer's tensors


class WeightAverage:
    """The moving average of an engine's trained weights; buffers, such as batch norm's, are not averaged."""

    def __init__(self, engine: Any, decay: float) -> None:
        """
        Args:
            engine: DeepSpeed's.
            decay: share of the average that a step keeps, in (0, 1).
        """
        self._engine, self._decay = engine, decay

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average toward the weights after `step` steps; the first call starts it at the weights.

        The decay of a step is at most (1 + step) / (10 + step), so that the initial weights are soon forgotten.
        """
        share = 1 - min(self._decay, (1 + step) / (10 + step))
        for master, state in self._engine.basic_optimizer.state.items():
            if AVERAGE not in state:  # not before the optimizer's own, which is made only where there is none
                state[AVERAGE] = master.detach().clone()
            state[AVERAGE].lerp_(master.detach(), share)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the module compute with the average; afterward the weights have the same bits as before.

        A collective call. An error leaves the average in place: the other ranks would not take part in the return.
        """
        self._exchange()
        yield
        self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        release_gathered(self._engine)
        for master, state in self._engine.basic_optimizer.state.items():
            if AVERAGE in state:
                kept = master.clone()
                master.copy_(state[AVERAGE])
                state[AVERAGE].copy_(kept)
        refresh_weights(self._engine)


def discard_average(engine: Any) -> None:
    """Forget the average that a checkpoint brought, in a run that keeps none."""
    for state in engine.basic_optimizer.state.values():
        state.pop(AVERAGE, None)
