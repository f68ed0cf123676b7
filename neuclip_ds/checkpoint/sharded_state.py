"""Weights and optimizer state as shards of flattened parameters, in files that any number of ranks can read.

The folder of K ranks holds

    fragments.RRRRR-of-KKKKK.safetensors    rank R's shards, with the keys below
    buffers.safetensors                     the module's persistent buffers, by name
    engine.json                             `format`, `save` (an identity, also in the metadata of the other files),
                                            `files` (K), `parameters` (name -> shape, in the module's order),
                                            `shards` (name -> KINDs, and [rank, START, STOP] of each),
                                            `counters` (of steps, samples and fp16's loss scale), `written_by`

with the keys

    weight/NAME/START-STOP    elements [START, STOP) of the flattened parameter NAME: its float32 master where it is
                              trained, else as it is
    KIND/NAME/START-STOP      the same elements of an optimizer's tensor, such as KIND exp_avg, or of KIND average, the
                              moving average of the weights
    KIND/NAME/scalar          a 0-dimensional tensor of the optimizer, such as KIND step; in rank 0's file alone

The shards of a parameter cover each of its elements once, over all files; alignment padding is in none. KIND
holds no slash. A parameter without a KIND was not trained, or that optimizer has no such tensor.

A reader opens the files that hold what it reads, and no others. Only where earlier versions have written no `shards`
it opens all files.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from neuclip_ds.checkpoint.integrity import is_complete, verify
from neuclip_ds.engine.average import AVERAGE
from neuclip_ds.errors import UserError
from neuclip_ds.state.tensor_file import BytesFile, TensorFile

FORMAT = "neuclip_ds.engine.1"
WEIGHT = "weight"
INDEX = "engine.json"
BUFFERS = "buffers.safetensors"
_SCALAR = "scalar"

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
        return f"{self.kind}/{self.name}/" + (f"{self.start}-{self.stop}" if self.tensor.ndim else _SCALAR)


Contents = Mapping[tuple[str, int, int], Sequence[str]]
"""What a file holds but scalars: the kinds of tensors by name, start and stop."""


def contents_of(shards: Iterable[StateShard]) -> Contents:
    """Return what a file of these shards holds."""
    found: defaultdict[tuple[str, int, int], list[str]] = defaultdict(list)
    for shard in shards:
        if shard.tensor.ndim:
            found[shard.name, shard.start, shard.stop].append(shard.kind)
    return dict(found)


def shards_file(rank: int, files: int, save: str, shards: Sequence[StateShard]) -> TensorFile:
    """Return the file number `rank` of `files`; all files of one save share the identity `save`."""
    tensors = {shard.key: shard.tensor for shard in shards}
    return TensorFile(_file_name(rank, files), tensors, {"format": FORMAT, "save": save})


def buffers_file(save: str, buffers: Mapping[str, Tensor]) -> TensorFile:
    """Return buffers.safetensors."""
    return TensorFile(BUFFERS, buffers, {"format": FORMAT, "save": save})


def index_file(
    save: str,
    parameters: Mapping[str, Sequence[int]],
    contents: Sequence[Contents],
    counters: Mapping[str, int],
    written_by: Mapping[str, Any],
) -> BytesFile:
    """Return engine.json, with the entries above; `contents` are those of each rank's file."""
    shards: dict[str, dict[str, Any]] = {name: {"kinds": [], "places": []} for name in parameters}
    for rank, of_rank in enumerate(contents):
        for (name, start, stop), kinds in of_rank.items():
            shards[name]["kinds"] = sorted({*shards[name]["kinds"], *kinds})
            shards[name]["places"].append([rank, start, stop])
    index = {"format": FORMAT, "save": save, "files": len(contents)}
    index |= {"counters": counters, "written_by": written_by, "parameters": parameters, "shards": shards}
    return BytesFile(INDEX, json.dumps(index).encode())


