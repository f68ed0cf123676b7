"""Compiled pairs give the gradient of the pairs that are not, for every pair loss and form of block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from build import batch, pairs, relative_error

from neuclip_ds.objectives import compiled_pairs
from neuclip_ds.objectives.compiled_pairs import CompiledPairs
from neuclip_ds.objectives.contrastive import GeneralPairs, PairSimilarities
from neuclip_ds.objectives.gather import GatheredFeatures
from neuclip_ds.objectives.pair_grid import PairGrid
from neuclip_ds.objectives.pair_loss import Hinge, PairLoss
from neuclip_ds.planning.objective_cost import SimulatedRank

ROWS = 24


def results(general: type[GeneralPairs], pair_loss: PairLoss, tau: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """Return log g, gradients and mean logits of rank 0 of a batch, in blocks of at most seven columns."""
    gathered = GatheredFeatures(batch(*pairs(ROWS, 6)), SimulatedRank(ranks), torch.float64)
    similarities = PairSimilarities(PairGrid(gathered, 7, budget=1e9), pair_loss, tau, general)
    similarities._pairs = general(similarities._grid, pair_loss, tau)  # also where a CPU would factor exponentials
    log_weight = torch.linspace(-1, 1, 2 * ranks * ROWS, dtype=torch.float64).reshape(2, -1)
    return [similarities.log_mean_exp(), *similarities.gradient(log_weight)]


def compare(pair_loss: PairLoss, ranks: int, individual: bool) -> None:
    tau = torch.tensor(0.05, dtype=torch.float64)
    if individual:
        tau = tau * torch.linspace(0.5, 2, 2 * ranks * ROWS, dtype=torch.float64).reshape(2, -1)
    wanted = results(GeneralPairs, pair_loss, tau, ranks)
    for value, exact in zip(results(CompiledPairs, pair_loss, tau, ranks), wanted, strict=True):
        assert relative_error(value, exact) < 1e-12


@pytest.mark.parametrize("individual", [False, True])
@pytest.mark.parametrize("pair_loss", [PairLoss(), Hinge(0.2, 2.0)])
def test_one_graph_gives_the_same(pair_loss: PairLoss, individual: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def traced(function: Any) -> Any:
        return torch.compile(function, dynamic=True, fullgraph=True, backend="eager")

    torch.compiler.reset()
    monkeypatch.setattr(compiled_pairs, "_compiled", traced)
    compare(pair_loss, 3, individual)


@pytest.mark.slow
@pytest.mark.parametrize("individual", [False, True])
def test_compiled_code_gives_the_same(individual: bool) -> None:
    compare(Hinge(0.2, 2.0), 3, individual)
