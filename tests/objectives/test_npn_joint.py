"""Algorithm 3: prototypes that take one AdamW step with the encoders, against autograd and torch's AdamW."""

from __future__ import annotations

import oracle
import pytest
import torch
from build import batch, objective, pairs, relative_error, step

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError


def test_each_step_is_one_of_adamw_on_the_papers_objective() -> None:
    """30 prototypes and batches of 20: they are drawn in the third step, from the samples 10 to 39."""
    dim, eps, lr = 6, 1e-14, 3e-3
    tau = torch.tensor(0.07, dtype=torch.float64)
    npn = {"prototypes": 30, "restart_every": 0, "order": "joint", "weight_decay": 0.2, "alpha_grad": "stop"}
    method = objective("neuclip", Communicator(), dim, eps=eps, npn=npn, temperature={"lr": 0.0})
    seen = [pairs(20, dim, seed=seed) for seed in range(5)]
    for number in range(2):
        method(batch(*seen[number]), step(number, lr=lr))
    drawn = torch.cat([torch.arange(30, 40), torch.arange(10, 30)])
    image, text = (torch.cat(parts)[drawn] for parts in zip(*seen[:2], strict=True))
    w1, w2 = torch.nn.Parameter(text.clone()), torch.nn.Parameter(image.clone())
    adamw = torch.optim.AdamW([w1, w2], lr=lr, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.2)
    for number in range(2, 5):
        image, text = seen[number]
        g = torch.stack([oracle.log_mean_exp(x).exp() for x in oracle.logits(image, text, tau)])
        alpha = oracle.alphas(image, text, tau, w1, w2, eps)
        found = method(batch(image, text), step(number, lr=lr))
        loss = ((-alpha).exp() * (eps + g) + alpha - 1).mean(1).sum()
        before = float(alpha.detach().mean())  # of the prototypes that the step has not moved
        assert float(found.metrics["alpha"]) == pytest.approx(before)
        adamw.zero_grad()
        (tau * loss).backward()
        adamw.step()
    table = method.row_tables()["npn"].tensors
    for name, wanted in (("w1", w1), ("w2", w2)):
        assert relative_error(table[name], wanted.detach()) < 1e-10
        assert relative_error(table[f"{name}_square"], adamw.state[wanted]["exp_avg_sq"]) < 1e-10


def test_the_mlp_is_refused() -> None:
    with pytest.raises(UserError, match=r"order=joint is for prototypes; .* use simultaneous\."):
        objective("neuclip", Communicator(), 4, npn={"network": "mlp", "order": "joint"})
