"""Test the precisions that a device supports, float32 matrix products on a GPU, and deterministic algorithms."""

import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from build import VARIANTS
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

from neuclip_ds.config import Config
from neuclip_ds.distributed.environment import RankEnvironment
from neuclip_ds.engine.config import load_engine_config
from neuclip_ds.engine.precision import deterministic_algorithms, require_precision, set_matmul_precision
from neuclip_ds.errors import UserError
from neuclip_ds.losses.arithmetic import restored_tf32
from neuclip_ds.losses.base import Position
from neuclip_ds.losses.contrastive_loss import ContrastiveLoss
from neuclip_ds.recipe import parse
from neuclip_ds.training import trainer

MATMUL = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = MATMUL.allow_tf32
    yield
    MATMUL.allow_tf32 = before


def config(deepspeed: str, **model: str) -> Config:
    return Config.model_validate({"deepspeed": deepspeed, "model": model})


@pytest.mark.parametrize(("options", "tf32"), [({}, True), ({"matmul_precision": "float32"}, False)])
def test_matmul_precision_is_set_and_logged_on_a_gpu(
    options: dict[str, str], tf32: bool, caplog: pytest.LogCaptureFixture
) -> None:
    MATMUL.allow_tf32 = not tf32
    tried = config("zero1_fp32", **options)
    with caplog.at_level(logging.INFO), restored_tf32():
        set_matmul_precision(tried, load_engine_config(tried, 1), torch.device("cuda"))
        assert MATMUL.allow_tf32 == tf32
    assert MATMUL.allow_tf32 != tf32, "a program's own products keep their precision after a run"
    assert f"matrix products in {tried.model.matmul_precision} (model.matmul_precision)" in caplog.text


@pytest.mark.parametrize(("deepspeed", "device"), [("zero1_fp32", "cpu"), ("zero1_bf16", "cuda")])
def test_matmul_precision_is_not_set_without_a_gpu_or_for_bf16(
    deepspeed: str, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    before, tried = MATMUL.allow_tf32, config(deepspeed)
    with caplog.at_level(logging.INFO):
        set_matmul_precision(tried, load_engine_config(tried, 1), torch.device(device))
    assert MATMUL.allow_tf32 == before
    assert not caplog.text


def test_a_device_without_the_precision_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    monkeypatch.setattr(accelerator, "is_bf16_supported", lambda: False)
    with pytest.raises(UserError, match=r"towers in bf16, which this device .*=zero1_fp32\."):
        require_precision(load_engine_config(config("zero1_bf16"), 1), "zero1_bf16")
    require_precision(load_engine_config(config("zero1_fp32"), 1), "zero1_fp32")


# The operations of torch's list that add in an undefined order on CUDA, with or without a deterministic form; some are
# gradients of index, index_select or gather. index_put is listed only with accumulate: our indices do not repeat.
ORDERLESS = {
    *("index_add", "index_put accumulate", "index_reduce", "scatter_add", "scatter_reduce", "put", "cumsum", "histc"),
    *("median", "bincount", "kthvalue", "embedding_dense_backward", "nll_loss_forward", "nll_loss_backward"),
}


def modes() -> tuple[bool, bool]:
    filled: bool = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    return torch.are_deterministic_algorithms_enabled(), filled


def test_deterministic_mode_ends_with_the_block() -> None:
    before = modes()
    with deterministic_algorithms(False):
        assert modes() == before
    with pytest.raises(KeyError), deterministic_algorithms(True):
        assert modes() == (True, False)
        raise KeyError
    assert modes() == before


def test_nccl_variables_are_set_before_ranks_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "")
    monkeypatch.delenv("NCCL_ALGO")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    found: list[str | None] = []

    def process_group(*options: object) -> None:
        found.extend(os.environ.get(name) for name in ("NCCL_ALGO", "NCCL_NVLS_ENABLE"))
        raise KeyError

    monkeypatch.setattr(trainer, "process_group", process_group)
    with pytest.raises(KeyError):
        trainer.train(parse(["demo", "--run.deterministic=true"]).config, RankEnvironment(0, 0, 1))
    assert found == ["Ring", "1"], "the user's choice stays"
    assert "NCCL_ALGO" not in os.environ, "a later run must not inherit it"


def test_an_operation_without_a_deterministic_algorithm_is_named() -> None:
    zeros = torch.zeros(3)
    refused = pytest.raises(UserError, match=r"^put_ does not have a deterministic .* set run.deterministic=false")
    with refused, deterministic_algorithms(True):
        zeros.put_(torch.tensor([0]), torch.ones(1))
    with pytest.raises(RuntimeError, match="size"), deterministic_algorithms(True):
        zeros + torch.zeros(2)


class Operations(TorchDispatchMode):
    """Dispatch mode that records the names of all operations, including operations of backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.strip("_")
        self.names.add(f"{name} accumulate" if name == "index_put" and True in args[3:] else name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", VARIANTS)
def test_no_method_adds_in_an_undefined_order(name: str) -> None:
    """Networks that all ranks fit to the same rows therefore stay equal on GPUs, with or without deterministic mode."""
    method, options = VARIANTS[name]
    loss = ContrastiveLoss(method, dim=6, samples=1000, epochs=3, steps_per_epoch=1, **options)
    torch.manual_seed(0)
    with Operations() as seen:
        for number in range(3):
            image, text = normalize(torch.randn(2, 12, 6), dim=-1)
            position = Position(step=number, epoch=number, lr=1e-3, peak_lr=1e-3)
            loss(image.requires_grad_(), text, torch.arange(12), position=position).backward()
    assert len(seen.names) > 20
    assert seen.names & ORDERLESS == set()
