"""Rules by which DeepSpeed, in the version that `engine/config.py` requires, interprets a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neuclip_ds.engine.config import precision, zero_stage
from neuclip_ds.engine.zero import Wrapper

# keys of `zero_optimization` that this module and step_costs.py read, with DeepSpeed's defaults
_DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "sub_group_size": 1_000_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_param_persistence_threshold": 100_000,
}
_FIXED_BUCKET = 500_000_000  # elements per all-reduce in wrappers other than `ZERO_1_2` and `ZERO_3`; no key sets it
_BYTES = {"fp32": 4, "float32": 4, "float": 4, "torch.float32": 4}  # all other names are 16-bit types


@dataclass(frozen=True)
class ZeroRules:
    """DeepSpeed's behavior under a config; sizes are in bytes per element."""

    stage: int
    wrapper: Wrapper
    offloads: bool  # whether the optimizer state and masters are in host memory
    weight: int
    accumulated: int  # gradients while they accumulate
    sent: int  # gradients sent between ranks
    checks_overflow: bool  # whether ranks compare an overflow flag before they compute the gradient norm
    zero: Mapping[str, Any]  # `zero_optimization`, completed by DeepSpeed's defaults

    @staticmethod
    def of(engine: dict[str, Any]) -> ZeroRules:
        """Return the rules for a DeepSpeed config."""
        stage, weight = zero_stage(engine), 4 if precision(engine) == "fp32" else 2
        section = engine.get("zero_optimization", {})
        offloads = (section.get("offload_optimizer") or {}).get("device", "none") != "none"
        accumulated = _bytes(engine.get("data_types", {}).get("grad_accum_dtype"), weight)
        wrapper = _wrapper(stage, weight, accumulated, offloads)
        checks = wrapper is Wrapper.ZERO_1_2 and weight == 2
        sent = _bytes(engine.get("communication_data_type"), weight)
        zero = {**_DEFAULTS, "overlap_comm": stage == 3, **section}
        return ZeroRules(stage, wrapper, offloads, weight, accumulated, sent, checks, zero)

    @property
    def bucketed(self) -> bool:
        """Whether gradients are sent in buckets of the configured size, which can overlap the backward pass."""
        return self.wrapper in (Wrapper.ZERO_1_2, Wrapper.ZERO_3)

    @property
    def bucket(self) -> int:
        """Number of elements that are reduced at once."""
        return int(self.zero["reduce_bucket_size"]) if self.bucketed else _FIXED_BUCKET


def _bytes(dtype: str | None, default: int) -> int:
    return default if dtype is None else _BYTES.get(dtype.lower(), 2)


def _wrapper(stage: int, weight: int, accumulated: int, offloads: bool) -> Wrapper:
    if stage == 0:
        return Wrapper.UNFUSED if weight == 2 else Wrapper.NONE
    if stage == 3:
        return Wrapper.ZERO_3
    return Wrapper.BF16 if (stage, weight, accumulated, offloads) == (1, 2, 4, False) else Wrapper.ZERO_1_2
