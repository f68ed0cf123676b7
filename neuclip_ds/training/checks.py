"""Check a run for errors and likely mistakes before it starts, and list the settings that a resumed run must keep."""

import json
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from neuclip_ds.checkpoint.checkpoints import Fingerprint
from neuclip_ds.config import SIZES, Config, ModelConfig
from neuclip_ds.data.feature_table import FeatureTable
from neuclip_ds.data.manifest import Manifest, has_same_layout
from neuclip_ds.data.stored_towers import CONTENTS, loss_tables, tower_folders
from neuclip_ds.data.training_set import source_settings
from neuclip_ds.engine.config import load_engine_config
from neuclip_ds.engine.start import check_engine_config
from neuclip_ds.errors import UserError
from neuclip_ds.losses.methods import find_method
from neuclip_ds.losses.options import DistillConfig, ObjectiveConfig
from neuclip_ds.models.trained_parts import TOWERS
from neuclip_ds.training.schedule import fitted_warmup
from neuclip_ds.training.stored_trunks import check_frozen_trunks

# options that may change between launches, and options that the fingerprint lists separately
_NOT_ARCHITECTURE: Any = {
    "vision": {"pretrained", "patch_drop", "class_token_only", "trainable", "projection"},
    "text": {"pretrained", "pooling", "tokenizer", "trainable", "packed", "projection"},
}


def check_config(config: Config, world_size: int) -> None:
    """Raise `UserError` for mistakes in a config that can be found without the data, the model or other ranks.

    These are home folders of unknown users, invalid batch sizes, DeepSpeed configs that are invalid or conflict with
    other options, options that have no effect or do not fit the method, and options of stored features, prefixes or the
    recovery that conflict with others. A version of DeepSpeed other than the tested one also raises `UserError`.
    """
    for option, path in {"run.output_dir": config.run.output_dir, "data.cache_dir": config.data.cache_dir}.items():
        if path is not None and str(path).startswith("~"):  # otherwise, the program would create a folder of this name
            raise UserError(f"{option}={path} names a user that does not exist on this machine; correct the path.")
    config.micro_batch(world_size)
    check_engine_config(load_engine_config(config, world_size), config.deepspeed)
    if config.ema.decay and config.optimizer.name == "sgd" and config.optimizer.momentum == 0:
        raise UserError(
            "ema.decay needs an optimizer with state, in which the average is stored, but sgd with momentum 0 has "
            "none: set optimizer.momentum, choose another optimizer, or set ema.decay=0."
        )
    anchors = config.run.normalizer_anchors
    method = config.objective.method
    if anchors and not find_method(method).estimates_normalizers:
        raise UserError(
            f"run.normalizer_anchors={anchors} measures normalizers, but objective.method={method} estimates none. "
            "Set run.normalizer_anchors=0."
        )
    _check_effect(config)
    _check_teachers(config.objective.distill)
    _check_recovery(config)
    _check_reference_model(config)
    check_frozen_trunks(config)


def _check_effect(config: Config) -> None:
    """Raise `UserError` if an option has no effect, because the option that it depends on is unset or has other values.

    Saved configs contain all options, so only options whose values differ from their defaults count as set. Configs of
    earlier versions may contain options without effect, so `Config` accepts them.
    """
    needed: dict[str, str] = {}  # option without effect -> setting that it needs
    if config.optimizer.schedule not in ("cooldown", "wsd"):
        needed["optimizer.cooldown_steps"] = "optimizer.schedule=cooldown or wsd"
    if config.optimizer.name != "sgd":
        needed["optimizer.momentum"] = "optimizer.name=sgd"
    if config.data.evaluation_sets is None:
        needed["data.evaluation_tasks"] = "data.evaluation_sets"
    if not config.model.lora.rank:
        needed["model.lora.alpha"] = "model.lora.rank"
        needed["model.lora.dropout"] = "model.lora.rank"
    if not config.recovery.epochs and config.recovery.reuse is None:
        needed["recovery.loss"] = "recovery.epochs"
        needed["recovery.restore"] = "recovery.epochs or recovery.reuse"
    defaults = Config()
    for option, setting in needed.items():
        value_of = attrgetter(option)
        default = value_of(defaults)
        if value_of(config) != default:
            raise UserError(
                f"{option} has no effect without {setting}: set {setting}, or omit {option} (or, if a recipe sets it, "
                f"pass its default, {json.dumps(default)})."
            )


