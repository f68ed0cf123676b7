"""gamma's schedule and the update of u in the log domain."""

from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from build import batch, objective, pairs, relative_error, step
from small_checkpoints import save_tables

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.state.shards import ShardFiles


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


def corrected(rate: float, gamma_min: float = 0.5) -> Any:
    average = {"gamma": "constant", "gamma_min": gamma_min, "drift_rate": rate}
    return objective("fastclip_v3", Communicator(), 6, eps=1e-6, moving_average=average, temperature={"lr": 0.0})


def test_u_relative_to_the_running_mean_of_log_g() -> None:
    """Two halves of the data in turn: u, weights and loss are those of the formula, with levels of each direction."""
    rate, gamma, eps, tau = 0.3, 0.5, 1e-6, torch.tensor(0.07, dtype=torch.float64)
    method = corrected(rate)
    level, relative = torch.zeros(2, 1, dtype=torch.float64), torch.zeros(2, 18, dtype=torch.float64)
    for number in range(6):
        image, text = (x.requires_grad_() for x in pairs(9, 6, seed=number, likeness=1 + number))
        index = torch.arange(9) + 9 * (number % 2)
        found = method(batch(image.detach(), text.detach(), index), step(number))
        log_g = torch.stack([oracle.log_mean_exp(x) for x in oracle.logits(image, text, tau)]).detach()
        level = level + max(rate, 1 / (number + 1)) * (log_g.mean(1, keepdim=True) - level)
        before = (relative[:, index] + level).exp()
        u = log_g.exp() if number < 2 else (1 - gamma) * before + gamma * log_g.exp()
        relative[:, index] = u.log() - level
        by_image, by_text = torch.autograd.grad(oracle.global_contrastive(image, text, tau, u, eps), (image, text))
        assert relative_error(found.image, by_image) < 1e-10
        assert relative_error(found.text, by_text) < 1e-10
        assert float(found.loss) == pytest.approx(float(tau * torch.log(eps + u).mean(1).sum()), rel=1e-9)


def test_u_and_relative_u_are_not_taken_for_each_other(tmp_path: Path) -> None:
    saved, other = corrected(0.1), corrected(0.0)
    save_tables(tmp_path, saved)
    with pytest.raises(UserError, match="log_u_above_level"):
        ShardFiles(tmp_path).fill(other.row_tables())
