"""Evaluation sets on disk: CLIP_benchmark's webdataset layout, one image folder per class, or a table of pairs.

    SET/classnames.txt  zeroshot_classification_templates.txt    prompts for labeled sets
    SET/dataset_type.txt                                         `retrieval` for captioned sets, otherwise absent
    SET/test/nshards.txt  0.tar  1.tar ...                       samples KEY.jpg (png, webp), KEY.cls, KEY.txt ...

    SET/red_fox/a.jpg  SET/red_fox/more/b.png  SET/wolf/1.webp   one folder per class, as in torchvision's ImageFolder
    SET/classnames.txt  zeroshot_classification_templates.txt    optional: names in the folders' order, prompts with {c}

    SET.csv (.tsv, .jsonl, .parquet)                             a column of images and a column of captions

A shard is indexed when iteration reaches it, and samples are read on demand. A damaged shard is an error, because
scores on an incomplete set are not comparable.
"""

import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torchvision.datasets.folder import make_dataset

from neuclip_ds.data.readers import read_at
from neuclip_ds.data.sample_table import IMAGE_EXTENSIONS
from neuclip_ds.data.tables import CAPTION_COLUMNS, IMAGE_COLUMNS, TABLES, captions_of, image_of, open_table, read_image
from neuclip_ds.data.tar import Extent, read_index
from neuclip_ds.errors import UserError, explained

_SHARD_COUNT = "test/nshards.txt"
_TEMPLATES = "zeroshot_classification_templates.txt"
_CLASS_NAMES = "classnames.txt"
PLACEHOLDER = "{c}"  # replaced by the class name in a template
LAYOUT = (
    "a zero-shot set is a folder with classnames.txt, zeroshot_classification_templates.txt, test/nshards.txt "
    "and test/0.tar, test/1.tar, ...; a retrieval set has dataset_type.txt (retrieval) instead of the two text files"
)
FORMS = f"{LAYOUT}; a set can also be a folder with a subfolder of images per class, or a table ({', '.join(TABLES)})"
# TIFF files cannot be decoded; they are listed so that they raise an error instead of being silently omitted
_IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
Member = bytes | Callable[[], bytes]  # the bytes of a member, or a function that reads them in any process


class Sample:
    """A sample of a set; error messages refer to it as `name`. Any process can read the sample's members on demand."""

    def __init__(self, name: str, members: Mapping[str, Member]) -> None:
        """Initialize a sample; `members` are keyed by extension: an image (`jpg`, `png` ...), `cls`, `txt`, `npy`."""
        self.name = name
        self._members = members

    def image(self, prefix: str = "") -> bytes:
        """Return the encoded image named `prefix` plus an image extension; raise UserError if no image can be read."""
        names = [prefix + extension for extension in IMAGE_EXTENSIONS]
        for name in names:
            if name in self._members:
                return self.read(name)
        raise UserError(f"{self.name} has no image; add one of {', '.join(names)}.")

    def read(self, extension: str) -> bytes:
        """Return the bytes of a member; raise UserError if the member is missing or cannot be read."""
        if extension not in self._members:
            raise UserError(f"{self.name} has no {extension} member; download the set again.")
        member = self._members[extension]
        with explained(f"{self.name} cannot be read", "check the storage"):
            return member if isinstance(member, bytes) else member()

    def text(self, extension: str) -> str:
        """Return the stripped text of a member; raise UserError if the member is missing or cannot be read."""
        return self.read(extension).decode("utf-8", "replace").strip()


@dataclass(frozen=True, kw_only=True)
class EvaluationSet:
    """An evaluation set on disk, in one of the forms that the module's docstring shows."""

    path: Path  # folder or file of the set
    kind: str  # `classification`, `retrieval` or `multilabel`
    contents: Hashable  # fingerprint for detecting copies with different contents
    samples: Callable[[], Iterator[Sample]]  # iterates over all samples, in order; raises UserError
    class_names: tuple[str, ...] = ()  # label -> name, for labeled sets
    templates: tuple[str, ...] = ()  # prompts with `{c}` in place of the class name, for labeled sets

    def prompt(self, index: int) -> str:
        """Return prompt `index` of the len(class_names) * len(templates) prompts, which are sorted by class."""
        label, template = divmod(index, len(self.templates))
        return self.templates[template].replace(PLACEHOLDER, self.class_names[label])


