"""Images to explore, with their captions: the samples of shards, or the image files of a folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.dataset import caption_numbers
from neuclip_ds.data.decoders import Captions
from neuclip_ds.data.listing import IMAGES, files_below
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.readers import TarReader
from neuclip_ds.errors import UserError, explained


@dataclass(frozen=True, kw_only=True)
class CaptionedImage:
    """An image as it is stored, and its caption."""

    image: bytes
    caption: str | None  # None if the image has no caption


class Collection(Protocol):
    """Interface of a collection of images, which are numbered from 0."""

    def __len__(self) -> int:
        """Return the number of images."""

    def name(self, index: int) -> str:
        """Return the name of an image: its key in a shard, or its path within the folder."""

    def read(self, index: int) -> CaptionedImage:
        """Read an image; raise OSError if it is missing or cannot be read, or UserError as in `TarReader.read`."""


class ShardImages:
    """The samples of shards; an image's number is its global index.

    Args:
        manifest: the shards.
        captions: sources of captions, as in `data.captions`.
        takes_first: whether an image's caption is the first of its captions. Otherwise, it is the one that training
            draws in epoch 0, whose features `neuclip-ds embed` stores by default.
        cache: cache for remote shards.
        seed: seed of the draw.
    """

    def __init__(
        self,
        manifest: Manifest,
        captions: Sequence[str],
        takes_first: bool = False,
        cache: ShardCache | None = None,
        seed: int = 0,
    ) -> None:
        self._n = manifest.n
        self._captions = Captions(captions)
        self._takes_first = takes_first
        self._seed = seed
        self._reader = TarReader(manifest, self._captions.extensions, cache)

    def __len__(self) -> int:
        return self._n

    def name(self, index: int) -> str:
        return self._reader.key(index)

    def read(self, index: int) -> CaptionedImage:
        raw = self._reader.read(index)
        if raw.image is None:
            raise OSError("no image")
        if self._takes_first:
            caption = next(iter(self._captions.all_captions(raw.texts)), None)
        else:
            (number,) = caption_numbers(self._seed, 0, index).tolist()
            drawn = self._captions.draw(raw.texts, number)
            caption = None if drawn is None else drawn.text
        return CaptionedImage(image=raw.image, caption=caption)


class FolderImages:
    """The image files in a folder and its subfolders, in the order of their paths.

    The caption of `a/b.jpg` is the first caption that the caption sources find in files with the same stem, such as
    `a/b.txt` or `a/b.json`. Raises UserError if the folder cannot be listed or contains no images.
    """

    def __init__(self, folder: Path, captions: Sequence[str]) -> None:
        self._folder = folder
        self._captions = Captions(captions)
        with explained(f"{folder} cannot be listed", "make the folder and its subfolders readable"):
            files = files_below(folder, IMAGES) if folder.is_dir() else []
        self._files = [path for path in files if path.is_file()]
        if not self._files:
            raise UserError(
                f"{folder} contains neither tar shards nor images ({', '.join(IMAGES)}): pass a folder with either."
            )

    def __len__(self) -> int:
        return len(self._files)

    def name(self, index: int) -> str:
        return str(self._files[index].relative_to(self._folder))

    def read(self, index: int) -> CaptionedImage:
        path = self._files[index]
        texts = {}
        for extension in self._captions.extensions:
            text_file = path.with_suffix(f".{extension}")
            if text_file.is_file():
                texts[extension] = text_file.read_bytes()
        captions = self._captions.all_captions(texts)
        return CaptionedImage(image=path.read_bytes(), caption=captions[0] if captions else None)
