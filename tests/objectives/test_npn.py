"""The NPN's closed-form update against autograd and torch's Adagrad, its queue and its restarts."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from build import batch, objective, pairs, relative_error, step

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.objectives.base import Context
from neuclip_ds.objectives.gather import GatheredFeatures
from neuclip_ds.objectives.methods.neuclip import NpnConfig
from neuclip_ds.objectives.normalizers.npn import NpnNormalizer


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("order", ["alternating", "simultaneous"])
def test_updates_follow_adagrad_on_the_papers_objective(separate: bool, order: str) -> None:
    """Three updates equal torch.optim.Adagrad on autograd's gradient of tau/B sum [exp(-alpha)(eps + g) + alpha]."""
    dim, size, eps, tau = 6, 20, 1e-14, torch.tensor(0.07, dtype=torch.float64)
    npn = {"prototypes": size, "updates": 3, "lr": 0.3, "initial_accumulator": 0.01, "order": order}
    npn["restart_with"] = "earlier"
    npn["objective"] = "separate" if separate else "unified"
    decayed = {**npn, "weight_decay": 0.2}
    method = objective("neuclip", Communicator(), dim, eps=eps, npn=decayed, temperature={"lr": 0.0})
    first_image, first_text = pairs(size, dim, seed=1)
    method(batch(first_image, first_text), step(0))
    w1, w2 = (torch.nn.Parameter(start.clone()) for start in (first_text, first_image))
    adagrad = torch.optim.Adagrad([w1, w2], lr=0.3, initial_accumulator_value=0.01, weight_decay=0.2)
    image, text = pairs(size, dim)
    g = torch.stack([oracle.log_mean_exp(x).exp() for x in oracle.logits(image, text, tau)])
    for _ in range(3):
        adagrad.zero_grad()
        alpha = oracle.alphas(image, text, tau, w1, w2, eps)
        unified = tau * ((-alpha).exp() * (eps + g) + alpha)
        ((alpha - torch.log(eps + g)).square() if separate else unified).mean(1).sum().backward()
        adagrad.step()
    method(batch(image, text), step(1))
    table = method.row_tables()["npn"].tensors
    for name, wanted in (("w1", w1), ("w2", w2)):
        assert relative_error(table[name], wanted.detach()) < 1e-10
        assert relative_error(table[f"{name}_accumulator"], adagrad.state[wanted]["sum"]) < 1e-10


def test_simultaneous_order_predicts_with_the_network_before_its_updates() -> None:
    found = {}
    for order, updates in (("simultaneous", 3), ("alternating", 3), ("alternating", 0)):
        npn = {"prototypes": 8, "updates": updates, "lr": 0.3, "order": order, "restart_with": "earlier"}
        method = objective("neuclip", Communicator(), 4, npn=npn)
        method(batch(*pairs(8, 4, seed=1)), step(0))
        found[order, updates] = method(batch(*pairs(8, 4)), step(1))
    untouched = found["alternating", 0].image
    assert torch.equal(found["simultaneous", 3].image, untouched)
    assert not torch.equal(found["alternating", 3].image, untouched)


def test_updates_in_float32() -> None:
    """tau = 0.01 and unlike pairs, ten updates from a warm accumulator (from zero AdaGrad's first step is a sign)."""
    tables = []
    for dtype in (torch.float32, torch.float64):
        npn = {"prototypes": 32, "initial_accumulator": 1.0, "lr": 0.1}
        method = objective("neuclip", Communicator(), 16, dtype, npn=npn, temperature={"initial": 0.01, "lr": 0.0})
        for number in range(2):
            image, text = pairs(32, 16, seed=number)
            method(batch(image.to(dtype), text.to(dtype)), step(number))
        tables.append(method.row_tables()["npn"].tensors)
    for name in ("w1", "w2"):
        assert relative_error(tables[0][name].double(), tables[1][name]) < 1e-4


