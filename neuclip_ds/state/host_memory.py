"""Tables in host memory that are read and written at random rows."""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

from neuclip_ds.errors import UserError


def random_access_table(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Return zeros of (rows, columns), which only this process may use: a forked one is killed where it touches them.

    The table lies in huge pages where the kernel has them: with pages of 4 KB nearly every row misses the processor's
    cache of addresses. Forked processes do not inherit it: while one lives, such as a loader worker, the first write
    to each page would copy that page, which takes longer than the write and up to the table's size of memory again.

    Raises:
        UserError: there is not as much memory.
    """
    if type(torch.empty(0)) is not Tensor:  # under a mode whose tensors have no memory
        return torch.zeros(rows, columns, dtype=dtype)
    size = rows * columns * dtype.itemsize
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise UserError(
            f"The {size / 1e9:,.1f} GB of this rank's per-sample statistics cannot be allocated ({error.strerror}); "
            "use more ranks, or a machine with more memory."
        ) from error
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        with suppress(OSError, AttributeError):  # a kernel without huge pages, or without the advice
            memory.madvise(getattr(mmap, advice))
    return torch.frombuffer(memory, dtype=dtype).view(rows, columns)
