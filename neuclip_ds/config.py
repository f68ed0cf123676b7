"""The typed config tree: every option with its type, default and meaning.

Nothing here imports torch, so that the help and config errors appear immediately. A recipe (YAML) sets values, and
`--dotted.name=value` overrides them; see `neuclip_ds.recipe`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    SerializeAsAny,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import NoDecode

from neuclip_ds.errors import UserError, counted
from neuclip_ds.files import expand_user
from neuclip_ds.losses.methods import find_method, method_of
from neuclip_ds.losses.options import ObjectiveConfig, default_objective, objective_config
from neuclip_ds.section import Section, is_given, merge

Channels = tuple[float, float, float]
OPENAI_MEAN: Channels = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD: Channels = (0.26862954, 0.26130258, 0.27577711)
CLIP_BPE = "clip_bpe"  # a value of model.text.tokenizer
CONFIG = "config.yaml"  # file of a run's config, in its folder and in its checkpoints
TOKENIZER = "tokenizer"  # folder of the tokenizer, next to CONFIG, if the model is built from the config

Decay = Annotated[float, Field(ge=0, lt=1)]

_MOST_NAME_BYTES = 255  # file systems refuse longer names of files and folders
_MOST_RUN_NAME_BYTES = _MOST_NAME_BYTES - len("..starting")  # the run's staging folder is called .NAME.starting


def _usable(path: str) -> str:
    """Return a path with `~` expanded; raise `ValueError` if a name in a local path is too long for a file."""
    is_plain = re.search(r"://|[*?[{]", path) is None  # neither a URL nor a pattern
    if is_plain and any(len(name.encode(errors="replace")) > _MOST_NAME_BYTES for name in re.split("/|::", path)):
        raise ValueError(f"the path contains a name of more than {_MOST_NAME_BYTES} bytes; correct the path")
    return expand_user(path)


# paths in which `~` stands for the home folder; a Location may also be a URL, paths joined by ::, or a name
LocalPath = Annotated[Path, AfterValidator(lambda path: Path(_usable(str(path))))]
Location = Annotated[str, AfterValidator(_usable)]


class RunConfig(Section):
    name: str | None = None
    """Name of the run's folder: up to 200 letters, digits and any of _ . , = + @ -, with at most 245 bytes in UTF-8,
    beginning with a letter, a digit or _. By default, the recipe's name."""
    output_dir: LocalPath = Path("runs")
    """Folder for all runs; the config, log, metrics and checkpoints of a run are in OUTPUT_DIR/NAME."""
    seed: int = Field(0, ge=0)
    """Seed for the weights, data order, augmentation and dropout."""
    deterministic: bool = False
    """Use only deterministic algorithms, so that a run that resumes with the same GPUs, number of ranks, DeepSpeed
    config and library versions is bit-identical to an uninterrupted one. These algorithms may be slower. The run fails
    if its model uses an operation without a deterministic algorithm."""
    checkpoint_every: int = Field(1000, ge=1)
    """Steps between checkpoints; another checkpoint is saved at the end of the run."""
    keep_checkpoints: int = Field(2, ge=1)
    """Number of newest checkpoints to keep on disk, in addition to the one with the best `best_metric`."""
    max_skipped_steps: int = Field(10, ge=1)
    """Number of consecutive skipped steps (with a non-finite loss or gradient) after which the run returns to its
    newest checkpoint. The run fails if it has no checkpoint, or if it would have to return again before training has
    passed the skipped steps."""
    remote: Location | None = Field(None, min_length=1)
    """Folder in a remote store, such as s3://bucket/runs. The newest and the best checkpoint, metrics and logs are
    copied to its subfolder NAME while training continues. A run resumes from this copy if its local checkpoints are
    older, damaged or absent."""
    log_every: int = Field(10, ge=1)
    """Steps between lines of metrics.jsonl, and between points in TensorBoard and Weights & Biases."""
    evaluate_every: int = Field(0, ge=0)
    """Steps between evaluations during training, each preceded by a checkpoint; 0 evaluates only at the end. A run that
    starts from `model.pretrained` is also evaluated before step 1, unless this option is 0, `best_metric` is not set,
    and `data.evaluation_sets` or `normalizer_anchors` is set."""
    best_metric: str | None = None
    """Evaluation metric whose largest value selects the best checkpoint, which is kept in addition to the newest ones.
    The model is also evaluated before step 1, so that a misspelled metric fails immediately."""
    wandb: str | None = None
    """Weights & Biases project to log metrics to, as PROJECT or ENTITY/PROJECT; needs the wandb package."""
    normalizer_anchors: int = Field(0, ge=0)
    """Number of training samples on which each evaluation measures the error of the estimated normalizers; 0 skips
    this measurement. Must be 0 for siglip and for losses of plugins, which do not estimate normalizers."""
    plugins: list[str] = Field([])
    """Modules that register losses, imported before the options are checked: names of modules, or paths of .py files.
    `--plugin` adds one (docs/how-to/custom_loss.md)."""
    profile_steps: int = Field(0, ge=0)
    """Number of steps to profile, after the first ten steps of a launch; 0 profiles none. The time of each phase of a
    step, and the traffic by purpose, are written to OUTPUT_DIR/NAME/profile/. `--profile` sets this option to 10."""

    @field_validator("name")
    @classmethod
    def _name_is_one_folder(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"\w[\w.,=+@-]{0,199}", name):
            raise ValueError(
                f"{name!r} is not a valid name of a run; use up to 200 letters, digits and any of _ . , = + @ -, and "
                "begin with a letter, a digit or _"
            )
        if name is not None and len(name.encode()) > _MOST_RUN_NAME_BYTES:
            raise ValueError(
                f"{name!r} has {len(name.encode())} bytes in UTF-8, which is too long for the name of a folder; use up "
                f"to {_MOST_RUN_NAME_BYTES} bytes"
            )
        return name


