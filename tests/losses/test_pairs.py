"""The closed-form gradient over pairs equals float64 autograd, for every way of computing the pairs."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import oracle
import pytest
import torch
from build import gathered as gather
from build import pairs as random_pairs
from build import relative_error
from fake_cuda import DEVICE, GpuRank, fake_cuda
from ranks import run_ranks
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.losses import pairs
from neuclip_ds.losses.pairs import (
    FactoredSimilarities,
    Hinge,
    PairGrid,
    PairLoss,
    PairSimilarities,
    compiled,
    pair_similarities,
)

EXACT = 1e-10
DIM = 6
UNLIMITED = 1e9  # bytes


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A batch, and how its pairs are split over ranks and cut into blocks."""

    size: int  # B
    rank_starts: tuple[int, ...] = (0,)  # first row of each rank
    columns: int | None = None  # of a block at most
    block_elements: int = 1 << 16

    @property
    def rank_rows(self) -> list[slice]:
        stops = (*self.rank_starts[1:], self.size)
        return [slice(start, stop) for start, stop in zip(self.rank_starts, stops, strict=True)]


SHAPES = [
    Shape(size=2),
    Shape(size=33),
    Shape(size=11, columns=5, block_elements=15),  # 3 x 5, and smaller blocks at the edges
    Shape(size=5, rank_starts=(0, 2), columns=1, block_elements=1),  # a block per pair
    Shape(size=14, rank_starts=(0, 3, 3, 9), columns=4, block_elements=8),  # a rank without rows
    Shape(size=12, rank_starts=(0, 5)),
]


@dataclass(frozen=True, kw_only=True)
class Results:
    """Results of all ranks' rows together."""

    log_g: Tensor  # (2, B)
    image: Tensor  # (B, d)
    text: Tensor  # (B, d)
    weighted_logits: Tensor  # (2, B), or 0-dim if all anchors share tau

    def tensors(self) -> list[Tensor]:
        return [self.log_g, self.image, self.text, self.weighted_logits]


def closed_form(
    features: tuple[Tensor, Tensor],
    pair_loss: PairLoss,
    tau: Tensor,
    log_weight: Tensor,
    shape: Shape,
    budget: float = UNLIMITED,
) -> Results:
    """Compute each rank's part of the pairs from the whole batch, and combine the results."""
    image, text = features
    gathered = gather(image, text, image.dtype)
    log_g = []
    gradients = []
    for rows in shape.rank_rows:
        gathered.local = rows
        similarities = pair_similarities(PairGrid(gathered, shape.columns, budget), pair_loss, tau)
        log_g.append(similarities.log_mean_exp())
        gradients.append(similarities.gradient(log_weight))
    weighted_logits = [gradient.weighted_logits for gradient in gradients]
    return Results(
        log_g=torch.cat(log_g, dim=1),
        image=torch.cat([gradient.image for gradient in gradients]),
        text=torch.cat([gradient.text for gradient in gradients]),
        weighted_logits=torch.cat(weighted_logits, dim=1) if tau.ndim else torch.stack(weighted_logits).sum(),
    )


def by_autograd(
    features: tuple[Tensor, Tensor], pair_loss: PairLoss, tau: Tensor, log_weight: Tensor | None
) -> tuple[Results, Tensor]:
    """Compute the same from the whole similarity matrix; return the results and the weights, 1/g by default."""
    image, text = (x.detach().requires_grad_() for x in features)
    tau = tau.detach().requires_grad_()
    margin = pair_loss.margin if isinstance(pair_loss, Hinge) else None
    size = len(image)
    log_mean = torch.stack([oracle.log_mean_exp(x) for x in oracle.logits(image, text, tau, margin)])
    log_g = log_mean + math.log((size - 1) / (size - pair_loss.divisor_offset))
    if log_weight is None:
        log_weight = -log_g.detach()
    loss = (log_weight + log_g).exp().mean(1).sum()
    grad_image, grad_text, grad_tau = torch.autograd.grad(loss, (image, text, tau))
    weighted_logits = -size * tau.detach() * grad_tau
    return Results(log_g=log_g.detach(), image=grad_image, text=grad_text, weighted_logits=weighted_logits), log_weight


def assert_close(results: Results, expected: Results, limit: float) -> None:
    for value, exact in zip(results.tensors(), expected.tensors(), strict=True):
        if exact.any():
            assert relative_error(value.double(), exact) < limit
        else:
            assert not value.any()


