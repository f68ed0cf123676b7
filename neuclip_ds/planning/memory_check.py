"""Compare what a run needs with the memory of this machine."""

import os

import torch

from neuclip_ds.config import Config
from neuclip_ds.planning.memory import MemoryAccount, MemoryQuery, account, count_towers


def memory_warning(config: Config, world_size: int) -> str | None:
    """Return a sentence if the run, planned before anything is allocated, needs more memory than this machine has.

    Raises `UserError` if the model cannot be built.
    """
    query = MemoryQuery(config, world_size, device="cuda" if torch.cuda.is_available() else "cpu")
    return does_not_fit(account(query, count_towers(query)), query.device)


def does_not_fit(found: MemoryAccount, device: str) -> str | None:
    """Return a sentence if this machine's GPU, or its RAM for all ranks that run here, is smaller than the account."""
    if device == "cuda":
        needed, there, what = found.peak, torch.cuda.get_device_properties(0).total_memory, "each rank's GPU"
    else:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)  # torchrun's, DeepSpeed's
        needed, there = ranks * found.peak, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        what = f"this machine for its {ranks} ranks" if ranks > 1 else "this machine"
    if needed <= there:
        return None
    return (
        f"The run needs {needed / 1e9:,.1f} GB (computed) of {what}, which has {there / 1e9:,.1f} GB: use a smaller "
        "data.micro_batch, model.activation_checkpointing=true, a higher ZeRO stage, or more ranks."
    )
