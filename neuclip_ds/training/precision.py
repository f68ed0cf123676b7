"""The precisions of a run: of the towers, and of features between ranks."""

from __future__ import annotations

from typing import Any

import torch

from neuclip_ds.config import Config
from neuclip_ds.training.engine_config import is_bf16


def towers_dtype(engine: dict[str, Any]) -> torch.dtype:
    """Of weights and activations, as DeepSpeed's config says."""
    return torch.bfloat16 if is_bf16(engine) else torch.float32


def wire_dtype(config: Config, engine: dict[str, Any]) -> torch.dtype:
    """In which features travel (`objective.wire`)."""
    wires = {"auto": towers_dtype(engine), "bfloat16": torch.bfloat16, "float32": torch.float32}
    return wires[config.objective.wire]
