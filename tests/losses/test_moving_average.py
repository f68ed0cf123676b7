"""Check the schedule of gamma and the update of u in the log domain."""

import oracle
import pytest
import torch
from build import batch, objective, pairs, relative_error, step

from neuclip_ds.distributed.communicator import Communicator


@pytest.mark.parametrize(
    ("gamma", "epoch_steps", "steps", "wanted"),
    [
        ("cosine", None, [(n, n) for n in range(6)], [1.0, 0.8828427, 0.6, 0.3171573, 0.2, 0.2]),
        ("constant", None, [(0, 0), (90, 30)], [0.2, 0.2]),
        # ten steps count as an epoch, though the data's epoch stays 0
        ("cosine", 10, [(9, 0), (10, 0), (39, 0), (40, 0)], [1, 0.8828427, 0.3171573, 0.2]),
    ],
)
def test_gamma(gamma: str, epoch_steps: int | None, steps: list[tuple[int, int]], wanted: list[float]) -> None:
    average = {"gamma": gamma, "gamma_min": 0.2, "gamma_epochs": 4}
    method = objective("fastclip_v3", Communicator(), 6, epoch_steps=epoch_steps, moving_average=average)
    found = [float(method(batch(*pairs(9, 6)), step(*at)).metrics["gamma"]) for at in steps]
    assert found == pytest.approx(wanted)


def test_u_averages_the_visits_of_each_sample() -> None:
    """With batches from alternating halves of the data, the loss and the gradients match the formula for u."""
    gamma, eps, tau = 0.5, 1e-6, torch.tensor(0.07, dtype=torch.float64)
    average = {"gamma": "constant", "gamma_min": gamma}
    method = objective("fastclip_v3", Communicator(), 6, eps=eps, moving_average=average, temperature={"lr": 0.0})
    kept = torch.zeros(2, 18, dtype=torch.float64)
    for number in range(6):
        image, text = (x.requires_grad_() for x in pairs(9, 6, seed=number, likeness=1 + number))
        index = torch.arange(9) + 9 * (number % 2)
        found = method(batch(image.detach(), text.detach(), index), step(number))
        log_g = torch.stack([oracle.log_mean_exp(x) for x in oracle.logits(image, text, tau)]).detach()
        u = log_g.exp() if number < 2 else (1 - gamma) * kept[:, index] + gamma * log_g.exp()
        kept[:, index] = u
        by_image, by_text = torch.autograd.grad(oracle.global_contrastive(image, text, tau, u, eps), (image, text))
        assert relative_error(found.image, by_image) < 1e-10
        assert relative_error(found.text, by_text) < 1e-10
        assert float(found.loss) == pytest.approx(float(tau * torch.log(eps + u).mean(1).sum()), rel=1e-9)
