"""Options of the losses: the section `objective` of a config. This module does not import torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, create_model, model_serializer, model_validator

from neuclip_ds.errors import UserError, counted
from neuclip_ds.losses.amorlip_options import AmortizedConfig
from neuclip_ds.losses.fastclip_options import MovingAverageConfig
from neuclip_ds.losses.methods import (
    DEFAULT,
    METHODS,
    REGISTERED_OPTIONS,
    find_method,
    method_of,
    method_sections,
)
from neuclip_ds.losses.neuclip_options import NpnConfig
from neuclip_ds.losses.neuclip_queue_options import QueueConfig
from neuclip_ds.losses.siglip_options import SiglipConfig
from neuclip_ds.losses.tuneclip_options import HingeConfig
from neuclip_ds.section import Section, merge

PREFIX = "prefix"
"""Start of the names of the metrics and state that belong to a prefix of the embedding, such as `prefix64/tau`."""


class TemperatureConfig(Section):
    initial: float | None = Field(None, gt=0)
    """Temperature tau at step 0. By default, the tau of `model.pretrained`. Without a pretrained model, the method's
    default, or 0.07 if the method has none. Required if the pretrained checkpoint has no tau."""
    minimum: float = Field(0.01, gt=0)
    """Lower bound of tau; 0.01 is CLIP's clamp of 1/tau at 100."""
    maximum: float = Field(1.0, gt=0)
    """Upper bound of tau."""
    optimizer: Literal["adam", "lion", "sgd"] = "adam"
    """Optimizer of a global temperature and of SigLIP's bias: Adam, or Lion or SGD as in FastCLIP's study of
    optimizers. It uses the betas of the encoders' optimizer; SGD uses the first beta as momentum."""
    variable: Literal["log", "tau"] = "log"
    """Variable that the optimizer of a global temperature updates: log(1/tau), as in the papers' released code, or tau
    itself (FastCLIP Procedure 5). Individual temperatures are always updated as tau."""
    lr: float | None = Field(None, ge=0)
    """Peak learning rate of the temperature and of SigLIP's bias; 0 keeps both constant. By default, the encoders' peak
    learning rate, `optimizer.lr`, or 0.01 for isogclr."""
    rule: Literal["robust", "learned"] | None = None
    """How neuclip and neuclip_queue learn tau. `robust` uses rho (NeuCLIP eq. 12) and is neuclip's default. `learned`
    works as in OpenCLIP, with eps = 1/(n-1) for n training samples and without rho, and is neuclip_queue's default."""
    schedule: Literal["encoder", "constant", "third_below_0.03"] = "encoder"
    """Schedule of the learning rate of the temperature and of SigLIP's bias: the encoders' schedule (`encoder`),
    `constant`, or constant but divided by 3 while tau < 0.03 (`third_below_0.03`, FastCLIP)."""
    rho: float | Annotated[list[float], Field(min_length=1)] = 0.0
    """Margin rho of the robust contrastive loss (FastCLIP eq. 10). For a list, each entry applies to an equal fraction
    of the run."""

    @model_validator(mode="after")
    def _bounds_hold_initial(self) -> TemperatureConfig:
        if self.minimum > self.maximum:
            raise ValueError(f"minimum={self.minimum} is above maximum={self.maximum}; change one of them")
        if self.initial is not None and not self.minimum <= self.initial <= self.maximum:
            raise ValueError(
                f"initial={self.initial} is outside [minimum={self.minimum}, maximum={self.maximum}]; change initial "
                "or a bound"
            )
        return self


