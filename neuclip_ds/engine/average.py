"""The exponential moving average (EMA) of the weights, in float32.

It is part of the optimizer's state of each master. So it is sharded like the masters under every ZeRO stage, and saved,
restored and resharded like the moments.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from neuclip_ds.engine.zero import refresh_weights, release_gathered

AVERAGE = "average"  # its key in the optimizer's state


class WeightAverage:
    """The moving average of an engine's trained weights; buffers, such as batch norm's, are not averaged."""

    def __init__(self, engine: Any, decay: float) -> None:
        """
        Args:
            engine: DeepSpeed's engine.
            decay: fraction of the average that a step keeps, in (0, 1).
        """
        self._engine, self._decay = engine, decay

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average toward the weights after `step` steps; the first call starts it at the weights.

        The decay of a step is at most (1 + step) / (10 + step), so that the initial weights are soon forgotten.
        """
        share = 1 - min(self._decay, (1 + step) / (10 + step))
        for master, state in self._engine.basic_optimizer.state.items():
            if AVERAGE not in state:  # after the optimizer has made its state, which it makes only if none exists
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
    """Drop the average that a checkpoint contains if the run keeps none."""
    for state in engine.basic_optimizer.state.values():
        state.pop(AVERAGE, None)