class SourceConfig(Section):
    """One source in a mixture of data sources."""

    path: Location = Field(min_length=1)
    """Pairs of the source, in any form that `data.train` accepts for a single source."""
    weight: float | None = Field(None, ge=0)
    """Weight of the source in each batch, relative to the other sources. By default, the source's number of samples."""


class AugmentConfig(Section):
    """Augmentations of the cropped training images, applied in the order of the options; none by default."""

    auto_augment: str | None = None
    """Name of an augmentation policy of timm: rand-m9-mstd0.5-inc1 (RandAugment; timm's documentation explains the
    parts of a name), augmix-m3-w3, original, v0, 3a and others."""
    color_jitter_prob: float = Field(0.0, ge=0, le=1)
    """Probability that `color_jitter` changes an image, as in open_clip's --aug-cfg; SimCLR uses 0.8."""
    color_jitter: tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat, Annotated[float, Field(ge=0, le=0.5)]] = (
        0.32,
        0.32,
        0.32,
        0.08,
    )
    """Largest relative changes in brightness, contrast and saturation, and the largest hue shift (1 is the full
    circle)."""
    gray_scale_prob: float = Field(0.0, ge=0, le=1)
    """Probability that an image is converted to gray, as in open_clip's --aug-cfg; SimCLR uses 0.2."""

    @model_validator(mode="after")
    def _jitter_is_used(self) -> AugmentConfig:
        default = type(self).model_fields["color_jitter"].default
        if self.color_jitter != default and not self.color_jitter_prob:
            raise ValueError("color_jitter has no effect without color_jitter_prob; set color_jitter_prob too")
        return self


