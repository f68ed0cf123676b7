"""Exponential moving average (EMA) of the weights, in float32.

The average is part of the optimizer state of each master weight. It is therefore sharded like the master weights under
every ZeRO stage, and saved, restored and resharded like the moments.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from neuclip_ds.engine.engine import Engine

AVERAGE = "average"  # key of the average in the optimizer state


class WeightAverage:
    """The moving average of an engine's trained weights; buffers, such as batch norm's, are not averaged.

    Args:
        engine: the engine.
        decay: fraction of the average that each step retains, in (0, 1).
    """

    def __init__(self, engine: Engine, decay: float) -> None:
        self._engine = engine
        self._decay = decay

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average toward the weights after `step` steps; the first call sets the average to the weights.

        The decay in a step is at most (1 + step) / (10 + step), so that the initial weights are soon forgotten.
        """
        decay = min(self._decay, (1 + step) / (10 + step))
        for master, state in self._engine.optimizer_state.items():
            if AVERAGE not in state:  # set after a step, because optimizers initialize only an empty state
                state[AVERAGE] = master.detach().clone()
            state[AVERAGE].lerp_(master.detach(), 1 - decay)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Use the average as the module's weights during the block; afterward, restore the weights bit for bit.

        All ranks must call this. After an error, the average stays in use because restoring weights requires all ranks.
        """
        self._exchange()
        yield
        self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Swap the master weights and the average."""
        with self._engine.changing_master_weights():
            for master, state in self._engine.optimizer_state.items():
                if AVERAGE in state:
                    weights = master.clone()
                    master.copy_(state[AVERAGE])
                    state[AVERAGE].copy_(weights)


def discard_average(engine: Engine) -> None:
    """Drop the average that was loaded from a checkpoint; called if this run does not keep an average."""
    for state in engine.optimizer_state.values():
        state.pop(AVERAGE, None)
