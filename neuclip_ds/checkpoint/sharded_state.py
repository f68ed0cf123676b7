"""Read the weights, optimizer state and objective state of a checkpoint without DeepSpeed.

The `state` folder of a checkpoint contains state shards in the format that state/shards.py describes, with these kinds
of tensors:

    weight       elements of a flattened parameter; if the parameter is trained, of its float32 master weights
    exp_avg ...  the same elements of the optimizer's tensors and of the weights' moving average (`average`)
    scalar       the optimizer's 0-dimensional tensors, such as PARAMETER/step
    buffer       the module's persistent buffers
    table        rows of the objective's partitioned tables: per-sample statistics, NPN prototypes
    objective    the part of the objective's state that is the same on all ranks: temperature, counters

Alignment padding is not saved. For a parameter that was not trained, only the kind `weight` is saved. The index
contains `parameters` (name -> shape, in the module's order) and `counters` (of steps and samples).
"""

from pathlib import Path

import torch
from torch import Tensor

from neuclip_ds.checkpoint.integrity import is_complete, verify
from neuclip_ds.engine.average import AVERAGE
from neuclip_ds.errors import UserError
from neuclip_ds.state.shards import ShardFiles

STATE = "state"  # folder in a checkpoint
# kinds of tensors
WEIGHT = "weight"
SCALAR = "scalar"
BUFFER = "buffer"
OBJECTIVE = "objective"


class StateFiles(ShardFiles):
    """Reader of a checkpoint's state; raises `UserError` if a file is missing, damaged or unreadable.

    Args:
        folder: the `state` folder of a checkpoint.
        verified: whether the caller has already verified the checksums; if not, the constructor verifies them, unless
            the checkpoint has no meta.json.

    Example:
        files = StateFiles(Path("runs/demo/checkpoints/step_000000100/state"))
        for name, shape in files.shapes.items():
            weight = files.read(name, WEIGHT).view(shape)

    Attributes:
        counters: the engine's counts of steps and samples.
        shapes: shapes of the parameters by name, in the module's order.
    """

    def __init__(self, folder: Path, verified: bool = False) -> None:
        if not verified and is_complete(folder.parent):
            verify(folder.parent)
        super().__init__(folder)
        self.counters: dict[str, int] = self.metadata["counters"]
        self.shapes = {name: torch.Size(shape) for name, shape in self.metadata["parameters"].items()}

    def weights(self, average: bool = False) -> dict[str, Tensor]:
        """Return all parameters (in float32 if trained) in their original shapes, and all buffers, by name.

        If `average` is true, moving averages replace the trained weights. Raises `UserError` if none were saved.
        """
        averaged = {name for name in self.shapes if average and AVERAGE in self.kinds(name)}
        if average and not averaged:
            raise UserError(
                f"{self.folder} contains no average of the weights: train with ema.decay, or omit --ema (in Python, "
                "ema=True)."
            )
        parameters = {}
        for name, shape in self.shapes.items():
            kind = AVERAGE if name in averaged else WEIGHT
            parameters[name] = self.read(name, kind, 0, shape.numel()).view(shape)
        return {**parameters, **self.replicated(BUFFER)}