class DistillConfig(Section):
    features: str | Annotated[list[str], Field(min_length=1)] | None = None
    """Folder of the teacher's stored features; setting it enables distillation. For an ensemble of teachers, set a list
    of folders: the teachers' softmaxes are averaged as in MobileCLIP."""
    weight: float = Field(1.0, gt=0)
    """Weight of the distillation loss; open_clip and MobileCLIP use 1."""
    contrastive_weight: float = Field(1.0, ge=0)
    """Weight of the method's own loss in a run with distillation: 1 in open_clip, 0 in MobileCLIP's ViT-B/16."""
    temperature: float | Annotated[list[float], Field(min_length=1)] = 0.01
    """Temperature of the teacher's softmax, or a list with one for each teacher; OpenAI's CLIP and many other models
    use 0.01."""

    @model_validator(mode="after")
    def _temperatures_fit(self) -> DistillConfig:
        temperatures = self.temperature if isinstance(self.temperature, list) else [self.temperature]
        if min(temperatures) <= 0:
            raise ValueError(f"temperature={self.temperature} must be above 0")
        if isinstance(self.features, list):
            self.temperatures(len(self.features))
        return self

    @property
    def folders(self) -> list[str]:
        """The folder of each teacher's stored features; empty without distillation."""
        if self.features is None:
            return []
        return self.features if isinstance(self.features, list) else [self.features]

    def temperatures(self, teachers: int) -> list[float]:
        """Return the temperature of each teacher; a single value applies to all of them.

        Raises `UserError` if there are several values and their number differs from `teachers`.
        """
        temperatures = self.temperature if isinstance(self.temperature, list) else [self.temperature]
        if len(temperatures) == 1:  # the command line makes a list of a single number
            return temperatures * teachers
        if len(temperatures) != teachers:
            raise UserError(
                f"objective.distill.temperature lists {len(temperatures)} values for {counted(teachers, 'teacher')}: "
                "pass one value for each teacher, or a single number."
            )
        return temperatures