def _check_teachers(distill: DistillConfig) -> None:
    """Raise `UserError` if options of teachers have no effect, because there is no teacher."""
    changed = [
        f"objective.distill.{name}"
        for name in DistillConfig.model_fields
        if getattr(distill, name) != getattr(DistillConfig(), name)
    ]
    if distill.features is None and changed:
        names = " and ".join(changed)
        verb = "has" if len(changed) == 1 else "have"
        raise UserError(
            f"{names} {verb} no effect without a teacher: set objective.distill.features to the folder of a teacher's "
            f"features, or omit {names}."
        )


def _check_recovery(config: Config) -> None:
    """Raise `UserError` if options of the loss conflict with the recovery of its statistics."""
    objective = config.objective
    if objective.prefixes and config.recovery.epochs:
        raise UserError(
            "recovery.epochs cannot be combined with objective.prefixes, whose statistics are not recovered: omit one "
            "of these options."
        )
    if config.recovers_u() and objective.epoch_steps is not None and objective.moving_average.gamma == "cosine":
        raise UserError(
            "objective.epoch_steps cannot be combined with recovered statistics, because gamma's schedule, which then "
            "counts steps of training only, would start at 1 and overwrite them: omit objective.epoch_steps, or set "
            "recovery.restore=[moments]."
        )


def _check_reference_model(config: Config) -> None:
    """Raise `UserError` if a reference model has no effect or conflicts with the loss of the recovery."""
    distill = config.objective.distill
    if config.objective.reference_model is None:
        return
    if distill.features is not None and distill.contrastive_weight == 0:
        raise UserError(
            "objective.reference_model has no effect with objective.distill.contrastive_weight=0, because the "
            "reference changes only the method's loss, whose weight is then 0: omit objective.reference_model, or set "
            "objective.distill.contrastive_weight above 0."
        )
    if config.recovery.epochs and config.recovery.loss == "hgcl":
        raise UserError(
            "recovery.loss=hgcl is a hinge loss, which cannot use objective.reference_model: set recovery.loss=gcl."
        )


def check_tables(tables: Mapping[str, FeatureTable]) -> None:
    """Raise `UserError` if image-text similarities cannot be computed from a reference's or teacher's features."""
    for table in loss_tables(tables).values():
        contents = {"images": table.image_width, "texts": table.text_width}
        missing = [name for name, width in contents.items() if width is None]
        if missing:
            problem = f"no features of {' and '.join(missing)}"
        elif table.embedding["output"] != "joint":
            problem = "features from before the projection"
        elif table.image_width != table.text_width:
            problem = f"image features of width {table.image_width} and text features of width {table.text_width}"
        else:
            continue
        raise UserError(
            f"{table.folder} contains {problem}, but a reference model or a teacher needs the similarities of images "
            "and texts: run neuclip-ds embed on the training data, with a model that encodes both and without "
            "--output=trunk."
        )


def check_data(saved: Mapping[str, Any], manifest: Manifest, what: str, fix: str) -> None:
    """Raise `UserError` if a manifest's hashes differ from the hashes in a checkpoint's record of its data.

    `what` is the subject of the message, and `fix` is an alternative to using the recorded data.
    """
    if manifest.content_hash != saved["hash"]:
        raise UserError(
            f"{what} was written with different data (hash {saved['hash']}, now {manifest.content_hash}): pass the "
            f"data that it was written with, or {fix}."
        )
    # checkpoints of earlier versions have no layout
    if not has_same_layout(saved.get("layout"), manifest.layout_of_first(manifest.n_shards)):
        raise UserError(
            f"{what} was written with shards of the same names and sizes, but with other samples or with the samples "
            f"in a different order: pass the data that it was written with, or {fix}."
        )


def check_length(done: int, total: int) -> None:
    """Raise `UserError` if a run has already trained for more steps than its config allows."""
    if done > total:
        raise UserError(
            f"The run has trained for {done:,} steps, more than the {total:,} that the config allows: raise max_steps "
            "(or epochs, if max_steps is not set) to train further, or give the run another name (run.name)."
        )