def test_prototypes_come_from_earlier_batches_only() -> None:
    """A restart draws the last m samples before the current batch: W1 texts, W2 images, of the same samples."""
    dim, size, m = 4, 5, 12
    npn = {"prototypes": m, "updates": 0, "restart_every": 4}
    method = objective("neuclip", Communicator(), dim, npn=npn)
    history = [pairs(size, dim, seed=number) for number in range(9)]
    for number, (image, text) in enumerate(history):
        method(batch(image, text), step(number))
        table = method.row_tables()["npn"].tensors
        if number < 3:  # 3 batches of 5 are needed before 12 samples have been seen
            assert not table["w1"].any()
            continue
        drawn = max(3, number - number % 4)
        texts = torch.cat([text for _, text in history[:drawn]])[-m:]
        images = torch.cat([image for image, _ in history[:drawn]])[-m:]
        order = torch.cdist(table["w1"], texts).argmin(dim=1)
        assert sorted(order.tolist()) == list(range(m))
        torch.testing.assert_close(table["w1"], texts[order])
        torch.testing.assert_close(table["w2"], images[order])


@pytest.mark.parametrize(("source", "number"), [("current", 1), ("earlier", 0)])
def test_batches_larger_than_the_queue(source: str, number: int) -> None:
    """Algorithm 1 draws from the batch itself, or, without an anchor's own partner, from the one before."""
    npn = {"prototypes": 6, "updates": 0, "restart_every": 1, "restart_with": source}
    method = objective("neuclip", Communicator(), 4, npn=npn)
    batches = [pairs(20, 4), pairs(20, 4, seed=1)]
    for order, (image, text) in enumerate(batches):
        method(batch(image, text), step(order))
    text = batches[number][1]
    found = method.row_tables()["npn"].tensors["w1"]
    order = torch.cdist(found, text[-6:]).argmin(dim=1)
    assert sorted(order.tolist()) == list(range(6))
    torch.testing.assert_close(found, text[-6:][order])


@pytest.mark.parametrize("reset", [True, False])
def test_accumulator_at_restart(reset: bool) -> None:
    npn = {"prototypes": 8, "updates": 1, "restart_every": 2, "lr": 0.05, "reset_accumulator": reset}
    method = objective("neuclip", Communicator(), 4, npn=npn)
    sums = []
    for number in range(3):
        method(batch(*pairs(8, 4, seed=number)), step(number))
        sums.append(method.row_tables()["npn"].tensors["w1_accumulator"].clone())
    grown = bool((sums[2] >= sums[1]).all())
    assert grown is not reset


def test_a_runaway_is_said_in_words(caplog: pytest.LogCaptureFixture) -> None:
    method = objective("neuclip", Communicator(), 4, npn={"prototypes": 8, "updates": 0, "restart_with": "earlier"})
    image, text = pairs(8, 4, likeness=3.0)
    method(batch(image, -image), step(0))
    with caplog.at_level(logging.WARNING):
        method(batch(image, text), step(1))
        method(batch(image, text), step(2))
    said = [record.getMessage() for record in caplog.records if "lost the normaliser" in record.getMessage()]
    assert len(said) == 1
    assert "objective.npn.lr" in said[0]


def test_health_is_read_in_steps_that_log_alone(caplog: pytest.LogCaptureFixture) -> None:
    method = objective("neuclip", Communicator(), 4, npn={"prototypes": 8, "updates": 0, "restart_with": "earlier"})
    image, text = pairs(8, 4, likeness=3.0)
    method(batch(image, -image), step(0))
    with caplog.at_level(logging.WARNING):
        method(batch(image, text), step(1)._replace(logs=False))
        assert not caplog.records
        method(batch(image, text), step(2))
    assert "step 2" in caplog.text