class ObjectiveConfig(Section):
    method: str = DEFAULT
    """Method to train with: a name in the table of docs/reference/losses.md, or of a loss that a plugin registers."""
    eps: float = Field(1e-14, gt=0)
    """Constant added to the estimated normalizers (FastCLIP App. D: 1e-6 for more than about 100M samples). openclip,
    siglip, amorlip and temperature.rule=learned do not use it."""
    chunk_size: int | None = Field(None, ge=1)
    """Number of columns of the similarity matrix to compute at once; the default depends on the device and the rows per
    rank. The number of rows is limited so that a block takes at most 128 MiB on a GPU or 1 MiB per thread on a CPU."""
    comm_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision in which features are sent between ranks; `auto` is the towers' precision."""
    reference: Literal["paper", "released_code"] = "paper"
    """Version to follow where a paper and its released code differ. FastCLIP's code omits the leading tau of losses
    with constant or individual tau. In the gradient of a learned global tau, it counts the data term w dg/dtau twice
    relative to the features' gradient; with rule=robust, this also applies to neuclip and neuclip_queue. For individual
    temperatures, FastCLIP's code clamps gradients, bases Adam's bias correction on epochs, and sets both betas to 0 in
    epoch 0. AmorLIP's code starts each epoch's nets near log lambda = 0 instead of the first batch's mean log Z,
    divides divergences by B^2 instead of B, and divides the squared error by B instead of 2 B."""
    epoch_steps: int | None = Field(None, ge=1)
    """Training steps that count as one epoch for gamma's schedule and amorlip's nets, for runs that see each sample
    about once. By default, an epoch is one pass over the data."""
    reference_model: str | None = None
    """Folder of the stored features of a reference model. Its similarities are subtracted from those of the model in
    training (DRRho-CLIP)."""
    prefixes: dict[Annotated[int, Field(ge=1)], Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Lengths of prefixes of the embedding that are trained as embeddings too (Matryoshka), and the weight of each
    prefix's loss, such as {"64": 1, "128": 1}. The loss of the whole embedding has weight 1."""
    temperature: TemperatureConfig = Field(default_factory=TemperatureConfig)
    distill: DistillConfig = Field(default_factory=DistillConfig)
    siglip: SiglipConfig = Field(default_factory=SiglipConfig)
    moving_average: MovingAverageConfig = Field(default_factory=MovingAverageConfig)
    amortized: AmortizedConfig = Field(default_factory=AmortizedConfig)
    npn: NpnConfig = Field(default_factory=NpnConfig)
    queue: QueueConfig = Field(default_factory=QueueConfig)
    hinge: HingeConfig = Field(default_factory=HingeConfig)

    @model_validator(mode="before")
    @classmethod
    def _over_the_methods_defaults(cls, tree: Any) -> Any:
        """Reject other methods' options, and use the method's defaults for options that are not set.

        Most shared options that the method does not read, such as `temperature.rho`, are ignored.
        """
        if not isinstance(tree, dict):
            return tree
        method = method_of(tree)
        name = tree.get("method", DEFAULT)
        for section in method_sections():
            if section in tree and section not in method.sections:
                raise UserError(_unread_section(name, section, tree[section]))
        temperature = tree.get("temperature")
        if isinstance(temperature, dict) and temperature.get("rule") is not None and not method.has_temperature_rule:
            option = f"objective.temperature.rule={temperature['rule']}"
            readers = [other for other, row in METHODS.items() if row.has_temperature_rule]
            raise UserError(_unread_message(name, option, readers))
        if tree.get("reference_model") is not None and method.refuses_reference:
            # a registered loss may refuse a reference when it is built
            readers = [
                other for other, row in METHODS.items() if not row.refuses_reference and isinstance(row.builder, str)
            ]
            reason = f" The loss of {name} does not support a reference model."
            raise UserError(_unread_message(name, "objective.reference_model", readers, reason))
        if isinstance(temperature, dict) and "rule" in temperature and temperature["rule"] is None:
            # null, as in the saved config of a method without rules, means the method's default
            tree = {**tree, "temperature": {key: value for key, value in temperature.items() if key != "rule"}}
        return merge(method.defaults, tree)

    @model_serializer(mode="wrap")
    def _without_unread_sections(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        options = serialize(self)
        unread = set(method_sections()) - set(find_method(self.method).sections)
        return {name: value for name, value in options.items() if name not in unread}

    @model_validator(mode="after")
    def _prefixes_are_not_combined(self) -> ObjectiveConfig:
        for option, is_set in (
            ("objective.reference_model", self.reference_model is not None),
            ("objective.distill.features", self.distill.features is not None),
        ):
            if self.prefixes and is_set:
                raise UserError(
                    f"objective.prefixes cannot be combined with {option}, because prefixes of stored features are not "
                    "supported: remove one of the two options."
                )
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the class, which cannot be imported by its name if it has options of registered losses."""
        return _blank_objective, (), self.__getstate__()

    @property
    def needs_epochs(self) -> bool:
        """Whether `ContrastiveLoss` requires the number of steps in an epoch for a loss with these options."""
        method = find_method(self.method)
        has_constant_gamma = "moving_average" in method.sections and self.moving_average.gamma == "constant"
        if "epoch_steps" in method.sections and self.epoch_steps is None and not has_constant_gamma:
            return True
        if method.has_individual_temperatures and self.reference == "released_code":
            return True
        return isinstance(self.temperature.rho, list)

    def warnings(self) -> list[str]:
        """Return a warning for each setting that is valid but probably a mistake."""
        is_amortized = "amortized" in find_method(self.method).sections
        if is_amortized and self.reference == "released_code" and self.amortized.encoder_normalizer == "ema":
            return [
                "objective.reference=released_code with objective.amortized.encoder_normalizer=ema: until the EMA nets "
                "have caught up with the fitted nets, C/lambda and the gradients are too large by a factor of up to "
                "exp(1/tau), capped at 3e15. Set encoder_normalizer=combined, as in the released code."
            ]
        return []


def objective_config() -> type[ObjectiveConfig]:
    """Return the class of the section `objective`, with the options of losses that `register_loss` added."""
    if not REGISTERED_OPTIONS:
        return ObjectiveConfig
    fields: dict[str, Any] = {
        name: (options, Field(default_factory=options)) for name, options in REGISTERED_OPTIONS.items()
    }
    return create_model("ObjectiveConfig", __base__=ObjectiveConfig, __module__=__name__, **fields)


def _blank_objective() -> ObjectiveConfig:
    """Return an object whose state `pickle` will set."""
    section = objective_config()
    return section.__new__(section)


def default_objective() -> ObjectiveConfig:
    """Return the default options, including those of registered losses."""
    return objective_config()()


def _unread_section(method: str, section: str, options: Any) -> str:
    """Return the message for a section that the method does not read."""
    names = [f"objective.{section}"]
    if isinstance(options, dict) and options:
        names = [f"objective.{section}.{key}" for key in options]
    sections = [f"objective.{name}" for name in METHODS[method].sections]
    readers = [name for name, row in METHODS.items() if section in row.sections]
    used = f" {method} uses {' and '.join(sections)}." if sections else ""
    return _unread_message(method, ", ".join(names), readers, used)


def _unread_message(method: str, options: str, readers: list[str], note: str = "") -> str:
    return (
        f"objective.method={method} does not use {options}; these methods do: {', '.join(readers)}. Omit the unused "
        f"options, or choose one of these methods.{note}"
    )
