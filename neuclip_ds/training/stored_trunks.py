"""Check that stored outputs of frozen trunks come from a run's towers."""

from collections.abc import Mapping
from typing import Any

from neuclip_ds.config import AugmentConfig, Config
from neuclip_ds.data.feature_parts import TRUNK_OUTPUTS
from neuclip_ds.data.feature_table import FeatureTable
from neuclip_ds.data.stored_towers import CONTENTS, IMAGE, TOWER_OF_TABLE, tower_folders, tower_tables
from neuclip_ds.errors import UserError
from neuclip_ds.models.pretrained.base import Preprocessing
from neuclip_ds.models.tokenizer import ModelTokenizer
from neuclip_ds.models.towers import DualEncoder, Encoder
from neuclip_ds.models.trained_parts import check_separate_projection, projection_width
from neuclip_ds.models.trunk_output import image_sample, is_same_output, text_sample, trunk_output
from neuclip_ds.models.weights_hash import weights_hash

_FIX = "run neuclip-ds embed --output=trunk on the training data, with the model that the run starts from."


def check_frozen_trunks(config: Config) -> None:
    """Raise `UserError` if a trunk with stored outputs is trained, or an option needs such a trunk to run."""
    folders = tower_folders(config.data)
    for table in folders:
        tower = TOWER_OF_TABLE[table]
        trained = config.model.trained(tower)
        if trained not in ("frozen", "projection"):
            raise UserError(
                f"data.{table} contains the outputs of a frozen trunk, but model.{tower}.trainable={trained} trains "
                f"the trunk: set model.{tower}.trainable=projection, or omit data.{table}."
            )
        if trained == "frozen" and config.model.lora.rank:
            raise UserError(
                f"data.{table} contains the outputs of a frozen trunk, but model.lora.rank={config.model.lora.rank} "
                f"adds adapters to it: set model.{tower}.trainable=projection to adapt only the other tower, or omit "
                f"data.{table} or model.lora.rank."
            )
    if IMAGE in folders and config.model.vision.patch_drop:
        raise UserError(
            f"model.vision.patch_drop={config.model.vision.patch_drop} has no effect with data.image_features, because "
            "the image trunk does not run in training: omit one of these options."
        )
    if IMAGE in folders and config.data.augment != AugmentConfig():
        raise UserError(
            "data.augment has no effect with data.image_features, whose images were encoded without it: omit one of "
            "these options."
        )
    if len(folders) == len(TOWER_OF_TABLE) and config.model.activation_checkpointing:
        raise UserError(
            "model.activation_checkpointing has no effect with data.image_features and data.text_features, because no "
            "trunk runs in training: omit model.activation_checkpointing."
        )


def check_trunks(
    tables: Mapping[str, FeatureTable], model: DualEncoder, preprocessing: Preprocessing, tokenizer: ModelTokenizer
) -> None:
    """Raise `UserError` unless the tables contain outputs of the model's trunks.

    The arguments are those of `check_trunk_outputs`; the model has its initial weights in float32, on the host.
    """
    for name, table in tower_tables(tables).items():
        kind = CONTENTS[name]
        tower: Encoder = model.vision if name == IMAGE else model.text
        trunk = tower.get_submodule("trunk")
        if table.embedding.get("trunk_weights", {}).get(kind) != weights_hash(trunk):
            raise UserError(
                f"{table.folder} contains outputs of {table.embedding['model']}, whose weights differ from those of "
                f"the {kind} tower: {_FIX}"
            )
        sample = image_sample(preprocessing.size) if name == IMAGE else text_sample(tokenizer)
        stored = table.embedding.get(TRUNK_OUTPUTS, {}).get(kind, [])
        if not is_same_output(stored, trunk_output(tower, sample)):
            raise UserError(
                f"{table.folder} contains outputs of {table.embedding['model']}, which uses the weights of the {kind} "
                "tower, but computes different features with them: give the tower the options of that model, such as "
                f"model.vision.options, or {_FIX}"
            )


def check_trunk_outputs(
    tables: Mapping[str, FeatureTable], model: DualEncoder, preprocessing: Preprocessing, tokenizer: ModelTokenizer
) -> None:
    """Raise `UserError` unless the tables fit the model's projections and were computed with the run's settings.

    These settings are the preprocessing of images, and the context length and pooling of texts.

    Args:
        tables: the tables of the run, by name.
        model: the model, with any weights.
        preprocessing: the preprocessing of the model's images.
        tokenizer: the model's tokenizer.
    """
    for name, table in tower_tables(tables).items():
        tower: Encoder = model.vision if name == IMAGE else model.text
        check_separate_projection(tower, f"data.{name}", "omit the option")
        _check_contents(name, table, tower)
        embedding = table.embedding
        # by option: the table's value, the run's value, and the option of `embed` that sets it
        settings: dict[str, tuple[Any, Any, str]] = {}
        if name == IMAGE:
            options = "model.vision.image_size, mean and std"
            values = embedding.get("preprocessing"), preprocessing.to_json()
            settings[options] = *values, "--image-size, only for timm:NAME; MODEL determines the other values"
        else:
            lengths = embedding.get("context_length"), tokenizer.context_length
            settings["model.text.context_length"] = *lengths, "--context-length, only for hf:NAME"
            settings["model.text.pooling"] = embedding.get("pooling"), getattr(tower, "pooling", None), "--pooling"
        for option, (of_table, of_run, of_embed) in settings.items():
            if of_table != of_run:
                raise UserError(
                    f"{table.folder} was computed with values of {option} ({of_table}) that differ from this run's "
                    f"({of_run}): use the features' values in this run, or run neuclip-ds embed with this run's values "
                    f"({of_embed})."
                )


def _check_contents(name: str, table: FeatureTable, tower: Encoder) -> None:
    """Raise `UserError` unless a table contains trunk outputs of the tower's kind (image or text) and width."""
    kind = CONTENTS[name]
    width = table.image_width if name == IMAGE else table.text_width
    if width is None:
        raise UserError(f"{table.folder} contains no {kind} features, which data.{name} needs: {_FIX}")
    if table.embedding["output"] != "trunk":
        raise UserError(
            f"{table.folder} contains joint features, but data.{name} needs features from before the projection: {_FIX}"
        )
    expected_width = projection_width(tower)
    if width != expected_width:
        raise UserError(
            f"{table.folder} contains features of width {width}, but the {kind} tower's trunk has width "
            f"{expected_width}: {_FIX}"
        )
