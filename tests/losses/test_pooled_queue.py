"""Check the queue method's normalizer against float64 autograd, its queue's contents, and its float32 results."""

import math
from typing import Any, Literal

import oracle
import pytest
import torch
from build import SAMPLES, batch, objective, pairs, relative_error, step, with_scalar_gradients
from ranks import run_ranks
from torch import Tensor
from torch.nn.functional import normalize

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError

DIM, RHO = 6, 2.0
Batches = list[tuple[Tensor, Tensor, Tensor]]  # images, texts and sample indices


def batches(size: int, n: int, count: int = 5) -> Batches:
    """Return batches from shuffled epochs of n samples; a sample's features differ between visits."""
    generator = torch.Generator().manual_seed(n)
    order = torch.cat([torch.randperm(n, generator=generator) for _ in range(1 + count * size // n)]).split(size)
    return [(*pairs(size, DIM, seed=10 + number), order[number]) for number in range(count)]


def means_of(history: Batches, side: int) -> list[Tensor]:
    """Return the running mean after each batch; a batch of b samples has the weight b/256, but at most 1."""
    means = [history[0][side].mean(0)]
    for rows in history[1:]:
        weight = min(1, len(rows[side]) / 256)
        means.append((1 - weight) * means[-1] + weight * rows[side].mean(0))
    return means


def queue_of(history: Batches, m: int, side: int) -> Tensor:
    """Return the last m features before the last batch, each moved with the running mean since it was added."""
    means = means_of(history, side)
    moved = [rows[side] - mean for rows, mean in zip(history[:-1], means[:-1], strict=True)]
    return torch.cat(moved)[-m:] + means[-1]


def _found(communicator: Communicator, given: Batches, options: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Return this rank's gradients and the loss for each step."""
    method, results = objective("neuclip_queue", communicator, DIM, chunk_size=5, **options), []
    for number, rows in enumerate(given):
        mine = [x.chunk(communicator.world_size)[communicator.rank] for x in rows]
        found, scalars = with_scalar_gradients(method, batch(*mine), step(number))
        results.append({"image": found.image, "text": found.text, "loss": found.loss, "theta": scalars["theta"]})
    return results


def _wanted(given: Batches, number: int, m: int, kappa: float, eps: float, tau: float, rule: str) -> dict[str, Tensor]:
    """Return the same values for the whole batch, computed by autograd."""
    image, text = (x.clone().requires_grad_() for x in given[number][:2])
    theta = torch.tensor(-math.log(tau), dtype=torch.float64, requires_grad=True)
    leaf = (-theta).exp()
    queues = queue_of(given[: number + 1], m, 1), queue_of(given[: number + 1], m, 0)
    others = given[number][2].unsqueeze(1) != torch.cat([rows[2] for rows in given[:number]])[-m:]
    value = torch.log(eps + oracle.pooled_normalizers(image, text, leaf, queues, others, kappa)).mean(1).sum()
    loss = leaf * (value + 2 * RHO) if rule == "robust" else value / 2 + math.log(SAMPLES - 1)
    gradients = torch.autograd.grad(loss, (image, text, theta))
    return {**dict(zip(("image", "text", "theta"), gradients, strict=True)), "loss": loss.detach()}


SIZES = [  # batch, queue, kappa, samples
    (9, 30, 1.0, SAMPLES),
    (24, 7, 0.3, SAMPLES),
    (16, 16, 3.0, SAMPLES),
    (8, 24, 1.0, 16),  # each anchor's sample is in the queue, some twice
    (8, 24, 0.5, 26),  # only some anchors' samples are in the queue
    (10, 1, 1.0, 10),  # for one anchor, the queue has no entry of a different sample
]


def check_gradients(
    world_size: int, sizes: tuple[int, int, float, int], tau: float, eps: float, rule: Literal["robust", "learned"]
) -> None:
    """Check the gradients for the features and theta from the second step on, while the queue fills and afterward."""
    size, m, kappa, n = sizes
    temperature = {"initial": tau, "lr": 0.0, "rule": rule, "rho": RHO}
    options = {"temperature": temperature, "eps": eps, "queue": {"size": m, "kappa": kappa}}
    given = batches(size, n)
    ranks = run_ranks(2, _found, given, options) if world_size > 1 else [_found(Communicator(), given, options)]
    for number in range(1, len(given)):
        wanted = _wanted(given, number, m, kappa, eps if rule == "robust" else 1 / (SAMPLES - 1), tau, rule)
        found = {key: torch.cat([rank[number][key] for rank in ranks]) for key in ("image", "text")}
        for key, value in ranks[0][number].items():
            assert relative_error(found.get(key, value), wanted[key]) < 1e-9, (number, key)


@pytest.mark.parametrize("rule", ["robust", "learned"])
@pytest.mark.parametrize(("tau", "eps"), [(0.01, 1e-14), (0.02, 1e-14), (0.07, 0.03), (1.0, 1e-14)])
@pytest.mark.parametrize("sizes", SIZES)
def test_gradients(sizes: tuple[int, int, float, int], tau: float, eps: float, rule: Any) -> None:
    check_gradients(1, sizes, tau, eps, rule)


@pytest.mark.parametrize("sizes", SIZES[3:5])
def test_gradients_on_two_ranks(sizes: tuple[int, int, float, int]) -> None:
    check_gradients(2, sizes, 0.02, 1e-14, "robust")


@pytest.mark.parametrize("sizes", [(3, 4, 5, 2, 6, 2, 7), (9, 2, 16, 3), (20, 7, 7, 7), (300, 3, 400)])
@pytest.mark.parametrize("passes", [1, 2])
def test_the_queue_holds_the_last_samples(sizes: tuple[int, ...], passes: int) -> None:
    """Sample i is stored at position i mod m, whatever the batch size; a batch that is passed twice is added once."""
    m = 7
    method = objective("neuclip_queue", Communicator(), DIM, queue={"size": m})
    history: Batches = []
    for number, size in enumerate(sizes):
        seen = sum(sizes[: number + 1])
        index = torch.arange(seen - size, seen)
        history.append((*pairs(size, DIM, seed=10 * number), index))
        for _ in range(passes):
            method(batch(*history[-1]), step(number))
        state = method.replicated_state()
        places = torch.arange(max(0, seen - m), seen) % m
        assert torch.equal(state["normalizer.queue_index"][places], torch.arange(max(0, seen - m), seen))
        for side, name in enumerate(("image", "text") if passes == 1 else ()):
            wanted = torch.cat([rows[side] - mean for rows, mean in zip(history, means_of(history, side), strict=True)])
            torch.testing.assert_close(state[f"normalizer.queue_{name}"][places], wanted[-m:], rtol=0, atol=1e-14)


def test_features_that_move_together_have_no_gradient_from_their_old_places() -> None:
    """If all features in a batch are equal, the gradients are zero, even after the features have moved together."""
    method = objective("neuclip_queue", Communicator(), DIM, temperature={"initial": 0.05}, queue={"size": 512})
    for number in range(2):
        row = normalize(
            torch.randn(1, DIM, generator=torch.Generator().manual_seed(number), dtype=torch.float64), dim=1
        )
        rows = row.expand(256, DIM), row.expand(256, DIM), torch.arange(256) + 256 * number
        found = method(batch(*rows), step(number))
        assert float(found.image.abs().max()) < 1e-14


def clustered(rows: int, dim: int, seed: int, spread: float = 0.1) -> tuple[Tensor, Tensor]:
    """Return images and texts around four centers; if an image's center is odd, its text is around the next center."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.randn(4, dim, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    of = torch.randint(4, (rows,), generator=generator)
    noise = spread * torch.randn(2, rows, dim, generator=generator, dtype=torch.float64)
    return normalize(places[of] + noise[0], dim=1), normalize(places[(of + of % 2) % 4] + noise[1], dim=1)


@pytest.mark.parametrize("tau", [0.003, 0.01, 0.03, 0.1])
@pytest.mark.parametrize(("size", "m"), [(24, 64), (40, 16)])
def test_float32(tau: float, size: int, m: int) -> None:
    """Float32 matches float64 for clusters that the queue contains and, in the last step, for opposite clusters."""
    results = []
    for dtype in (torch.float32, torch.float64):
        temperature = {"initial": tau, "minimum": 0.003, "lr": 0.0}
        method = objective("neuclip_queue", Communicator(), 8, dtype, temperature=temperature, queue={"size": m})
        for number in range(4):
            image, text = clustered(size, 8, number)
            sign = -1 if number == 3 else 1
            rows = (sign * image).to(dtype), text.to(dtype), torch.arange(size) + size * number
            results.append(method(batch(*rows), step(number)))
    for single, double in zip(results[:4], results[4:], strict=True):
        assert relative_error(single.image.double(), double.image) < 1e-6 / tau
        assert relative_error(single.text.double(), double.text) < 1e-6 / tau
        assert float(single.loss) == pytest.approx(float(double.loss), rel=1e-4)


def test_a_checkpoint_with_another_queue() -> None:
    short, long = (objective("neuclip_queue", Communicator(), 4, queue={"size": m}) for m in (6, 8))
    with pytest.raises(UserError, match=r"has the shape \(6, 4\).*set objective.queue.size=6"):
        long.load_replicated_state(short.replicated_state())
