"""Evaluation sets on disk: CLIP_benchmark's webdataset layout, a folder of images by class, or a table of pairs.

    SET/classnames.txt  zeroshot_classification_templates.txt    prompts, of labeled sets
    SET/dataset_type.txt                                         `retrieval` for captioned sets, otherwise absent
    SET/test/nshards.txt  0.tar  1.tar ...                       samples KEY.jpg (png, webp), KEY.cls, KEY.txt ...

    SET/red_fox/a.jpg  SET/red_fox/more/b.png  SET/wolf/1.webp   images by class, as in torchvision's ImageFolder
    SET/classnames.txt  zeroshot_classification_templates.txt    optional: names in the folders' order, prompts with {c}

    SET.csv (.tsv, .jsonl, .parquet)                             a column of images and one of captions

A shard is indexed when it is read, and bytes are read on demand. A damaged shard is an error: the scores of an
incomplete set are not the set's.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Protocol

from torchvision.datasets.folder import make_dataset

from neuclip_ds.data.pack import (
    CAPTION_COLUMNS,
    IMAGE_COLUMNS,
    TABLES,
    captions_of,
    image_of,
    open_table,
    read_image,
)
from neuclip_ds.data.readers import read_at
from neuclip_ds.data.sample_table import IMAGE_EXTENSIONS
from neuclip_ds.data.tar import Extent, SampleEntry, read_index
from neuclip_ds.errors import UserError

TEMPLATES, CLASS_NAMES = "zeroshot_classification_templates.txt", "classnames.txt"
LAYOUT = (
    "a zero-shot set is a folder with classnames.txt, zeroshot_classification_templates.txt, test/nshards.txt "
    "and test/0.tar, test/1.tar, ...; a retrieval set has dataset_type.txt (retrieval) in place of the first two"
)
FORMS = f"{LAYOUT}; or a folder has a folder of images for each class; or a file ({', '.join(TABLES)}) has pairs"
# TIFF cannot be decoded, but is listed, so that such a file is an error instead of missing from the score
_IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
_DEFAULT_TEMPLATE = "a photo of a {c}."


Member = bytes | Callable[[], bytes]  # of a sample: its bytes, or what reads them, also in another process


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
        member = self._members[extension]
        try:
            return member if isinstance(member, bytes) else member()
        except OSError as error:
            raise UserError(f"{self.name} cannot be read ({error}); check the storage.") from error

    def text(self, extension: str) -> str:
        """Return the text of a member, stripped; raises as `read` does."""
        return self.read(extension).decode("utf-8", "replace").strip()


class EvaluationSet(Protocol):
    """Samples on disk, in any of the forms that `open_set` opens."""

    @property
    def path(self) -> Path:
        """Its folder or file."""

    @property
    def kind(self) -> str:
        """`classification`, `retrieval` or `multilabel`."""

    @property
    def contents(self) -> Hashable:
        """A value that differs between copies with different contents."""

    def samples(self) -> Iterator[Sample]:
        """Yield all samples, in order; raise UserError if they cannot be read."""


@dataclass(frozen=True)
class WebdatasetFolder:
    """Evaluation set in CLIP_benchmark's layout."""

    path: Path  # the folder
    shards: tuple[Path, ...]  # its tar files
    kind: str  # content of dataset_type.txt: `classification` (without the file), `retrieval` or `multilabel`

    @classmethod
    def read(cls, path: Path) -> WebdatasetFolder:
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

    @property
    def contents(self) -> Hashable:
        """Size of all shards together, and their number."""
        return sum(shard.stat().st_size for shard in self.shards), len(self.shards)

    def samples(self) -> Iterator[Sample]:
        """Yield all samples, in order; raise UserError if a shard cannot be read, or is damaged."""
        for path in self.shards:
            shard = _Shard(path)
            for entry in shard.index():
                members = {name: partial(shard.read, extent) for name, extent in entry.members.items()}
                yield Sample(f"{path}: sample {entry.key}", members)


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

    def read(self, extent: Extent) -> bytes:
        return read_at(self.fd, *extent)

    def __del__(self) -> None:
        if "fd" in vars(self):
            os.close(self.fd)


