"""Check a run for errors and likely mistakes before it starts, and list the settings that a resumed run must keep."""

from collections.abc import Mapping
from typing import Any

from neuclip_ds.checkpoint.checkpoints import Fingerprint
from neuclip_ds.config import Config, ModelConfig
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.training_set import source_settings
from neuclip_ds.engine.config import load_engine_config
from neuclip_ds.engine.start import check_engine_config
from neuclip_ds.errors import UserError
from neuclip_ds.models.trained_parts import TOWERS
from neuclip_ds.training.schedule import fitted_warmup

# options that may change between launches, and options that the fingerprint lists separately
_NOT_ARCHITECTURE: Any = {
    "vision": {"pretrained", "patch_drop", "trainable"},
    "text": {"tokenizer", "trainable"},
}


def check_config(config: Config, world_size: int) -> None:
    """Raise `UserError`, without communicating with other ranks, if a config would fail regardless of the data."""
    config.micro_batch(world_size)
    check_engine_config(load_engine_config(config, world_size), config.deepspeed)


def check_data(saved: Mapping[str, Any], manifest: Manifest) -> None:
    """Raise `UserError` if a manifest's content hash differs from the hash that a checkpoint recorded."""
    if manifest.content_hash != saved["hash"]:
        raise UserError(
            f"The checkpoint was written with different data (hash {saved['hash']}, now {manifest.content_hash}): name "
            "the data it was trained on, or give the run another name (--run.name)."
        )


def config_warnings(config: Config, steps: int) -> list[str]:
    """Return a warning for each setting that is legal but probably a mistake in a run of `steps` steps."""
    optimizer, found = config.optimizer, []
    if optimizer.lr == 0:
        found.append("optimizer.lr=0: the encoders will not learn.")
    elif optimizer.warmup_steps >= steps:
        found.append(
            f"optimizer.warmup_steps={optimizer.warmup_steps} is not shorter than the run of {steps} steps: it is "
            f"shortened to {fitted_warmup(optimizer.warmup_steps, steps)}, a tenth of the run."
        )
    for name in TOWERS:
        pretrained = config.model.pretrained or (name == "vision" and config.model.vision.pretrained)
        if config.model.trained(name) == "frozen" and not pretrained:
            found.append(f"model.{name}.trainable=frozen freezes random weights: start from pretrained ones.")
    if optimizer.min_lr > 0 and optimizer.schedule == "constant":
        found.append("optimizer.min_lr has no effect with optimizer.schedule=constant; cooldown decays to it.")
    elif optimizer.min_lr > optimizer.lr:
        found.append(f"optimizer.min_lr={optimizer.min_lr:g} is above optimizer.lr={optimizer.lr:g}: swap them.")
    return found + config.objective.warnings()


def fingerprint(config: Config) -> Fingerprint:
    """Return the part of the config that a resumed run must share with its checkpoint."""
    data = config.data
    chosen = {name: getattr(data, name) for name in ("shard_streams", "shuffle_block_size")}
    return {
        "batch_size": data.batch_size,
        **{name: value for name, value in chosen.items() if value is not None},
        **source_settings(data),
        "decoder": data.decoder,
        "drop_last": data.drop_last,
        "seed": config.run.seed,
        "method": config.objective.method,
        "optimizer": config.optimizer.name,
        **_architecture(config.model),
    }


def _architecture(model: ModelConfig) -> Fingerprint:
    """Return the trained parts, adapters and, for a model that is not pretrained, its architecture; omit file names."""
    trains: dict[str, Any] = {f"model.{name}.trainable": model.trained(name) for name in TOWERS}
    if model.lora.rank:
        trains["model.lora"] = model.lora.model_dump()
    if model.pretrained:
        return trains
    tree = model.model_dump(mode="json", include={"vision", "text", "embed_dim"}, exclude=_NOT_ARCHITECTURE)
    tree["vision"] |= dict(zip(("mean", "std"), map(list, model.vision.statistics()), strict=True))
    options = {f"{part}.{key}": value for part in ("vision", "text") for key, value in tree.pop(part).items()}
    return {f"model.{name}": value for name, value in {**options, **tree}.items()} | trains
