"""The precisions of a run: of the towers, and of features between ranks."""

from typing import Any

import torch

from neuclip_ds.config import Config
from neuclip_ds.engine.config import is_bf16


def towers_dtype(engine: dict[str, Any]) -> torch.dtype:
    """Return the dtype of weights and activations under DeepSpeed's config."""
    return torch.bfloat16 if is_bf16(engine) else torch.float32


def resolve_comm_dtype(config: Config, engine: dict[str, Any]) -> torch.dtype:
    """Return the dtype in which features travel between ranks (`objective.comm_dtype`)."""
    comm_dtypes = {"auto": towers_dtype(engine), "bfloat16": torch.bfloat16, "float32": torch.float32}
    return comm_dtypes[config.objective.comm_dtype]
