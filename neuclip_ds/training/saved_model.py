"""Opens a model to use it, without an engine: of a run, of one of its checkpoints, or a pretrained one."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import yaml

from neuclip_ds.config import Config, ModelConfig
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.models.dual_encoder import DualEncoder
from neuclip_ds.models.pretrained.base import Pixels
from neuclip_ds.models.source import locate_model, open_saved, open_source
from neuclip_ds.models.tokenizer import CaptionTokenizer, Tokenize
from neuclip_ds.recipe import validate
from neuclip_ds.training.export import find_checkpoint
from neuclip_ds.training.fragments import EngineFiles


class SavedModel(NamedTuple):
    """A model with its weights in float32, and what its input has to be."""

    name: str  # what tells it from others: the checkpoint's folder, or the pretrained model's name
    model: DualEncoder
    tokenizer: Tokenize
    pixels: Pixels
    config: Config | None  # of the run that trained it
    checkpoint: Path | None


def open_model(name: str, communicator: Communicator) -> SavedModel:
    """
    Args:
        name: a run's folder, whose newest checkpoint is taken; a checkpoint in it; or what `model.pretrained` takes.
        communicator: the ranks, who open it together; one of them downloads.

    Raises:
        UserError: there is no such model, or its files do not fit.
    """
    path = Path(name)
    is_run = (path / "checkpoints").is_dir() or (path / "meta.json").is_file()
    if is_run:
        return _of_checkpoint(communicator.on_rank_zero(lambda: find_checkpoint(path)))
    return _of_name(name, communicator)


def _of_checkpoint(checkpoint: Path) -> SavedModel:
    run = checkpoint.parent.parent
    config = validate(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")))
    source, _ = open_saved(config.model, run / "model")
    tokenizer = source.tokenizer(lambda: CaptionTokenizer.load(run / "tokenizer", config.model.text.context_length))
    model = source.build(tokenizer)
    model.load_state_dict(EngineFiles(checkpoint / "engine").weights())
    return SavedModel(str(checkpoint), model, tokenizer, source.pixels, config, checkpoint)


def _of_name(name: str, communicator: Communicator) -> SavedModel:
    config = ModelConfig(pretrained=name)
    source = open_source(config, communicator.on_rank_zero(lambda: locate_model(config)))
    tokenizer = source.tokenizer(_no_tokenizer)
    return SavedModel(name, source.load(tokenizer).model, tokenizer, source.pixels, None, None)


def _no_tokenizer() -> CaptionTokenizer:
    raise AssertionError("a pretrained model has its own tokenizer")
