"""Weights and optimizer state as shards of flattened parameters, in files that any number of ranks can read.

The folder of K ranks holds

    fragments.RRRRR-of-KKKKK.safetensors    rank R's shards, with the keys below
    buffers.safetensors                     the module's persistent buffers, by name
    engine.json                             `format`, `save` (an identity, also in the metadata of the other files),
                                            `files` (K), `parameters` (name -> shape, in the module's order),
                                            `counters` (of steps and samples), `written_by` (for the log)

with the keys

    weight/NAME/START-STOP    elements [START, STOP) of the flattened parameter NAME: its float32 master where it is
                              trained, else as it is
    KIND/NAME/START-STOP      the same elements of an optimizer's tensor, such as KIND exp_avg
    KIND/NAME/scalar          a 0-dimensional tensor of the optimizer, such as KIND step; in rank 0's file alone

The shards of a parameter cover each of its elements once, over all files; alignment padding is in none. KIND
holds no slash. A parameter without a KIND was not trained, or that optimizer has no such tensor.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from neuclip_ds.checkpoint.integrity import is_complete, verify
from neuclip_ds.errors import UserError
from neuclip_ds.state.tensor_file import BytesFile, TensorFile

FORMAT = "neuclip_ds.engine.1"
WEIGHT = "weight"
INDEX = "engine.json"
BUFFERS = "buffers.safetensors"

_FIX = "restore the folder, or delete the checkpoint to resume from an older one"


class StateShard(NamedTuple):
    """The tensor of one key: elements [start, stop) of a parameter's tensor, or a 0-dimensional tensor."""

    kind: str
    name: str
    start: int
    stop: int
    tensor: Tensor  # (stop - start,), or () for a scalar, whose start and stop mean nothing

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.name}/" + (f"{self.start}-{self.stop}" if self.tensor.ndim else "scalar")


def shards_file(rank: int, files: int, save: str, shards: Sequence[StateShard]) -> TensorFile:
    """Return the file number `rank` of `files`; all files of one save share the identity `save`."""
    tensors = {shard.key: shard.tensor for shard in shards}
    return TensorFile(_file_name(rank, files), tensors, {"format": FORMAT, "save": save})


def buffers_file(save: str, buffers: Mapping[str, Tensor]) -> TensorFile:
    """Return buffers.safetensors."""
    return TensorFile(BUFFERS, buffers, {"format": FORMAT, "save": save})


def index_file(
    files: int,
    save: str,
    parameters: Mapping[str, Sequence[int]],
    counters: Mapping[str, int],
    written_by: Mapping[str, Any],
) -> BytesFile:
    """Return engine.json, with the entries above."""
    index = {"format": FORMAT, "save": save, "files": files}
    index |= {"counters": counters, "written_by": written_by, "parameters": parameters}
    return BytesFile(INDEX, json.dumps(index, indent=1).encode())


class StateFiles:
    """Reader of what K ranks wrote, for any number of readers.

    Raises `UserError` where files are missing, damaged, of another format or save, or lack elements that are read.

    Example:
        files = StateFiles(Path("runs/demo/checkpoints/step_000000100/engine"))
        for name in files.names():
            weight = files.read(name, WEIGHT).view(files.shape(name))

    Attributes:
        folder: where the files are.
        counters: the engine's counts of steps and samples.
        written_by: world_size, zero_stage and precision of the writer.
    """

    def __init__(self, folder: Path, verified: bool = False) -> None:
        """
        Args:
            folder: of a checkpoint, whose checksums are compared, or what `save_engine` wrote elsewhere.
            verified: whether the caller has compared the checksums.
        """
        self.folder = folder
        if not verified and is_complete(folder.parent):
            verify(folder.parent, inside=f"{folder.name}/")
        index = _read_index(folder)
        self.counters: dict[str, int] = index["counters"]
        self.written_by: dict[str, Any] = index["written_by"]
        self._shapes = {name: torch.Size(shape) for name, shape in index["parameters"].items()}
        # name -> kind -> (start, stop, key, file) in order of start
        self._places: dict[str, defaultdict[str, list[tuple[int, int, str, Any]]]]
        self._places = {name: defaultdict(list) for name in self._shapes}
        self._scalars: dict[str, dict[str, Tensor]] = {name: {} for name in self._shapes}
        self._save = index["save"]
        for number in range(index["files"]):
            self._add(self._open(folder / _file_name(number, index["files"])))
        for kinds in self._places.values():
            for places in kinds.values():
                places.sort(key=lambda place: place[:2])

    def names(self) -> list[str]:
        """Return the parameters' names in the module's order."""
        return list(self._shapes)

    def shape(self, name: str) -> torch.Size:
        return self._shapes[name]

    def kinds(self, name: str) -> list[str]:
        """Return the kinds of tensors of a parameter: WEIGHT, and the optimizer's if it was trained."""
        return sorted(self._places[name])

    def scalars(self, name: str) -> dict[str, Tensor]:
        """Return the optimizer's 0-dimensional tensors of a parameter, by kind."""
        return dict(self._scalars[name])

    def read(self, name: str, kind: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Read (stop - start,) elements of a flattened parameter, by default all, and nothing else from disk."""
        stop = self._shapes[name].numel() if stop is None else stop
        parts, filled = [], start
        for first, last, key, file in self._places[name].get(kind, []):
            low, high = max(first, filled), min(last, stop)
            if low >= high:
                continue
            if low > filled:
                break
            parts.append(file.get_slice(key)[low - first : high - first])
            filled = high
        if filled < stop:
            raise UserError(f"{self.folder} lacks elements {filled} to {stop} of {name} ({kind}); {_FIX}.")
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0)

    def weights(self) -> dict[str, Tensor]:
        """Return all parameters in their shapes, float32 where they were trained, and all buffers, by name."""
        parameters = {name: self.read(name, WEIGHT).view(shape) for name, shape in self._shapes.items()}
        return {**parameters, **self.buffers()}

    def buffers(self) -> dict[str, Tensor]:
        """Return the module's buffers by name."""
        file = self._open(self.folder / BUFFERS)
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not iterable itself

    def _open(self, path: Path) -> Any:
        if not path.is_file():
            raise UserError(f"{path} is missing; {_FIX}.")
        try:
            file = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise UserError(f"{path} is damaged ({error}); {_FIX}.") from error
        if (file.metadata() or {}).get("save") != self._save:
            raise UserError(f"{path} belongs to another checkpoint than {self.folder / INDEX}; {_FIX}.")
        return file

    def _add(self, file: Any) -> None:
        for key in file.keys():  # noqa: SIM118
            kind, _, rest = key.partition("/")
            name, _, span = rest.rpartition("/")
            if span == "scalar":
                self._scalars[name][kind] = file.get_tensor(key)
            else:
                start, _, stop = span.partition("-")
                self._places[name][kind].append((int(start), int(stop), key, file))


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    if not path.is_file():
        raise UserError(f"There is no {path}; {_FIX}.")
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); {_FIX}.") from error
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise UserError(f"{path} is not of the format {FORMAT}; read it with the version of the program that wrote it.")
    return index


def _file_name(rank: int, files: int) -> str:
    return f"fragments.{rank:05d}-of-{files:05d}.safetensors"
