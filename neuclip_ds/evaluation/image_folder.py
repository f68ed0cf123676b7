"""Zero-shot sets as folders of images by class, as torchvision's ImageFolder reads them.

    SET/red_fox/a.jpg  SET/red_fox/more/b.png  SET/wolf/1.webp     a folder for each class, in the order of their names
    SET/classnames.txt  zeroshot_classification_templates.txt      optional: names in that order, prompts with {c}

Without these files a class has the name of its folder, with spaces for underscores, and the prompt "a photo of a {c}.".
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.folder import CLASS_NAMES, TEMPLATES, Held, Sample, read_lines

# TIFF is not decoded, but listed, so that such a file is an error instead of missing from the score
_EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
_TEMPLATE = "a photo of a {c}."


class _File(NamedTuple):
    path: Path

    def read(self) -> bytes:
        return self.path.read_bytes()


@dataclass(frozen=True)
class ImageFolder:
    """Labelled images on disk; a class without an image is one that no image belongs to."""

    path: Path
    class_names: tuple[str, ...]  # label -> name
    templates: tuple[str, ...]
    images: tuple[tuple[str, ...], ...]  # label -> paths below `path`
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
        images = tuple(tuple(str(image.relative_to(path)) for image in _images(folder)) for folder in folders)
        return cls(path, class_names, read_lines(templates) if templates.is_file() else (_TEMPLATE,), images)

    @property
    def contents(self) -> Hashable:
        """Checksum of the names of all images."""
        return zlib.crc32("\0".join(name for images in self.images for name in images).encode("utf-8", "replace"))

    def samples(self) -> Iterator[Sample]:
        """Yield all samples, by class."""
        for label, images in enumerate(self.images):
            for name in images:
                image = self.path / name
                yield Sample(str(image), {"jpg": _File(image), "cls": Held(str(label).encode())})


def is_image_folder(path: Path) -> bool:
    """Whether at least half of the folders in a folder, and several, have images in them."""
    has_images = [any(_is_image(entry) for entry in folder.iterdir()) for folder in _class_folders(path)]
    return sum(has_images) > max(1, (len(has_images) - 1) // 2)


def _class_folders(path: Path) -> list[Path]:
    return sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))


def _images(folder: Path) -> Iterator[Path]:
    """Yield the images of a class, those in subfolders included, in the order of their paths."""
    for place, folders, files in os.walk(folder, followlinks=True):
        folders.sort()
        yield from (path for name in sorted(files) if _is_image(path := Path(place, name)))


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in _EXTENSIONS and not path.name.startswith(".")