class DataConfig(Section):
    train: Annotated[Location | list[SourceConfig], NoDecode] = ""
    """Training pairs: local tar shards (a folder, a file, a glob or brace pattern, a .txt list of these, or several of
    these joined by ::), a manifest folder (required for remote shards), or `demo:train`; or several weighted sources:
    [{"path": "/data/dfn", "weight": 3}, {"path": "/data/cc12m", "weight": 1}]."""
    val: Annotated[Annotated[int, Field(ge=0)] | Location, Field(union_mode="left_to_right")] = "auto"
    """Held-out pairs for retrieval: a single source, in any form that `train` accepts, or the number of pairs to hold
    out of `train`. `auto` uses the `val` folder next to `train` (next to the first of several sources) if it exists;
    otherwise, it holds out 0.1% of the pairs, but at least 200 and at most 10,000, or none if `train` has fewer than
    2,000 pairs. An empty value disables validation."""
    zero_shot: Location = "auto"
    """Zero-shot set: a folder with one subfolder of images per class, or a folder in CLIP_benchmark's layout. `auto`
    uses the `zero_shot` folder next to `train` (next to the first of several sources) if it exists; an empty value
    disables zero-shot evaluation."""
    evaluation_sets: LocalPath | None = None
    """Folder of evaluation sets to score, DataComp's or your own (docs/how-to/evaluate.md). By default, none."""
    evaluation_tasks: list[str] = Field([])
    """Names, keys or patterns, such as imagenet*, of evaluation sets to score. By default, all in the folder."""
    batch_size: int = Field(256, ge=2, le=1 << 30)
    """Global batch size over all ranks: the number of pairs that are contrasted with each other in one step."""
    micro_batch: int | None = Field(None, ge=1)
    """Pairs that go through the towers at once on each rank. By default, the rank's whole batch. A smaller value
    needs a second forward pass and keeps the batch's pixels in host memory."""
    workers: int = Field(2, ge=0, le=1024)
    """Loader processes per rank; 0 loads in the training process."""
    prefetch: int = Field(4, ge=1, le=1024)
    """Batches that each worker loads ahead. A batch with more than 134 MB of pixels per rank is split into parts, each
    of which counts as a batch here."""
    timeout: float = Field(300, gt=0)
    """Seconds without a batch, and without new data of remote shards, after which a loader process is replaced. A
    remote read may stall for up to a tenth of this time."""
    captions: Annotated[list[str] | dict[str, Annotated[float, Field(gt=0)]], NoDecode] = Field(["txt"])
    """Sources of captions in a sample: txt (one caption), txt:lines (one caption per line), json:KEY (a string or a
    list), or one of these after a prefix, such as syn.txt. Each visit to a sample draws one caption; {"txt": 0.7,
    "syn.txt": 0.3} draws its source with these weights, among the sources that have a caption for the sample."""
    decoder: Literal["simplejpeg", "pil"] = "simplejpeg"
    """Library that decodes JPEGs: simplejpeg is faster; pil produces open_clip's pixels. For random crops, both first
    scale large JPEGs down to 1/2, 1/4 or 1/8, which open_clip does not do."""
    image_features: Location | None = Field(None, min_length=1)
    """Folder that `neuclip-ds embed --output=trunk` wrote for the training data, with the image tower's pooled outputs
    before the projection. Training reads them instead of decoding images and running the tower's frozen trunk
    (docs/how-to/stored_features.md)."""
    text_features: Location | None = Field(None, min_length=1)
    """Folder with the text tower's pooled outputs before the projection, in the form of `image_features`. Training then
    does not tokenize captions or run the text tower's frozen trunk."""
    cache_dir: LocalPath | None = None
    """Folder on each node for copies of remote shards. By default, neuclip_ds_shards-UID in the system's temporary
    folder, writable only by you."""
    cache_gb: float = Field(100, gt=0)
    """Size limit of `cache_dir`, in GB. Each node caches the shards that it reads now or will read next."""
    downloads: int = Field(8, ge=1, le=1024)
    """Maximum number of concurrent prefetches of remote shards per node. In addition, loader processes fetch the shards
    that they are waiting for."""
    max_outage: float = Field(3600, gt=0)
    """Seconds that a batch may wait for remote storage that throttles or fails; after that, the run fails."""
    crop_scale: float = Field(0.9, gt=0, le=1)
    """Smallest fraction of an image's area that the random resized crop keeps; 1 uses the evaluation crop instead."""
    augment: AugmentConfig = Field(default_factory=AugmentConfig)
    shard_streams: int | None = Field(None, ge=1)
    """Number of shard streams that are interleaved in each batch; must divide the batch size. By default, up to 64 or,
    on more than 64 nodes, up to one per node."""
    shuffle_block_size: int | None = Field(None, ge=1)
    """Samples that are shuffled together within a shard stream. By default, up to 8 million over all streams (500,000
    per node on more than 16 nodes), or fewer if their shards would not fit into `cache_gb`."""
    drop_last: bool = False
    """Skip the samples that do not fill an epoch's last batch. If false, every sample of a single dataset is seen
    exactly once per epoch, and the last batch may have empty rows. Not for a mixture of sources, whose batches are
    always full."""
    max_bad_fraction: float = Field(0.01, ge=0, le=1)
    """Largest accepted fraction of bad samples among all samples read; above it, the run stops. The run also stops if
    more than 10 times this fraction of the samples of one rank's last 1,000 steps are bad. Fewer than 1,000 samples
    count as 1,000 in both fractions."""

    @field_validator("train", "captions", mode="before")
    @classmethod
    def _read_option(cls, value: Any, info: ValidationInfo) -> Any:
        """Parse a list or mapping given on the command line; leave a glob such as `[ab].tar` unchanged."""
        if not isinstance(value, str):
            return value
        if value[:1] in ("[", "{"):
            with suppress(ValueError):
                return json.loads(value)
        return value.split(",") if info.field_name == "captions" else value

    @field_validator("train", mode="after")
    @classmethod
    def _all_have_weights_or_none(cls, train: str | list[SourceConfig]) -> str | list[SourceConfig]:
        if isinstance(train, str):
            return train
        have_weight = [source.weight is not None for source in train]
        if any(have_weight) and not all(have_weight):
            raise ValueError("some sources have a weight and others do not; set all weights, or none")
        return train

    @model_validator(mode="after")
    def _mixtures_fill_their_batches(self) -> DataConfig:
        if self.sources and self.drop_last:
            raise ValueError(
                "drop_last has no effect on a mixture of sources, whose batches are always full; omit drop_last"
            )
        return self

    @property
    def sources(self) -> list[SourceConfig]:
        """The sources of a mixture; empty for a single dataset."""
        return [] if isinstance(self.train, str) else self.train

    @property
    def train_paths(self) -> list[str]:
        """Paths of the training data: `train` itself or the paths of its sources; empty if `train` is empty."""
        paths = [self.train] if isinstance(self.train, str) else [source.path for source in self.train]
        return [path for path in paths if path]


