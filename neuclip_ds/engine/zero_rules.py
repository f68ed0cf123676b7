"""Rules by which DeepSpeed, in the version that `engine/config.py` requires, interprets a config."""

from __future__ import annotations

from dataclasses import dataclass

from neuclip_ds.engine.config import EngineConfig, ZeroOptions, is_float32
from neuclip_ds.engine.zero import Wrapper

_FIXED_BUCKET = 500_000_000  # elements that wrappers without a configured bucket copy and reduce at once


@dataclass(frozen=True, kw_only=True)
class ZeroRules:
    """DeepSpeed's behavior under a config."""

    stage: int  # the ZeRO stage, or 0 without ZeRO
    wrapper: Wrapper
    offloads: bool  # whether the optimizer state and masters are in host memory
    weight: int  # bytes per element of the weights
    accumulated: int  # bytes per element of the gradients while they accumulate
    sent: int  # bytes per element of the gradients when they are sent between ranks
    zero: ZeroOptions

    @staticmethod
    def of(engine_config: EngineConfig) -> ZeroRules:
        """Return the rules for a config."""
        stage = engine_config.zero_stage
        offloads = engine_config.offloads_optimizer
        weight = 4 if engine_config.precision == "fp32" else 2
        accumulated = 4 if engine_config.accumulates_in_float32 else weight
        sent = weight
        communication_dtype = engine_config.options.communication_data_type
        if communication_dtype is not None:
            sent = 4 if is_float32(communication_dtype) else 2
        return ZeroRules(
            stage=stage,
            wrapper=_wrapper(stage, weight, accumulated, offloads),
            offloads=offloads,
            weight=weight,
            accumulated=accumulated,
            sent=sent,
            zero=engine_config.options.zero_optimization,
        )

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer updates float32 copies of the weights instead of the weights themselves."""
        return self.wrapper is not Wrapper.NONE

    @property
    def bucketed(self) -> bool:
        """Whether gradients are sent in buckets of the configured size, which can overlap the backward pass."""
        return self.wrapper in (Wrapper.ZERO_1_2, Wrapper.ZERO_3)

    @property
    def bucket(self) -> int:
        """Largest number of elements that are reduced at once."""
        return self.zero.reduce_bucket_size if self.bucketed else _FIXED_BUCKET

    @property
    def overlaps(self) -> bool:
        """Whether the backward pass continues while a bucket is sent."""
        overlap_comm = self.zero.overlap_comm
        if overlap_comm is None:
            overlap_comm = self.stage == 3
        return self.bucketed and overlap_comm

    @property
    def reduces_at_end(self) -> bool:
        """Whether ZeRO 1 reduces gradients only after the last one is computed, because buckets do not overlap."""
        return self.stage == 1 and not self.overlaps

    @property
    def creates_one_by_one(self) -> bool:
        """Whether the backward pass allocates the gradients one by one, and all of them exist when it ends.

        `ZERO_1_2` does so only if gradients are reduced at the end and are copied neither to another dtype nor to the
        host. `ZERO_3` never does so, and the other wrappers always do.
        """
        if self.wrapper is Wrapper.ZERO_1_2:
            return self.reduces_at_end and self.accumulated == self.weight and not self.offloads
        return self.wrapper is not Wrapper.ZERO_3

    @property
    def checks_overflow(self) -> bool:
        """Whether ranks compare an overflow flag before they compute the gradient norm."""
        return self.wrapper is Wrapper.ZERO_1_2 and self.weight == 2


def _wrapper(stage: int, weight: int, accumulated: int, offloads: bool) -> Wrapper:
    if stage == 0:
        return Wrapper.UNFUSED if weight == 2 else Wrapper.NONE
    if stage == 3:
        return Wrapper.ZERO_3
    return Wrapper.BF16 if (stage, weight, accumulated, offloads) == (1, 2, 4, False) else Wrapper.ZERO_1_2