class OneOf(Communicator):
    """A rank of several that sends nothing."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.rank, self.world_size = rank, world_size


@pytest.mark.parametrize("sizes", [(3, 4, 5, 2, 6, 1, 7), (9, 2, 16, 3), (20, 7, 7, 7)])
@pytest.mark.parametrize("world_size", [1, 3, 5])
def test_each_rank_queues_the_last_samples_of_its_places(sizes: tuple[int, ...], world_size: int) -> None:
    """Sample number i has place i mod m; batches smaller and larger than m and than a rank's places."""
    m, dim = 7, 2
    config = NpnConfig(prototypes=m)
    ranks = [NpnNormalizer(config, 1e-14, Context(dim, 100, OneOf(r, world_size))) for r in range(world_size)]
    wanted, seen = torch.zeros(m), 0
    for size in sizes:
        numbers = torch.arange(seen, seen + size, dtype=torch.float32)
        for number in numbers:
            wanted[int(number) % m] = number
        rows = SimpleNamespace(image=numbers.unsqueeze(1).expand(-1, dim), text=-numbers.unsqueeze(1).expand(-1, dim))
        rows.size = size
        for rank in ranks:
            rank._enqueue(rows)  # type: ignore[arg-type]
        seen += size
        tables = [rank.row_tables()["npn"].tensors for rank in ranks]
        assert torch.equal(torch.cat([table["queue_image"] for table in tables])[:, 0], wanted)
        assert torch.equal(torch.cat([table["queue_text"] for table in tables])[:, 0], -wanted)


def test_a_rank_without_prototypes_takes_part() -> None:
    """Two prototypes over three ranks: the third adds nothing to the sums, and no number that is not finite."""
    normalizer = NpnNormalizer(NpnConfig(prototypes=2, alpha_grad="full"), 1e-14, Context(4, 100, OneOf(2, 3)))
    image, text = (x.float() for x in pairs(5, 4))
    side = normalizer._side(image, normalizer._prototypes[0].detach(), torch.tensor(0.01))
    assert side.share.shape == (5, 0)
    assert not (side.log_sum.double() - (1 - (image * text).sum(1)) / 0.01).exp().any()
    assert side.log_sum.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("goal", ["unified", "separate"])
def test_the_updates_are_one_graph(goal: Any) -> None:
    """No branch of the loop depends on a number of the device: it can be compiled, or captured in a CUDA graph."""
    size, dim = 8, 4
    config = NpnConfig(prototypes=size, updates=3, lr=0.1, objective=goal)
    context = Context(dim, 100, Communicator(), torch.float64)
    captured, eager = (NpnNormalizer(config, 1e-14, context) for _ in range(2))
    for normalizer in (captured, eager):
        for prototype, start in zip(normalizer.parameters().values(), pairs(size, dim, seed=1), strict=True):
            prototype.copy_(start)
    rows = GatheredFeatures(batch(*pairs(size, dim)), Communicator(), torch.float64)
    log_target, tau = torch.randn(2, size, dtype=torch.float64), torch.tensor(0.07, dtype=torch.float64)
    positive = (rows.image * rows.text).sum(dim=1)
    graph = torch.compile(captured._fit, backend="eager", fullgraph=True)
    graph(rows, positive, log_target, tau)
    eager._fit(rows, positive, log_target, tau)
    tables = [normalizer.row_tables()["npn"].tensors for normalizer in (captured, eager)]
    for key, wanted in tables[1].items():
        torch.testing.assert_close(tables[0][key], wanted, rtol=1e-12, atol=1e-14, msg=key)


@pytest.mark.parametrize("network", ["prototypes", "mlp"])
@pytest.mark.parametrize("source", ["current", "earlier"])
@pytest.mark.parametrize("reading", ["full", "positive", "stop"])
def test_float32_at_a_temperature_of_three_thousandths(network: str, source: str, reading: str) -> None:
    """Unlike, clustered batches, whose normalisers the network misses by up to exp(600): all stays finite."""
    npn: dict[str, Any] = {"prototypes": 32, "updates": 5, "restart_every": 3, "lr": 0.05, "mlp_lr": 0.1}
    npn |= {"network": network, "restart_with": source, "alpha_grad": reading}
    temperature = {"initial": 0.003, "minimum": 0.003, "rho": 2.0}
    method = objective("neuclip", Communicator(), 16, torch.float32, npn=npn, temperature=temperature)
    for number in range(8):
        image, text = (x.float() for x in pairs(32, 16, seed=number, likeness=(-1) ** number))
        image[:8], text[8:16] = -text[:8], text[16:17]
        found = method(batch(image, text), step(number))
        assert all(torch.isfinite(x).all() for x in (found.image, found.text, found.loss, *found.metrics.values()))
    tensors = [value for rows in method.row_tables().values() for value in rows.tensors.values()]
    assert all(torch.isfinite(value).all() for value in (*method.replicated_state().values(), *tensors))