Trained = Literal["all", "projection", "frozen"] | Annotated[int, Field(ge=0)]
"""Trained part of a tower; a number K means the last K blocks."""

Pooling = Literal["cls", "mean", "eos", "last"]
"""Feature of a caption: the hidden state of the first token (`cls`), of the EOS token (`eos`) or of the last token,
whichever token it is (`last`), or the `mean` over all tokens. With `eos`, an EOS token is added if the tokenizer does
not end captions with one."""

Projection = Literal["linear", "mlp"]
"""Form of a projection to the joint space: one linear layer, or two with GELU between them."""

# options of model.text that a pretrained text encoder replaces
REPLACED_BY_TEXT_ENCODER = ("tokenizer", "vocab_size", "width", "layers", "heads")
# options of the towers that model.pretrained replaces; it also replaces model.embed_dim
REPLACED_BY_CHECKPOINT = {
    "vision": ("name", "options", "patch_drop", "mean", "std", "projection"),
    "text": (*REPLACED_BY_TEXT_ENCODER, "projection"),
}
# options that have the checkpoint's values by default; for other values, position embeddings are resampled
SIZES = {"vision": "image_size", "text": "context_length"}


class LoraConfig(Section):
    """LoRA adapters for the linear layers in the frozen blocks of both towers."""

    rank: int = Field(0, ge=0, le=1 << 12)
    """Rank of the adapters; 0 adds no adapters. A tower with `trainable=all` or `trainable=projection` gets none."""
    alpha: float = Field(16, gt=0)
    """Scale of the adapters, whose outputs are multiplied by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on the adapters' inputs."""


class TowerConfig(Section):
    """Options common to both towers."""

    trainable: Trained | None = None
    """Parameters to train: `all`, none (`frozen`), only the `projection` to the joint space, or, for a number K, the
    last K blocks with the final norm, pooling and projection (0: no blocks). By default, `all`, or `frozen` with LoRA.
    Applies to pretrained towers too."""

    @field_validator("trainable", mode="before")
    @classmethod
    def _names_a_part(cls, value: Any) -> Any:
        if value not in (None, "all", "projection", "frozen") and not str(value).isdecimal():
            raise ValueError(f"{str(value)[:50]!r} is not valid; use all, projection, frozen or a number of blocks")
        return value


class VisionConfig(TowerConfig):
    name: str = "vit_base_patch32_clip_224"
    """Name of a timm model, including DINOv3's (vit_*_dinov3) and SigLIP 2's (vit_*_siglip_*)."""
    pretrained: Location = ""
    """Pretrained weights of this tower: a timm tag such as openai or augreg_in21k, or a file. Position embeddings are
    resampled to `image_size`. By default, the weights are random."""
    image_size: int | None = Field(None, ge=8, le=1 << 14)
    """Side length of the square input images, in pixels. By default, the size of `model.pretrained`, else 224. If the
    size differs from the checkpoint's, the position embeddings are resampled, as in open_clip."""
    patch_drop: float = Field(0.0, ge=0, lt=1)
    """Fraction of an image's patches that training drops at random (FLIP), in timm models that support dropping them,
    without `model.pretrained`. Evaluation uses all patches."""
    class_token_only: Literal["auto"] | bool = "auto"
    """Whether the last block computes only the class token, which gives the same feature with 7% fewer FLOPs (in a
    ViT-B/16). `auto` does so on CPUs, for standard vision transformers that pool at the class token; `true` does so on
    GPUs too, where its speed has not been measured yet, and refuses other models. Applies to pretrained towers too."""
    projection: Projection = "linear"
    """Projection of the image model's feature to the joint space, without biases: one `linear` layer, or an `mlp` with
    (width + d) // 2 hidden units and GELU, as in open_clip's `hf_proj_type`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Additional keyword arguments of `timm.create_model`, such as patch_size, embed_dim, depth and num_heads."""
    mean: tuple[float, float, float] | None = None
    """Mean per channel, subtracted from pixels in [0, 1]. By default, with `pretrained`, timm's mean for the tag (for a
    file, timm's mean for the model); without `pretrained`, the mean of OpenAI's CLIP."""
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] | None = None
    """Standard deviation per channel, by which pixels are divided; the default is chosen as for `mean`."""

    def resolved_image_size(self) -> int:
        """Return the image size of a tower that is built from the config, by default 224."""
        return self.image_size or 224

    def statistics(self) -> tuple[Channels, Channels]:
        """Return the mean and standard deviation per channel, by default the values of OpenAI's CLIP."""
        return self.mean or OPENAI_MEAN, self.std or OPENAI_STD

    @field_validator("options")
    @classmethod
    def _sizes_are_possible(cls, options: dict[str, Any]) -> dict[str, Any]:
        for name, value in options.items():
            if isinstance(value, int) and not 0 <= value <= 1 << 16:
                raise ValueError(f"{name}={value} is out of range (0 to 65536)")
        return options


