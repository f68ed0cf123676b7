"""Samples of evaluation sets, and sets in the webdataset layout that CLIP_benchmark and DataComp publish.

    SET/classnames.txt  zeroshot_classification_templates.txt    prompts, of labelled sets
    SET/dataset_type.txt                                         `retrieval` for captioned sets, otherwise absent
    SET/test/nshards.txt  0.tar  1.tar ...                       samples KEY.jpg (jpeg, png, webp), KEY.cls, KEY.txt ...

Each shard is indexed when its turn comes, so that one shard's index is in memory at a time; bytes are read on demand.
A damaged shard is an error: the scores of an incomplete set are not the set's.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

from neuclip_ds.data.sample_table import IMAGE_EXTENSIONS
from neuclip_ds.data.tar import Extent, SampleEntry, read_index, read_member
from neuclip_ds.errors import UserError

TEMPLATES, CLASS_NAMES = "zeroshot_classification_templates.txt", "classnames.txt"
LAYOUT = (
    "a zero-shot set is a folder with classnames.txt, zeroshot_classification_templates.txt, test/nshards.txt "
    "and test/0.tar, test/1.tar, ...; a retrieval set has dataset_type.txt (retrieval) in place of the first two"
)


class Member(Protocol):
    """Bytes of a sample, which other processes can read too."""

    def read(self) -> bytes:
        """Return the bytes; raise OSError if they cannot be read."""


class Held(NamedTuple):
    """Member in memory."""

    data: bytes

    def read(self) -> bytes:
        """Return the bytes."""
        return self.data


class Sample:
    """One sample of a set; its members are read on demand, also in another process that it is sent to.

    Attributes:
        name: where it is, for messages.
    """

    def __init__(self, name: str, members: Mapping[str, Member]) -> None:
        """`members` are named as in a tar: an image (`jpg`, `png` ...), `cls`, `txt`, `npy`."""
        self.name, self._members = name, members

    def image(self, prefix: str = "") -> bytes:
        """Return the encoded image whose extension begins with `prefix`; raise UserError if none can be read."""
        names = [prefix + extension for extension in IMAGE_EXTENSIONS]
        for name in names:
            if name in self._members:
                return self.read(name)
        raise UserError(f"{self.name} has no image; add one of {', '.join(names)}.")

    def read(self, extension: str) -> bytes:
        """Return the bytes of a member; raise UserError if the sample has no such member, or it cannot be read."""
        if extension not in self._members:
            raise UserError(f"{self.name} has no {extension} member; download the set again.")
        try:
            return self._members[extension].read()
        except OSError as error:
            raise UserError(f"{self.name} cannot be read ({error}); check the storage.") from error

    def text(self, extension: str) -> str:
        """Return the text of a member, stripped; raises as `read` does."""
        return self.read(extension).decode("utf-8", "replace").strip()


class EvaluationSet(Protocol):
    """Samples on disk, in any of the forms that `neuclip_ds.evaluation.sets` opens."""

    @property
    def path(self) -> Path:
        """Its folder or file."""

    @property
    def kind(self) -> str:
        """`classification`, `retrieval` or `multilabel`."""

    @property
    def contents(self) -> Hashable:
        """What tells copies apart that differ."""

    def samples(self) -> Iterator[Sample]:
        """Yield all samples, in order; raise UserError if they cannot be read."""


@dataclass(frozen=True)
class EvaluationFolder:
    """Evaluation set on disk in CLIP_benchmark's layout."""

    path: Path  # the folder
    shards: tuple[Path, ...]  # its tar files
    kind: str  # content of dataset_type.txt: `classification` (without the file), `retrieval` or `multilabel`

    @classmethod
    def read(cls, path: Path) -> EvaluationFolder:
        """Find the shards of a set; raise UserError if a file is missing or malformed."""
        shards_file = path / "test" / "nshards.txt"
        shard_count = read_lines(shards_file)[0]
        if not shard_count.isdecimal() or int(shard_count) == 0:
            raise UserError(f"{shards_file} holds '{shard_count}'; write the number of tar files there.")
        shards = tuple(path / "test" / f"{number}.tar" for number in range(int(shard_count)))
        for shard in shards:
            _require(shard)
        kind_file = path / "dataset_type.txt"
        kind = read_lines(kind_file)[0].lower() if kind_file.is_file() else "classification"
        return cls(path, shards, kind)

    def samples(self) -> Iterator[Sample]:
        """Yield all samples, in order; raise UserError if a shard cannot be read, or is damaged."""
        for path in self.shards:
            shard = _Shard(path)
            for entry in shard.index():
                members = {name: _Stored(shard, extent) for name, extent in entry.members.items()}
                yield Sample(f"{path}: sample {entry.key}", members)

    @property
    def contents(self) -> Hashable:
        """Size of all shards together, and their number."""
        return sum(shard.stat().st_size for shard in self.shards), len(self.shards)


class _Shard:
    """Shard that opens when it is first read, in each process, and closes when its last sample is dropped."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def fd(self) -> int:
        try:
            return os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise UserError(f"{self.path} cannot be opened ({error}); check the storage.") from error

    def __reduce__(self) -> tuple[type[_Shard], tuple[Path]]:
        return _Shard, (self.path,)

    def index(self) -> list[SampleEntry]:
        try:
            samples, gaps = read_index(self.fd)
        except OSError as error:
            raise UserError(f"{self.path} cannot be read ({error}); check the storage.") from error
        if gaps:
            raise UserError(f"{self.path} is damaged at byte {gaps[0].offset}; download it again.")
        return samples

    def __del__(self) -> None:
        if "fd" in vars(self):
            os.close(self.fd)


class _Stored(NamedTuple):
    """Member of a shard."""

    shard: _Shard
    extent: Extent

    def read(self) -> bytes:
        return read_member(self.shard.fd, self.extent)


def read_lines(path: Path) -> tuple[str, ...]:
    """Return the stripped lines of a file; raise UserError if it is missing or a line blank: their numbers matter."""
    _require(path)
    lines = tuple(line.strip() for line in path.read_text(encoding="utf-8").rstrip().split("\n"))
    if "" in lines:
        raise UserError(f"{path}: line {lines.index('') + 1} is blank; write an entry on every line.")
    return lines


def _require(path: Path) -> None:
    if not path.is_file():
        raise UserError(f"{path} is missing; {LAYOUT}.")
