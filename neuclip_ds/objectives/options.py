"""Options shared by all methods, and config sections read by only some of them. This module does not import torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from neuclip_ds.errors import UserError
from neuclip_ds.objectives.methods import DEFAULT, METHODS, SECTIONS, find_method, method_of
from neuclip_ds.section import Section, merge


class AdamSettings(NamedTuple):
    """Betas and epsilon of Adam, for the temperature and, with `order=joint`, for the prototypes."""

    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-6


class TemperatureConfig(Section):
    initial: float | None = Field(None, gt=0)
    """Temperature tau at step 0. By default, the pretrained checkpoint's tau, else the method's default."""
    minimum: float = Field(0.01, gt=0)
    """Lower bound of tau; 0.01 is CLIP's clamp of 1/tau at 100."""
    maximum: float = Field(1.0, gt=0)
    """Upper bound of tau."""
    optimizer: Literal["adam", "lion", "sgd"] = "adam"
    """Optimizer of a global temperature and of SigLIP's bias: Adam, or Lion or SGD as in FastCLIP's study of
    optimizers. It uses the betas of the encoders' optimizer; SGD uses the first beta as momentum."""
    variable: Literal["log", "tau"] = "log"
    """Variable that the optimizer of a global temperature updates: log(1/tau), as in all released code, or tau itself
    (FastCLIP Procedure 5). With individual temperatures it is always tau."""
    lr: float | None = Field(None, ge=0)
    """Learning rate of `variable`. By default, the encoders' learning rate."""
    rule: Literal["robust", "learned"] | None = None
    """How neuclip and neuclip_queue learn tau. `robust` uses rho (NeuCLIP eq. 12) and is neuclip's default. `learned`
    works as in OpenCLIP, with eps = 1/(n-1) and without rho, and is neuclip_queue's default."""
    schedule: Literal["encoder", "constant", "third_below_0.03"] = "encoder"
    """`encoder` follows the encoders' schedule; `third_below_0.03` divides lr by 3 while tau < 0.03 (FastCLIP)."""
    rho: float | Annotated[list[float], Field(min_length=1)] = 0.0
    """Margin rho of the robust contrastive loss (FastCLIP eq. 10). For a list, each entry applies to an equal fraction
    of the run."""

    @model_validator(mode="after")
    def _bounds_hold_initial(self) -> TemperatureConfig:
        if self.initial is not None and not self.minimum <= self.initial <= self.maximum:
            raise ValueError(
                f"initial={self.initial} is outside [minimum={self.minimum}, maximum={self.maximum}]; change one of "
                "them"
            )
        return self


class SiglipConfig(Section):
    bias: float | None = None
    """Learned bias of the logits at step 0. By default, the pretrained checkpoint's bias, else -10."""


class MovingAverageConfig(Section):
    gamma: Literal["cosine", "constant"] = "cosine"
    """Schedule of gamma: FastCLIP's cosine, or SogCLR's constant gamma_min. Gamma is 1 when a sample is first seen."""
    gamma_min: float = Field(0.2, gt=0, le=1)
    """Weight of the current batch's estimate at the end of the schedule."""
    gamma_epochs: float = Field(18, ge=0)
    """Number of epochs E over which gamma falls from 1 to gamma_min along a cosine; gamma changes once per epoch."""


class AmortizedConfig(Section):
    width: float = Field(1.0, gt=0)
    """Hidden units of the amortization MLP, as a multiple f_d of the feature width."""
    loss: Literal["l2_log", "kl", "js"] = "l2_log"
    """Loss for fitting lambda: the squared error of the logarithms, or the KL or Jensen-Shannon divergence plus a tenth
    of the squared error."""
    amortizes: Literal["partition", "negatives"] = "partition"
    """Target of lambda: the partition function, or its sum over negatives alone, to which the positive of each anchor
    is then added (AmorLIP Table 3)."""
    gather: Literal["every_step", "fits"] = "every_step"
    """Steps that gather the features of all ranks: every step, or only steps that fit the nets. In the other steps,
    each rank contrasts only its local rows (AmorLIP section 3.3)."""
    lr: float = Field(1e-3, gt=0)
    """Adam learning rate for the MLPs (the released code multiplies it by the number of ranks)."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Maximum gradient norm of the MLPs; 0 disables clipping."""
    inner_steps: int = Field(3, ge=0)
    """Adam steps T_lambda per batch."""
    online_every: int = Field(1, ge=1)
    """Steps T_online between fits of the online nets."""
    target_every: int = Field(2, ge=1)
    """Steps T_target between updates of the EMA target nets."""
    ema: float = Field(0.999, ge=0, le=1)
    """Decay alpha of the target nets' EMA."""
    previous_weight: float = Field(0.8, ge=0, lt=1)
    """Largest weight beta_T of the previous epoch's net in the target."""
    previous_epochs: float = Field(16, ge=0)
    """Epochs over which beta rises to `previous_weight` along a cosine: all in the paper, 16 of 33 in the README."""
    positive_weight: float = Field(1.0, ge=0)
    """Weight c of the positive pair in the partition function: 1 in the paper, 1e-3 in the released scripts."""
    encoder_normalizer: Literal["ema", "combined"] = "ema"
    """Normalizer of the encoders' loss: the EMA target net (paper), or the target that the nets fit (released code)."""


