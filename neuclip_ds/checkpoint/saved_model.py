"""Open the model of a run or checkpoint, or a pretrained model, without DeepSpeed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from neuclip_ds.checkpoint.checkpoints import all_checkpoints, read_best, step_folder, verify_together
from neuclip_ds.checkpoint.integrity import META, is_complete
from neuclip_ds.checkpoint.sharded_state import OBJECTIVE, STATE, StateFiles
from neuclip_ds.config import CLIP_BPE, TOKENIZER, Config, LoraConfig, ModelConfig
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.files import exists, expand_user
from neuclip_ds.losses.temperature import trained_temperature
from neuclip_ds.models.build import add_configured_adapters
from neuclip_ds.models.pretrained.base import (
    LibraryModel,
    LoadedModel,
    LogitParameters,
    Preprocessing,
    TrainedTowers,
    check_tensors,
    read_start_hash,
)
from neuclip_ds.models.pretrained.positions import resample_positions
from neuclip_ds.models.source import (
    ModelSource,
    locate_model,
    locate_on_rank_zero,
    merged,
    model_source,
    open_model_folder,
    open_saved,
    with_sizes,
)
from neuclip_ds.models.tokenizer import ModelTokenizer, named_tokenizer
from neuclip_ds.models.towers import DualEncoder
from neuclip_ds.models.trained_parts import TOWERS
from neuclip_ds.models.weights_hash import weights_hash
from neuclip_ds.recipe import load_saved

MODEL = "model"  # folder with the model's description, in a run's folder and in each of its checkpoints


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """A model with float32 weights, its tokenizer and its image preprocessing."""

    name: str  # the checkpoint's folder, or the pretrained model's name
    model: DualEncoder
    tokenizer: ModelTokenizer
    preprocessing: Preprocessing
    logits: LogitParameters  # temperature and bias; the initial temperature if each sample has its own
    config: Config | None  # config of the run that trained the model; None for a pretrained model
    checkpoint: Path | None  # None for a pretrained model


def open_model(name: str, communicator: Communicator, average: bool = False) -> SavedModel:
    """Open a model by name; a collective call in which only one rank downloads files.

    Args:
        name: a run's folder (its newest checkpoint is opened), a checkpoint in it, or any value of `model.pretrained`.
        average: whether to open the moving average of a run's weights (`ema.decay`).

    Raises `UserError` if the model does not exist, cannot be downloaded or is not supported; if its files are damaged
    or inconsistent; if a package that it needs is not installed; or if `average` is true and no average was saved.
    """
    path = Path(expand_user(name))
    if is_run(path):
        checkpoint = Path(communicator.on_rank_zero(lambda: str(find_checkpoint(path))))
        verify_together(checkpoint, communicator)
        run = open_run(checkpoint)
        model = run.source.build(run.tokenizer)
        state = StateFiles(checkpoint / STATE, verified=True)
        model.load_state_dict(state.weights(average))
        return SavedModel(
            name=f"{checkpoint} (ema)" if average else str(checkpoint),
            model=model,
            tokenizer=run.tokenizer,
            preprocessing=run.source.preprocessing,
            logits=final_logits(state.replicated(OBJECTIVE), run.config, run.initial_logits),
            config=run.config,
            checkpoint=checkpoint,
        )
    if average:
        raise UserError(
            f"{name} is not a run of neuclip_ds, so it contains no average of the weights: omit --ema (in Python, "
            "ema=True)."
        )
    config = ModelConfig(pretrained=name)
    source = model_source(config, locate_on_rank_zero(config, communicator))
    tokenizer = source.own_tokenizer()
    assert tokenizer is not None  # a pretrained model has one
    model, logits = source.load(tokenizer)
    return SavedModel(
        name=name,
        model=model,
        tokenizer=tokenizer,
        preprocessing=source.preprocessing,
        logits=logits,
        config=None,
        checkpoint=None,
    )


def is_run(path: Path) -> bool:
    """Return whether a path is a run's folder or a checkpoint."""
    return exists(path) and ((path / "checkpoints").is_dir() or is_complete(path))


def find_checkpoint(path: Path) -> Path:
    """Return a run's newest checkpoint, or `path` if it is a checkpoint.

    Raises `UserError` if there is no checkpoint or if the run's newest one is incomplete.
    """
    checkpoint: Path | None = path
    if not is_complete(path):
        checkpoint = next(iter(all_checkpoints(path / "checkpoints")), None)
    if checkpoint is None:
        raise UserError(
            f"{path} is neither a run with a checkpoint nor a checkpoint. Pass the folder of a run that has saved a "
            "checkpoint, such as runs/NAME."
        )
    if not is_complete(checkpoint):
        raise UserError(
            f"{checkpoint}, the newest checkpoint of {path}, is incomplete: it contains no {META}. Restore it from a "
            "copy, or pass an older checkpoint."
        )
    return checkpoint.resolve()