def config_warnings(config: Config, steps: int) -> list[str]:
    """Return a warning for each setting that is legal but probably a mistake in a run of `steps` steps."""
    optimizer = config.optimizer
    warnings: list[str] = []
    if optimizer.lr == 0:
        warnings.append("optimizer.lr=0: the encoders will not learn.")
    elif optimizer.warmup_steps >= steps:
        warnings.append(
            f"optimizer.warmup_steps={optimizer.warmup_steps} is not shorter than the run of {steps} steps: it is "
            f"shortened to {fitted_warmup(optimizer.warmup_steps, steps)}, a tenth of the run."
        )
    for tower in TOWERS:
        is_pretrained = bool(config.model.pretrained) or bool(getattr(config.model, tower).pretrained)
        trained = config.model.trained(tower)
        if trained in ("frozen", "projection") and not is_pretrained:
            warnings.append(
                f"model.{tower}.trainable={trained} freezes random weights: set model.pretrained or "
                f"model.{tower}.pretrained, or train the tower (model.{tower}.trainable=all)."
            )
    if optimizer.min_lr > 0 and optimizer.schedule == "constant":
        warnings.append(
            "optimizer.min_lr has no effect with optimizer.schedule=constant: omit optimizer.min_lr, or use another "
            "schedule."
        )
    elif optimizer.min_lr > optimizer.lr:
        warnings.append(
            f"optimizer.min_lr={optimizer.min_lr:g} is above optimizer.lr={optimizer.lr:g}: lower optimizer.min_lr."
        )
    return warnings + config.objective.warnings()


def fingerprint(config: Config) -> Fingerprint:
    """Return the part of the config that a resumed run must share with its checkpoint."""
    data = config.data
    order: dict[str, int] = {}  # options of the order of the samples, except those that the data determine
    for name in ("shard_streams", "shuffle_block_size"):
        value = getattr(data, name)
        if value is not None:
            order[name] = value
    return {
        "batch_size": data.batch_size,
        **order,
        **source_settings(data),
        "decoder": data.decoder,
        "drop_last": data.drop_last,
        "seed": config.run.seed,
        "method": config.objective.method,
        "objective.prefixes": {str(length): weight for length, weight in config.objective.prefixes.items()} or None,
        "optimizer": config.optimizer.name,
        **_state_options(config.objective),
        **_stored_features(config.objective),
        **{f"data.{name}": "a folder" if name in tower_folders(data) else None for name in CONTENTS},
        **_architecture(config.model),
    }


def _state_options(objective: ObjectiveConfig) -> Fingerprint:
    """Return the options that determine the tensors of the loss's state."""
    names = find_method(objective.method).state_options
    return {f"objective.{name}": attrgetter(name)(objective) for name in names}


def _stored_features(objective: ObjectiveConfig) -> Fingerprint:
    """Return the settings of stored features without their folders, which may move.

    `TrainingData.record()` identifies the features.
    """
    distill = objective.distill
    teachers = len(distill.folders)
    settings: dict[str, Any] = {
        "objective.reference_model": None if objective.reference_model is None else "a folder",
        "objective.distill.features": ["a folder"] * teachers or None,
    }
    for name in ("weight", "contrastive_weight"):
        settings[f"objective.distill.{name}"] = getattr(distill, name) if teachers else None
    settings["objective.distill.temperature"] = distill.temperatures(teachers) if teachers else None
    return settings


def _architecture(model: ModelConfig) -> Fingerprint:
    """Return the options that determine the architecture, its trained parts and its adapters, without file names.

    With `model.pretrained`, the architecture consists only of the sizes that the config sets.
    """
    trained_parts: dict[str, Any] = {f"model.{tower}.trainable": model.trained(tower) for tower in TOWERS}
    if model.lora.rank:
        trained_parts["model.lora"] = model.lora.model_dump()
    if model.pretrained:  # the checkpoint determines the rest of the architecture
        sizes = {f"model.{tower}.{name}": getattr(getattr(model, tower), name) for tower, name in SIZES.items()}
        return {**{name: size for name, size in sizes.items() if size is not None}, **trained_parts}

    options = model.model_dump(mode="json", include={"vision", "text", "embed_dim"}, exclude=_NOT_ARCHITECTURE)
    mean, std = model.vision.statistics()
    options["vision"]["mean"] = list(mean)
    options["vision"]["std"] = list(std)
    options["vision"]["image_size"] = model.vision.resolved_image_size()
    options["text"]["context_length"] = model.text.resolved_context_length()
    architecture: dict[str, Any] = {}
    for tower in ("vision", "text"):
        for name, value in options[tower].items():
            architecture[f"model.{tower}.{name}"] = value
    architecture["model.embed_dim"] = options["embed_dim"]
    # checkpoints of earlier versions lack these options, so their defaults are omitted
    if model.text.pretrained:
        architecture["model.text.pretrained"] = "an encoder"
        architecture["model.text.pooling"] = model.text.pooling
    for tower_name in TOWERS:
        projection = getattr(model, tower_name).projection
        if projection != "linear":
            architecture[f"model.{tower_name}.projection"] = projection
    return {**architecture, **trained_parts}
