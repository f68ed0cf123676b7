"""Evaluation sets on disk: CLIP_benchmark's webdataset layout, one image folder per class, or a table of pairs.

    SET/classnames.txt  zeroshot_classification_templates.txt    prompts for labeled sets
    SET/dataset_type.txt                                         `retrieval` for captioned sets, otherwise absent
    SET/test/nshards.txt  0.tar  1.tar ...                       samples KEY.jpg (jpeg, png, webp), KEY.cls, KEY.txt ...

    SET/red_fox/a.jpg  SET/red_fox/more/b.png  SET/wolf/1.webp   one folder per class, as in torchvision's ImageFolder
    SET/classnames.txt  zeroshot_classification_templates.txt    optional: names in the folders' order (by number if all
                                                                 are numbers), prompts with {c}

    SET.csv (.tsv, .jsonl, .parquet)                             a column of images and a column of captions

A shard is indexed when iteration reaches it, and samples are read on demand. A damaged shard is an error, because
scores on an incomplete set are not comparable.
"""

import hashlib
import logging
import os
import re
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from neuclip_ds.data.listing import IMAGES, files_below, is_visible
from neuclip_ds.data.readers import read_at
from neuclip_ds.data.sample_table import IMAGE_EXTENSIONS
from neuclip_ds.data.shards import is_local
from neuclip_ds.data.tables import (
    CAPTION_COLUMNS,
    IMAGE_COLUMNS,
    TABLES,
    captions_of,
    image_of,
    open_table,
    read_image,
    source_of,
)
from neuclip_ds.data.tar import Extent, is_blank, read_index
from neuclip_ds.errors import UserError, counted, explained
from neuclip_ds.files import read_text

log = logging.getLogger(__name__)

_SHARD_COUNT = "test/nshards.txt"
_TEMPLATES = "zeroshot_classification_templates.txt"
_CLASS_NAMES = "classnames.txt"
_WORDNET_ID = re.compile(r"n[0-9]{8}")  # ImageNet's name of a class
PLACEHOLDER = "{c}"  # replaced by the class name in a template
LAYOUT = (
    "a zero-shot set is a folder with classnames.txt, zeroshot_classification_templates.txt, test/nshards.txt "
    "and test/0.tar, test/1.tar, ...; a retrieval set has dataset_type.txt (`retrieval`) instead of the first two files"
)
FORMS = f"{LAYOUT}; a set can also be a folder with a subfolder of images per class, or a table ({', '.join(TABLES)})"
# TIFF files cannot be decoded; they are listed so that they raise an error instead of being silently omitted
_IMAGE_SUFFIXES = (*IMAGES, ".tif", ".tiff")
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
        raise UserError(
            f"{self.name} has no image; add a member with one of the extensions {', '.join(names)}, or download the "
            "set again."
        )

    def read(self, extension: str) -> bytes:
        """Return the bytes of a member; raise UserError if the member is missing or cannot be read."""
        if extension not in self._members:
            raise UserError(f"{self.name} has no {extension} member; add it, or download the set again.")
        member = self._members[extension]
        with explained(f"{self.name} cannot be read", "check the file and the storage"):
            return member if isinstance(member, bytes) else member()

    def text(self, extension: str) -> str:
        """Return the stripped text of a member; raise UserError if the member is missing or cannot be read."""
        return self.read(extension).decode("utf-8-sig", "replace").strip()


