"""The typed config tree: every option with its type, default and meaning.

Nothing here imports torch, so that `--help` and mistakes in a config answer at once. A recipe (YAML) fills the
tree and `--dotted.name=value` overrides it; see `neuclip_ds.recipe`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, field_validator, model_validator

from neuclip_ds.errors import UserError
from neuclip_ds.objectives.config import ObjectiveConfig
from neuclip_ds.objectives.methods import method_of
from neuclip_ds.section import Section, merge

Decay = Annotated[float, Field(ge=0, lt=1)]
Weight = Annotated[float, Field(ge=0)]


class RunConfig(Section):
    name: str | None = Field(None, min_length=1)
    """Name of the run's folder. By default the recipe's name."""
    folder: Path = Path("runs")
    """Folder of all runs; config, log, metrics and checkpoints go to FOLDER/NAME."""
    seed: int = Field(0, ge=0)
    """Seed of weights, data order, augmentation and dropout."""
    deterministic: bool = False
    """Use deterministic algorithms only, so that a resumed run on GPUs equals one without interruption bit for bit.
    They may be slower, and a model with an operation that has none is refused."""
    resume: Literal["auto", "never"] = "auto"
    """`auto` resumes from the run's newest complete checkpoint; `never` refuses a folder that has one."""
    checkpoint_every: int = Field(1000, ge=1)
    """Steps between checkpoints; one more is saved at the end."""
    keep_checkpoints: int = Field(2, ge=1)
    """Number of newest checkpoints that are kept on disk."""
    max_skipped: int = Field(10, ge=1)
    """Steps in a row that may be skipped, as loss or gradient is not finite. Then the run returns to its newest
    checkpoint, and ends if it fails there again."""
    compare_every: int = Field(1000, ge=0)
    """Steps between comparisons of what all ranks must hold with the same bits; 0 compares before checkpoints only."""
    save_attempts: int = Field(3, ge=1)
    """Checkpoints in a row that cannot be written before the run stops; until then it trains on, with a warning."""
    background_saves: bool = False
    """Write checkpoints from a copy in host memory while training continues; each rank needs room for its share of
    weights and moments twice."""
    remote: str | None = Field(None, min_length=1)
    """Folder of a remote store, such as s3://bucket/runs, to whose folder NAME checkpoints, metrics and logs are copied
    while training continues. A run resumes from there where its local checkpoints are older or absent."""
    keep_remote: int | None = Field(None, ge=1)
    """Number of newest checkpoints that are kept there, besides the best one. By default all."""
    log_every: int = Field(10, ge=1)
    """Steps between lines of metrics.jsonl, and between points in TensorBoard and Weights & Biases."""
    evaluate_every: int = Field(0, ge=0)
    """Steps between evaluations during training, each after a checkpoint; 0 evaluates at the end only."""
    evaluate_start: bool = False
    """Also evaluate before step 1, for example to compare fine-tuning with its start."""
    best_metric: str | None = None
    """Evaluation metric, larger is better, whose best checkpoint is kept besides the newest. Also evaluates before
    step 1, so a misspelt metric fails at once."""
    report: bool = True
    """Write FOLDER/NAME/report.html and plots/ at the end."""
    wandb: str | None = None
    """Also log metrics to this Weights & Biases project, PROJECT or ENTITY/PROJECT; needs `pip install wandb`."""
    sample_log: bool = False
    """Write the sample indices of every step to FOLDER/NAME/samples/, one file per rank."""
    normalizer_anchors: int = Field(0, ge=0)
    """Training samples on which each evaluation measures the error of the normalisers; 0 does not measure."""
    profile_steps: int = Field(0, ge=0)
    """Steps to profile: time and traffic of each part go to FOLDER/NAME/profile/. `--profile` sets 10."""
    profile_after: int = Field(10, ge=1)
    """Steps before the profile begins. NeuCLIP's network predicts once `objective.npn.prototypes` samples have been
    seen."""

    @field_validator("remote")
    @classmethod
    def _remote_outlives_the_run(cls, remote: str | None) -> str | None:
        if remote is not None and remote.startswith("memory:"):
            raise ValueError("memory:// ends with the process; name a store that outlives the run, such as s3://...")
        return remote


