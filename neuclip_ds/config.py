"""The typed config tree: every option with its type, default and meaning.

Nothing here imports torch, so that `--help` and mistakes in a config answer at once. A recipe (YAML) fills the
tree and `--dotted.name=value` overrides it; see `neuclip_ds.recipe`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from neuclip_ds.errors import UserError


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, the string under a field is its help text."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True)


class RunConfig(Section):
    name: str | None = None
    """Name of the run's folder; the recipe's name when absent."""
    folder: Path = Path("runs")
    """Where runs are kept: config, log, metrics and checkpoints go to FOLDER/NAME."""
    seed: int = Field(0, ge=0)
    """Seed of weights, data order, augmentation and dropout."""
    resume: Literal["auto", "never"] = "auto"
    """`auto` goes on from the run's newest complete checkpoint, `never` refuses a folder that holds one."""
    checkpoint_every: int = Field(1000, ge=1)
    """Steps between checkpoints; one more is written at the end."""
    keep_checkpoints: int = Field(2, ge=1)
    """How many of the newest checkpoints stay on disk."""
    log_every: int = Field(10, ge=1)
    """Steps between lines of metrics.jsonl, and between points of TensorBoard and Weights & Biases."""
    evaluate_every: int = Field(0, ge=0)
    """Steps between evaluations during training; 0 evaluates at the end only."""
    evaluate_start: bool = False
    """Evaluate before the first step too, as fine-tuning has something to lose."""
    best_metric: str | None = None
    """Evaluated metric, the larger the better, whose best checkpoint stays on disk besides the newest; implies
    `evaluate_start`, which meets a name that no evaluation gives before the first step."""
    report: bool = True
    """Write FOLDER/NAME/report.html and plots/ at the end."""
    wandb: str | None = None
    """Weights & Biases project, or ENTITY/PROJECT, that the metrics go to as well; needs `pip install wandb`."""
    sample_log: bool = False
    """Write the sample indices of every step to FOLDER/NAME/samples/, one file a rank."""
    normalizer_anchors: int = Field(0, ge=0)
    """Anchors of the training set for which each evaluation measures the normaliser's error; 0 does not measure."""
    profile_steps: int = Field(0, ge=0)
    """Steps whose time and traffic are taken apart in FOLDER/NAME/profile/; `--profile` is ten of them."""
    profile_after: int = Field(10, ge=1)
    """Steps of this start that pass before them; NeuCLIP's network predicts once `objective.npn.prototypes` samples
    have been seen."""


class DataConfig(Section):
    train: str = ""
    """Training pairs: a folder of tar shards, a glob or brace pattern, a manifest folder, or `demo:train`."""
    val: str = "auto"
    """Held-out pairs for retrieval, in the same forms; `auto` is a folder `val` beside `train`, empty is none."""
    zero_shot: str = "auto"
    """Zero-shot set in CLIP_benchmark's layout; `auto` is a folder `zero_shot` beside `train`, empty is none."""
    evaluation_sets: Path | None = None
    """Folder of DataComp's evaluation sets (docs/evaluation.md), which each evaluation scores; absent is none."""
    evaluation_tasks: list[str] = []
    """Which of them, by names, keys or patterns such as imagenet*; none named means all that are there."""
    batch_size: int = Field(256, ge=2)
    """Global batch: pairs that contrast with each other in one step, over all ranks."""
    micro_batch: int | None = Field(None, ge=1)
    """Pairs that go through the towers at once on a rank; smaller than the rank's batch means two passes."""
    workers: int = Field(2, ge=0)
    """Loader processes a rank; 0 loads in the training process."""
    prefetch: int = Field(4, ge=1)
    """Batches that each worker prepares ahead."""
    timeout: float = Field(300, gt=0)
    """Seconds to wait for a batch before loader processes are replaced; for a byte of a remote shard a tenth of it."""
    restarts: int = Field(2, ge=0)
    """How often in a row loader processes that died or hang are replaced before the run stops and says so."""
    captions: list[str] = ["txt"]
    """Where captions are: txt, txt:lines (one each), json:KEY (a string or a list); of several one is drawn."""
    decoder: Literal["pil", "torchvision", "simplejpeg"] = "pil"
    """Library that decodes JPEGs for training; simplejpeg is the fastest where it is installed."""
    cache_dir: Path | None = None
    """Folder on each node for copies of remote shards; absent: neuclip_ds_shards in the folder for temporary files."""
    cache_gb: float = Field(100, gt=0)
    """Size of that folder at most, in GB; best twice the shards of one shuffle block in each of a node's slots."""
    crop_scale: float = Field(0.9, gt=0, le=1)
    """Smallest area share of the random resized crop; 1 turns augmentation off."""
    shard_streams: int | None = Field(None, ge=1)
    """Streams that a batch is mixed from; must divide the batch. Default: the largest divisor <= number of shards."""
    shuffle_block: int = Field(80_000, ge=1)
    """Samples that are shuffled together within a slot."""
    tail: Literal["pad", "drop"] = "pad"
    """End of an epoch: `pad` sees every sample exactly once (the last batch has empty rows), `drop` skips the rest."""
    reader: Literal["tar", "webdataset"] = "tar"
    """Who reads shards: our indexed tar reader, or the webdataset library (slower, for comparison)."""
    max_bad_fraction: float = Field(0.01, ge=0, le=1)
    """Share of undecodable samples above which the run stops."""