def temperatures(tau: float, individual: bool, size: int) -> Tensor:
    shared = torch.tensor(tau, dtype=torch.float64)
    if not individual:
        return shared
    return shared * torch.linspace(0.5, 2, 2 * size, dtype=torch.float64).reshape(2, size)


def force_factors(monkeypatch: pytest.MonkeyPatch, factors: bool) -> None:
    """Choose between the arithmetic of CPUs, where it is possible, and that of GPUs."""
    monkeypatch.setattr(pairs, "factors_exponentials", lambda device_type: factors)


@pytest.mark.parametrize(
    ("pair_loss", "individual", "factors"),
    [
        pytest.param(PairLoss(), False, True, id="identity, as on a CPU"),
        pytest.param(PairLoss(divisor_offset=0), False, True, id="identity over B, as on a CPU"),
        pytest.param(PairLoss(), False, False, id="identity"),
        pytest.param(PairLoss(divisor_offset=0), True, False, id="identity over B, individual tau"),
        pytest.param(Hinge(0.2), False, False, id="hinge"),
        pytest.param(Hinge(0.2), True, False, id="hinge, individual tau"),
    ],
)
def test_closed_form_equals_autograd_in_blocks_of_every_shape(
    pair_loss: PairLoss, individual: bool, factors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_factors(monkeypatch, factors)
    for shape in SHAPES:
        monkeypatch.setattr(pairs, "block_bytes", lambda device_type, shape=shape: 8 * shape.block_elements)
        features = random_pairs(shape.size, DIM)
        for tau in (0.01, 0.07, 1.0):
            taus = temperatures(tau, individual, shape.size)
            expected, log_weight = by_autograd(features, pair_loss, taus, None)
            cached = closed_form(features, pair_loss, taus, log_weight, shape)
            recomputed = closed_form(features, pair_loss, taus, log_weight, shape, budget=0)
            assert_close(cached, expected, EXACT)
            for value, again in zip(cached.tensors(), recomputed.tensors(), strict=True):
                assert torch.equal(value, again), "caching similarities changes no bit"


def located(kind: str) -> tuple[Tensor, Tensor]:
    """Return (24, d) images and texts: matching pairs, or features near one point or near two opposite points."""
    image, text = random_pairs(24, DIM)
    center = torch.zeros(24, 1, dtype=torch.float64)
    if kind == "collapsed":
        center += 3
    if kind == "opposed":
        center += 3
        center[::2] = -3
    return normalize(image + center, dim=1), normalize(text + center, dim=1)


@pytest.mark.parametrize("factors", [True, False], ids=["as on a CPU", "as on a GPU"])
@pytest.mark.parametrize("kind", ["matched", "collapsed", "opposed"])
def test_one_temperature_is_accurate_in_both_precisions(
    kind: str, factors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_factors(monkeypatch, factors)
    features = located(kind)
    for tau in (0.003, 0.01, 0.07):
        generator = torch.Generator().manual_seed(3)
        taus = temperatures(tau, False, 24)
        _, log_weight = by_autograd(features, PairLoss(), taus, None)
        log_weight = log_weight + torch.randn(2, 24, generator=generator, dtype=torch.float64)
        expected, _ = by_autograd(features, PairLoss(), taus, log_weight)
        for dtype, limit in ((torch.float64, EXACT), (torch.float32, 1e-6 / tau)):
            image, text = (x.to(dtype) for x in features)
            shape = Shape(size=24, columns=7)
            results = closed_form((image, text), PairLoss(), taus.to(dtype), log_weight.to(dtype), shape)
            assert_close(results, expected, limit)


@pytest.mark.parametrize(
    ("negative", "excess", "falls_back"),
    [(0.1, 0.0, False), (-0.97, 0.0, True), (-0.3, 60.0, True)],
    ids=["representable", "negatives vanish", "weights far exceed 1/g"],
)
def test_float32_is_accurate_where_one_exponential_per_pair_would_not_fit(
    negative: float, excess: float, falls_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At tau = 0.01, if exp(s/tau) vanishes for all negatives or if weights are huge, a CPU computes as a GPU does."""
    image = torch.eye(2, 8, dtype=torch.float64)
    text = negative * image.flip(0) + (1 - negative**2) ** 0.5 * image
    tau = temperatures(0.01, False, 2)
    _, log_weight = by_autograd((image, text), PairLoss(), tau, None)
    log_weight = log_weight + excess
    expected, _ = by_autograd((image, text), PairLoss(), tau, log_weight)
    single = (image.float(), text.float())
    results = {}
    for factors in (True, False):
        force_factors(monkeypatch, factors)
        results[factors] = closed_form(single, PairLoss(), tau.float(), log_weight.float(), Shape(size=2))
        assert_close(results[factors], expected, 1e-4)
    same_gradient = torch.equal(results[True].image, results[False].image)
    assert same_gradient == falls_back


class Exponentials(TorchDispatchMode):
    """Counts the elements that exponentials of pairs return."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.exp2_.default and len(result) > 2:  # of pairs, not of the 2 x B anchors
            self.count += result.numel()
        return result


@pytest.mark.parametrize(("factors", "per_pair"), [(True, 1), (False, 4)])
def test_a_cpu_computes_one_exponential_per_pair(factors: bool, per_pair: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not factors:
        force_factors(monkeypatch, False)
    features = random_pairs(32, DIM)
    with Exponentials() as exponentials:
        closed_form(features, PairLoss(), temperatures(0.07, False, 32), torch.zeros(2, 32).double(), Shape(size=32))
    assert exponentials.count == per_pair * 32 * 32


@pytest.mark.parametrize("pair_loss", [PairLoss(), Hinge(0.2)], ids=["l=x", "hinge"])
def test_a_pair_loss_has_one_value_in_all_its_forms(pair_loss: PairLoss) -> None:
    """The value, the exponent, and the weight, which is the value's derivative, agree."""
    tau = 0.3
    root = tau ** (1 / pair_loss.power)
    similarity = torch.linspace(-1, 1, 21, dtype=torch.float64)[None]
    positive = torch.tensor([[0.4]], dtype=torch.float64)
    x = (similarity - positive).requires_grad_()
    value = pair_loss.value_(x.clone())
    (slope,) = torch.autograd.grad(value.sum(), x)
    torch.testing.assert_close((x + pair_loss.margin) * slope, pair_loss.power * value)
    y = similarity / root
    origin = (positive - pair_loss.margin) / root
    exponent = pair_loss.exponent(y, origin, None) + pair_loss.omitted_constant(origin)
    torch.testing.assert_close(exponent, value.detach() / tau)
    weight = pair_loss.weight(y, origin, torch.zeros_like(origin), None, None)
    torch.testing.assert_close(weight * pair_loss.power / root, (value.detach() / tau).exp() * slope / tau)


# Ranks


def rank_results(communicator: Communicator) -> dict[str, list[Tensor]]:
    """Return this rank's results for its rows of a batch, with each pair loss, temperature and arithmetic."""
    share = 12 // communicator.world_size
    rows = slice(communicator.rank * share, (communicator.rank + 1) * share)
    image, text = random_pairs(12, DIM)
    valid = torch.ones(12, dtype=torch.bool)
    valid[[1, 10, 11]] = False  # uneven over ranks
    gathered = gather(image[rows], text[rows], torch.float64, communicator, valid[rows])
    grid = PairGrid(gathered, 5, UNLIMITED)
    cases = {
        "as on a CPU": FactoredSimilarities(grid, PairLoss(), temperatures(0.05, False, gathered.size)),
        "as on a GPU": PairSimilarities(grid, PairLoss(), temperatures(0.05, False, gathered.size)),
        "individual tau": PairSimilarities(grid, PairLoss(), temperatures(0.05, True, gathered.size)),
        "hinge": PairSimilarities(grid, Hinge(0.2), temperatures(0.05, False, gathered.size)),
    }
    results = {}
    for name, similarities in cases.items():
        log_g = similarities.log_mean_exp()
        gradient = similarities.gradient(gathered.gather(-log_g, "normalizer"))
        results[name] = [log_g.T, gradient.image, gradient.text]
        if gradient.weighted_logits.ndim:
            results[name].append(gradient.weighted_logits.T)
        else:
            results[name].append(communicator.all_reduce(gradient.weighted_logits[None], "scalars"))
    return results


def test_two_ranks_equal_one() -> None:
    one = rank_results(Communicator())
    two = run_ranks(2, rank_results)
    for name, expected in one.items():
        for number, value in enumerate(expected):
            parts = [rank[name][number] for rank in two]
            combined = parts[0] if value.ndim == 1 else torch.cat(parts)
            torch.testing.assert_close(combined, value, rtol=1e-10, atol=1e-14)


# Compiled blocks


@pytest.fixture
def fresh_compiler() -> None:
    torch.compiler.reset()
    counters.clear()
    compiled.cache_clear()


def assert_compiled_equals_uncompiled(
    monkeypatch: pytest.MonkeyPatch, pair_loss: PairLoss, individual: bool, columns: int | None, rows: int = 24
) -> None:
    """Compare one of three ranks' results; the batch has both local and other ranks' columns."""
    force_factors(monkeypatch, False)
    size = 3 * rows
    features = random_pairs(size, DIM)
    gathered = gather(*features, torch.float64)
    gathered.local = slice(rows, 2 * rows)
    tau = temperatures(0.05, individual, size)
    log_weight = torch.linspace(-1, 1, 2 * size, dtype=torch.float64).reshape(2, size)
    results = []
    for compiles in (False, True):
        monkeypatch.setattr(pairs, "compiles", lambda device_type, count, compiles=compiles: compiles)
        similarities = pair_similarities(PairGrid(gathered, columns, UNLIMITED), pair_loss, tau)
        log_g = similarities.log_mean_exp()
        gradient = similarities.gradient(log_weight)
        results.append([log_g, gradient.image, gradient.text, gradient.weighted_logits])
    for exact, value in zip(*results, strict=True):
        assert relative_error(value, exact) < 1e-12


@pytest.mark.parametrize(
    ("pair_loss", "individual", "columns"), [(PairLoss(), False, 7), (Hinge(0.2), True, None)], ids=["l=x", "hinge"]
)
def test_batches_of_every_size_share_four_compiled_graphs(
    pair_loss: PairLoss, individual: bool, columns: int | None, fresh_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the two passes needs one graph for local pairs and one for pairs with other ranks' rows."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    for rows in (24, 17):
        assert_compiled_equals_uncompiled(monkeypatch, pair_loss, individual, columns, rows)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 4


@pytest.mark.slow
@pytest.mark.parametrize(("pair_loss", "individual"), [(Hinge(0.2), False), (PairLoss(), True), (Hinge(0.2), True)])
def test_generated_code_gives_the_same_gradients(
    pair_loss: PairLoss,
    individual: bool,
    fresh_compiler: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert_compiled_equals_uncompiled(monkeypatch, pair_loss, individual, 7)
    assert "torch.compile failed" not in caplog.text


def test_without_a_compiler_the_functions_run_uncompiled(
    fresh_compiler: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("backend raised:\nno C compiler\nand its whole log")

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: fail)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert_compiled_equals_uncompiled(monkeypatch, PairLoss(), individual=False, columns=7)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == 2 * [
        "torch.compile failed, so the loss runs uncompiled and slower: backend raised: no C compiler"
    ], "once per function"


def test_an_error_in_the_compiled_function_itself_is_raised(
    fresh_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))

    def fail(x: Tensor) -> Tensor:
        raise ValueError("in the function")

    with pytest.raises(ValueError, match="in the function"):
        compiled(fail)(torch.ones(2))


# GPUs


@pytest.mark.parametrize("compiles", [False, True])
def test_a_gpu_is_never_waited_for(compiles: bool, fresh_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(pairs, "compiles", lambda device_type, count: compiles)
    world_size = 8
    size = 12 * world_size
    with fake_cuda() as gpu:
        image, text = torch.empty(2, 12, DIM, device=DEVICE, dtype=torch.bfloat16)
        gathered = gather(image, text, torch.float32, GpuRank(world_size))
        for pair_loss, shape in ((PairLoss(), ()), (Hinge(0.2), (2, size))):
            tau = torch.ones(shape, device=DEVICE)
            gpu.syncs.clear()
            similarities = pair_similarities(PairGrid(gathered, 40, UNLIMITED), pair_loss, tau)
            log_g = similarities.log_mean_exp()
            gradient = similarities.gradient(torch.zeros(2, size, device=DEVICE))
            assert not gpu.syncs
            results = (log_g, gradient.image, gradient.text, gradient.weighted_logits)
            assert {x.device for x in results} == {DEVICE}
            assert log_g.shape == (2, 12)
            assert gradient.image.shape == gradient.text.shape == (12, DIM)
            assert gradient.weighted_logits.shape == ((2, 12) if shape else ())


@pytest.mark.parametrize(("rows", "compiles"), [(5000, False), (6000, True), (20000, True)])
def test_a_gpu_has_large_blocks_and_compiles_many_pairs(rows: int, compiles: bool) -> None:
    with fake_cuda():
        image, text = torch.empty(2, rows, 4, device=DEVICE)
        grid = PairGrid(gather(image, text, torch.float32, GpuRank(1)), None, 0)
        assert grid.compiles == compiles
        elements = 1 << 25  # 128 MiB
        sizes = [block.view(torch.empty(elements)).numel() for block in grid.blocks()]
    assert max(sizes) > 0.9 * min(elements, rows * rows)
