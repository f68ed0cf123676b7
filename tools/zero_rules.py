"""What DeepSpeed makes of a config, by the rules of the version that `engine/config.py` requires."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neuclip_ds.engine.config import precision, zero_stage
from neuclip_ds.engine.zero import Wrapper

# keys of `zero_optimization` that are read here or worth tuning, and what DeepSpeed takes where they are absent
_DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "contiguous_gradients": True,
    "reduce_scatter": True,
    "use_multi_rank_bucket_allreduce": True,
    "sub_group_size": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "stage3_param_persistence_threshold": 100_000,
}
_FIXED_BUCKET = 500_000_000  # elements of an all-reduce outside `ZERO_1_2` and `ZERO_3`, which no key sets
_BYTES = {"fp32": 4, "float32": 4, "float": 4, "torch.float32": 4}  # other names are of 16 bits


@dataclass(frozen=True)
class ZeroRules:
    """What DeepSpeed does under a config; sizes are bytes of an element."""

    stage: int
    wrapper: Wrapper
    offloads: bool  # whether optimizer and masters live on the host
    weight: int
    accumulated: int  # gradients where they accumulate
    sent: int  # gradients between ranks
    checks_overflow: bool  # whether ranks compare a flag before they take the norm of the gradients
    zero: Mapping[str, Any]  # `zero_optimization`, completed by DeepSpeed's defaults

    @staticmethod
    def of(engine: dict[str, Any]) -> ZeroRules:
        """Read DeepSpeed's config."""
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
        """Whether gradients travel in buckets of the config's size, during the backward pass if it asks for that."""
        return self.wrapper in (Wrapper.ZERO_1_2, Wrapper.ZERO_3)

    @property
    def bucket(self) -> int:
        """Elements that are reduced at once."""
        return int(self.zero["reduce_bucket_size"]) if self.bucketed else _FIXED_BUCKET


def _bytes(dtype: str | None, default: int) -> int:
    return default if dtype is None else _BYTES.get(dtype.lower(), 2)


def _wrapper(stage: int, weight: int, accumulated: int, offloads: bool) -> Wrapper:
    if stage == 0:
        return Wrapper.UNFUSED if weight == 2 else Wrapper.NONE
    if stage == 3:
        return Wrapper.ZERO_3
    return Wrapper.BF16 if (stage, weight, accumulated, offloads) == (1, 2, 4, False) else Wrapper.ZERO_1_2