@dataclass(frozen=True)
class ImageFolder:
    """Labeled images on disk; a class may have no image."""

    path: Path
    class_names: tuple[str, ...]  # label -> name
    templates: tuple[str, ...]
    images: tuple[tuple[str, int], ...]  # (file, label) of each
    kind: str = "classification"

    @classmethod
    def read(cls, path: Path) -> ImageFolder:
        """List the images of a set; raise UserError if classnames.txt does not fit its folders."""
        folders = _class_folders(path)
        names, templates = path / CLASS_NAMES, path / TEMPLATES
        class_names = read_lines(names) if names.is_file() else tuple(one.name.replace("_", " ") for one in folders)
        if len(class_names) != len(folders):
            raise UserError(
                f"{names} has {len(class_names)} names for {len(folders)} folders of classes; write one on each line, "
                "in the order of the folders' names."
            )
        labels = {folder.name: label for label, folder in enumerate(folders)}
        images = make_dataset(str(path), labels, is_valid_file=lambda file: _is_image(Path(file)), allow_empty=True)
        prompts = read_lines(templates) if templates.is_file() else (_DEFAULT_TEMPLATE,)
        return cls(path, class_names, prompts, tuple(images))

    @property
    def contents(self) -> Hashable:
        """Checksum of the names of all images."""
        names = (image.removeprefix(str(self.path)) for image, _ in self.images)
        return zlib.crc32("\0".join(names).encode("utf-8", "replace"))

    def samples(self) -> Iterator[Sample]:
        """Yield all samples, by class."""
        for image, label in self.images:
            yield Sample(image, {"jpg": partial(Path.read_bytes, Path(image)), "cls": str(label).encode()})


@dataclass(frozen=True)
class PairFile:
    """Captioned images of a table.

    Rows that name the same image file together have its captions, as in Flickr30k's tables. Where the table holds the
    images themselves, each row is one image, with a caption or a list of them.
    """

    path: Path  # the file
    image_column: str
    caption_column: str
    kind: str = "retrieval"

    @classmethod
    def read(cls, path: Path) -> PairFile:
        """Find the columns of a table; raise UserError if it cannot be read, or has none of the usual names."""
        table, advice = open_table(str(path)), "rename one of them"
        image = table.find_column(IMAGE_COLUMNS, "images", advice)
        return cls(path, image, table.find_column(CAPTION_COLUMNS, "captions", advice))

    @property
    def contents(self) -> Hashable:
        """Size of the file."""
        return self.path.stat().st_size

    def samples(self) -> Iterator[Sample]:
        """Yield one image after the other; raise UserError for a row without one."""
        captions: dict[str, list[str]] = {}  # by named image
        for row, (image, texts) in enumerate(self._rows()):
            if isinstance(image, str):
                captions.setdefault(image, []).extend(texts)
            else:
                yield self._captioned(f"row {row}", image, texts)
        for name, texts in captions.items():
            yield self._captioned(name, name, texts)

    def _rows(self) -> Iterator[tuple[bytes | str, list[str]]]:
        for row, values in enumerate(open_table(str(self.path)).read([self.image_column, self.caption_column])):
            image = image_of(values[self.image_column])
            if image is None:
                raise UserError(f"{self.path}: row {row} has no image in the column {self.image_column}; remove it.")
            yield image, captions_of(values[self.caption_column])

    def _captioned(self, name: str, image: bytes | str, captions: list[str]) -> Sample:
        lines = "\n".join(" ".join(caption.split()) for caption in captions)
        read = partial(read_image, image, self.path.parent)
        return Sample(f"{self.path}: {name}", {"jpg": read, "txt": lines.encode()})


def is_set(path: Path) -> bool:
    """Whether a path is a set itself, and not a folder of sets."""
    if path.is_file():
        return path.suffix.lower() in TABLES
    return path.is_dir() and (_has_shards(path) or _is_image_folder(path))


def open_set(path: Path) -> EvaluationSet:
    """Open a set; raise UserError if it is none, or a file is missing or malformed."""
    if path.is_file():
        return PairFile.read(path)
    if not path.is_dir():
        raise UserError(f"{path} does not exist; name an evaluation set: {FORMS}.")
    webdataset = _has_shards(path) or not _is_image_folder(path)
    return WebdatasetFolder.read(path) if webdataset else ImageFolder.read(path)


def open_captioned(path: Path) -> EvaluationSet:
    """Open a retrieval set; raise UserError if it is none."""
    found = open_set(path)
    if found.kind != "retrieval":
        raise UserError(f"{path} is a {found.kind} set, not a retrieval set; write retrieval to its dataset_type.txt.")
    return found


def read_lines(path: Path) -> tuple[str, ...]:
    """Return the stripped lines of a file; raise UserError if it is missing or a line blank: their numbers matter."""
    _require(path)
    lines = tuple(line.strip() for line in path.read_text(encoding="utf-8").rstrip().split("\n"))
    if "" in lines:
        raise UserError(f"{path}: line {lines.index('') + 1} is blank; write an entry on every line.")
    return lines


def _has_shards(path: Path) -> bool:
    return (path / "test" / "nshards.txt").is_file()


def _is_image_folder(path: Path) -> bool:
    """Whether at least half of the folders in a folder, and several, have images in them."""
    has_images = [any(_is_image(entry) for entry in folder.iterdir()) for folder in _class_folders(path)]
    return sum(has_images) > max(1, (len(has_images) - 1) // 2)


def _class_folders(path: Path) -> list[Path]:
    return sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in _IMAGE_SUFFIXES and not path.name.startswith(".")


def _require(path: Path) -> None:
    if not path.is_file():
        raise UserError(f"{path} is missing; {LAYOUT}.")