class TextConfig(TowerConfig):
    pretrained: Location = ""
    """Folder or hub name of a text encoder of transformers, such as BERT, ModernBERT, XLM-R or a Gemma- or Qwen-style
    embedding model. The tower starts from its weights and uses its tokenizer. By default, the tower is CLIP's
    transformer with random weights."""
    pooling: Pooling | None = None
    """Feature of a caption in a tower with `pretrained`: the hidden state of the first (`cls`), the EOS (`eos`) or the
    last token (`last`), or the mean over all tokens (`mean`). The default is the pooling in the encoder's
    sentence-transformers config; if this config is missing or unsupported, the option is required."""
    projection: Projection = "linear"
    """Projection of the text feature to the joint space; see `model.vision.projection`."""
    tokenizer: Location | None = None
    """Folder or hub name of a transformers tokenizer, or `clip_bpe` (CLIP's English tokenizer, which needs the
    open_clip_torch package). By default, or if that package is missing, a byte-level BPE is trained on the captions. A
    copy of the tokenizer is saved in the run's folder and is used when the run resumes."""
    vocab_size: int = Field(49408, ge=300, le=1 << 24)
    """Largest vocabulary size of a BPE that is trained on the captions; other tokenizers keep their vocabularies."""
    context_length: int | None = Field(None, ge=4, le=1 << 16)
    """Number of tokens, including special tokens, to which a caption is truncated or padded. By default, the length of
    `model.pretrained`, else 77. If the length differs from the checkpoint's, the position embeddings are resampled, as
    in open_clip."""
    width: int = Field(512, ge=8, le=1 << 16)
    """Hidden width of CLIP's text transformer."""
    layers: int = Field(12, ge=1, le=1000)
    """Number of blocks of CLIP's text transformer."""
    heads: int = Field(8, ge=1, le=1 << 16)
    """Number of attention heads in each block; must divide `width`."""
    packed: bool | Literal["auto"] = "auto"
    """Run the text tower only on the tokens of captions, without padding, which changes features only by rounding.
    `true` needs a text transformer of CLIP, MetaCLIP 2 or open_clip that is causal, is pooled at EOS, and has no
    attention dropout. `auto` packs the captions of such towers on CPUs, unless model.compile is `blocks` or `towers`.
    Packing has been tested on a simulated GPU, but not on a real one yet."""

    def resolved_context_length(self) -> int:
        """Return the context length of a tower that is built from the config, by default 77."""
        return self.context_length or 77

    @model_validator(mode="after")
    def _heads_divide_width(self) -> TextConfig:
        if self.width % self.heads:
            raise ValueError(f"heads={self.heads} does not divide width={self.width}; choose a divisor")
        return self

    @model_validator(mode="after")
    def _options_belong_to_the_tower(self) -> TextConfig:
        if not self.pretrained and self.pooling is not None:
            raise ValueError("pooling has no effect without model.text.pretrained; omit pooling")
        if self.pretrained:
            for name in REPLACED_BY_TEXT_ENCODER:
                if is_given(self, name):
                    raise ValueError(
                        f"{name} has no effect with model.text.pretrained, whose encoder sets it; omit {name}"
                    )
        return self


