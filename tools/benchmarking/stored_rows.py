"""Random rows in place of the stored features of a reference model and of teachers."""

from dataclasses import dataclass

import torch
from torch.nn.functional import normalize

from neuclip_ds.config import Config
from neuclip_ds.data.feature_table import StoredFeatures, find_table
from neuclip_ds.losses.stored_features import stored_folders


@dataclass(frozen=True, kw_only=True)
class StoredShape:
    """Width and dtype of the stored features of one model."""

    width: int
    dtype: torch.dtype

    def random_rows(self, rows: int, generator: torch.Generator) -> StoredFeatures:
        """Return normalized noise as the features of `rows` images and texts."""
        noise = torch.randn(2, rows, self.width, generator=generator)
        image, text = normalize(noise, dim=2).to(self.dtype)
        return StoredFeatures(image=image, text=text)


def stored_shapes(config: Config, width: int | None = None) -> dict[str, StoredShape]:
    """Return the shape of each table of features in the config, keyed by `reference`, `teacher`, `teacher 2` ...

    If `width` is given, the folders are not read; all features then have this width, and embed's default dtype float16.

    Raises:
        UserError: a folder cannot be read.
    """
    shapes: dict[str, StoredShape] = {}
    for name, folder in stored_folders(config.objective).items():
        if width is not None:
            shapes[name] = StoredShape(width=width, dtype=torch.float16)
            continue
        embedding = find_table(folder)["embedding"]
        dtype: torch.dtype = getattr(torch, embedding["dtype"])
        shapes[name] = StoredShape(width=embedding["image_width"], dtype=dtype)
    return shapes
