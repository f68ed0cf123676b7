"""Stored outputs of the towers' frozen trunks, which training reads in place of pixels and captions.

The outputs come from the folders of `data.image_features` and `data.text_features`. Their tables are named after these
options; the tables of a reference model and of teachers have other names.
"""

from collections.abc import Mapping
from typing import Literal

from neuclip_ds.config import DataConfig
from neuclip_ds.data.decoders import Captions, CaptionSources
from neuclip_ds.data.feature_table import FeatureTable
from neuclip_ds.errors import UserError

IMAGE = "image_features"
TEXT = "text_features"
CONTENTS: dict[str, Literal["image", "text"]] = {IMAGE: "image", TEXT: "text"}
"""Maps the name of a tower's table to the features that the table serves."""
TOWER_OF_TABLE: dict[str, Literal["vision", "text"]] = {IMAGE: "vision", TEXT: "text"}
"""Maps the name of a table to the name of the tower whose trunk computed the table's features."""


def tower_folders(data: DataConfig) -> dict[str, str]:
    """Return the folders set in `data.image_features` and `data.text_features`, keyed by the names of their tables."""
    folders: dict[str, str] = {}
    if data.image_features is not None:
        folders[IMAGE] = data.image_features
    if data.text_features is not None:
        folders[TEXT] = data.text_features
    return folders


def loss_tables(tables: Mapping[str, FeatureTable]) -> dict[str, FeatureTable]:
    """Return the tables of a reference model and of teachers, without the tables of frozen trunks."""
    return {name: table for name, table in tables.items() if name not in CONTENTS}


def tower_tables(tables: Mapping[str, FeatureTable]) -> dict[str, FeatureTable]:
    """Return the tables of frozen trunks."""
    return {name: table for name, table in tables.items() if name in CONTENTS}


def reads_images(tables: Mapping[str, FeatureTable]) -> bool:
    """Return whether training decodes images."""
    return IMAGE not in tables


def reads_captions(tables: Mapping[str, FeatureTable], captions: CaptionSources) -> bool:
    """Return whether training reads the captions of samples.

    If text features are stored, captions are read only if their sources have weights: a weighted draw depends on how
    many captions a sample has from each source, but a table contains only the total number.
    """
    return TEXT not in tables or isinstance(captions, Mapping)


def reads_shards(tables: Mapping[str, FeatureTable], captions: CaptionSources) -> bool:
    """Return whether training reads samples from shards; false if stored features replace images and captions."""
    return reads_images(tables) or reads_captions(tables, captions)


def check_views(tables: Mapping[str, FeatureTable], crop_scale: float, captions: CaptionSources) -> None:
    """Raise UserError if the tables lack crops or captions that training would draw."""
    image = tables.get(IMAGE)
    if image is not None and not image.has_random_crops and crop_scale < 1:
        raise UserError(
            f"{image.folder} contains features of the evaluation crop, but data.crop_scale={crop_scale} draws random "
            "crops: set data.crop_scale=1, or run neuclip-ds embed with --crops and a new --out."
        )
    text = tables.get(TEXT)
    if text is None or text.text_width is None:  # reported when the model has been built
        return
    if Captions(captions).may_be_several and not text.embedding["all_captions"]:
        raise UserError(
            f"{text.folder} contains features of only one caption per sample, but training draws from all captions of "
            f"{', '.join(captions)}: run neuclip-ds embed with --all-captions and a new --out."
        )