@dataclass(frozen=True, kw_only=True)
class EvaluationSet:
    """An evaluation set on disk, in one of the forms that the module's docstring shows."""

    path: Path  # folder or file of the set
    kind: str  # `classification`, `retrieval`, or any other content of dataset_type.txt, such as `multilabel`
    contents: Hashable  # fingerprint for detecting copies with different contents
    samples: Callable[[], Iterator[Sample]]  # iterates over all samples, in order; raises UserError
    files: Callable[[], Iterator[Path]]  # iterates over all local files of the set; raises UserError
    class_names: tuple[str, ...] = ()  # label -> name, for labeled sets
    templates: tuple[str, ...] = ()  # prompts with `{c}` in place of the class name, for labeled sets

    def prompt(self, index: int) -> str:
        """Return prompt `index` of the len(class_names) * len(templates) prompts, which are sorted by class."""
        label, template = divmod(index, len(self.templates))
        return self.templates[template].replace(PLACEHOLDER, self.class_names[label])

    def fingerprint(self) -> str:
        """Return a string that changes if local files are added, removed or written; raise the same errors as `files`.

        The string depends on the names, sizes and modification times of the files. Only a table is read, to find the
        images that it lists.
        """
        digest = hashlib.sha256(self.kind.encode())
        with explained(f"{self.path} cannot be read", "check the storage"):
            for file in self.files():
                name = os.path.relpath(file, self.path)
                status = file.stat() if file.exists() else None
                stamp = (status.st_size, status.st_mtime_ns) if status is not None else None
                digest.update(f"{name}\0{stamp}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()[:32]


def is_set(path: Path) -> bool:
    """Return whether a path is an evaluation set rather than a folder of sets; raise UserError if it is unreadable."""
    with _listed(path):
        if path.is_file():
            return path.suffix.lower() in TABLES and is_visible(path.name)
        return path.is_dir() and ((path / _SHARD_COUNT).is_file() or _is_image_folder(path))


def open_set(path: Path) -> EvaluationSet:
    """Open an evaluation set of any form; raise UserError if a file is missing or malformed."""
    with _listed(path):
        if path.is_file():
            return _open_pairs(path)
        if not path.is_dir():
            raise UserError(f"{path} does not exist; pass an evaluation set: {FORMS}.")
        if (path / _SHARD_COUNT).is_file():
            return open_shards(path)
        if _is_image_folder(path):
            return _open_images(path)
        return open_shards(path)  # explains which file is missing


def _listed(path: Path) -> AbstractContextManager[None]:
    """Return a context in which file-system errors, such as a folder that cannot be listed, become UserErrors."""
    return explained(f"The evaluation set {path} cannot be read", "check the folders and their permissions")


def open_captioned(path: Path) -> EvaluationSet:
    """Open a retrieval set; raise UserError if a file is missing or malformed, or the set is of a different kind."""
    captioned_set = open_set(path)
    kind = captioned_set.kind
    if kind != "retrieval":
        raise UserError(
            f"{path} is a {kind} set, not a retrieval set; pass a retrieval set or, if the samples of this set have "
            "captions, write `retrieval` to its dataset_type.txt."
        )
    return captioned_set


def open_labeled(path: Path) -> EvaluationSet:
    """Open a zero-shot set with its prompts.

    Raises UserError if a file is missing or malformed, or if the set is of a different kind.
    """
    labeled_set = open_set(path)
    if labeled_set.kind != "classification":
        raise UserError(
            f"{path} is a {labeled_set.kind} set, not a zero-shot set; pass a zero-shot set or, if the samples of this "
            "set have labels, remove its dataset_type.txt."
        )
    if not labeled_set.class_names:
        class_names = _read_lines(path / _CLASS_NAMES)
        templates = _read_lines(path / _TEMPLATES)
        labeled_set = replace(labeled_set, class_names=class_names, templates=templates)
    for template in labeled_set.templates:
        if PLACEHOLDER not in template:
            raise UserError(
                f"{path / _TEMPLATES}: the template '{template}' lacks {PLACEHOLDER}, which stands for the class name; "
                "add it."
            )
    # ranks with different numbers of prompts would wait for each other forever
    prompts = "\0".join([*labeled_set.class_names, *labeled_set.templates])
    contents = (labeled_set.contents, len(labeled_set.class_names), zlib.crc32(prompts.encode("utf-8", "replace")))
    return replace(labeled_set, contents=contents)


def open_shards(path: Path) -> EvaluationSet:
    """Open a set in CLIP_benchmark's layout, without its prompts; raise UserError if a file is missing or malformed."""
    shards_file = path / _SHARD_COUNT
    shard_count = _read_lines(shards_file)[0]
    if not shard_count.isdecimal() or int(shard_count) == 0:
        raise UserError(f"{shards_file} contains '{shard_count}'; write the number of tar files there.")
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

    def files() -> Iterator[Path]:
        texts = [shards_file, kind_file, path / _CLASS_NAMES, path / _TEMPLATES]
        yield from filter(Path.is_file, texts)
        yield from shards

    total_bytes = sum(shard.stat().st_size for shard in shards)
    return EvaluationSet(path=path, kind=kind, contents=(total_bytes, len(shards)), samples=samples, files=files)


def _samples_of_shard(shard: Path) -> Iterator[Sample]:
    with explained(f"{shard} cannot be read", "check the storage"), shard.open("rb") as file:
        index = read_index(file.fileno())
        are_blank = [is_blank(file.fileno(), gap) for gap in index.gaps]
    if index.gaps and all(are_blank):
        raise UserError(
            f"{shard} has zeros between its members at byte {index.gaps[0].offset}: several tars may have been joined. "
            "Write their files to one tar, or download the set again."
        )
    if index.gaps:
        raise UserError(f"{shard} is damaged at byte {index.gaps[0].offset}; download it again.")
    if index.split or index.repeated or index.unreadable:
        raise UserError(
            f"{shard} cannot be used as it is (samples whose members are not adjacent: {index.split}; members with "
            f"the key and the extension of another member: {index.repeated}; links and sparse members: "
            f"{index.unreadable}). Write it again with webdataset, or with tar --sort=name --dereference "
            "--hard-dereference."
        )
    for entry in index.samples:
        members = {name: partial(_read_extent, shard, extent) for name, extent in entry.members.items()}
        yield Sample(f"{shard}: sample {entry.key}", members)


def _read_extent(shard: Path, extent: Extent) -> bytes:
    with shard.open("rb", buffering=0) as file:
        return read_at(file.fileno(), extent.offset, extent.size)


def _open_images(path: Path) -> EvaluationSet:
    """Open a set with one image folder per class.

    Raises UserError if classnames.txt does not match the folders, if a folder's name is not UTF-8, and as in
    `_read_lines` and `_imagenet_prompts`.
    """
    folders = _class_folders(path)
    images_of_folder = {folder: files_below(folder, _IMAGE_SUFFIXES) for folder in folders}
    class_names_file = path / _CLASS_NAMES
    class_names = _read_lines(class_names_file) if class_names_file.is_file() else None

    # a folder without images is a class only if classnames.txt counts it
    if class_names is None or len(class_names) != len(folders):
        without_images = [folder.name for folder in folders if not images_of_folder[folder]]
        folders = [folder for folder in folders if images_of_folder[folder]]
        if without_images:
            log.warning("%s: folders without images are not used as classes: %s", path, ", ".join(without_images))
    templates: tuple[str, ...] = (f"a photo of a {PLACEHOLDER}.",)
    if class_names is None and all(_WORDNET_ID.fullmatch(folder.name) for folder in folders):
        class_names, templates = _imagenet_prompts(path, [folder.name for folder in folders])
    elif class_names is None:
        class_names = tuple(folder.name.replace("_", " ") for folder in folders)
    elif len(class_names) != len(folders):
        raise UserError(
            f"{class_names_file} contains {counted(len(class_names), 'name')} for {counted(len(folders), 'folder')} of "
            "images; write one name for each folder, in the order of the folders."
        )
    else:
        _warn_of_numbers(path, folders, class_names)
    for folder in folders:
        with explained(f"The name of the folder {str(folder)!a} is not UTF-8 text", "rename it"):
            folder.name.encode()
    templates_file = path / _TEMPLATES
    if templates_file.is_file():
        templates = _read_lines(templates_file)

    images: list[tuple[Path, int]] = []
    for label, folder in enumerate(folders):
        images += [(image, label) for image in images_of_folder[folder]]

    def samples() -> Iterator[Sample]:
        for image, label in images:
            yield Sample(str(image), {"jpg": partial(Path.read_bytes, image), "cls": str(label).encode()})

    def files() -> Iterator[Path]:
        yield from filter(Path.is_file, [class_names_file, templates_file])
        yield from (image for image, _ in images)

    file_names = "\0".join(str(image).removeprefix(str(path)) for image, _ in images)
    return EvaluationSet(
        path=path,
        kind="classification",
        contents=zlib.crc32(file_names.encode("utf-8", "replace")),
        samples=samples,
        files=files,
        class_names=class_names,
        templates=templates,
    )


def _imagenet_prompts(path: Path, wordnet_ids: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return OpenAI's class names for WordNet ids of ImageNet, and OpenAI's 80 templates, as in open_clip.

    Raises UserError if open_clip is not installed, or a class is not one of ImageNet-1k's.
    """
    fix = f"write the class names to {path / _CLASS_NAMES}, one per line, in the sorted order of the folders' names"
    try:
        from open_clip.zero_shot_metadata import IMAGENET_CLASSNAMES, OPENAI_IMAGENET_TEMPLATES
    except ImportError as error:
        raise UserError(
            f"The folders in {path} are named by WordNet ids, such as {wordnet_ids[0]}. Their class names are read "
            f"from open_clip, which is not installed: run pip install open_clip_torch, or {fix}."
        ) from error
    from timm.data import ImageNetInfo

    names = dict(zip(ImageNetInfo("imagenet-1k").label_names(), IMAGENET_CLASSNAMES, strict=True))
    unknown = [wordnet_id for wordnet_id in wordnet_ids if wordnet_id not in names]
    if unknown:
        raise UserError(
            f"{path} contains {counted(len(unknown), 'folder')} with a WordNet id that ImageNet-1k lacks, such as "
            f"{unknown[0]}: {fix}."
        )
    templates = tuple(template(PLACEHOLDER) for template in OPENAI_IMAGENET_TEMPLATES)
    return tuple(names[wordnet_id] for wordnet_id in wordnet_ids), templates


def _warn_of_numbers(path: Path, folders: Sequence[Path], class_names: Sequence[str]) -> None:
    """Log a warning if folders such as class_2 and class_10 sort differently by name than by number."""

    def by_number(folder: Path) -> list[tuple[int, str]]:
        parts = re.split("([0-9]+)", folder.name)
        return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]

    for folder, other, name in zip(folders, sorted(folders, key=by_number), class_names, strict=True):
        if folder != other:
            log.warning(
                "%s: folders are sorted as text, so the class of %s is '%s'; if that is wrong, pad the numbers in the "
                "folders' names with zeros",
                path,
                folder.name,
                name,
            )
            return


def _open_pairs(path: Path) -> EvaluationSet:
    """Open a table of captioned images; raise UserError if it cannot be read or lacks columns with recognized names.

    Rows that name the same image file form one sample with all of their captions, as in Flickr30k's tables. If the
    table contains the images themselves, each row is one sample, with one caption or a list of captions.
    """
    table = open_table(str(path))
    advice = "rename the column with the {}s to one of the recognized names"
    image_column = table.find_column(IMAGE_COLUMNS, "image", advice.format("image"))
    caption_column = table.find_column(CAPTION_COLUMNS, "caption", advice.format("caption"))

    def sample_of(name: str, image: bytes | str, captions: list[str]) -> Sample:
        lines = "\n".join(" ".join(caption.split()) for caption in captions)
        return Sample(f"{path}: {name}", {"jpg": partial(read_image, image), "txt": lines.encode()})

    def samples() -> Iterator[Sample]:
        names: dict[str, str] = {}  # image file -> its name in the table
        captions_of_file: dict[str, list[str]] = {}  # image file -> its captions
        rows = open_table(str(path)).read([image_column, caption_column])
        for number, row in enumerate(rows, start=1):  # a header has no number
            image = source_of(row, image_column)
            captions = captions_of(row.cells[caption_column])
            if image is None:
                raise UserError(
                    f"{path}: row {number} (not counting a header) has no image in the column {image_column}; remove "
                    "the row."
                )
            if isinstance(image, str):
                names.setdefault(image, str(image_of(row.cells[image_column])))
                captions_of_file.setdefault(image, []).extend(captions)
            else:
                yield sample_of(f"row {number}", image, captions)
        for image_file, captions in captions_of_file.items():
            yield sample_of(names[image_file], image_file, captions)

    def files() -> Iterator[Path]:
        yield path
        images = (source_of(row, image_column) for row in open_table(str(path)).read([image_column]))
        names = (image for image in images if isinstance(image, str) and is_local(image))
        yield from map(Path, dict.fromkeys(names))

    return EvaluationSet(path=path, kind="retrieval", contents=path.stat().st_size, samples=samples, files=files)


def _read_lines(path: Path) -> tuple[str, ...]:
    """Return the stripped lines of a file; raise UserError if the file is missing, empty or not UTF-8.

    A blank line is a class without a name, as in CLEVR Distance; blank lines at the end are omitted.
    """
    if not path.is_file():
        raise UserError(f"{path} is missing; {LAYOUT}.")
    with explained(f"{path} cannot be read", "check its permissions"):
        text = read_text(path).rstrip()
    if not text:
        raise UserError(f"{path} is empty; write its entries, one per line.")
    return tuple(line.strip() for line in text.split("\n"))


def _is_image_folder(path: Path) -> bool:
    """Return whether at least half of a folder's subfolders, and at least two, contain images themselves."""
    folders = _class_folders(path)
    with_images = [folder for folder in folders if any(map(_is_image, folder.iterdir()))]
    return len(with_images) > max(1, (len(folders) - 1) // 2)


def _class_folders(path: Path) -> list[Path]:
    """Return the folders of classes, sorted by name, or by number if all of their names are numbers."""
    folders = [folder for folder in path.iterdir() if folder.is_dir() and is_visible(folder.name)]
    if all(folder.name.isdecimal() for folder in folders):
        return sorted(folders, key=lambda folder: (int(folder.name), folder.name))
    return sorted(folders)


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in _IMAGE_SUFFIXES and is_visible(path.name)
