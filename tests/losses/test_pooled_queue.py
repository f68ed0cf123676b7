"""Check the queue method's normalizer against float64 autograd, its queue's contents, and its float32 results."""

import math
from typing import Any

import oracle
import pytest
import torch
from build import (
    NO_MOMENTUM,
    SAMPLES,
    Result,
    build_loss,
    call,
    pairs,
    position,
    relative_error,
    replicated_state,
    scalar_gradients,
)
from ranks import run_ranks
from torch import Tensor
from torch.nn.functional import normalize

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError

DIM = 6
RHO = 2.0
Batches = list[tuple[Tensor, Tensor, Tensor]]  # images, texts and sample indices


def batches(size: int, n: int, count: int = 5) -> Batches:
    """Return batches from shuffled epochs of n samples; a sample's features differ between visits."""
    generator = torch.Generator().manual_seed(n)
    order = torch.cat([torch.randperm(n, generator=generator) for _ in range(1 + count * size // n)]).split(size)
    return [(*pairs(size, DIM, seed=10 + number), order[number]) for number in range(count)]


def queue_of(history: Batches, m: int, side: int) -> Tensor:
    """Return the last m features before the last batch."""
    return torch.cat([rows[side] for rows in history[:-1]])[-m:]


def results_of_steps(
    communicator: Communicator, all_batches: list[tuple[Batches, dict[str, Any]]]
) -> list[list[dict[str, Tensor]]]:
    """Return this rank's gradients and the loss for each step, for each list of batches and options of the loss."""
    results = []
    for batches_of_run, options in all_batches:
        loss_fn = build_loss("neuclip_queue", communicator, DIM, betas=NO_MOMENTUM, chunk_size=5, **options)
        steps = []
        for number, rows in enumerate(batches_of_run):
            image, text, index = (x.chunk(communicator.world_size)[communicator.rank] for x in rows)
            result = call(loss_fn, image, text, index, at=position(number))
            theta_gradient = scalar_gradients(loss_fn)["theta"]
            steps.append({"image": result.image, "text": result.text, "loss": result.loss, "theta": theta_gradient})
        results.append(steps)
    return results


def by_autograd(
    history: Batches, number: int, m: int, kappa: float, eps: float, tau: float, rule: str
) -> dict[str, Tensor]:
    """Return the same values for the whole batch of a step, computed by autograd."""
    image = history[number][0].clone().requires_grad_()
    text = history[number][1].clone().requires_grad_()
    theta = torch.tensor(-math.log(tau), dtype=torch.float64, requires_grad=True)
    leaf = (-theta).exp()
    queues = queue_of(history[: number + 1], m, 1), queue_of(history[: number + 1], m, 0)
    others = history[number][2].unsqueeze(1) != torch.cat([rows[2] for rows in history[:number]])[-m:]
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


def assert_steps_equal_autograd(
    ranks: list[list[dict[str, Tensor]]],
    history: Batches,
    sizes: tuple[int, int, float, int],
    tau: float,
    eps: float,
    rule: str,
) -> None:
    """Check all steps from the second on, while the queue fills and afterward."""
    _, m, kappa, _ = sizes
    eps_of_rule = eps if rule == "robust" else 1 / (SAMPLES - 1)
    for number in range(1, len(history)):
        expected = by_autograd(history, number, m, kappa, eps_of_rule, tau, rule)
        for key in ("image", "text"):
            gradient = torch.cat([rank[number][key] for rank in ranks])
            assert relative_error(gradient, expected[key]) < 1e-9, (number, key)
        for key in ("theta", "loss"):
            assert relative_error(ranks[0][number][key], expected[key]) < 1e-9, (number, key)


def options_of(sizes: tuple[int, int, float, int], tau: float, eps: float, rule: str) -> dict[str, Any]:
    _, m, kappa, _ = sizes
    temperature = {"initial": tau, "lr": 0.0, "rule": rule, "rho": RHO}
    return {"temperature": temperature, "eps": eps, "queue": {"size": m, "kappa": kappa}}


@pytest.mark.parametrize("rule", ["robust", "learned"])
@pytest.mark.parametrize("sizes", SIZES)
def test_gradients_equal_those_of_autograd(sizes: tuple[int, int, float, int], rule: str) -> None:
    history = batches(sizes[0], sizes[3])
    for tau, eps in ((0.01, 1e-14), (0.07, 0.03), (1.0, 1e-14)):
        (steps,) = results_of_steps(Communicator(), [(history, options_of(sizes, tau, eps, rule))])
        assert_steps_equal_autograd([steps], history, sizes, tau, eps, rule)


def test_gradients_on_two_ranks_equal_those_of_autograd() -> None:
    sizes_of_runs = SIZES[3:5]
    runs = []
    for sizes in sizes_of_runs:
        runs.append((batches(sizes[0], sizes[3]), options_of(sizes, 0.02, 1e-14, "robust")))
    first, second = run_ranks(2, results_of_steps, runs)
    for number, sizes in enumerate(sizes_of_runs):
        ranks = [first[number], second[number]]
        assert_steps_equal_autograd(ranks, runs[number][0], sizes, 0.02, 1e-14, "robust")


@pytest.mark.parametrize("sizes", [(3, 4, 5, 2, 6, 2, 7), (9, 2, 16, 3), (20, 7, 7, 7), (300, 3, 400)])
@pytest.mark.parametrize("passes", [1, 2])
def test_the_queue_holds_the_last_samples(sizes: tuple[int, ...], passes: int) -> None:
    """Sample i is stored at position i mod m, whatever the batch size; a batch that is passed twice is added once."""
    m = 7
    loss_fn = build_loss("neuclip_queue", queue={"size": m})
    history: Batches = []
    for number, size in enumerate(sizes):
        seen = sum(sizes[: number + 1])
        index = torch.arange(seen - size, seen)
        history.append((*pairs(size, DIM, seed=10 * number), index))
        for _ in range(passes):
            call(loss_fn, *history[-1], at=position(number))
        state = replicated_state(loss_fn)
        last_samples = torch.arange(max(0, seen - m), seen)
        positions = last_samples % m
        assert torch.equal(state["normalizer.queue_index"][positions], last_samples)
        if passes > 1:
            continue
        for side, name in enumerate(("image", "text")):
            added = torch.cat([rows[side] for rows in history])
            assert torch.equal(state[f"normalizer.queue_{name}"][positions], added[-m:])


def test_features_that_move_together_have_no_gradient_from_their_old_positions() -> None:
    """If all features in a batch are equal, the gradients are zero, even if those in the queue are elsewhere."""
    loss_fn = build_loss("neuclip_queue", temperature={"initial": 0.05}, queue={"size": 512})
    for number in range(2):
        generator = torch.Generator().manual_seed(number)
        row = normalize(torch.randn(1, DIM, generator=generator, dtype=torch.float64), dim=1)
        image = row.expand(256, DIM)
        result = call(loss_fn, image, image, torch.arange(256) + 256 * number, at=position(number))
        assert float(result.image.abs().max()) < 1e-14


def clustered(rows: int, dim: int, seed: int, spread: float = 0.1) -> tuple[Tensor, Tensor]:
    """Return images and texts around four centers; if an image's center is odd, its text is around the next center."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(4, dim, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    center_of_row = torch.randint(4, (rows,), generator=generator)
    noise = spread * torch.randn(2, rows, dim, generator=generator, dtype=torch.float64)
    image = centers[center_of_row] + noise[0]
    text = centers[(center_of_row + center_of_row % 2) % 4] + noise[1]
    return normalize(image, dim=1), normalize(text, dim=1)


@pytest.mark.parametrize("tau", [0.003, 0.01, 0.03, 0.1])
@pytest.mark.parametrize(("size", "m"), [(24, 64), (40, 16)])
def test_float32_is_accurate_for_clusters(tau: float, size: int, m: int) -> None:
    """Float32 matches float64 for clusters that the queue contains and, in the last step, for opposite clusters."""
    results: list[list[Result]] = []
    for dtype in (torch.float32, torch.float64):
        temperature = {"initial": tau, "minimum": 0.003, "lr": 0.0}
        loss_fn = build_loss("neuclip_queue", dim=8, dtype=dtype, temperature=temperature, queue={"size": m})
        results.append([])
        for number in range(4):
            image, text = clustered(size, 8, number)
            sign = -1 if number == 3 else 1
            index = torch.arange(size) + size * number
            result = call(loss_fn, (sign * image).to(dtype), text.to(dtype), index, at=position(number))
            results[-1].append(result)
    for single, double in zip(*results, strict=True):
        assert relative_error(single.image.double(), double.image) < 1e-6 / tau
        assert relative_error(single.text.double(), double.text) < 1e-6 / tau
        assert float(single.loss) == pytest.approx(float(double.loss), rel=1e-4)


def test_a_checkpoint_with_another_queue_names_the_option_to_set() -> None:
    short = build_loss("neuclip_queue", dim=4, queue={"size": 6})
    long = build_loss("neuclip_queue", dim=4, queue={"size": 8})
    with pytest.raises(UserError, match=r"has the shape \(6, 4\).*set objective.queue.size=6"):
        long.function.load_replicated_state(replicated_state(short))
