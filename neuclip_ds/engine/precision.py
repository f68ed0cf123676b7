"""The precisions of a run: of the towers, of their float32 matrix products, and of features between ranks."""

import logging
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from neuclip_ds.config import Config
from neuclip_ds.engine.config import precision
from neuclip_ds.errors import UserError

log = logging.getLogger(__name__)


def towers_dtype(engine: dict[str, Any]) -> torch.dtype:
    """Return the dtype of weights and activations under DeepSpeed's config."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision(engine)]


def require_precision(engine: dict[str, Any], name: str) -> None:
    """Raise `UserError` if this device cannot run towers in the precision of DeepSpeed's config, which is `name`."""
    accelerator, wanted = get_accelerator(), precision(engine)
    supported = {"fp32": True, "bf16": accelerator.is_bf16_supported(), "fp16": accelerator.is_fp16_supported()}
    if not supported[wanted]:
        others = " or ".join(f"zero1_{other}" for other, possible in supported.items() if possible)
        raise UserError(
            f"deepspeed={name} runs the towers in {wanted}, which this device ({accelerator.device_name()}) does not "
            f"support: use deepspeed={others}."
        )


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