def is_set(path: Path) -> bool:
    """Return whether a path is an evaluation set rather than a folder of sets."""
    if path.is_file():
        return path.suffix.lower() in TABLES
    return path.is_dir() and ((path / _SHARD_COUNT).is_file() or _is_image_folder(path))


def open_set(path: Path) -> EvaluationSet:
    """Open an evaluation set of any form; raise UserError if a file is missing or malformed."""
    if path.is_file():
        return _open_pairs(path)
    if not path.is_dir():
        raise UserError(f"{path} does not exist; name an evaluation set: {FORMS}.")
    if (path / _SHARD_COUNT).is_file():
        return open_shards(path)
    if _is_image_folder(path):
        return _open_images(path)
    return open_shards(path)  # explains which file is missing


def open_captioned(path: Path) -> EvaluationSet:
    """Open a retrieval set; raise UserError if a file is missing or the set is of a different kind."""
    captioned_set = open_set(path)
    kind = captioned_set.kind
    if kind != "retrieval":
        raise UserError(f"{path} is a {kind} set, not a retrieval set; write retrieval to its dataset_type.txt.")
    return captioned_set


def open_labeled(path: Path) -> EvaluationSet:
    """Open a zero-shot set with its prompts; raise UserError if a file is missing or the set is of a different kind."""
    labeled_set = open_set(path)
    if labeled_set.kind != "classification":
        raise UserError(f"{path} is a {labeled_set.kind} set; name a zero-shot set.")
    if not labeled_set.class_names:
        class_names = _read_lines(path / _CLASS_NAMES)
        templates = _read_lines(path / _TEMPLATES)
        labeled_set = replace(labeled_set, class_names=class_names, templates=templates)
    for template in labeled_set.templates:
        if PLACEHOLDER not in template:
            raise UserError(f"{path / _TEMPLATES}: the template '{template}' lacks {PLACEHOLDER} for the class name.")
    return labeled_set


def open_shards(path: Path) -> EvaluationSet:
    """Open a set in CLIP_benchmark's layout, without its prompts; raise UserError if a file is missing or malformed."""
    shards_file = path / _SHARD_COUNT
    shard_count = _read_lines(shards_file)[0]
    if not shard_count.isdecimal() or int(shard_count) == 0:
        raise UserError(f"{shards_file} holds '{shard_count}'; write the number of tar files there.")
    shards = [path / "test" / f"{number}.tar" for number in range(int(shard_count))]
    for shard in shards:
        if not shard.is_file():
            raise UserError(f"{shard} is missing; {LAYOUT}.")
    kind = "classification"
    kind_file = path / "dataset_type.txt"
    if kind_file.is_file():
        kind = _read_lines(kind_file)[0].lower()

    def samples() -> Iterator[Sample]:
        for shard in shards:
            yield from _samples_of_shard(shard)

    total_bytes = sum(shard.stat().st_size for shard in shards)
    return EvaluationSet(path=path, kind=kind, contents=(total_bytes, len(shards)), samples=samples)


def _samples_of_shard(shard: Path) -> Iterator[Sample]:
    with explained(f"{shard} cannot be read", "check the storage"), shard.open("rb") as file:
        entries, gaps = read_index(file.fileno())
    if gaps:
        raise UserError(f"{shard} is damaged at byte {gaps[0].offset}; download it again.")
    for entry in entries:
        members = {name: partial(_read_extent, shard, extent) for name, extent in entry.members.items()}
        yield Sample(f"{shard}: sample {entry.key}", members)


def _read_extent(shard: Path, extent: Extent) -> bytes:
    with shard.open("rb", buffering=0) as file:
        return read_at(file.fileno(), extent.offset, extent.size)


