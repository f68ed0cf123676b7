"""Sources of a run's dual encoder: the config (with random or pretrained towers) or a pretrained checkpoint.

Code that reads or writes other libraries' models is imported only when used, because most runs do not need it.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from neuclip_ds.config import TOKENIZER, Channels, LoraConfig, ModelConfig, without_replaced
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.models.build import build_dual_encoder
from neuclip_ds.models.image_models import ImageWeights, locate_image_weights
from neuclip_ds.models.pretrained.base import (
    START_FILE,
    CheckpointRef,
    LoadedModel,
    LogitParameters,
    ModelSource,
    Preprocessing,
    TrainedTowers,
)
from neuclip_ds.models.pretrained.files import read_json, read_tensors
from neuclip_ds.models.tokenizer import CaptionTokenizer, ModelTokenizer
from neuclip_ds.models.towers import DualEncoder
from neuclip_ds.models.trained_parts import merge_adapters

if TYPE_CHECKING:
    from neuclip_ds.models.pretrained.text_encoder import TextEncoderSource

# file with the model config of an earlier run without `model.pretrained`, in the model folder of each run that started
# from it, directly or through other runs; the earlier run's tokenizer is in the same folder
ARCHITECTURE = "architecture.json"
TEXT_ENCODER = "text"  # folder of a pretrained text encoder's files, without weights, in a run's model folder
INITIAL_LOGITS = LogitParameters(temperature=0.07, bias=-10.0)  # initial values of CLIP's temperature and SigLIP's bias


class FromConfig(ModelSource):
    """Source of a model built from the config, whose towers have random weights (from torch's seed) or pretrained ones.

    Args:
        config: the model config.
        image: pretrained weights of the image tower, if any; with an empty path, only its preprocessing.
        text: the pretrained text encoder, if any.
        tokenizer: folder or name of an earlier run's tokenizer, if the model uses it.
    """

    def __init__(
        self,
        config: ModelConfig,
        image: ImageWeights | None = None,
        text: TextEncoderSource | None = None,
        tokenizer: Path | str | None = None,
    ) -> None:
        self._image = image
        self._text = text
        self._tokenizer = tokenizer
        squash = False
        if image is None:
            mean, std = config.vision.statistics()
        else:
            mean = image.mean
            std = image.std
            squash = image.squash
        vision = config.vision.model_copy(update={"mean": mean, "std": std})
        self.config = config.model_copy(update={"vision": vision})
        self.name = config.vision.name
        self.preprocessing = Preprocessing(size=config.vision.resolved_image_size(), mean=mean, std=std, squash=squash)
        self.embed_dim = config.embed_dim

    def own_tokenizer(self) -> ModelTokenizer | None:
        if self._text is not None:
            return self._text.tokenizer()
        if self._tokenizer is not None:
            return CaptionTokenizer.load(self._tokenizer, self.config.text.resolved_context_length())
        return None

    def build(self, tokenizer: ModelTokenizer, weights: bool = False) -> DualEncoder:
        image_weights = None
        if weights and self._image is not None and self._image.path:
            image_weights = read_tensors(Path(self._image.path))
        if self._text is not None:
            text = self._text.build(self.config.embed_dim, weights)
            return build_dual_encoder(self.config, None, image_weights, text)
        caption_tokenizer = cast(CaptionTokenizer, tokenizer)  # new, or from `own_tokenizer`
        return build_dual_encoder(self.config, caption_tokenizer, image_weights)

    def load(self, tokenizer: ModelTokenizer) -> LoadedModel:
        return LoadedModel(self.build(tokenizer, weights=True), INITIAL_LOGITS)

    def with_statistics(self, mean: Channels, std: Channels, squash: bool) -> FromConfig:
        """Return a source that differs only in its preprocessing; the arguments are as in `Preprocessing`."""
        path = "" if self._image is None else self._image.path
        image = ImageWeights(path=path, mean=mean, std=std, squash=squash)
        return FromConfig(self.config, image, self._text, self._tokenizer)

    def save_files(self, folder: Path) -> None:
        if self._text is not None:
            self._text.save(folder / TEXT_ENCODER)
        if not self.config.pretrained:
            return  # the run's config describes the rest of the model
        architecture = self.config.model_copy(update={"pretrained": ""})
        (folder / ARCHITECTURE).write_text(architecture.model_dump_json(), encoding="utf-8")
        if isinstance(self._tokenizer, Path):
            shutil.copytree(self._tokenizer, folder / TOKENIZER)

    def to_library_model(
        self, tokenizer: ModelTokenizer, weights: Mapping[str, Tensor], logits: LogitParameters
    ) -> TrainedTowers:
        with torch.device("meta"):
            model = self.build(tokenizer)
        return TrainedTowers(
            config=self.config,
            model=model,
            weights=weights,
            logits=logits,
            preprocessing=self.preprocessing,
            tokenizer=tokenizer,
        )


class TowerRefs(NamedTuple):
    """Locations of the pretrained towers of a model that is built from the config; can be sent to other ranks."""

    image: ImageWeights | None = None  # None for random weights
    text: str | None = None  # folder of the text encoder; None for CLIP's transformer with random weights


ModelRef = CheckpointRef | TowerRefs


def locate_model(config: ModelConfig, weights: bool = True) -> ModelRef:
    """Locate the checkpoint or the towers that a model config names, downloading them if needed; call on one rank only.

    Args:
        config: the model config.
        weights: whether to locate the weights as well; planning needs only the architecture.

    Returns:
        A reference to pass to `model_source` on every rank.

    Raises:
        UserError: a checkpoint or a tower does not exist, cannot be downloaded or is not supported, or open_clip is
            needed and not installed.
    """
    if config.pretrained:
        from neuclip_ds.models.pretrained.locate import locate

        return locate(config.pretrained, weights)
    image = None
    text = None
    if config.vision.pretrained and weights:
        image = locate_image_weights(config.vision)
    if config.text.pretrained:
        from neuclip_ds.models.pretrained.text_encoder import locate_text_encoder

        text = str(locate_text_encoder(config.text.pretrained, "model.text.pretrained=", weights))
    return TowerRefs(image, text)


def locate_on_rank_zero(config: ModelConfig, communicator: Communicator) -> ModelRef:
    """Call `locate_model`, which may download weights, on rank 0 and return its result on all ranks."""
    kind = CheckpointRef if config.pretrained else TowerRefs
    return communicator.value_from_rank_zero(kind, lambda: locate_model(config))


def model_source(config: ModelConfig, ref: ModelRef) -> ModelSource:
    """Open the source that `locate_model` found, on any rank.

    Raises UserError as in `open_checkpoint`, or as in `TextEncoderSource` for a model that is built from the config.
    """
    if isinstance(ref, CheckpointRef):
        from neuclip_ds.models.pretrained.locate import open_checkpoint

        return open_checkpoint(ref, config)
    text = None if ref.text is None else _text_encoder(config, Path(ref.text))
    return FromConfig(config, ref.image, text)


def _text_encoder(config: ModelConfig, folder: Path) -> TextEncoderSource:
    from neuclip_ds.models.pretrained.text_encoder import TextEncoderSource

    return TextEncoderSource(config.text, folder)


def merged(
    source: ModelSource, tokenizer: ModelTokenizer, weights: dict[str, Tensor]
) -> tuple[ModelSource, dict[str, Tensor]]:
    """Merge any LoRA adapters into the weights; return the source and the weights of the model without adapters."""
    if not source.config.lora.rank:
        return source, weights
    model = source.build(tokenizer)
    model.load_state_dict(weights)
    merge_adapters(model)
    config_without_adapters = source.config.model_copy(update={"lora": LoraConfig()})
    return source.with_config(config_without_adapters), model.state_dict()


def resumed_source(source: ModelSource, preprocessing: Mapping[str, Any], checkpoint: Path) -> ModelSource:
    """Return the source of a resumed run's model, with the preprocessing that its checkpoint recorded.

    A resumed run need not name its pretrained image weights again, but its images must be normalized as before.

    Args:
        source: the source that the config names.
        preprocessing: the result of `read_start_preprocessing`.
        checkpoint: the checkpoint, for messages.

    Raises:
        UserError: the image size differs, or `model.pretrained` names a model whose preprocessing differs.
    """
    current = asdict(source.preprocessing)
    for name, saved_value in preprocessing.items():
        value = list(current[name]) if isinstance(saved_value, list) else current[name]
        if value == saved_value:
            continue
        if isinstance(source, FromConfig) and name in ("mean", "std", "squash"):
            mean = tuple(preprocessing["mean"])
            std = tuple(preprocessing["std"])
            return source.with_statistics(mean, std, preprocessing["squash"])
        fix = "set model.pretrained to the model from which the run started"
        if name == "size":
            fix = f"set model.vision.image_size={saved_value}"
        raise UserError(
            f"The checkpoint {checkpoint} was written with a model whose preprocessing has {name}={saved_value}, but "
            f"that of {source.name} has {name}={value}: {fix}, or give the run a different name (run.name)."
        )
    return source


def open_saved(config: ModelConfig, folder: Path) -> tuple[ModelSource, LogitParameters]:
    """Return a saved run's model source and initial logit parameters, without reading pretrained weights.

    `ModelSource.save` must have written the folder. If the run started from a checkpoint, the folder determines the
    image size and the context length. Raises UserError if files are missing or unusable.
    """
    if config.pretrained:
        config = with_sizes(config, None, None)
    return open_model_folder(config, folder)


def with_sizes(config: ModelConfig, image_size: int | None, context_length: int | None) -> ModelConfig:
    """Return a config with another image size and context length; None stands for the checkpoint's value."""
    vision = config.vision.model_copy(update={"image_size": image_size})
    text = config.text.model_copy(update={"context_length": context_length})
    return config.model_copy(update={"vision": vision, "text": text})


def with_architecture(config: ModelConfig, architecture: ModelConfig) -> ModelConfig:
    """Return `config` with the towers of `architecture`.

    The image size and the context length are those of `config` if it sets them. The trained parts, the adapters and all
    options that do not change the features are taken from `config`.
    """
    vision = architecture.vision.model_copy(
        update={
            "image_size": config.vision.image_size or architecture.vision.resolved_image_size(),
            "trainable": config.vision.trainable,
            "class_token_only": config.vision.class_token_only,
            "patch_drop": config.vision.patch_drop,
        }
    )
    text = architecture.text.model_copy(
        update={
            "context_length": config.text.context_length or architecture.text.resolved_context_length(),
            "trainable": config.text.trainable,
            "packed": config.text.packed,
        }
    )
    return config.model_copy(update={"vision": vision, "text": text, "embed_dim": architecture.embed_dim})


def open_model_folder(
    config: ModelConfig, folder: Path, architecture: ModelConfig | None = None
) -> tuple[ModelSource, LogitParameters]:
    """Open a saved run's model source with the image size and the context length of the config, if they are set.

    Also returns the run's initial logit parameters.

    Args:
        config: the model config.
        folder: folder that `ModelSource.save` wrote.
        architecture: model config of the run that wrote the folder, required if that run did not start from a
            checkpoint and `config` belongs to another run.

    Raises:
        UserError: files are missing or unusable, or do not support the image size or the context length.
    """
    start = read_json(folder / START_FILE)
    logits = LogitParameters(**start["logits"])
    earlier = _earlier_run(config, folder, architecture)
    if earlier is not None:
        config = with_architecture(config, earlier.architecture)
    elif config.pretrained:  # a checkpoint of a library, whose small files are in the folder
        saved_config = config.model_copy(update={"pretrained": str(folder)})
        return model_source(config, locate_model(saved_config, weights=False)), logits
    preprocessing = start["preprocessing"]
    mean = tuple(preprocessing["mean"])
    std = tuple(preprocessing["std"])
    statistics = ImageWeights(path="", mean=mean, std=std, squash=preprocessing["squash"])
    text = _text_encoder(config, folder / TEXT_ENCODER) if config.text.pretrained else None
    tokenizer: Path | str | None = None
    if earlier is not None:
        # earlier versions did not copy the tokenizer if the config names it; a pretrained text encoder has its own
        tokenizer = earlier.tokenizer if earlier.tokenizer.is_dir() else config.text.tokenizer
    return FromConfig(config, statistics, text, tokenizer), logits


class _EarlierRun(NamedTuple):
    """A run whose model was built from its config, and from whose weights another run started."""

    architecture: ModelConfig  # the run's model config
    tokenizer: Path  # folder of the run's tokenizer, which may be missing


def _earlier_run(config: ModelConfig, folder: Path, architecture: ModelConfig | None) -> _EarlierRun | None:
    """Return the earlier run whose config describes the model that `open_model_folder` opens.

    It is None if `config` itself describes the model, or if the model is that of a library's checkpoint. The arguments
    are those of `open_model_folder`.
    """
    if architecture is not None:  # `folder` belongs to the earlier run
        return _EarlierRun(architecture, folder.parent / TOKENIZER)
    if config.pretrained and (folder / ARCHITECTURE).is_file():  # `folder` belongs to a run that started from it
        tree = without_replaced({"model": read_json(folder / ARCHITECTURE)})
        return _EarlierRun(ModelConfig.model_validate(tree["model"]), folder / TOKENIZER)
    return None