class VisionConfig(Section):
    name: str = "vit_base_patch32_clip_224"
    """timm model name."""
    image_size: int = Field(224, ge=8)
    """Side of the square input, pixels."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of `timm.create_model`, such as patch_size, embed_dim, depth, num_heads."""
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    """Per-channel mean subtracted from pixels in [0, 1] (OpenAI CLIP's by default)."""
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)
    """Per-channel standard deviation that pixels are divided by."""


class TextConfig(Section):
    tokenizer: str | None = None
    """transformers tokenizer, a local folder or hub name; absent: a byte-level BPE trained on the captions."""
    vocab_size: int = Field(49408, ge=300)
    """Size of the trained BPE; taken from the tokenizer when one is named."""
    context_length: int = Field(77, ge=4)
    """Tokens a caption is cut or padded to."""
    width: int = Field(512, ge=8)
    """Hidden width."""
    layers: int = Field(12, ge=1)
    """Transformer blocks."""
    heads: int = Field(8, ge=1)
    """Attention heads; must divide the width."""

    @model_validator(mode="after")
    def _heads_divide_width(self) -> TextConfig:
        if self.width % self.heads:
            raise ValueError(f"heads={self.heads} does not divide width={self.width}; choose a divisor")
        return self


class ModelConfig(Section):
    pretrained: str = ""
    """Checkpoint to start from, whose architecture and tokenizer replace those below: a folder or hub name of a
    transformers CLIPModel or SiglipModel or of an open_clip model, or open_clip:ARCHITECTURE/TAG_OR_FILE."""
    vision: VisionConfig = Field(default_factory=VisionConfig)
    text: TextConfig = Field(default_factory=TextConfig)
    embed_dim: int = Field(512, ge=2)
    """Width d of the joint feature space."""
    activation_checkpointing: bool = False
    """Recompute the towers' activations in the backward pass instead of keeping them."""
    compile: bool = False
    """Towers go through torch.compile, which needs a C++ compiler; the first steps then take minutes."""


class TemperatureConfig(Section):
    initial: float | None = Field(None, gt=0)
    """Temperature tau at step 0; absent: the pretrained checkpoint's, or 0.07."""
    minimum: float = Field(0.01, gt=0)
    """Lower bound of tau; 0.01 is CLIP's clamp of 1/tau at 100."""
    maximum: float = Field(1.0, gt=0)
    """Upper bound of tau."""
    lr: float | None = Field(None, ge=0)
    """Learning rate of log(1/tau); absent: the encoders'."""
    schedule: Literal["encoder", "constant", "third_below_0.03"] = "encoder"
    """`encoder` follows the encoders' schedule; `third_below_0.03` is lr, and lr/3 while tau < 0.03 (FastCLIP)."""
    rho: float | list[float] = 0.0
    """Margin rho of the robust contrastive loss (FastCLIP eq. 10); a list's entries hold for equal parts of the run."""
    data_term: Literal["paper", "released_code"] = "paper"
    """Coefficient of the data term in tau's gradient: 1 in the papers, 2 in FastCLIP's released code."""
    individual: Literal["paper", "released_code"] = "paper"
    """Adam of individual temperatures: textbook, or with the released code's clamp and bias correction by epochs."""

    @model_validator(mode="after")
    def _bounds_hold_initial(self) -> TemperatureConfig:
        if self.initial is not None and not self.minimum <= self.initial <= self.maximum:
            raise ValueError(
                f"initial={self.initial} is outside [minimum={self.minimum}, maximum={self.maximum}]; move one of them"
            )
        return self


class SiglipConfig(Section):
    bias: float | None = None
    """Bias of the logits at step 0, which is learned; absent: the pretrained checkpoint's, or -10, as SigLIP starts."""


class HingeConfig(Section):
    margin: float = Field(0.1, ge=0)
    """Margin m of TuneCLIP's pair loss max(s_ij - s_ii + m, 0)^power."""
    power: float = Field(2.0, ge=1)
    """Its exponent; TuneCLIP eq. 8 squares."""


