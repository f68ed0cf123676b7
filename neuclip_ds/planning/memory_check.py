"""Compare what a run needs with the memory of this machine."""

import os

import torch

from neuclip_ds.config import Config
from neuclip_ds.planning.loader_memory import SHARED_MEMORY, LoaderMemory, loader_memory
from neuclip_ds.planning.memory import MemoryAccount, MemoryQuery, account, count_towers

_FIX = "use a smaller data.micro_batch, model.activation_checkpointing=true, a higher ZeRO stage, or more ranks"
_FIX_OF_HOST = "use fewer data.workers or data.prefetch, a smaller data.batch_size, or more nodes"


def local_ranks() -> int:
    """Return how many ranks of this launch run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)  # torchrun's, DeepSpeed's


def memory_warnings(config: Config, world_size: int) -> list[str]:
    """Return a sentence for each memory of this machine that the run, planned before it allocates, is too large for.

    Raises `UserError` if the model cannot be built.
    """
    query = MemoryQuery(config, world_size, device="cuda" if torch.cuda.is_available() else "cpu")
    return shortages(account(query, count_towers(query)), loader_memory(query, local_ranks()), query.device)


def shortages(found: MemoryAccount, loaders: LoaderMemory, device: str) -> list[str]:
    """Return a sentence for each of this machine's memories that is smaller than the accounts.

    These are its GPU, its RAM for all ranks that run here with their loaders, and its shared memory.
    """
    ranks = loaders.ranks_of_node
    machine = f"this machine for its {ranks} ranks" if ranks > 1 else "this machine"
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0).total_memory
        sentences = [_shortage(found.peak, gpu, "each rank's GPU", _FIX)]
        sentences.append(_shortage(ranks * found.host + loaders.of_node, ram, machine, _FIX_OF_HOST))
    else:
        sentences = [_shortage(ranks * found.peak + loaders.of_node, ram, machine, _FIX)]
    return [sentence for sentence in (*sentences, _short_shared_memory(loaders)) if sentence]


def _shortage(needed: int, there: int, what: str, fix: str) -> str | None:
    if needed <= there:
        return None
    return f"The run needs {needed / 1e9:,.1f} GB (computed) of {what}, which has {there / 1e9:,.1f} GB: {fix}."


def _short_shared_memory(loaders: LoaderMemory) -> str | None:
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError:  # a system that keeps it elsewhere
        return None
    needed, free = loaders.shared_of_node, status.f_bavail * status.f_frsize
    if needed <= free:
        return None
    return (
        f"The loaders need {needed / 1e9:,.2f} GB (computed) in {SHARED_MEMORY}, which has {free / 1e9:,.2f} GB free, "
        f"and are killed by SIGBUS where it is full: start the container with {loaders.advice}, or lower data.workers "
        "or data.prefetch."
    )
