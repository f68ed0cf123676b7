"""Deterministic algorithms: the same bits from the same inputs, also on a GPU, at some cost in speed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from neuclip_ds.errors import UserError

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # cuBLAS reads it at its first call
_WORKSPACES = (":4096:8", ":16:8")  # with which cuBLAS gives the same bits on every stream
_RAISE = 2  # torch's mode in which an operation without a deterministic algorithm raises
_REFUSAL = " does not have a deterministic implementation"  # in torch's error, after the operation's name


@contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Let torch, cuDNN and cuBLAS use deterministic algorithms in the block, if `enabled`; then restore their modes.

    Raises:
        UserError: the block has called an operation that has no deterministic algorithm, or the environment asks for
            another workspace of cuBLAS.
    """
    if not enabled:
        yield
        return
    before, workspace = _modes(), os.environ.get(_WORKSPACE)
    if workspace not in (None, *_WORKSPACES):
        raise UserError(
            f"{_WORKSPACE}={workspace} is not deterministic: unset it, set it to {' or '.join(_WORKSPACES)}, or set "
            "run.deterministic=false."
        )
    os.environ.setdefault(_WORKSPACE, _WORKSPACES[0])
    # nothing reads memory before it is written, so filling it would only take time
    _set_modes(_RAISE, deterministic=True, benchmark=False, fill=False)
    try:
        yield
    except RuntimeError as error:
        operation, refused, _ = str(error).partition(_REFUSAL)
        if not refused:
            raise
        raise UserError(
            f"{operation} has no deterministic algorithm on this device: set run.deterministic=false, or choose a "
            "model without it."
        ) from error
    finally:
        _set_modes(*before)
        if workspace is None:
            del os.environ[_WORKSPACE]


def _modes() -> tuple[int, bool, bool, bool]:
    cudnn, memory = torch.backends.cudnn, torch.utils.deterministic
    fill = memory.fill_uninitialized_memory  # type: ignore[attr-defined]
    return torch.get_deterministic_debug_mode(), cudnn.deterministic, cudnn.benchmark, fill


def _set_modes(mode: int, deterministic: bool, benchmark: bool, fill: bool) -> None:
    torch.set_deterministic_debug_mode(mode)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = deterministic, benchmark
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