class MovingAverageConfig(Section):
    gamma: Literal["cosine", "constant"] = "cosine"
    """Schedule of gamma: FastCLIP's cosine, or SogCLR's constant gamma_min; a sample's first visit always takes 1."""
    gamma_min: float = Field(0.2, gt=0, le=1)
    """Weight of the new estimate once the schedule has ended."""
    gamma_epochs: float = Field(18, ge=0)
    """Epochs E over which gamma falls from 1 to gamma_min on a cosine, in steps of one epoch."""
    gamma_epoch_steps: int | None = Field(None, ge=1)
    """Training steps that count as an epoch here; absent: the data's. For runs that see each sample about once."""


class NpnConfig(Section):
    network: Literal["prototypes", "mlp"] = "prototypes"
    """Form of the network: prototypes (NeuCLIP eq. 10), or AmorLIP's MLP fitted to the same objective (ablation)."""
    mlp_lr: float = Field(1e-3, gt=0)
    """Adam's learning rate where the network is an MLP."""
    prototypes: int = Field(4096, ge=1)
    """Columns m of W1 and of W2."""
    updates: int = Field(10, ge=0)
    """AdaGrad updates T_u a step."""
    restart_every: int = Field(500, ge=0)
    """Steps T_r between re-draws of the columns from recent features; 0 draws them once."""
    lr: float = Field(1.0, gt=0)
    """AdaGrad learning rate; the published 1.0 belongs to B >= 1024 and m = 4096, small settings need a smaller one."""
    initial_accumulator: float = Field(0.0, ge=0)
    """AdaGrad's accumulator at the start."""
    reset_accumulator: bool = False
    """Whether a restart also resets AdaGrad's accumulator."""
    alpha_grad: Literal["stop", "full"] = "stop"
    """Encoder gradient: `stop` holds alpha constant, `full` is the literal gradient of NeuCLIP eq. 12."""
    objective: Literal["unified", "separate"] = "unified"
    """What the network is fitted to: the loss itself, or (alpha - log(eps + g))^2 (ablation)."""
    order: Literal["alternating", "simultaneous"] = "alternating"
    """Network first and the encoders with its new prediction, or both from the old one (Algorithm 3, ablation)."""


class AmortizedConfig(Section):
    width: float = Field(1.0, gt=0)
    """Hidden units of the amortisation MLP as a multiple f_d of the feature width."""
    loss: Literal["l2_log", "kl", "js"] = "l2_log"
    """What lambda is fitted by: squared error of logarithms, or KL or Jensen-Shannon divergence."""
    divergence_l2: float = Field(0.1, ge=0)
    """Weight of l2_log beside kl and js."""
    lr: float = Field(1e-3, gt=0)
    """Adam's learning rate (the released code multiplies it by the number of ranks)."""
    clip_norm: float = Field(1.0, ge=0)
    """Largest gradient norm of the MLPs; 0 does not clip."""
    updates: int = Field(3, ge=0)
    """Adam steps T_lambda on a batch."""
    online_every: int = Field(1, ge=1)
    """Steps T_online between fits of the online nets."""
    target_every: int = Field(2, ge=1)
    """Steps T_target between updates of the EMA target nets."""
    ema: float = Field(0.999, ge=0, le=1)
    """Decay alpha of the EMA."""
    previous_weight: float = Field(0.8, ge=0, lt=1)
    """Largest weight beta_T of the last epoch's net in the target."""
    previous_epochs: float = Field(16, ge=0)
    """Epochs E over which that weight rises from 0 on a cosine."""
    positive_weight: float = Field(1.0, ge=0)
    """Weight c of an anchor's own pair in the partition: 1 in the paper, 1e-3 in the released scripts."""
    stage2: Literal["ema", "combined"] = "ema"
    """Normaliser of the encoders' loss: the EMA target net (paper), or the combined batch target (released code)."""
    start: Literal["batch_mean", "released_code"] = "batch_mean"
    """Level of an epoch's new nets: the mean log Z of its first batch, or near 0; the paper leaves it open."""