class NpnConfig(Section):
    prototypes: int = Field(4096, ge=1, le=1 << 24)
    """Number of prototypes m per direction."""
    network: Literal["prototypes", "mlp"] = "prototypes"
    """Form of the network: prototypes (NeuCLIP eq. 10), or AmorLIP's MLP trained on the same objective (ablation)."""
    optimizer: Literal["scaled", "adagrad"] = "scaled"
    """Update of the prototypes: AdaGrad (NeuCLIP), or `scaled` (this project), whose steps change no logit by more than
    about lr at any batch size. At low temperatures, `scaled` amplifies rounding errors far less than AdaGrad."""
    inner_steps: int = Field(10, ge=0)
    """Number of updates T_u per training step."""
    redraw_every: int = Field(500, ge=0)
    """Steps T_r between redraws of the prototypes from recent features; 0 draws them once, as order=joint does."""
    lr: float | None = Field(None, gt=0)
    """Step size of an update. By default, 0.3 for `scaled`, 1e-3 for the Adam of network=mlp, and 1.0 for AdaGrad. The
    1.0 is published for B >= 1024 and m = 4096; use a lower value for smaller settings."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay of the network: coupled with the gradient in AdaGrad and in the MLP's Adam, decoupled with
    order=joint. NeuCLIP searched values from 0 to 1 and uses 0; optimizer=scaled has no weight decay."""
    alpha_grad: Literal["full", "positive", "stop"] = "full"
    """Part of alpha's gradient that the encoders and tau receive: all of it (NeuCLIP eq. 12), only the part along the
    positive, or none."""
    objective: Literal["unified", "separate"] = "unified"
    """Objective of the network: the loss itself, or (alpha - log(eps + g))^2 (ablation)."""
    replicas: int | None = Field(None, ge=1)
    """Maximum number of ranks that store and fit the same prototypes: by default 4, or 8 on 64 or more ranks. The run
    uses the largest divisor of the world size up to this number. With more replicas, alpha_grad=full sends less and
    each rank computes more."""
    order: Literal["alternating", "joint"] = "alternating"
    """`alternating` updates the network, then the encoders with the new prediction (Algorithm 1). `joint` updates both
    from the old prediction; the network takes one AdamW step at the encoders' lr, without redraws (Algorithm 3)."""

    @model_validator(mode="after")
    def _order_fits_the_network(self) -> NpnConfig:
        if self.order == "joint" and self.network == "mlp":
            raise ValueError("order=joint is for prototypes; remove it, or network=mlp")
        scaled = self.optimizer == "scaled" and self.network == "prototypes" and self.order != "joint"
        if scaled and self.weight_decay:
            raise ValueError("weight_decay is not read by optimizer=scaled; set optimizer=adagrad")
        return self

    def replicas_on(self, world_size: int) -> int:
        """Return the number of replicas of each prototype; more than one is useful only with alpha_grad=full."""
        most = self.replicas or (4 if world_size < 64 else 8)
        most = most if self.alpha_grad == "full" else 1
        return max(count for count in range(1, most + 1) if world_size % count == 0)

    @property
    def rate(self) -> float:
        """Step size of an update: `lr`, or the default if `lr` is None."""
        if self.lr is not None:
            return self.lr
        return 1e-3 if self.network == "mlp" else {"scaled": 0.3, "adagrad": 1.0}[self.optimizer]


class QueueConfig(Section):
    size: int = Field(4096, ge=1, le=1 << 24)
    """Number of samples m in the queue."""
    kappa: float = Field(1.0, gt=0, le=1e6)
    """Weight of the queue's estimate relative to the batch's estimate, whose weight is 1."""


