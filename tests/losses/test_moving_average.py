"""Check the schedule of gamma and the update of u in the log domain."""

import oracle
import pytest
import torch
from build import build_loss, call, pairs, position, relative_error


@pytest.mark.parametrize(
    ("gamma", "epoch_steps", "steps", "expected"),
    [
        ("cosine", None, [(n, n) for n in range(6)], [1.0, 0.8828427, 0.6, 0.3171573, 0.2, 0.2]),
        ("constant", None, [(0, 0), (90, 30)], [0.2, 0.2]),
        # ten steps count as an epoch, though the data's epoch stays 0
        ("cosine", 10, [(9, 0), (10, 0), (39, 0), (40, 0)], [1, 0.8828427, 0.3171573, 0.2]),
    ],
)
def test_gamma_is_constant_or_follows_a_half_cosine(
    gamma: str, epoch_steps: int | None, steps: list[tuple[int, int]], expected: list[float]
) -> None:
    average = {"gamma": gamma, "gamma_min": 0.2, "gamma_epochs": 4}
    loss_fn = build_loss("fastclip_v3", epoch_steps=epoch_steps, moving_average=average)
    gammas = []
    for step, epoch in steps:
        result = call(loss_fn, *pairs(9, 6), at=position(step, epoch))
        gammas.append(float(result.metrics["gamma"]))
    assert gammas == pytest.approx(expected)


def test_u_averages_the_visits_of_each_sample() -> None:
    """With batches from alternating halves of the data, the loss and the gradients match the formula for u."""
    gamma = 0.5
    eps = 1e-6
    tau = torch.tensor(0.07, dtype=torch.float64)
    average = {"gamma": "constant", "gamma_min": gamma}
    loss_fn = build_loss("fastclip_v3", eps=eps, moving_average=average, temperature={"lr": 0.0})
    stored = torch.zeros(2, 18, dtype=torch.float64)
    for number in range(6):
        image, text = (x.requires_grad_() for x in pairs(9, 6, seed=number, likeness=1 + number))
        index = torch.arange(9) + 9 * (number % 2)
        result = call(loss_fn, image, text, index, at=position(number))
        g = oracle.mean_exponentials(image, text, tau).detach()
        u = g if number < 2 else (1 - gamma) * stored[:, index] + gamma * g
        stored[:, index] = u
        loss = oracle.global_contrastive(image, text, tau, u, eps)
        image_gradient, text_gradient = torch.autograd.grad(loss, (image, text))
        assert relative_error(result.image, image_gradient) < 1e-10
        assert relative_error(result.text, text_gradient) < 1e-10
        assert float(result.loss) == pytest.approx(float(tau * torch.log(eps + u).mean(1).sum()), rel=1e-9)
