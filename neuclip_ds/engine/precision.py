"""The precisions of a run: of the towers, of their float32 matrix products, and of features between ranks."""

import logging
from typing import Any

import torch

from neuclip_ds.config import Config
from neuclip_ds.engine.config import is_bf16

log = logging.getLogger(__name__)


def towers_dtype(engine: dict[str, Any]) -> torch.dtype:
    """Return the dtype of weights and activations under DeepSpeed's config."""
    return torch.bfloat16 if is_bf16(engine) else torch.float32


def resolve_comm_dtype(config: Config, engine: dict[str, Any]) -> torch.dtype:
    """Return the dtype in which features travel between ranks (`objective.comm_dtype`)."""
    comm_dtypes = {"auto": towers_dtype(engine), "bfloat16": torch.bfloat16, "float32": torch.float32}
    return comm_dtypes[config.objective.comm_dtype]


def set_matmul_precision(config: Config, engine: dict[str, Any], device: torch.device) -> None:
    """Set and log the precision in which a GPU multiplies float32 matrices; does nothing on a CPU or for bf16 towers.

    The setting is torch's for the whole process. The loss chooses the precision of its products itself.
    """
    if device.type == "cuda" and towers_dtype(engine) is torch.float32:
        torch.backends.cuda.matmul.allow_tf32 = config.model.matmul_precision == "tf32"
        log.info("float32 towers: matrix products in %s (model.matmul_precision)", config.model.matmul_precision)