class SourceConfig(Section):
    """A source of a mixture."""

    train: str = Field(min_length=1)
    """Its pairs, in the forms of `data.train`."""
    weight: Weight | list[tuple[Annotated[int, Field(ge=0)], Weight]] | None = None
    """Its share of the rows of each batch, relative to the other weights; or [step, share] pairs, each from a step on,
    such as [[0, 1], [10000, 3]]. By default the number of its samples, times `upsample`."""
    upsample: float = Field(1, gt=0)
    """How often its samples are seen relative to those of a source with 1."""

    @model_validator(mode="after")
    def _weight_is_known_from_the_start(self) -> SourceConfig:
        if isinstance(self.weight, list):
            steps = [step for step, _ in self.weight]
            if steps[:1] != [0] or steps != sorted(set(steps)):
                raise ValueError("weights by step begin with step 0 and ascend, as in [[0, 1], [10000, 3]]")
        if self.weight is not None and self.upsample != 1:
            raise ValueError("weight and upsample exclude each other: an upsampled source's weight is its size")
        return self


class DataConfig(Section):
    train: str = ""
    """Training pairs: a folder of tar shards, a glob or brace pattern, a manifest folder, or `demo:train`."""
    sources: dict[str, SourceConfig] = Field(default_factory=dict)
    """Instead of `train`, several weighted sources by name: {dfn: {train: /data/dfn, weight: 3}, cc: {train: ...}}."""
    stratified: bool = True
    """Whether every batch has the same share of each source; else the rows are drawn at random, over 64 batches in the
    same shares."""
    val: str = "auto"
    """Held-out pairs for retrieval, in the same forms; `auto` takes a folder `val` next to `train`, empty is none."""
    zero_shot: str = "auto"
    """Zero-shot set in CLIP_benchmark's layout; `auto` takes a folder `zero_shot` next to `train`, empty is none."""
    evaluation_sets: Path | None = None
    """Folder of DataComp's evaluation sets (docs/reference/evaluation.md) to score. By default none."""
    evaluation_tasks: list[str] = Field([])
    """Evaluation sets to score, by names, keys or patterns such as imagenet*. By default all in the folder."""
    batch_size: int = Field(256, ge=2, le=1 << 30)
    """Global batch size over all ranks: the pairs that contrast with each other in one step."""
    micro_batch: int | None = Field(None, ge=1)
    """Pairs that go through the towers at once on a rank. By default the rank's batch; less costs a second pass, and
    keeps the pixels of the batch in host memory."""
    workers: int = Field(2, ge=0, le=1024)
    """Loader processes per rank; 0 loads in the training process."""
    prefetch: int = Field(4, ge=1, le=1024)
    """Batches that each worker loads ahead; of a rank's batch with more than 134 MB of pixels, parts of that size."""
    allow_commands: bool = False
    """Run the `pipe:` commands of a manifest. They can do what you can: set it only if you trust the manifest."""
    timeout: float = Field(300, gt=0)
    """Seconds to wait for a batch, or for the next remote shard, before loader processes are restarted; a remote read
    may stall a tenth of it."""
    restarts: int = Field(2, ge=0)
    """Restarts in a row of loader processes that were killed or hang; then the run stops with a message."""
    captions: list[str] = Field(["txt"])
    """Where captions are: txt, txt:lines (one per line), json:KEY (a string or a list). One of several is drawn."""
    decoder: Literal["simplejpeg", "pil", "torchvision"] | None = None
    """Library that decodes JPEGs. By default simplejpeg, the fastest; pil gives open_clip's pixels. A run keeps its
    decoder when it resumes; those of earlier versions had pil."""
    cache_dir: Path | None = None
    """Folder on each node for copies of remote shards. By default neuclip_ds_shards-UID in the folder for temporary
    files, which only you can write to."""
    cache_gb: float = Field(100, gt=0)
    """Size limit of that folder, in GB. Each node keeps the shards there that it reads from at a time."""
    cache_local: bool = False
    """Also copy shards that are files to that folder, each in one sequential read: for Lustre, GPFS, NFS and other file
    systems that nodes share."""
    transfers: int = Field(8, ge=1, le=1024)
    """Remote shards that a node fetches ahead at a time, and as many that a batch waits for. Fewer while the storage
    throttles or fails."""
    min_rate: float = Field(0.1, ge=0)
    """MB per second below which the transfer of a remote shard is stopped and repeated, with fewer others at a time; 0
    accepts any."""
    max_outage: float = Field(3600, gt=0)
    """Seconds that a batch waits for remote storage that refuses access, throttles or fails; then the run ends."""
    crop_scale: float = Field(0.9, gt=0, le=1)
    """Smallest share of the area that the random resized crop keeps; 1 turns augmentation off."""
    shard_streams: int | None = Field(None, ge=1)
    """Shard streams that each batch is interleaved from; must divide the batch. By default up to 64, or one for each of
    more nodes."""
    shuffle_block: int | None = Field(None, ge=1)
    """Samples that are shuffled together within a shard stream. By default up to 8 million over all streams, 16
    million on 64 nodes, fewer if the shards of so many exceed `cache_gb`."""
    last_batch: Literal["pad", "drop"] = "pad"
    """Last batch of an epoch: `pad` sees every sample exactly once and leaves rows empty, `drop` skips the rest."""
    reader: Literal["tar", "webdataset"] = "tar"
    """Reader of the shards: the indexed tar reader, or the webdataset library (slower, for comparison)."""
    max_bad_fraction: float = Field(0.01, ge=0, le=1)
    """Share of bad samples above which the run stops; of those of one node's last 1,000 steps, ten times that share."""

    @model_validator(mode="after")
    def _train_or_sources(self) -> DataConfig:
        if self.train and self.sources:
            raise ValueError("data.train and data.sources are both set; name the data as one of them")
        if len({source.weight is None for source in self.sources.values()}) > 1:
            raise ValueError("some sources have a weight and others not; give each one, or none")
        return self

    @property
    def first_train(self) -> str:
        """What `train` or the first source names."""
        return self.train or next((source.train for source in self.sources.values()), "")


