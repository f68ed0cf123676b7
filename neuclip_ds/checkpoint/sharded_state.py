"""Weights and optimizer state as shards of flattened parameters, in files that any number of ranks can read.

The folder of K ranks holds

    fragments.RRRRR-of-KKKKK.safetensors    rank R's shards, with the keys below
    buffers.safetensors                     the module's persistent buffers, by name
    engine.json                             `parameters` (name -> shape, in the module's order), `keys` (of each file),
                                            `counters` (of steps, samples and fp16's loss scale)

with the keys

    weight/NAME/START-STOP    elements [START, STOP) of the flattened parameter NAME: its float32 master where it is
                              trained, else as it is
    KIND/NAME/START-STOP      the same elements of an optimizer's tensor, such as KIND exp_avg, or of KIND average, the
                              moving average of the weights
    KIND/NAME/scalar          a 0-dimensional tensor of the optimizer, such as KIND step; in rank 0's file alone

The shards of a parameter cover each of its elements once, over all files; alignment padding is in none. KIND
holds no slash. A parameter without a KIND was not trained, or that optimizer has no such tensor.

A reader opens the files that hold what it reads, and no others.
"""

import bisect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neuclip_ds.checkpoint.integrity import is_complete, verify
from neuclip_ds.engine.average import AVERAGE
from neuclip_ds.errors import UserError
from neuclip_ds.state.tensor_file import BytesFile, TensorFile, open_tensors, read_tensors

WEIGHT = "weight"
INDEX = "engine.json"
BUFFERS = "buffers.safetensors"
_SCALAR = "scalar"


Shards = Mapping[str, Tensor]
"""Tensors of one file by key."""


def shard_key(kind: str, name: str, start: int, stop: int) -> str:
    """Return the key of elements [start, stop) of a parameter's tensor."""
    return f"{kind}/{name}/{start}-{stop}"


def scalar_key(kind: str, name: str) -> str:
    """Return the key of a 0-dimensional tensor of the optimizer."""
    return f"{kind}/{name}/{_SCALAR}"


def shards_file(rank: int, files: int, shards: Shards) -> TensorFile:
    """Return the file number `rank` of `files`."""
    return TensorFile(_file_name(rank, files), shards)


def index_file(
    parameters: Mapping[str, Sequence[int]], keys: Sequence[Sequence[str]], counters: Mapping[str, int]
) -> BytesFile:
    """Return engine.json, with the entries above; `keys` are those of each rank's file."""
    return BytesFile(INDEX, json.dumps({"counters": counters, "parameters": parameters, "keys": keys}).encode())


class StateFiles:
    """Reader of what K ranks wrote, for any number of readers; a file is opened when something in it is read.

    Raises `UserError` where a checkpoint's files are not as they were written.

    Example:
        files = StateFiles(Path("runs/demo/checkpoints/step_000000100/engine"))
        for name, shape in files.shapes.items():
            weight = files.read(name, WEIGHT).view(shape)

    Attributes:
        folder: where the files are.
        counters: the engine's counts of steps and samples.
        shapes: those of the parameters by name, in the module's order.
    """

    def __init__(self, folder: Path, verified: bool = False) -> None:
        """
        Args:
            folder: `engine` of a checkpoint.
            verified: whether the caller has compared the checksums.
        """
        self.folder = folder
        if not verified and is_complete(folder.parent):
            verify(folder.parent)
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        self.counters: dict[str, int] = index["counters"]
        self.shapes = {name: torch.Size(shape) for name, shape in index["parameters"].items()}
        self._count = len(index["keys"])
        self._files: dict[int, Any] = {}  # open ones by number
        # name -> kind -> (start, stop, number of the file) in order of start
        self._places: dict[str, dict[str, list[tuple[int, int, int]]]] = {name: {} for name in self.shapes}
        self._scalars: dict[str, list[str]] = {name: [] for name in self.shapes}  # kinds
        for number, keys in enumerate(index["keys"]):
            for key in keys:
                kind, _, rest = key.partition("/")
                name, _, place = rest.rpartition("/")
                if place == _SCALAR:
                    self._scalars[name].append(kind)
                else:
                    start, stop = map(int, place.split("-"))
                    bisect.insort(self._places[name].setdefault(kind, []), (start, stop, number))

    def kinds(self, name: str) -> list[str]:
        """Return the kinds of tensors of a parameter: WEIGHT, and the optimizer's if it was trained."""
        return sorted(self._places[name])

    def scalars(self, name: str) -> dict[str, Tensor]:
        """Return the optimizer's 0-dimensional tensors of a parameter, by kind."""
        return {kind: self._file(0).get_tensor(scalar_key(kind, name)) for kind in self._scalars[name]}

    def read(self, name: str, kind: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Read (stop - start,) elements of a flattened parameter, by default all, and nothing else from disk."""
        stop = self.shapes[name].numel() if stop is None else stop
        parts, filled = [], start
        for first, last, number in self._places[name].get(kind, []):
            low, high = max(first, filled), min(last, stop)
            if low >= high:
                continue
            if low > filled:
                break
            elements = self._file(number).get_slice(shard_key(kind, name, first, last))
            parts.append(elements[low - first : high - first])
            filled = high
        if filled < stop:
            raise UserError(f"{self.folder} lacks elements {filled} to {stop} of {name} ({kind}); restore the folder.")
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0)

    def weights(self, average: bool = False) -> dict[str, Tensor]:
        """Return all parameters in their shapes, float32 where they were trained, and all buffers, by name.

        With `average` the moving average of those that were trained; raises `UserError` where there is none.
        """
        averaged = {name for name in self.shapes if average and AVERAGE in self.kinds(name)}
        if average and not averaged:
            raise UserError(f"{self.folder} holds no average of the weights: train with ema.decay, or omit --ema.")
        kinds = {name: AVERAGE if name in averaged else WEIGHT for name in self.shapes}
        parameters = {name: self.read(name, kinds[name]).view(shape) for name, shape in self.shapes.items()}
        return {**parameters, **self.buffers()}

    def buffers(self) -> dict[str, Tensor]:
        """Return the module's buffers by name."""
        return read_tensors(self.folder / BUFFERS)

    def _file(self, number: int) -> Any:
        if number not in self._files:
            self._files[number] = open_tensors(self.folder / _file_name(number, self._count))
        return self._files[number]


def _file_name(rank: int, files: int) -> str:
    return f"fragments.{rank:05d}-of-{files:05d}.safetensors"