def _open_images(path: Path) -> EvaluationSet:
    """Open a set with one image folder per class; raise UserError if classnames.txt does not match the folders."""
    folders = _class_folders(path)
    class_names_file = path / _CLASS_NAMES
    if class_names_file.is_file():
        class_names = _read_lines(class_names_file)
    else:
        class_names = tuple(folder.name.replace("_", " ") for folder in folders)
    if len(class_names) != len(folders):
        raise UserError(
            f"{class_names_file} has {len(class_names)} names for {len(folders)} folders of classes; "
            "write one for each, in order."
        )
    templates_file = path / _TEMPLATES
    templates = _read_lines(templates_file) if templates_file.is_file() else (f"a photo of a {PLACEHOLDER}.",)

    labels = {folder.name: label for label, folder in enumerate(folders)}
    # a class may have no images
    images = make_dataset(str(path), labels, is_valid_file=lambda file: _is_image(Path(file)), allow_empty=True)

    def samples() -> Iterator[Sample]:
        for image, label in images:
            yield Sample(image, {"jpg": partial(Path.read_bytes, Path(image)), "cls": str(label).encode()})

    file_names = "\0".join(image.removeprefix(str(path)) for image, _ in images)
    return EvaluationSet(
        path=path,
        kind="classification",
        contents=zlib.crc32(file_names.encode("utf-8", "replace")),
        samples=samples,
        class_names=class_names,
        templates=templates,
    )


def _open_pairs(path: Path) -> EvaluationSet:
    """Open a table of captioned images; raise UserError if it cannot be read or lacks columns with the usual names.

    Rows that name the same image file form one sample with all of their captions, as in Flickr30k's tables. If the
    table contains the images themselves, each row is one sample, with one caption or a list of captions.
    """
    table = open_table(str(path))
    advice = "rename one of them"
    image_column = table.find_column(IMAGE_COLUMNS, "images", advice)
    caption_column = table.find_column(CAPTION_COLUMNS, "captions", advice)

    def sample_of(name: str, image: bytes | str, captions: list[str]) -> Sample:
        lines = "\n".join(" ".join(caption.split()) for caption in captions)
        return Sample(f"{path}: {name}", {"jpg": partial(read_image, image, path.parent), "txt": lines.encode()})

    def samples() -> Iterator[Sample]:
        captions_of_file: dict[str, list[str]] = {}  # keyed by image file name
        for row, values in enumerate(open_table(str(path)).read([image_column, caption_column])):
            image = image_of(values[image_column])
            captions = captions_of(values[caption_column])
            if image is None:
                raise UserError(f"{path}: row {row} has no image in the column {image_column}; remove the row.")
            if isinstance(image, str):
                captions_of_file.setdefault(image, []).extend(captions)
            else:
                yield sample_of(f"row {row}", image, captions)
        for file_name, captions in captions_of_file.items():
            yield sample_of(file_name, file_name, captions)

    return EvaluationSet(path=path, kind="retrieval", contents=path.stat().st_size, samples=samples)


def _read_lines(path: Path) -> tuple[str, ...]:
    """Return the stripped lines of a file; raise UserError if it is missing or a line is blank."""
    if not path.is_file():
        raise UserError(f"{path} is missing; {LAYOUT}.")
    lines = tuple(line.strip() for line in path.read_text(encoding="utf-8").rstrip().split("\n"))
    if "" in lines:
        raise UserError(f"{path}: line {lines.index('') + 1} is blank; write an entry on every line.")
    return lines


def _is_image_folder(path: Path) -> bool:
    """Return whether at least half of a folder's subfolders, and at least two, contain images."""
    folders = _class_folders(path)
    with_images = [folder for folder in folders if any(map(_is_image, folder.iterdir()))]
    return len(with_images) > max(1, (len(folders) - 1) // 2)


def _class_folders(path: Path) -> list[Path]:
    return sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in _IMAGE_SUFFIXES and not path.name.startswith(".")
