"""Options of the temperature; free of torch."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from neuclip_ds.section import Section


class AdamSettings(NamedTuple):
    """Constants of the Adam that learns the temperature."""

    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-6


class TemperatureConfig(Section):
    initial: float | None = Field(None, gt=0)
    """Temperature tau at step 0. By default a pretrained checkpoint's, else the method's."""
    minimum: float = Field(0.01, gt=0)
    """Lower bound of tau; 0.01 is CLIP's clamp of 1/tau at 100."""
    maximum: float = Field(1.0, gt=0)
    """Upper bound of tau."""
    optimizer: Literal["adam", "lion", "sgd"] = "adam"
    """Optimizer of a global temperature, and of SigLIP's bias: Adam, or Lion or SGD as FastCLIP's study of optimizers
    has them. Moment decays are the encoders', of which the first is SGD's momentum."""
    lr: float | None = Field(None, ge=0)
    """Learning rate of log(1/tau). By default that of the encoders."""
    rule: Literal["robust", "learned"] | None = None
    """How neuclip and neuclip_queue learn tau: `robust` with rho (NeuCLIP eq. 12), the default of the first; `learned`
    as OpenCLIP with eps = 1/(n-1) and no rho, that of the second."""
    schedule: Literal["encoder", "constant", "third_below_0.03"] = "encoder"
    """`encoder` follows the encoders' schedule; `third_below_0.03` takes lr, and lr/3 while tau < 0.03 (FastCLIP)."""
    rho: float | Annotated[list[float], Field(min_length=1)] = 0.0
    """Margin rho of the robust contrastive loss (FastCLIP eq. 10). Entries of a list each hold for an equal part of
    the run."""
    data_term: Literal["paper", "released_code"] = "paper"
    """Coefficient of the data term in tau's gradient: 1 in the papers, 2 in FastCLIP's released code."""
    individual: Literal["paper", "released_code"] = "paper"
    """Adam of individual temperatures: textbook, or with the released code's clamp and bias correction by epochs."""

    @model_validator(mode="after")
    def _bounds_hold_initial(self) -> TemperatureConfig:
        if self.initial is not None and not self.minimum <= self.initial <= self.maximum:
            raise ValueError(
                f"initial={self.initial} is outside [minimum={self.minimum}, maximum={self.maximum}]; change one of "
                "them"
            )
        return self
