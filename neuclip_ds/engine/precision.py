"""Numerics of a run: the precision of towers, matrix products and gathered features, and deterministic algorithms."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from deepspeed.accelerator import get_accelerator

from neuclip_ds.config import Config
from neuclip_ds.engine.config import EngineConfig
from neuclip_ds.errors import UserError

log = logging.getLogger(__name__)

_LIBRARY_ALGORITHMS = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",  # NCCL's own choice would depend on the nodes of the launch
    "NCCL_NVLS_ENABLE": "0",
}


def towers_dtype(engine_config: EngineConfig) -> torch.dtype:
    """Return the dtype of the towers' weights and activations under DeepSpeed's config."""
    return torch.bfloat16 if engine_config.precision == "bf16" else torch.float32


def require_precision(engine_config: EngineConfig, name: str) -> None:
    """Raise `UserError` if this device cannot run towers in the precision of the DeepSpeed config called `name`."""
    accelerator = get_accelerator()
    is_supported = accelerator.is_bf16_supported()
    if accelerator.device_name() == "cuda":  # DeepSpeed's accelerator counts slow emulation as support
        is_supported = torch.cuda.is_bf16_supported(including_emulation=False)
    if engine_config.precision == "bf16" and not is_supported:
        raise UserError(
            f"deepspeed={name} runs the towers in bf16, which this device ({accelerator.device_name()}) does not "
            "support: use deepspeed=zero1_fp32."
        )


def resolve_comm_dtype(config: Config, engine_config: EngineConfig) -> torch.dtype:
    """Return the dtype in which features are sent between ranks (`objective.comm_dtype`)."""
    comm_dtypes = {"auto": towers_dtype(engine_config), "bfloat16": torch.bfloat16, "float32": torch.float32}
    return comm_dtypes[config.objective.comm_dtype]


def set_matmul_precision(config: Config, engine_config: EngineConfig, device: torch.device) -> None:
    """Set and log the precision in which a GPU multiplies float32 matrices; do nothing on a CPU or for bf16 towers.

    The setting applies to the whole process until `neuclip_ds.train` ends. The loss overrides it for its own matrix
    products.
    """
    if device.type == "cuda" and towers_dtype(engine_config) is torch.float32:
        torch.backends.cuda.matmul.allow_tf32 = config.model.matmul_precision == "tf32"
        log.info("the towers compute matrix products in %s (model.matmul_precision)", config.model.matmul_precision)


@contextmanager
def fixed_library_algorithms(enabled: bool) -> Iterator[None]:
    """If `enabled`, make cuBLAS and NCCL use the same algorithms in every launch unless the environment selects others.

    NCCL reads its variables when ranks connect; cuBLAS reads its variable at the first call. The variables are removed
    at the end of the block, so that they affect neither later runs in this process nor commands that it starts.
    """
    added: list[str] = []
    if enabled:
        added = [name for name in _LIBRARY_ALGORITHMS if name not in os.environ]
    for name in added:
        os.environ[name] = _LIBRARY_ALGORITHMS[name]
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """If `enabled`, use deterministic algorithms in the block: equal inputs give bit-identical results, even on GPUs.

    Raises:
        UserError: the block called an operation without a deterministic algorithm.
    """
    if not enabled:
        yield
        return
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    settings = torch.utils.deterministic
    filled_memory = settings.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    # no operation reads uninitialized memory, so filling it would only take time
    settings.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        with fixed_library_algorithms(True):
            yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        reason = str(error).partition(". ")[0]
        raise UserError(f"{reason}: set run.deterministic=false, or choose a model without this operation.") from error
    finally:
        torch.use_deterministic_algorithms(was_deterministic)
        settings.fill_uninitialized_memory = filled_memory  # type: ignore[attr-defined]