class ModelConfig(Section):
    pretrained: Location = ""
    """Checkpoint from which both towers start; it sets their architecture and tokenizer. Give the folder or hub name of
    a transformers model (CLIP, MetaCLIP 2, SigLIP, fixed-resolution SigLIP 2) or of an open_clip model,
    open_clip:ARCHITECTURE/TAG_OR_FILE, or the folder of a run or of a checkpoint in it."""
    vision: VisionConfig = Field(default_factory=VisionConfig)
    text: TextConfig = Field(default_factory=TextConfig)
    lora: LoraConfig = Field(default_factory=LoraConfig)
    embed_dim: int = Field(512, ge=2, le=1 << 16)
    """Dimension d of the joint feature space."""
    projection_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on the inputs of both projections to the joint space. docs/tutorials/stored_features.md uses 0.3 against
    overfitting of the projections of frozen towers."""
    activation_checkpointing: int | bool = False
    """Recompute activations in the backward pass instead of storing them, for all blocks (`true`) or for the first N
    blocks of each tower. A larger N uses less memory and takes more time."""
    compile: Literal["auto", "blocks", "towers", False] = False
    """Whether to compile the towers with torch.compile, which needs a C++ compiler: each block (`blocks`; identical
    blocks are compiled once), or whole towers (`towers` or `true`; the first steps then take minutes). `auto` means
    `blocks` on GPUs of machines with a C++ compiler, unless the DeepSpeed config uses ZeRO 3, and `false` otherwise.
    The default stays `false` until `blocks` has been measured on a GPU."""
    matmul_precision: Literal["tf32", "float32"] = "tf32"
    """Precision of matrix multiplications in float32 towers on a GPU: `tf32` has 11 significant bits, and open_clip
    uses it too. This option does not affect bf16 towers or the loss."""

    @field_validator("activation_checkpointing", mode="before")
    @classmethod
    def _counts_blocks(cls, value: Any) -> Any:
        if str(value).lower() not in ("true", "false") and not str(value).isdecimal():
            raise ValueError(f"{str(value)[:50]!r} is not valid; use true, false or a number of blocks")
        return value

    @field_validator("compile", mode="before")
    @classmethod
    def _accepts_bools(cls, value: Any) -> Any:
        given = str(value).lower()
        if given == "true":
            return "towers"  # as in version 0.1, whose runs can be resumed
        return False if given == "false" else value

    @model_validator(mode="after")
    def _weights_have_one_source(self) -> ModelConfig:
        for name, tower in (("vision", self.vision), ("text", self.text)):
            if self.pretrained and tower.pretrained:
                raise ValueError(
                    f"model.pretrained provides both towers; omit model.pretrained or model.{name}.pretrained"
                )
        return self

    @model_validator(mode="after")
    def _checkpoint_sets_the_architecture(self) -> ModelConfig:
        if not self.pretrained:
            return self
        given = []
        for tower, names in REPLACED_BY_CHECKPOINT.items():
            given += [f"model.{tower}.{name}" for name in names if is_given(getattr(self, tower), name)]
        if is_given(self, "embed_dim"):
            given.append("model.embed_dim")
        if given:
            options = "this option" if len(given) == 1 else "these options"
            raise ValueError(f"the checkpoint of model.pretrained determines {', '.join(given)}; omit {options}")
        return self

    @model_validator(mode="after")
    def _something_trains(self) -> ModelConfig:
        trained = {self.trained("vision"), self.trained("text")}
        if self.lora.rank and trained <= {"all", "projection"}:
            raise ValueError(
                "lora.rank has no effect if both towers have trainable=all or projection; set the trainable option of "
                "one tower to frozen or to a number of blocks, or omit lora.rank"
            )
        if not self.lora.rank and trained == {"frozen"}:
            raise ValueError(
                "vision.trainable and text.trainable are both frozen, so nothing trains; set one of them to projection "
                "or all, or set lora.rank"
            )
        return self

    def trained(self, tower: Literal["vision", "text"]) -> Trained:
        """Return which of a tower's own weights (not adapters) are trained: by default all, or none with LoRA."""
        chosen: Trained | None = getattr(self, tower).trainable
        if chosen is not None:
            return chosen
        return "frozen" if self.lora.rank else "all"


