"""The queue's normalizer against float64 autograd, its queue, and its numbers in float32."""

import math

import oracle
import pytest
import torch
from build import SAMPLES, batch, objective, pairs, relative_error, step, with_scalar_gradients
from torch import Tensor
from torch.nn.functional import normalize

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError


def queue_of(history: list[tuple[Tensor, Tensor]], m: int) -> tuple[Tensor, Tensor]:
    """The last m texts and images."""
    images, texts = (torch.cat(parts)[-m:] for parts in zip(*history, strict=True))
    return texts, images


@pytest.mark.parametrize("tau", [0.01, 0.07, 1.0])
@pytest.mark.parametrize("eps", [1e-14, 0.03])
@pytest.mark.parametrize(("size", "m", "kappa"), [(9, 30, 1.0), (24, 7, 0.3), (16, 16, 3.0)])
def test_gradients(size: int, m: int, kappa: float, eps: float, tau: float) -> None:
    """Features and temperature, from the second step on: while the queue fills, and afterward."""
    dim, rho = 6, 2.0
    temperature = {"initial": tau, "lr": 0.0, "rule": "robust", "rho": rho}
    options = {"temperature": temperature, "eps": eps, "chunk_size": 5}
    queue = {"size": m, "kappa": kappa}
    method = objective("neuclip_queue", Communicator(), dim, **options, queue=queue)
    history = [pairs(size, dim, seed=10)]
    method(batch(*history[0]), step(0))
    for number in range(1, 5):
        image, text = (x.requires_grad_() for x in pairs(size, dim, seed=10 + number))
        theta = torch.tensor(-math.log(tau), dtype=torch.float64, requires_grad=True)
        value, differentiated = oracle.pooled_queue(image, text, (-theta).exp(), queue_of(history, m), kappa, eps, rho)
        wanted = torch.autograd.grad(differentiated, (image, text, theta))
        found, scalars = with_scalar_gradients(method, batch(image.detach(), text.detach()), step(number))
        assert relative_error(found.image, wanted[0]) < 1e-9
        assert relative_error(found.text, wanted[1]) < 1e-9
        assert float(scalars["theta"]) == pytest.approx(float(wanted[2]), rel=1e-9)
        assert float(found.loss) == pytest.approx(float(value.detach()), rel=1e-9)
        assert 0 < float(found.metrics["normalizer_ratio"]) < 1 + kappa
        history.append((image.detach(), text.detach()))


@pytest.mark.parametrize("tau", [0.01, 0.07, 1.0])
def test_without_rho(tau: float) -> None:
    """Half the loss with eps = 1/(n-1), whose own gradient log(1/tau) gets; rho and eps of the config are not read."""
    dim, m, kappa = 6, 20, 2.0
    temperature = {"initial": tau, "rho": 3.0, "lr": 0.0}
    queue = {"size": m, "kappa": kappa}
    method = objective("neuclip_queue", Communicator(), dim, eps=0.5, temperature=temperature, queue=queue)
    history = [pairs(17, dim, seed=10)]
    method(batch(*history[0]), step(0))
    for number in (1, 2):
        image, text = (x.requires_grad_() for x in pairs(17, dim, seed=10 + number))
        theta = torch.tensor(-math.log(tau), dtype=torch.float64, requires_grad=True)
        estimates = (image, text, (-theta).exp(), queue_of(history, m), kappa, 1 / (SAMPLES - 1))
        target, prediction, alpha = oracle.queue_estimates(*estimates)
        ratio = (target - alpha).exp().detach()
        slope = (ratio * target + (1 - ratio) * prediction).mean(1).sum() / 2
        by_image, by_text, by_theta = torch.autograd.grad(slope, (image, text, theta))
        found, scalars = with_scalar_gradients(method, batch(image.detach(), text.detach()), step(number))
        assert relative_error(found.image, by_image) < 1e-9
        assert relative_error(found.text, by_text) < 1e-9
        assert float(scalars["theta"]) == pytest.approx(float(by_theta), rel=1e-9)
        wanted = float((ratio + alpha.detach() - 1).mean(1).sum()) / 2 + math.log(SAMPLES - 1)
        assert float(found.loss) == pytest.approx(wanted, rel=1e-9)
        history.append((image.detach(), text.detach()))