def find_best_checkpoint(run: Path) -> Path:
    """Return a run's best checkpoint by `run.best_metric`.

    Raises `UserError` if no best checkpoint has been recorded, its record is damaged, or the checkpoint is missing. The
    checkpoint's files are not verified.
    """
    best = read_best(run / "checkpoints")
    if best is None:
        raise UserError(
            f"{run} has no best checkpoint. Pass the folder of a run that was trained with run.best_metric=NAME, or "
            "omit --best."
        )
    checkpoint = step_folder(run / "checkpoints", best.step)
    if not is_complete(checkpoint):
        raise UserError(
            f"The best checkpoint of {run}, {checkpoint}, is missing or incomplete. Restore it from a copy, or omit "
            "--best."
        )
    return checkpoint.resolve()


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """The config, model source, initial logit parameters and tokenizer of the run that saved a checkpoint."""

    config: Config
    source: ModelSource
    initial_logits: LogitParameters  # of the model that the run started from; for random weights, fixed defaults
    tokenizer: ModelTokenizer


def open_run(checkpoint: Path) -> SavedRun:
    """Load the config, model source and tokenizer from a checkpoint that `find_checkpoint` returned.

    Raises `UserError` if one of their files is missing or unusable.
    """
    config = load_saved(checkpoint / "config.yaml")
    source, initial_logits = open_saved(config.model, checkpoint / MODEL)
    text = config.model.text
    folder = checkpoint / TOKENIZER
    # checkpoints of earlier versions lack the folder if the config names a tokenizer, which is then opened by its name
    if text.tokenizer in (None, CLIP_BPE) or folder.is_dir():
        text = text.model_copy(update={"tokenizer": str(folder)})
    tokenizer = source.own_tokenizer()
    if tokenizer is None:
        tokenizer = named_tokenizer(text)
    return SavedRun(config=config, source=source, initial_logits=initial_logits, tokenizer=tokenizer)


@dataclass(frozen=True, kw_only=True)
class ModelWeights:
    """A model's weights with merged LoRA adapters, its temperature and bias, and the objects that build the model."""

    name: str  # the checkpoint's folder, or the pretrained model's name
    source: ModelSource
    tokenizer: ModelTokenizer
    weights: dict[str, Tensor]  # parameters and buffers by name
    logits: LogitParameters
    start_hash: str | None = None  # hash of the weights that the model's run started from; None if unknown

    def build(self) -> DualEncoder:
        """Build the model in float32."""
        model = self.source.build(self.tokenizer)
        model.load_state_dict(self.weights)
        return model


def read_result(checkpoint: Path, average: bool = False) -> ModelWeights:
    """Read the weights of a verified checkpoint, or their moving average, and merge LoRA adapters into them.

    Raises `UserError` as `open_run` does, or if `average` is true and the checkpoint has no moving average.
    """
    run = open_run(checkpoint)
    state = StateFiles(checkpoint / STATE, verified=True)
    logits = final_logits(state.replicated(OBJECTIVE), run.config, run.initial_logits)
    source, weights = merged(run.source, run.tokenizer, state.weights(average))
    return ModelWeights(
        name=f"{checkpoint} (ema)" if average else str(checkpoint),
        source=source,
        tokenizer=run.tokenizer,
        weights=weights,
        logits=logits,
        start_hash=read_start_hash(checkpoint / MODEL),
    )


def read_start(checkpoint: Path, communicator: Communicator) -> ModelWeights:
    """Load, in float32, the weights of `model.pretrained` from which a checkpoint's run started.

    A collective call in which only one rank downloads files. Raises `UserError` if `model.pretrained` was empty, or if
    the model that it named cannot be opened or has been replaced by a different one.
    """
    run = open_run(checkpoint)
    name = run.config.model.pretrained
    if not name:
        raise UserError(
            f"{checkpoint} cannot be blended: its run did not start from a trained model (model.pretrained is empty). "
            "Omit --blend."
        )
    config = run.config.model.model_copy(update={"lora": LoraConfig()})
    # load the start at the run's image size and context length; these options had no effect in earlier versions
    config = with_sizes(config, run.source.preprocessing.size, run.tokenizer.context_length)
    try:
        source = initial_source(config, communicator)
        model, logits = source.load(run.tokenizer)
    except UserError as error:
        raise UserError(
            f"The model from which the run of {checkpoint} started cannot be opened: restore it, or omit --blend. The "
            f"problem: {error}"
        ) from error
    expected_hash = read_start_hash(checkpoint / MODEL)
    difference = None
    if not _are_close(logits, run.initial_logits):
        difference = "temperature or bias differs"
    elif expected_hash is not None and weights_hash(model) != expected_hash:
        difference = "weights differ"
    if difference is not None:
        raise UserError(
            f"The model at model.pretrained={name} is no longer the one from which the run of {checkpoint} started: "
            f"its {difference}. Restore the original model, or omit --blend."
        )
    tokenizer = source.own_tokenizer()
    assert tokenizer is not None  # a pretrained model has one
    return ModelWeights(
        name=name,
        source=source,
        tokenizer=tokenizer,
        weights=model.state_dict(),
        logits=logits,
    )


