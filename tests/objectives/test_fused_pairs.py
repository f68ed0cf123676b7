"""Fused operations give the gradients of unfused ones, with few graphs; 16-bit features are multiplied exactly."""

import logging
from functools import partial
from typing import Any

import pytest
import torch
from build import batch, pairs, relative_error
from fake_cuda import DEVICE, fake_cuda
from neuclip_ds.objectives import pair_arithmetic
from neuclip_ds.objectives.gather import GatheredFeatures
from neuclip_ds.objectives.general_pairs import GeneralSimilarities, fused
from neuclip_ds.objectives.pair_arithmetic import pair_products
from neuclip_ds.objectives.pair_grid import PairGrid
from neuclip_ds.objectives.pair_loss import Hinge, PairLoss
from step_costs import SimulatedRank
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode


def results(
    fuses: bool, pair_loss: PairLoss, rows: int, ranks: int, individual: bool, chunk: int | None
) -> list[Tensor]:
    """Return log g, the gradients and the mean logits of rank 0 for a batch."""
    gathered = GatheredFeatures(batch(*pairs(rows, 6)), SimulatedRank(ranks), torch.float64)
    tau = torch.tensor(0.05, dtype=torch.float64)
    if individual:
        tau = tau * torch.linspace(0.5, 2, 2 * ranks * rows, dtype=torch.float64).reshape(2, -1)
    grid = PairGrid(gathered, chunk, budget=1e9)
    grid.fuses = fuses
    found = GeneralSimilarities(grid, pair_loss, tau)
    log_weight = torch.linspace(-1, 1, 2 * ranks * rows, dtype=torch.float64).reshape(2, -1)
    return [found.log_mean_exp(), *found.gradient(log_weight)]


def compare(pair_loss: PairLoss, rows: int, individual: bool, ranks: int = 3, chunk: int | None = 7) -> None:
    case = pair_loss, rows, ranks, individual, chunk
    for value, exact in zip(results(True, *case), results(False, *case), strict=True):
        assert relative_error(value, exact) < 1e-12


@pytest.fixture
def fresh() -> None:
    torch.compiler.reset()
    counters.clear()
    fused.cache_clear()


@pytest.mark.parametrize(
    ("pair_loss", "individual", "chunk"),
    [(PairLoss(), False, 7), (PairLoss(), True, None), (Hinge(0.2), False, None), (Hinge(0.2), True, 7)],
)
def test_ragged_batches_share_graphs(
    pair_loss: PairLoss, individual: bool, chunk: int | None, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the two passes needs one graph for local pairs and one for pairs with other ranks' rows."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    for rows in (24, 23, 17, 20, 26):
        compare(pair_loss, rows, individual, chunk=chunk)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] <= 4, "two functions, each compiled again once"


@pytest.mark.slow
@pytest.mark.parametrize("individual", [False, True])
def test_generated_code_gives_the_same(individual: bool, fresh: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        compare(Hinge(0.2), 24, individual)
    assert "torch.compile fails" not in caplog.text


def test_without_a_compiler_it_runs_as_it_is(
    fresh: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no C compiler\nand its whole log")

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: fail)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            compare(PairLoss(), 24, individual=False)
    said = [record.getMessage() for record in caplog.records]
    assert said == 2 * ["The objective runs slower, since torch.compile fails: no C compiler"], "once for each function"


def test_an_error_of_its_own_is_raised(fresh: None) -> None:
    def fail(x: Tensor) -> Tensor:
        raise ValueError("of the function")

    with pytest.raises(ValueError, match="of the function"):
        fused(fail)(torch.ones(2))


@pytest.mark.parametrize(("rows", "fuses"), [(5000, False), (6000, True), (20000, True)])
def test_blocks_of_a_gpu(rows: int, fuses: bool) -> None:
    with fake_cuda():
        features = batch(*torch.empty(2, rows, 4, device=DEVICE))
        grid = PairGrid(GatheredFeatures(features, SimulatedRank(1), torch.float32), None, 0)
        assert grid.fuses == fuses
        elements = 1 << 25  # 128 MiB
        sizes = [block.view(torch.empty(elements)).numel() for block in grid.blocks()]
    assert max(sizes) > 0.9 * min(elements, rows * rows)


class Products(TorchDispatchMode):
    """Records the input dtype of each matrix product and whether the product may round its inputs to TF32."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.mm:
            self.seen.append((args[0].dtype, torch.backends.cuda.matmul.allow_tf32))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("widens", [True, False], ids=["torch 2.8", "before"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_of_a_gpu(dtype: torch.dtype, widens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_arithmetic, "_MM_WIDENS", widens)
    with fake_cuda():
        rows, columns = torch.empty(8, 4, device=DEVICE), torch.empty(6, 4, device=DEVICE)
        with torch.no_grad(), Products() as products:
            found = pair_products(rows, columns, dtype)
    assert (found.dtype, found.shape) == (torch.float32, (8, 6))
    half = dtype != torch.float32
    assert products.seen == ([(dtype, False)] if half and widens else [(torch.float32, half)])