class VisionConfig(Section):
    name: str = "vit_base_patch32_clip_224"
    """Name of a timm model."""
    image_size: int = Field(224, ge=8, le=1 << 14)
    """Side of the square input, in pixels."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of `timm.create_model`, such as patch_size, embed_dim, depth, num_heads."""
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    """Mean per channel that is subtracted from pixels in [0, 1]; OpenAI CLIP's by default."""
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = (0.26862954, 0.26130258, 0.27577711)
    """Standard deviation per channel that pixels are divided by."""

    @field_validator("options")
    @classmethod
    def _sizes_are_possible(cls, options: dict[str, Any]) -> dict[str, Any]:
        for name, value in options.items():
            if isinstance(value, int) and not 0 <= value <= 1 << 16:
                raise ValueError(f"{name}={value} is no size that a tower can have")
        return options


class TextConfig(Section):
    tokenizer: str | None = None
    """transformers tokenizer, a local folder or hub name. By default a byte-level BPE is trained on the captions."""
    vocab_size: int = Field(49408, ge=300, le=1 << 24)
    """Size of the trained BPE; a named tokenizer has its own."""
    context_length: int = Field(77, ge=4, le=1 << 16)
    """Tokens that a caption is cut or padded to."""
    width: int = Field(512, ge=8, le=1 << 16)
    """Hidden width."""
    layers: int = Field(12, ge=1, le=1000)
    """Transformer blocks."""
    heads: int = Field(8, ge=1, le=1 << 16)
    """Attention heads; must divide the width."""

    @model_validator(mode="after")
    def _heads_divide_width(self) -> TextConfig:
        if self.width % self.heads:
            raise ValueError(f"heads={self.heads} does not divide width={self.width}; choose a divisor")
        return self


class ModelConfig(Section):
    pretrained: str = ""
    """Checkpoint to start from; its architecture and tokenizer replace those below. A folder or hub name of a
    transformers CLIPModel or SiglipModel or of an open_clip model, or open_clip:ARCHITECTURE/TAG_OR_FILE."""
    vision: VisionConfig = Field(default_factory=VisionConfig)
    text: TextConfig = Field(default_factory=TextConfig)
    embed_dim: int = Field(512, ge=2, le=1 << 16)
    """Width d of the joint feature space."""
    activation_checkpointing: bool = False
    """Recompute the towers' activations in the backward pass instead of keeping them."""
    compile: bool = False
    """Compile the towers with torch.compile, which needs a C++ compiler; the first steps then take minutes."""
    matmul_precision: Literal["tf32", "float32"] = "tf32"
    """Precision in which a GPU multiplies the matrices of float32 towers: `tf32` has 11 significant bits and is what
    open_clip sets. bf16 towers and the loss do not follow it."""


