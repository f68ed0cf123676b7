"""Deterministic algorithms: the modes in and after the block, and what is refused; no method needs another one."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from build import VARIANTS, batch, objective, pairs, step
from torch.utils._python_dispatch import TorchDispatchMode

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.deterministic import deterministic_algorithms
from neuclip_ds.errors import UserError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
# of torch's list, what adds in an undefined order on CUDA, with a deterministic form or without; also as the gradient
# of an index, index_select or gather. An index_put counts where it accumulates, as our indices do not repeat.
ORDERLESS = {
    *("index_add", "index_put accumulate", "index_reduce", "scatter_add", "scatter_reduce", "put", "cumsum", "histc"),
    *("median", "bincount", "kthvalue", "embedding_dense_backward", "nll_loss_forward", "nll_loss_backward"),
}


def modes() -> tuple[object, ...]:
    cudnn, memory = torch.backends.cudnn, torch.utils.deterministic
    filled = memory.fill_uninitialized_memory  # type: ignore[attr-defined]
    return torch.get_deterministic_debug_mode(), cudnn.deterministic, cudnn.benchmark, filled, os.environ.get(WORKSPACE)


def test_the_modes_hold_in_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKSPACE, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    before = modes()
    with deterministic_algorithms(False):
        assert modes() == before
    with pytest.raises(KeyError), deterministic_algorithms(True):
        assert modes() == (2, True, False, False, ":4096:8")
        raise KeyError
    assert modes() == before


def test_an_operation_that_cannot_is_named() -> None:
    zeros = torch.zeros(3)
    refused = pytest.raises(UserError, match=r"^put_ has no deterministic algorithm .* set run.deterministic=false")
    with refused, deterministic_algorithms(True):
        zeros.put_(torch.tensor([0]), torch.ones(1))
    with pytest.raises(RuntimeError, match="size"), deterministic_algorithms(True):
        zeros + torch.zeros(2)


def test_another_workspace_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, ":0:0")
    refused = pytest.raises(UserError, match=f"{WORKSPACE}=:0:0 is not deterministic: unset it")
    with refused, deterministic_algorithms(True):
        pass
    monkeypatch.setenv(WORKSPACE, ":16:8")
    with deterministic_algorithms(True):
        assert os.environ[WORKSPACE] == ":16:8"
    assert os.environ[WORKSPACE] == ":16:8"


class Operations(TorchDispatchMode):
    """Keeps the names of the operations, also of those in a backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.strip("_")
        self.names.add(f"{name} accumulate" if name == "index_put" and True in args[3:] else name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", VARIANTS)
def test_no_method_adds_in_an_undefined_order(name: str) -> None:
    """So nets that every rank fits to the same rows stay equal on GPUs, deterministic or not."""
    method, options = VARIANTS[name]
    built = objective(method, Communicator(), 6, torch.float32, **options)
    with Operations() as seen:
        for number in range(3):
            built(batch(*(x.float() for x in pairs(12, 6, seed=number))), step(number, epoch=number))
    assert len(seen.names) > 20
    assert seen.names & ORDERLESS == set()