class HingeConfig(Section):
    margin: float = Field(0.1, ge=0)
    """Margin m of TuneCLIP's pair loss max(s_ij - s_ii + m, 0)^2."""


class ObjectiveConfig(Section):
    method: str = DEFAULT
    """Method to train with: a name in the table of docs/reference/losses.md."""
    eps: float = Field(1e-14, gt=0)
    """Constant added to the estimated normalizers (FastCLIP App. D: 1e-6 beyond about 100M samples)."""
    chunk_size: int | None = Field(None, ge=1)
    """Columns of the similarity matrix that are computed at once; the default depends on the device. The number of rows
    is limited so that a block has at most 128 MiB on a GPU or 1 MiB per thread on a CPU."""
    comm_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision in which features are sent between ranks; `auto` is the towers' precision."""
    reference: Literal["paper", "released_code"] = "paper"
    """Version to follow where a paper and its released code differ. FastCLIP's code omits the leading tau of losses
    with constant or individual tau and counts the data term twice in the gradient of a robust tau. For individual
    temperatures, it clamps gradients and bases Adam's bias correction on epochs. AmorLIP's code starts each epoch's
    nets near log lambda = 0 instead of the first batch's mean log Z, divides divergences by B^2 instead of B, and
    divides the squared error by B instead of 2 B."""
    epoch_steps: int | None = Field(None, ge=1)
    """Training steps that count as one epoch for gamma's schedule and amorlip's nets, for runs that see each sample
    about once. By default, an epoch is one pass over the data."""
    temperature: TemperatureConfig = Field(default_factory=TemperatureConfig)
    siglip: SiglipConfig = Field(default_factory=SiglipConfig)
    moving_average: MovingAverageConfig = Field(default_factory=MovingAverageConfig)
    amortized: AmortizedConfig = Field(default_factory=AmortizedConfig)
    npn: NpnConfig = Field(default_factory=NpnConfig)
    queue: QueueConfig = Field(default_factory=QueueConfig)
    hinge: HingeConfig = Field(default_factory=HingeConfig)

    @model_validator(mode="before")
    @classmethod
    def _over_the_methods_defaults(cls, tree: Any) -> Any:
        """Reject options that the method does not read, and use the method's defaults for options that are not set."""
        if not isinstance(tree, dict):
            return tree
        method = method_of(tree)
        name, temperature = tree.get("method", DEFAULT), tree.get("temperature")
        for section in SECTIONS:
            if section in tree and section not in method.sections:
                options = tree[section] if isinstance(tree[section], dict) else {}
                given = ", ".join(f"objective.{section}.{key}" for key in options) or f"objective.{section}"
                reads = " and ".join(f"objective.{other}" for other in method.sections) or "no section of its own"
                readers = [other for other in METHODS if section in METHODS[other].sections]
                raise UserError(_unread(name, given, reads, readers))
        if isinstance(temperature, dict) and temperature.get("rule") is not None and method.temperature != "rule":
            readers = [other for other in METHODS if METHODS[other].temperature == "rule"]
            given = f"objective.temperature.rule={temperature['rule']}"
            raise UserError(_unread(name, given, "none, because its rule is fixed", readers))
        return merge(merge(method.defaults, method.starts), tree)

    @model_serializer(mode="wrap")
    def _without_unread_sections(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        read = find_method(self.method).sections
        return {name: value for name, value in whole(self).items() if name not in SECTIONS or name in read}

    @property
    def needs_epochs(self) -> bool:
        """Whether the method depends on the number of steps in an epoch or in the run."""
        method = find_method(self.method)
        released = method.temperature == "individual" and self.reference == "released_code"
        by_epochs = "epoch_steps" in method.sections and self.epoch_steps is None
        return by_epochs or released or isinstance(self.temperature.rho, list)

    def warnings(self) -> list[str]:
        """Return a warning for each setting that is valid but probably a mistake."""
        released = self.reference == "released_code" and "amortized" in find_method(self.method).sections
        if not released or self.amortized.encoder_normalizer != "ema":
            return []
        return [
            "objective.reference=released_code with objective.amortized.encoder_normalizer=ema: until the EMA has "
            "caught up, C/lambda and the gradients are too large by a factor of up to exp(1/tau), capped at 3e15. Set "
            "encoder_normalizer=combined, as in the released code."
        ]


def _unread(method: str, given: str, reads: str, readers: list[str]) -> str:
    return (
        f"{given} is read by {', '.join(readers)} only; objective.method={method} reads {reads}: remove it, or choose "
        "one of those methods."
    )