def test_the_first_step_is_that_of_the_batch() -> None:
    image, text = (x.requires_grad_() for x in pairs(12, 5))
    tau = torch.tensor(0.05, dtype=torch.float64)
    temperature = {"initial": 0.05, "rule": "robust"}
    method = objective("neuclip_queue", Communicator(), 5, eps=1e-300, temperature=temperature)
    found = method(batch(image.detach(), text.detach()), step())
    loss = tau * torch.stack([oracle.log_mean_exp(x) for x in oracle.logits(image, text, tau)]).mean(1).sum()
    wanted = torch.autograd.grad(loss, (image, text))
    assert relative_error(found.image, wanted[0]) < 1e-10
    assert relative_error(found.text, wanted[1]) < 1e-10


@pytest.mark.parametrize("sizes", [(3, 4, 5, 2, 6, 2, 7), (9, 2, 16, 3), (20, 7, 7, 7)])
def test_the_queue_holds_the_last_samples(sizes: tuple[int, ...]) -> None:
    """Sample number i has place i mod m; batches smaller and larger than m."""
    m = 7
    method = objective("neuclip_queue", Communicator(), 4, queue={"size": m})
    history = []
    for number, size in enumerate(sizes):
        history.append(pairs(size, 4, seed=number))
        method(batch(*history[-1]), step(number))
        seen = sum(sizes[: number + 1])
        state = method.replicated_state()
        places = torch.arange(max(0, seen - m), seen) % m
        texts, images = queue_of(history, m)
        assert torch.equal(state["normalizer.queue_image"][places], images)
        assert torch.equal(state["normalizer.queue_text"][places], texts)


def clustered(rows: int, dim: int, seed: int, spread: float = 0.1) -> tuple[Tensor, Tensor]:
    """Images and texts around four places, the texts of every other pair at another place than its image."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.randn(4, dim, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    of = torch.randint(4, (rows,), generator=generator)
    noise = spread * torch.randn(2, rows, dim, generator=generator, dtype=torch.float64)
    return normalize(places[of] + noise[0], dim=1), normalize(places[(of + of % 2) % 4] + noise[1], dim=1)


@pytest.mark.parametrize("tau", [0.003, 0.01, 0.03, 0.1])
@pytest.mark.parametrize(("size", "m"), [(24, 64), (40, 16)])
def test_float32(tau: float, size: int, m: int) -> None:
    """Clusters that the queue has seen, and in the last step opposite ones, which it has not."""
    results = []
    for dtype in (torch.float32, torch.float64):
        temperature = {"initial": tau, "minimum": 0.003, "lr": 0.0}
        method = objective("neuclip_queue", Communicator(), 8, dtype, temperature=temperature, queue={"size": m})
        for number in range(4):
            image, text = clustered(size, 8, number)
            sign = -1 if number == 3 else 1
            results.append(method(batch((sign * image).to(dtype), text.to(dtype)), step(number)))
    for single, double in zip(results[:4], results[4:], strict=True):
        assert relative_error(single.image.double(), double.image) < 1e-6 / tau
        assert relative_error(single.text.double(), double.text) < 1e-6 / tau
        assert float(single.loss) == pytest.approx(float(double.loss), rel=1e-4)


def test_a_checkpoint_with_another_queue() -> None:
    short, long = (objective("neuclip_queue", Communicator(), 4, queue={"size": m}) for m in (6, 8))
    with pytest.raises(UserError, match=r"has the shape \(6, 4\).*set objective.queue.size=6"):
        long.load_replicated_state(short.replicated_state())
