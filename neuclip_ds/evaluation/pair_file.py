"""Retrieval sets as a table of pairs: a file with a column of images and one of captions.

Rows that name the same image have its captions, as in Flickr30k's tables. Where the table holds the images, each row
has one, with a caption or a list of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path

from neuclip_ds.data.pair_table import CAPTION_COLUMNS, IMAGE_COLUMNS, ImageCell, captions_of, find_column, open_table
from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.folder import Held, Sample

_ADVICE = "rename one of them"


@dataclass(frozen=True)
class PairFile:
    """Captioned images of a table."""

    path: Path  # the file
    image_column: str
    caption_column: str
    kind: str = "retrieval"

    @classmethod
    def read(cls, path: Path) -> PairFile:
        """Find the columns of a table; raise UserError if it cannot be read, or has none of the usual names."""
        table = open_table(str(path))
        image = find_column(table, IMAGE_COLUMNS, "images", _ADVICE)
        return cls(path, image, find_column(table, CAPTION_COLUMNS, "captions", _ADVICE))

    @property
    def contents(self) -> Hashable:
        """Size of the file."""
        return self.path.stat().st_size

    def samples(self) -> Iterator[Sample]:
        """Yield an image after the other; raise UserError for a row without one."""
        captions: dict[ImageCell, list[str]] = {}  # of images that rows name
        for row, (image, texts) in enumerate(self._rows()):
            if isinstance(image.source, str):
                captions.setdefault(image, []).extend(texts)
            else:
                yield _sample(f"{self.path}: row {row}", image, texts)
        for image, texts in captions.items():
            yield _sample(f"{self.path}: {image.source!s}", image, texts)

    def _rows(self) -> Iterator[tuple[ImageCell, list[str]]]:
        table = open_table(str(self.path))
        columns = [self.image_column, self.caption_column]
        batches = (batch for rows in table.slices(max(1, table.rows), columns=columns) for batch in rows.batches())
        for row, values in enumerate(values for batch in batches for values in batch.to_pylist()):
            image = ImageCell.of(values[self.image_column], table.folder)
            if image is None:
                raise UserError(f"{self.path}: row {row} has no image in the column {self.image_column}; remove it.")
            yield image, captions_of(values[self.caption_column])


def _sample(name: str, image: ImageCell, captions: list[str]) -> Sample:
    lines = "\n".join(" ".join(caption.split()) for caption in captions)
    return Sample(name, {"jpg": image, "txt": Held(lines.encode())})