class RunStart(ModelSource):
    """Source of a model that starts from the weights of an earlier run, with its temperature and bias.

    LoRA adapters of that run are merged, and position embeddings are resampled to the config's sizes.

    Args:
        config: model config of the new run; its `pretrained` names the earlier run.
        checkpoint: checkpoint of the earlier run.

    Raises:
        UserError: a file is missing, or the model does not support the config's image size or context length.
    """

    def __init__(self, config: ModelConfig, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        saved = load_saved(checkpoint / "config.yaml").model
        self._source, _ = open_model_folder(config, checkpoint / MODEL, None if saved.pretrained else saved)
        self.config = self._source.config
        self.name = config.pretrained
        self.preprocessing = self._source.preprocessing
        self.embed_dim = self._source.embed_dim

    def own_tokenizer(self) -> ModelTokenizer:
        tokenizer = self._source.own_tokenizer()
        assert tokenizer is not None  # each run saves its tokenizer
        return tokenizer

    def build(self, tokenizer: ModelTokenizer) -> DualEncoder:
        return self._source.build(tokenizer)

    def load(self, tokenizer: ModelTokenizer) -> LoadedModel:
        result = read_result(self._checkpoint)
        source = self._source
        config = self.config
        if config.lora.rank:  # adapters are added to the loaded weights
            trained: dict[str, Any] = {}
            for name in TOWERS:
                trained[name] = getattr(config, name).model_copy(update={"trainable": config.trained(name)})
            source = source.with_config(config.model_copy(update={**trained, "lora": LoraConfig()}))
        model = source.build(tokenizer)
        expected = model.state_dict()
        weights = resample_positions(result.weights, expected)
        check_tensors(str(self._checkpoint), expected, weights)
        model.load_state_dict(weights)
        if config.lora.rank:
            add_configured_adapters(model, config)
        return LoadedModel(model, result.logits)

    def to_library_model(
        self, tokenizer: ModelTokenizer, weights: Mapping[str, Tensor], logits: LogitParameters
    ) -> LibraryModel | TrainedTowers:
        return self._source.to_library_model(tokenizer, weights, logits)

    def save_files(self, folder: Path) -> None:
        self._source.save_files(folder)


def initial_source(config: ModelConfig, communicator: Communicator) -> ModelSource:
    """Open the source of a run's initial model; a collective call in which only one rank downloads files.

    Raises `UserError` if `model.pretrained` or a pretrained tower cannot be used.
    """
    checkpoint = communicator.on_rank_zero(lambda: _initial_checkpoint(config))
    if not checkpoint:
        return model_source(config, locate_on_rank_zero(config, communicator))
    verify_together(Path(checkpoint), communicator)
    return RunStart(config, Path(checkpoint))


def planned_source(config: ModelConfig) -> ModelSource:
    """Open the source of a run's initial model on one rank, to plan the run.

    Weights are neither downloaded nor verified. Raises `UserError` if `model.pretrained` or a pretrained text encoder
    cannot be used.
    """
    checkpoint = _initial_checkpoint(config)
    if checkpoint:
        return RunStart(config, Path(checkpoint))
    return model_source(config, locate_model(config, weights=False))


def _initial_checkpoint(config: ModelConfig) -> str:
    """Return the checkpoint of the run that `model.pretrained` names, or an empty string if it names no run."""
    path = Path(expand_user(config.pretrained))
    return str(find_checkpoint(path)) if config.pretrained and is_run(path) else ""


def _are_close(first: LogitParameters, second: LogitParameters) -> bool:
    """Return whether two models have the same temperature and bias, up to rounding."""
    for value, other in zip(first, second, strict=True):
        if value is None or other is None:
            if value != other:
                return False
        elif not math.isclose(value, other, rel_tol=1e-6):
            return False
    return True


def final_logits(state: Mapping[str, Tensor], config: Config, initial: LogitParameters) -> LogitParameters:
    """Return a run's final temperature and bias; a value that was not stored as one scalar is the initial one.

    A run without SigLIP's loss and without `model.pretrained` has no bias. A plugin's loss may store tensors of any
    shape under the names of the temperature and the bias.
    """
    temperature = config.objective.temperature.initial or initial.temperature
    final_tau = trained_temperature(state)
    if final_tau is not None and final_tau.numel() == 1:
        temperature = final_tau.item()

    saved_bias = state.get("bias")
    bias: float | None = None
    if saved_bias is not None and saved_bias.numel() == 1:
        bias = saved_bias.item()
    elif config.model.pretrained:
        bias = initial.bias
    return LogitParameters(temperature, bias)