class StateFiles:
    """Reader of what K ranks wrote, for any number of readers; a file is opened when something in it is read.

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
        self._save, self._count = index["save"], int(index["files"])
        self._files: dict[int, Any] = {}  # open ones by number
        # name -> kind -> (start, stop, number of the file) in order of start
        self._places: dict[str, dict[str, list[tuple[int, int, int]]]]
        self._places = self._places_in(index["shards"]) if "shards" in index else self._places_in_headers()

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
        return dict(self._scalars.get(name, {}))

    def read(self, name: str, kind: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Read (stop - start,) elements of a flattened parameter, by default all, and nothing else from disk."""
        stop = self._shapes[name].numel() if stop is None else stop
        parts, filled = [], start
        for first, last, number in self._places[name].get(kind, []):
            low, high = max(first, filled), min(last, stop)
            if low >= high:
                continue
            if low > filled:
                break
            parts.append(self._slice(number, f"{kind}/{name}/{first}-{last}")[low - first : high - first])
            filled = high
        if filled < stop:
            raise UserError(f"{self.folder} lacks elements {filled} to {stop} of {name} ({kind}); {_FIX}.")
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0)

    def weights(self, average: bool = False) -> dict[str, Tensor]:
        """Return all parameters in their shapes, float32 where they were trained, and all buffers, by name.

        With `average` the moving average of those that were trained; raises `UserError` where there is none.
        """
        averaged = {name for name in self._shapes if average and AVERAGE in self.kinds(name)}
        if average and not averaged:
            raise UserError(f"{self.folder} holds no average of the weights: train with ema.decay, or omit --ema.")
        kinds = {name: AVERAGE if name in averaged else WEIGHT for name in self._shapes}
        parameters = {name: self.read(name, kinds[name]).view(shape) for name, shape in self._shapes.items()}
        return {**parameters, **self.buffers()}

    def buffers(self) -> dict[str, Tensor]:
        """Return the module's buffers by name."""
        file = self._open(self.folder / BUFFERS)
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not iterable itself

    @cached_property
    def _scalars(self) -> dict[str, dict[str, Tensor]]:
        """The scalars by name and kind, all of which the first file holds."""
        found: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
        file = self._file(0)
        for key in file.keys():  # noqa: SIM118
            kind, name, span = _parts(key)
            if span == _SCALAR:
                found[name][kind] = file.get_tensor(key)
        return found

    def _slice(self, number: int, key: str) -> Any:
        try:
            return self._file(number).get_slice(key)
        except SafetensorError as error:
            raise UserError(f"{self._path(number)} is damaged ({error}); {_FIX}.") from error

    def _file(self, number: int) -> Any:
        if number not in self._files:
            self._files[number] = self._open(self._path(number))
        return self._files[number]

    def _path(self, number: int) -> Path:
        return self.folder / _file_name(number, self._count)

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

    def _places_in(self, shards: Mapping[str, Any]) -> dict[str, dict[str, list[tuple[int, int, int]]]]:
        """Return the places of the index."""
        found = {
            name: sorted((start, stop, number) for number, start, stop in shards[name]["places"]) for name in shards
        }
        return {name: dict.fromkeys(shards[name]["kinds"], places) for name, places in found.items()}

    def _places_in_headers(self) -> dict[str, dict[str, list[tuple[int, int, int]]]]:
        """Return the places in all files, of which earlier versions kept no index."""
        found: dict[str, dict[str, list[tuple[int, int, int]]]] = {name: {} for name in self._shapes}
        for number in range(self._count):
            for key in self._file(number).keys():  # noqa: SIM118
                kind, name, span = _parts(key)
                if span != _SCALAR:
                    start, _, stop = span.partition("-")
                    found[name].setdefault(kind, []).append((int(start), int(stop), number))
        for kinds in found.values():
            for places in kinds.values():
                places.sort()
        return found


def _parts(key: str) -> tuple[str, str, str]:
    """Return kind, name and range of a key."""
    kind, _, rest = key.partition("/")
    name, _, span = rest.rpartition("/")
    return kind, name, span


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