class ObjectiveConfig(Section):
    method: str = "neuclip"
    """Name of a composition in `neuclip_ds.objectives.METHODS`."""
    eps: float = Field(1e-14, gt=0)
    """Added to every normaliser (FastCLIP App. D: 1e-6 beyond about 100M samples)."""
    chunk: int | None = Field(None, ge=1)
    """Columns of the similarity matrix that are worked on at once; absent: 1024 on a CPU, 8192 on a GPU."""
    similarity_budget_mb: float = Field(1024, ge=0)
    """Similarities are kept between the two passes up to this many MB a rank, recomputed beyond."""
    comm_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision in which features travel between ranks; `auto` is the towers' precision."""
    scale: Literal["paper", "released_code"] = "paper"
    """Leading factor of losses with constant or individual tau: tau in the papers, 1 in FastCLIP's released code."""
    temperature: TemperatureConfig = Field(default_factory=TemperatureConfig)
    siglip: SiglipConfig = Field(default_factory=SiglipConfig)
    hinge: HingeConfig = Field(default_factory=HingeConfig)
    moving_average: MovingAverageConfig = Field(default_factory=MovingAverageConfig)
    npn: NpnConfig = Field(default_factory=NpnConfig)
    amortized: AmortizedConfig = Field(default_factory=AmortizedConfig)


class OptimizerConfig(Section):
    name: Literal["adamw", "lamb", "lion", "sgd"] = "adamw"
    """Optimizer of the encoders; the temperature always has Adam."""
    lr: float = Field(5e-4, ge=0)
    """Peak learning rate of the encoders."""
    min_lr: float = Field(0.0, ge=0)
    """Learning rate at the end of the cosine."""
    warmup_steps: int = Field(500, ge=0)
    """Steps of linear warm-up."""
    weight_decay: float = Field(0.2, ge=0)
    """Decay of weight matrices; gains and biases have none. Coupled with the gradient in sgd, decoupled elsewhere."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Moment decays of AdamW, LAMB and Lion, and of the temperature's Adam."""
    eps: float = Field(1e-6, gt=0)
    """Epsilon of AdamW and LAMB, and of the temperature's Adam."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of sgd."""
    clip_norm: float = Field(0.0, ge=0)
    """Largest global gradient norm; 0 does not clip."""


class RecoveryConfig(Section):
    mode: Literal["none", "full", "cached"] = "none"
    """Whether u and moments are recovered with frozen weights before training: TuneCLIP's `full`, or `cached`, which
    fills u in one pass from blocks of features and then takes a few backward steps."""
    epochs: float = Field(5, gt=0)
    """Passes over the data of `full`."""
    loss: Literal["gcl", "hgcl"] = "gcl"
    """Loss whose gradients are averaged then: the global contrastive loss (TuneCLIP Algorithm 1), or the hinged one."""
    cached_block: int = Field(32768, ge=2)
    """Pairs that contrast with each other in a block of `cached`."""
    cached_steps: int = Field(200, ge=1)
    """Backward steps of `cached`, for the moments."""
    transfer: list[Literal["moments", "statistics"]] = ["moments", "statistics"]
    """What training takes over: the optimizer's moments and step count, the per-sample u."""
    gamma: Literal["continued", "anew"] = "continued"
    """Whether gamma's schedule goes on after these epochs where u is taken over, or begins at 1, which replaces u at
    the next visit; the paper leaves it open."""
    reuse: Path | None = None
    """Run whose recovered statistics are taken instead; its weights and data must be this run's."""


class BudgetConfig(Section):
    epochs: float = Field(1.0, gt=0)
    """Passes over the training data."""
    steps: int | None = Field(None, ge=1)
    """Steps to run instead of whole epochs."""


class Config(Section):
    run: RunConfig = Field(default_factory=RunConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    recovery: RecoveryConfig = Field(default_factory=RecoveryConfig)
    budget: BudgetConfig = Field(default_factory=BudgetConfig)
    deepspeed: str = "zero1_bf16"
    """DeepSpeed configuration: a name in ds_configs/ or the path of a JSON file."""

    def rank_batch(self, world_size: int) -> int:
        """Pairs of the global batch that each rank holds.

        Raises:
            UserError: the world size does not divide the batch.
        """
        if self.data.batch_size % world_size:
            below = self.data.batch_size // world_size * world_size
            raise UserError(
                f"data.batch_size={self.data.batch_size} is not divisible by the {world_size} ranks; "
                f"use {max(below, world_size)} or {below + world_size}, or another number of ranks."
            )
        return self.data.batch_size // world_size

    def micro_batch(self, world_size: int) -> int:
        """Pairs that go through the towers at once on a rank.

        Raises:
            UserError: it does not divide the rank's batch.
        """
        rank_batch = self.rank_batch(world_size)
        micro = self.data.micro_batch or rank_batch
        if rank_batch % micro:
            divisors = [size for size in range(1, rank_batch + 1) if rank_batch % size == 0]
            nearest = min(divisors, key=lambda size: abs(size - micro))
            raise UserError(
                f"data.micro_batch={micro} does not divide the rank's batch of {rank_batch} "
                f"({self.data.batch_size} over {world_size} ranks); use {nearest}."
            )
        return micro