class OptimizerConfig(Section):
    name: Literal["adamw", "lamb", "lion", "sgd"] = "adamw"
    """Optimizer of the encoders; `objective.temperature.optimizer` sets the temperature's optimizer."""
    lr: float = Field(5e-4, ge=0)
    """Peak learning rate of the encoders."""
    min_lr: float = Field(0.0, ge=0)
    """Learning rate at the end of the schedule; `constant` ignores it."""
    schedule: Literal["cosine", "constant", "cooldown", "wsd"] = "cosine"
    """Learning rate after the warm-up: `cosine` decays to min_lr along half a cosine; `constant` does not decay;
    `cooldown` and `wsd` are constant until the last `cooldown_steps`, and then decay linearly (`cooldown`, open_clip's
    const-cooldown) or as 1 - sqrt (`wsd`: warm-up, stable, decay)."""
    warmup_steps: int = Field(500, ge=0)
    """Steps of linear warm-up; a warm-up that is not shorter than the run is reduced to a tenth of the run."""
    cooldown_steps: int | None = Field(None, ge=1)
    """Steps over which `cooldown` and `wsd` decay to min_lr. By default, a fifth of the run."""
    weight_decay: float = Field(0.2, ge=0)
    """Weight decay of parameters with two or more dimensions, but not of gains and biases. sgd adds it to the gradient;
    for the other optimizers, it is decoupled."""
    betas: tuple[Decay, Decay] = (0.9, 0.98)
    """Betas for AdamW, LAMB and Lion, and for the optimizers of three parameters of the losses: the temperature,
    SigLIP's bias and, with `objective.npn.order=joint`, NeuCLIP's prototypes."""
    eps: float = Field(1e-6, gt=0)
    """Epsilon for AdamW and LAMB, and for Adam on the parameters of the losses that `betas` lists."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of sgd."""
    max_grad_norm: float = Field(0.0, ge=0)
    """Maximum global gradient norm; 0 disables clipping."""
    vision_lr: float | None = Field(None, gt=0)
    """Peak learning rate of the image tower, on the same schedule. By default, `lr`."""
    text_lr: float | None = Field(None, gt=0)
    """Peak learning rate of the text tower, on the same schedule. By default, `lr`."""
    layer_decay: float = Field(1.0, gt=0, le=1)
    """Ratio of each layer's learning rate to that of the next layer of the tower, as in BEiT and EVA-CLIP. Layers after
    the blocks use the tower's `lr`, the last block uses this fraction of it, and the embeddings have the lowest
    learning rate."""
    lean_zero1: bool = False
    """Replace DeepSpeed's ZeRO 1 step in bf16 with one that gives the same result up to rounding, but halves the kernel
    launches of a step, halves the bytes that are sent for gradients, and starts sending gradients during the backward
    pass. Only for DeepSpeed configs with ZeRO 1, bf16 and float32 gradients, such as zero1_bf16, without offload; not
    yet tested on GPUs."""

    @model_validator(mode="after")
    def _rates_have_a_base(self) -> OptimizerConfig:
        if self.lr == 0 and (self.vision_lr or self.text_lr):
            raise ValueError(
                "lr=0 leaves no schedule for vision_lr and text_lr; set lr above 0 and, to train one tower only, "
                "model.vision.trainable or model.text.trainable to frozen"
            )
        return self


class EmaConfig(Section):
    decay: float = Field(0.0, ge=0, lt=1)
    """Decay of an exponential moving average of the weights, kept in float32; 0 disables it. At step n, the decay is
    at most (1 + n)/(10 + n). Evaluations score both the weights and the average, the latter as `ema/NAME`. Not
    available with `optimizer.name=sgd` and `optimizer.momentum=0`."""


class RecoveryConfig(Section):
    epochs: float = Field(0, ge=0, le=1e6)
    """Passes over the data with frozen weights before training, which recover the optimizer's moments and each
    sample's moving average u (TuneCLIP's first stage); 0 skips them. With `reuse`, set the same number as in the reused
    run."""
    loss: Literal["gcl", "hgcl", "method"] | None = None
    """Loss whose gradients the recovered moments average: the global contrastive loss (`gcl`, TuneCLIP Algorithm 1),
    its hinged form (`hgcl`), or the run's loss (`method`). By default, `gcl` for methods that keep u, and `method` for
    other methods, such as openclip and neuclip, for which only moments are recovered."""
    restore: list[Literal["moments", "statistics"]] = Field(["moments", "statistics"])
    """Recovered state that training uses: the optimizer's moments and step count (`moments`), and each sample's u if
    the method keeps u (`statistics`)."""
    reuse: LocalPath | None = None
    """Folder of a run whose recovery is reused, or one of its checkpoints; that run must have had the same initial
    weights and optimizer and, to restore `statistics`, the same data, temperature and reference model."""

    @model_validator(mode="after")
    def _gamma_has_a_start(self) -> RecoveryConfig:
        if self.reuse and not self.epochs and "statistics" in self.restore:
            raise ValueError(
                "reuse needs recovery.epochs, because gamma's schedule continues after the recovery; set "
                "recovery.epochs to its value in the reused run, or set recovery.restore=[moments]"
            )
        return self