class OptimizerConfig(Section):
    name: Literal["adamw", "lamb", "lion", "sgd"] = "adamw"
    """Optimizer of the encoders; the temperature has `objective.temperature.optimizer`."""
    lr: float = Field(5e-4, ge=0)
    """Peak learning rate of the encoders."""
    min_lr: float = Field(0.0, ge=0)
    """Learning rate at the end of the cosine."""
    warmup_steps: int = Field(500, ge=0)
    """Steps of linear warm-up."""
    weight_decay: float = Field(0.2, ge=0)
    """Weight decay of matrices, not of gains and biases. Coupled with the gradient in sgd, decoupled in the others."""
    betas: tuple[Decay, Decay] = (0.9, 0.98)
    """Moment decays of AdamW, LAMB and Lion, and of the temperature's optimizer."""
    eps: float = Field(1e-6, gt=0)
    """Epsilon of AdamW and LAMB, and of the temperature's Adam."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of sgd."""
    clip_norm: float = Field(0.0, ge=0)
    """Largest global gradient norm; 0 does not clip."""


class RecoveryConfig(Section):
    mode: Literal["none", "full", "cached"] = "none"
    """Recovery of u and the optimizer's moments with frozen weights before training (TuneCLIP's first stage): `full`,
    or `cached`, which fills u in one pass from blocks of features and then takes a few backward steps."""
    epochs: float = Field(5, gt=0, le=1e6)
    """Passes over the data with mode=full."""
    loss: Literal["gcl", "hgcl"] = "gcl"
    """Loss whose gradients are averaged: the global contrastive loss (TuneCLIP Algorithm 1), or the hinged one."""
    cached_block: int = Field(32768, ge=2, le=1 << 30)
    """Pairs that contrast with each other in a block, with mode=cached."""
    cached_steps: int = Field(200, ge=1)
    """Backward steps for the moments, with mode=cached."""
    transfer: list[Literal["moments", "statistics"]] = Field(["moments", "statistics"])
    """State that training takes over: the optimizer's moments and step count, the u of each sample."""
    gamma: Literal["continue", "restart"] = "continue"
    """Schedule of gamma where u is taken over: `continue` after the epochs of the recovery, or `restart` at 1, which
    replaces u at a sample's next visit. The paper leaves it open."""
    reuse: Path | None = None
    """Run whose recovered statistics are taken instead; it must have this run's initial weights and data."""


class BudgetConfig(Section):
    epochs: float = Field(1.0, gt=0, le=1e6)
    """Passes over the training data."""
    steps: int | None = Field(None, ge=1)
    """Steps to run instead of whole epochs."""


class Config(Section):
    """All options of a run, as a recipe nests them."""

    run: RunConfig = Field(default_factory=RunConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    recovery: RecoveryConfig = Field(default_factory=RecoveryConfig)
    budget: BudgetConfig = Field(default_factory=BudgetConfig)
    deepspeed: str = "zero1_bf16"
    """DeepSpeed config: a name in ds_configs/ or the path of a JSON file."""

    @model_validator(mode="before")
    @classmethod
    def _start_where_the_checkpoint_is(cls, tree: Any) -> Any:
        """With a pretrained checkpoint, tau and bias start at its own values instead of the method's."""
        model, objective = (tree.get(key, {}) if isinstance(tree, dict) else None for key in ("model", "objective"))
        if not (isinstance(model, dict) and isinstance(objective, dict) and model.get("pretrained")):
            return tree
        blank = {section: dict.fromkeys(options) for section, options in method_of(objective).starts.items()}
        return {**tree, "objective": merge(blank, objective)}

    def rank_batch(self, world_size: int) -> int:
        """Return the number of pairs of the global batch that each rank holds."""
        if self.data.batch_size % world_size:
            below = self.data.batch_size // world_size * world_size
            raise UserError(
                f"data.batch_size={self.data.batch_size} is not divisible by the {world_size} ranks; "
                f"use {max(below, world_size)} or {below + world_size}, or another number of ranks."
            )
        return self.data.batch_size // world_size

    def micro_batch(self, world_size: int) -> int:
        """Return the number of pairs that go through the towers at once on a rank."""
        rank_batch = self.rank_batch(world_size)
        micro = self.data.micro_batch or rank_batch
        if rank_batch % micro:
            small = [size for size in range(1, math.isqrt(rank_batch) + 1) if rank_batch % size == 0]
            divisors = small + [rank_batch // size for size in reversed(small)]
            nearest = min(divisors, key=lambda size: abs(size - micro))
            raise UserError(
                f"data.micro_batch={micro} does not divide the rank's batch of {rank_batch} "
                f"({self.data.batch_size} over {world_size} ranks); use {nearest}."
            )
        return micro