class Config(Section):
    """All options of a run, nested as in a recipe.

    `neuclip-ds train --help all` prints every option with its default. A config is a pydantic model; an unknown option
    or an invalid value raises pydantic's `ValidationError`, which is a `ValueError`. An unknown method, options of
    another method, and some other conflicts between options of `objective` raise `UserError`.

    Example:
        import neuclip_ds

        config = neuclip_ds.Config(
            data={"train": "/data/pairs/train", "batch_size": 512},
            objective={"method": "fastclip_v3"},
            optimizer={"lr": 1e-3},
            epochs=30,
        )
        print(config.objective.temperature.rho)  # run = neuclip_ds.train(config) trains with it
    """

    run: RunConfig = Field(default_factory=RunConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    objective: SerializeAsAny[ObjectiveConfig] = Field(default_factory=default_objective)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    ema: EmaConfig = Field(default_factory=EmaConfig)
    recovery: RecoveryConfig = Field(default_factory=RecoveryConfig)
    epochs: float = Field(1.0, gt=0, le=1e6)
    """Passes over the training data."""
    max_steps: int | None = Field(None, ge=1)
    """Number of training steps; overrides `epochs`."""
    deepspeed: Location = "zero1_bf16"
    """DeepSpeed config: a name in ds_configs/ or the path of a JSON file."""

    @field_validator("objective", mode="before")
    @classmethod
    def _has_sections_of_registered_losses(cls, objective: Any) -> Any:
        """Validate `objective` with the class that includes the options of losses that `register_loss` added."""
        if isinstance(objective, ObjectiveConfig):
            return objective
        return objective_config().model_validate(objective)

    @model_validator(mode="before")
    @classmethod
    def _start_where_the_checkpoint_is(cls, tree: Any) -> Any:
        """With a pretrained checkpoint, start tau and bias at the checkpoint's values, not the method's defaults."""
        if not isinstance(tree, dict):
            return tree
        model = tree.get("model", {})
        objective = tree.get("objective", {})
        if not (isinstance(model, dict) and isinstance(objective, dict) and model.get("pretrained")):
            return tree
        blank: dict[str, Any] = {"temperature": {"initial": None}}
        if "siglip" in method_of(objective).sections:
            blank["siglip"] = {"bias": None}
        return {**tree, "objective": merge(blank, objective)}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as this class: a subclass with the options of registered losses cannot be imported by its name."""
        return Config.__new__, (Config,), self.__getstate__()

    def recovers_u(self) -> bool:
        """Return whether training starts with values of u from a recovery."""
        uses_recovery = self.recovery.epochs > 0 and "statistics" in self.recovery.restore
        return uses_recovery and find_method(self.objective.method).keeps_u

    def rank_batch(self, world_size: int) -> int:
        """Return the number of pairs per rank in a global batch; raise `UserError` if it is not a whole number."""
        batch_size = self.data.batch_size
        if batch_size % world_size:
            smaller = batch_size // world_size * world_size
            choices = f"{smaller} or {smaller + world_size}" if smaller else str(world_size)
            raise UserError(
                f"data.batch_size={batch_size} is not divisible by the {world_size} ranks; use {choices}, or a "
                "different number of ranks."
            )
        return batch_size // world_size

    def micro_batch(self, world_size: int) -> int:
        """Return the number of pairs that a rank passes through the towers at a time.

        Raises `UserError` if the number of ranks does not divide the global batch, or if `data.micro_batch` does not
        divide a rank's batch.
        """
        rank_batch = self.rank_batch(world_size)
        micro_batch = self.data.micro_batch or rank_batch
        if rank_batch % micro_batch:
            up_to_root = [size for size in range(1, math.isqrt(rank_batch) + 1) if rank_batch % size == 0]
            from_root = [rank_batch // size for size in reversed(up_to_root)]
            nearest_divisor = min(up_to_root + from_root, key=lambda size: abs(size - micro_batch))
            raise UserError(
                f"data.micro_batch={micro_batch} does not divide the rank's batch of {rank_batch} "
                f"({self.data.batch_size} over {counted(world_size, 'rank')}); use {nearest_divisor}."
            )
        return micro_batch


def dump(config: Config) -> str:
    """Return the config as YAML, which can be used as a recipe.

    Sections that the method does not use, and options that a checkpoint or a text encoder replaces, are omitted.
    """
    return yaml.safe_dump(without_replaced(config.model_dump(mode="json")), sort_keys=False)


def without_replaced(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree of options without the options of `model` that its checkpoint or its text encoder replaces.

    Configs that earlier versions saved contain these options, which have no effect.
    """
    model = tree.get("model")
    if not isinstance(model, Mapping):  # the file is damaged
        return dict(tree)
    replaced: Mapping[str, Sequence[str]] = {}
    text = model.get("text")
    if model.get("pretrained"):
        replaced = REPLACED_BY_CHECKPOINT
        model = {name: value for name, value in model.items() if name != "embed_dim"}
    elif isinstance(text, Mapping) and text.get("pretrained"):
        replaced = {"text": REPLACED_BY_TEXT_ENCODER}
    towers: dict[str, Any] = {}
    for tower, names in replaced.items():
        options = model.get(tower)
        if isinstance(options, Mapping):
            towers[tower] = {name: value for name, value in options.items() if name not in names}
    return {**tree, "model": {**model, **towers}}
